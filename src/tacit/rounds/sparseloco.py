"""SparseLoCo (Sarfi et al. 2025): DiLoCo whose momentum is what was not sent. Each rank sends the few largest parts of its difference
and remembers the rest; an outer step of plain SGD follows the mean.

    e <- d e + (w - anchor),    send C(e),   e <- e - C(e)              d: the decay; C: top-k, a few bits each
    anchor <- anchor + a m,     w <- anchor                             m: mean of what the ranks sent

The first line is the codec's, `ef(topk, decay=0.95)`: after a merge w is the anchor, and what was not sent lives in the codec's memory
alone. With a codec that sends all, and rate 1, it is `local`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tacit.requests import Memory
from tacit.rounds.merging import ANCHOR, Periodic, share
from tacit.rounds.rules import Moment


@dataclass(frozen=True, slots=True)
class SparseLoCo(Periodic):
    """`sparseloco(30) / ef(topk, decay=0.95)`: the paper's; 15 to 250 steps are usual."""

    every: int = 30
    rate: float = 1
    name: ClassVar[str] = "sparseloco"
    default_codec: ClassVar[str] = "ef(topk, decay=0.95)"

    def __post_init__(self) -> None:
        super(SparseLoCo, self).__post_init__()
        share("rate", self.rate, below=10)

    def __str__(self) -> str:
        return self.text(f"rate={self.rate}")

    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        return memory.vector(ANCHOR).add_(mean, alpha=self.rate)
