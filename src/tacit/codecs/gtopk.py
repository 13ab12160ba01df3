"""gTop-k (Shi et al. 2019): the k largest of the sum, in 2 log2 n stages of k numbers each.

    up a binomial tree:  partial = topk_k(own partial + received);    down: the root's, to all

Top-k of each rank, gathered, is n k numbers for every rank; here no rank ever holds more than 2 k. What a merge leaves out is remembered by
the rank that merged: the paper gives ranks back what they sent of elements that the root did not keep, which loses what was left out on
the way of elements that it did keep. Inside error feedback: `ef(gtopk(0.001))`.

A request of its own, Merge, carries it over a tree whatever the scheme: docs/decisions/0024-merging-on-a-tree.md.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tacit.codecs.cast import Plain
from tacit.codecs.sparse_form import SparseForm, check_share, kept_of, largest, with_values
from tacit.codecs.topk import format_of
from tacit.requests import Codec, Context, Conversation, Merge, Merged, Reduced, Traits, seed_of

Sparse = tuple[Tensor, Tensor]  # places and numbers


@dataclass(frozen=True, slots=True)
class GTopK:
    """`gtopk(share=0.001)`; `gtopk > bf16` writes the numbers as bf16 does, again at every merge."""

    share: float = 0.001
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_share(self.share, 0.001)
        format_of(self.values, "gtopk")

    def __str__(self) -> str:
        return with_values(f"gtopk(share={self.share})", self.values)

    @property
    def traits(self) -> Traits:
        return Traits(rounds=1, summable=False)

    def over(self, values: Codec) -> Codec:
        return replace(self, values=values)

    def nbytes(self, numel: int) -> int:
        return self._form(numel).nbytes

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x, form = x.float(), self._form(x.numel())
        index = largest(x, form.kept)
        own = form.pack(index, x[index], context.own_seed)
        seed = seed_of(context.own_seed, "merge")
        merged: Merged = yield Merge(own, lambda a, b: merge(form, a, b, seed))

        def contribution() -> Tensor:
            kept = form.sum_of([own])
            for places, numbers in merged.left_out:
                kept.index_add_(0, places, -numbers)
            return kept

        return Reduced(form.sum_of([merged.value]), contribution)

    def _form(self, numel: int) -> SparseForm:
        return SparseForm(numel, kept_of(self.share, numel), format_of(self.values, "gtopk"))


def merge(form: SparseForm, own: Tensor, received: Tensor, seed: int) -> tuple[Tensor, Sparse]:
    """The largest of both, added, as a payload; and what that leaves out, by its rounding too."""
    (a, x), (b, y) = form.unpack(own), form.unpack(received)
    places, where = torch.cat([a, b]).unique(return_inverse=True)
    numbers = x.new_zeros(places.numel()).index_add_(0, where, torch.cat([x, y]))
    kept = largest(numbers, form.kept)
    payload = form.pack(places[kept], numbers[kept], seed)
    _, sent = form.unpack(payload)
    return payload, (places, numbers.index_add_(0, kept, -sent))
