"""EF21 (Richtarik, Sokolov, Fatkhullin, NeurIPS 2021, arXiv 2106.05203): what is sent is how far a gradient has moved.

    send C(x_i - h_i);   h_i += C(x_i - h_i);   total = sum of the h_i        h: 0 at first

All ranks hold the mean of the h_i, so only C(x - h) travels. Where `ef` sends what is left over a second time, here nothing is owed:
h_i converges to x_i where gradients settle, whatever the ranks' data have in common. C must contract. The mean is kept, not the sum, so
that a changed number of ranks finds h and their mean in step. Each rank's part in the total is its h.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import recycled
from tacit.errors import ConfigError, ConformanceError, PairingError
from tacit.layout import Layout
from tacit.requests import (
    Codec,
    Context,
    Conversation,
    Reduced,
    Sum,
    TableSum,
    Traits,
    as_reduced,
    declared_nbytes,
)


@dataclass(frozen=True, slots=True)
class Ef21:
    """`ef21(topk)`: the differences to what was sent so far, by a codec that contracts."""

    inner: Codec

    def __post_init__(self) -> None:
        if not hasattr(self.inner, "reduce"):  # a number, or a text in quotes
            raise ConfigError(f"ef21({self.inner}): an inner codec is needed, for example ef21(topk)")
        traits = self.inner.traits
        if traits.remembers or traits.stateful:
            raise PairingError(
                f"ef21({self.inner}): {self.inner} has a memory of its own; write one of the two"
            )
        if not traits.contracting:
            raise PairingError(
                f"ef21({self.inner}): what {self.inner} leaves out may be larger than what it is given, so the ranks' "
                f"memories would not settle; name a codec that contracts, as topk, sign or int4(rounding=nearest)"
            )

    def __str__(self) -> str:
        return f"ef21({self.inner})"

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, unbiased=False, contracting=False, exact=False, stateful=True)

    def nbytes(self, numel: int) -> int:
        return self.inner.nbytes(numel)

    def nbytes_of(self, layout: Layout) -> int:
        return declared_nbytes(self.inner, layout)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        own, mean = context.memory.vector("h"), context.memory.vector("mean of h")
        moved = torch.sub(x, own, out=recycled.empty_like(own))
        reduced = yield from _to_all(self.inner.reduce(moved, context), self.inner.traits.rounds)
        total, part = reduced.total, reduced.contribution() if reduced.contribution else moved
        # what held a NaN or an infinity reaches all ranks once, and no memory
        own.add_(torch.where(total.isfinite(), part, 0.0))
        mean.add_(torch.where(total.isfinite(), total, 0.0), alpha=1 / context.world)
        share = recycled.clone(own)
        return Reduced(torch.where(total.isfinite(), mean * context.world, total), lambda: share)


def _to_all(talk: Conversation, rounds: int) -> Conversation:
    """The same conversation, its sums sent to all ranks: under FSDP2 too, all must hold the mean of the h."""
    answer = None
    for _ in range(rounds + 1):
        try:
            request = talk.send(answer)
        except StopIteration as end:
            return as_reduced(end.value)
        answer = yield replace(request, to_all=True) if isinstance(request, Sum | TableSum) else request
    raise ConformanceError(f"a codec made more than the {rounds} requests it declares")
