"""Elastic averaging (Zhang et al. 2015): ranks stay near a centre, and apart enough to explore.

w_i <- w_i - a (w_i - c),    c <- c + a sum_i (w_i - c)          c: the anchor, held by every rank
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.errors import ConfigError
from tacit.requests import Memory
from tacit.rounds.merging import ANCHOR, Periodic, share
from tacit.rounds.rules import Moment


@dataclass(frozen=True, slots=True)
class Elastic(Periodic):
    """`elastic(8, pull=0.9)`: `pull` is n a, the centre's part of the mean; each rank gives way by a = pull / n."""

    every: int = 8
    pull: float = 0.9
    name: ClassVar[str] = "elastic"

    def __post_init__(self) -> None:
        super(Elastic, self).__post_init__()
        share("pull", self.pull)
        if not self.pull:
            raise ConfigError("pull=0: the ranks' models would never be pulled together; the paper's is 0.9")

    def __str__(self) -> str:
        return self.text(f"pull={self.pull:g}")

    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        memory.vector(ANCHOR).add_(mean, alpha=self.pull)
        return w.float() - (self.pull / at.world) * own
