"""Streaming DiLoCo (Douillard et al. 2025): a part of the model at a time, merged some steps after it was sent.

part p of P is sent p H / P steps before the period of H ends, so the link is never asked for all at once;
`delay` steps later, after training went on:   w <- mix w + (1 - mix) anchor          without delay: w <- anchor
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.errors import ConfigError
from tacit.requests import Memory
from tacit.rounds.diloco import DiLoCo
from tacit.rounds.merging import share, whole
from tacit.rounds.rules import Moment


@dataclass(frozen=True, slots=True)
class Streaming(DiLoCo):
    """`streaming(64, parts=4, delay=2, mix=0.5)`: parts are made of buckets, dealt out in turn.

    The paper uses 4-bit differences: `streaming(64) / hush / sharded`.
    """

    parts: int = 4
    delay: int = 2
    mix: float = 0.5
    name: ClassVar[str] = "streaming"

    def __post_init__(self) -> None:
        super(Streaming, self).__post_init__()
        whole("parts", self.parts, 1)
        whole("delay", self.delay, 0)
        share("mix", self.mix)
        if self.parts > self.every:
            raise ConfigError(f"parts={self.parts}: at most one a step, so at most every={self.every}")
        if self.delay >= self.every:
            raise ConfigError(
                f"delay={self.delay}: a part is merged before it is sent again, so below every={self.every}"
            )

    def __str__(self) -> str:
        outer = f"rate={self.rate:g}", f"momentum={self.momentum:g}"
        return self.text(*outer, f"parts={self.parts}", f"delay={self.delay}", f"mix={self.mix:g}")

    def due(self, since: int, period: int, bucket: int) -> bool:
        return since == period - (bucket % self.parts) * period // self.parts

    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        anchor = super(Streaming, self).merge(w, mean, own, memory, at)
        return anchor.lerp(w.float(), self.mix) if self.delay else anchor
