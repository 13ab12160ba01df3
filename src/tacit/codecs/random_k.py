"""Random-k with a shared seed (Stich et al. 2018, Wangni et al. 2018): all ranks send the same elements, which nobody has to name.

    sent_j = x_j  if j is picked, else 0;      E |x - sent|^2 = (1 - k/d) |x|^2        (a contraction: for error feedback)
    sent_j = d/k x_j                           E sent = x                              (`unbiased=True`: d/k times the variance)

One of each of k runs of d/k elements is picked, by the shared seed, another in each step: so picks are in order and never meet. No
place travels, and the numbers of all ranks add as they stand: over every scheme that sums, trees and an aggregator too, and in the
format of any codec, `randomk(0.05) > hush`. Padding of FSDP2 is never picked.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from tacit.codecs.cast import Plain
from tacit.codecs.in_torch import random_words
from tacit.codecs.shared_places import all_finite, check_values, scatter, sum_of
from tacit.codecs.sparse_form import check_share, kept_of, with_values
from tacit.errors import ConfigError
from tacit.layout import Layout
from tacit.requests import Codec, Context, Conversation, Traits, seed_of


@dataclass(frozen=True, slots=True)
class RandomK:
    """`randomk(share=0.01)`; with `unbiased=True` numbers beyond 3e38 times the share are infinite."""

    share: float = 0.01
    unbiased: bool = False
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_share(self.share, 0.01)
        if not isinstance(self.unbiased, bool):
            raise ConfigError(f"unbiased={self.unbiased}: True scales what is sent by 1 / share; else False")
        check_values("randomk", self.values)

    def __str__(self) -> str:
        unbiased = ", unbiased=True" if self.unbiased else ""
        return with_values(f"randomk(share={self.share}{unbiased})", self.values)

    @property
    def traits(self) -> Traits:
        inner = self.values.traits
        return replace(
            inner,
            unbiased=self.unbiased and inner.unbiased,
            contracting=not self.unbiased and inner.contracting,
            exact=False,
        )

    def over(self, values: Codec) -> Codec:
        return replace(self, values=values)

    def nbytes(self, numel: int) -> int:
        return self.values.nbytes(kept_of(self.share, numel))

    def nbytes_of(self, layout: Layout) -> int:
        return self.nbytes(sum(layout.numels))

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x, seed = x.float(), seed_of(context.shared_seed, "places")
        index, lengths = picked(context.layout, self.share, seed, x.device)
        gain = lengths.float() if self.unbiased else 1.0

        def place(numbers: Tensor) -> Tensor:
            return scatter(numbers * gain, index, x.numel())

        return (yield from sum_of(self.values, x[index], context, all_finite(x), place))


def picked(layout: Layout, share: float, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One place of each run, rising, and how long each run is."""
    numel = sum(layout.numels)
    kept = kept_of(share, numel)
    edges = torch.arange(kept + 1, device=device) * numel // max(1, kept)
    lengths = edges.diff()
    index = edges[:-1] + (random_words(seed, kept, device) * lengths >> 32)
    return (index if numel == layout.numel else _places_of(layout, device)[index]), lengths


@lru_cache(maxsize=256)
def _places_of(layout: Layout, device: torch.device) -> Tensor:
    """The elements that belong to a parameter."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in layout.spans])
