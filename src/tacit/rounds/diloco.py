"""DiLoCo (Douillard et al. 2023): the mean difference is a gradient, and an outer Nesterov step follows it.

g = -m,    v <- b v + g,    anchor <- anchor - a (g + b v)          m: mean of w - anchor
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.requests import Memory
from tacit.rounds.merging import ANCHOR, Periodic, share
from tacit.rounds.rules import Moment


@dataclass(frozen=True, slots=True)
class DiLoCo(Periodic):
    """`diloco(64, rate=0.7, momentum=0.9, after=24000)`: the paper's outer optimizer; 30 to 500 steps are usual, after a quarter of the training."""

    every: int = 64
    rate: float = 0.7
    momentum: float = 0.9
    name: ClassVar[str] = "diloco"

    def __post_init__(self) -> None:
        super(DiLoCo, self).__post_init__()
        share("rate", self.rate, below=10)
        share("momentum", self.momentum)

    def __str__(self) -> str:
        return self.text(f"rate={self.rate:g}", f"momentum={self.momentum:g}")

    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        velocity = memory.vector("velocity").mul_(self.momentum).sub_(mean)
        return (
            memory.vector(ANCHOR).add_(mean, alpha=self.rate).sub_(velocity, alpha=self.rate * self.momentum)
        )
