"""The sum over ranks of a few elements whose places all ranks know: plain vectors of `kept` numbers, which add like any others.

So the numbers may take any codec that remembers nothing, and any scheme that carries it: trees, an aggregator, indices and lanes.
Where this rank's x holds a NaN or an infinity, all that it sends is NaN, and all of the sum: else what is not picked would hide it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tacit import recycled
from tacit.errors import PairingError
from tacit.requests import Codec, Context, Conversation, LocalMemory, Reduced, as_reduced, seed_of

Place = Callable[[Tensor], Tensor]


def sum_of(values: Codec, numbers: Tensor, context: Context, finite: Tensor, place: Place) -> Conversation:
    """The conversation of `values` about `numbers`; `place` puts a vector of them where they belong."""
    sent = torch.where(finite, numbers, torch.nan)
    seeds = [seed_of(seed, "picked") for seed in (context.own_seed, context.shared_seed)]
    told = replace(context, memory=LocalMemory(sent), own_seed=seeds[0], shared_seed=seeds[1])
    reduced: Reduced = as_reduced((yield from values.reduce(sent, told)))
    contribution = reduced.contribution or (lambda: sent)
    return Reduced(place(reduced.total), lambda: place(contribution()))


def scatter(numbers: Tensor, index: Tensor, numel: int) -> Tensor:
    """A vector of zeros with `numbers` at `index`; all NaN if one of them is not finite."""
    rest = torch.where(numbers.isfinite().all(), 0.0, torch.nan)
    out = recycled.empty(numel, torch.float32, numbers.device)
    return out.copy_(rest.expand(numel)).index_copy_(0, index, numbers.float())


def all_finite(x: Tensor) -> Tensor:
    """Whether all of x is finite, as a tensor: nothing waits for an accelerator."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(x)  # one pass; a NaN is both
    return low.isfinite() & high.isfinite()


def check_values(name: str, values: Codec) -> None:
    """Raises PairingError for a codec that cannot be about elements which are others in each step."""
    if values.traits.remembers or values.traits.stateful:
        raise PairingError(
            f"{name} > {values}: it keeps memory of elements, and those sent are others in each step; write ef({name} > ...)"
        )
