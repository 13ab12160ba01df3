"""SlowMo (Wang et al. 2020): momentum over merges, on top of any optimizer.

u <- b u - m / lr,    anchor <- anchor - a lr u          m: mean of w - anchor; lr: the optimizer's own, at the merge
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.requests import Memory
from tacit.rounds.merging import ANCHOR, Periodic, share
from tacit.rounds.rules import Moment


@dataclass(frozen=True, slots=True)
class SlowMo(Periodic):
    """`slowmo(16, momentum=0.7, rate=1)`: momentum b, rate a. Momentum 0 and rate 1 are `local`."""

    momentum: float = 0.7
    rate: float = 1.0
    name: ClassVar[str] = "slowmo"

    def __post_init__(self) -> None:
        super(SlowMo, self).__post_init__()
        share("momentum", self.momentum)
        share("rate", self.rate, below=10)

    def __str__(self) -> str:
        return self.text(f"momentum={self.momentum:g}", f"rate={self.rate:g}")

    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        slow = memory.vector("slow").mul_(self.momentum)
        if at.lr > 0:  # a schedule that ends at 0 moves nothing
            slow.sub_(mean, alpha=1 / at.lr)
        return memory.vector(ANCHOR).sub_(slow, alpha=self.rate * at.lr)
