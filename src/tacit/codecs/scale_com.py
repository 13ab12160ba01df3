"""ScaleCom (Chen et al. 2020): a leader's top-k for all ranks, another leader in each step.

    leader = step mod n;   I = places of the k largest |x_leader|;      sent_j = x_j  if j in I, else 0, on every rank

All ranks send the same places, so their numbers add as they stand, in any scheme that sums and in the format of any codec:
`ef(scalecom(0.01) > hush)`. What each receives has k numbers whatever the world, where top-k of each rank builds up to n k. It rests on what ranks
remember being alike: use it inside error feedback. The paper's low-pass filter of the memory, for large learning rates, is not built: it
forgets a part of what was not sent, and here sent + remembered = input.

The leader's places go through a maximum, zeros from all others: about 2 + log2(1 / share) bits a place, once around the ring, where n - 1
copies from the leader would wait for its link.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tacit.codecs.cast import Plain
from tacit.codecs.shared_places import all_finite, check_values, scatter, sum_of
from tacit.codecs.sparse_form import Places, check_share, kept_of, largest, with_values
from tacit.requests import Codec, Context, Conversation, Max, Traits


@dataclass(frozen=True, slots=True)
class ScaleCom:
    """`scalecom(share=0.01)`: k numbers up and down, and 8.6 bits for each place."""

    share: float = 0.01
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        check_share(self.share, 0.01)
        check_values("scalecom", self.values)

    def __str__(self) -> str:
        return with_values(f"scalecom(share={self.share})", self.values)

    @property
    def traits(self) -> Traits:
        inner = self.values.traits
        return replace(inner, rounds=1 + inner.rounds, unbiased=False, exact=False)

    def over(self, values: Codec) -> Codec:
        return replace(self, values=values)

    def nbytes(self, numel: int) -> int:
        kept = kept_of(self.share, numel)
        return Places(numel, kept).nbytes + self.values.nbytes(kept)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x, kept = x.float(), kept_of(self.share, x.numel())
        form, leads = Places(x.numel(), kept), context.rank == context.step % context.world
        own = form.pack(largest(x, kept)) if leads else x.new_zeros(form.nbytes, dtype=torch.uint8)
        index = form.unpack((yield Max(own)))

        def place(numbers: Tensor) -> Tensor:
            return scatter(numbers, index, x.numel())

        return (yield from sum_of(self.values, x[index], context, all_finite(x), place))
