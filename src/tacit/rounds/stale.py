"""Bounded staleness: what is sent now is merged `delay` steps later, and nobody is further ahead of the others than that.

    w_i <- w_i + (m - x_i)          m, x_i: the mean and the own difference, of `delay` steps ago

Training never waits for a link that delivers within `delay` steps. (The collective form of SSP, Ho et al. 2013; DaSGD, Zhou et al. 2020.)
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.errors import ConfigError
from tacit.requests import Memory
from tacit.rounds.merging import ANCHOR, Periodic, whole
from tacit.rounds.rules import Moment


@dataclass(frozen=True, slots=True)
class Stale(Periodic):
    """`stale(4, delay=3)`: models are sent every 4 steps, and merged 3 steps later."""

    every: int = 4
    delay: int = 3
    name: ClassVar[str] = "stale"

    def __post_init__(self) -> None:
        super(Stale, self).__post_init__()
        whole("every", self.every, 2)
        whole("delay", self.delay, 1)
        if self.delay >= self.every:
            raise ConfigError(
                f"delay={self.delay}: merged before the next is sent, so below every={self.every}"
            )

    def __str__(self) -> str:
        return self.text(f"delay={self.delay}")

    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        memory.vector(ANCHOR).add_(mean)
        return w.float() + (mean - own)
