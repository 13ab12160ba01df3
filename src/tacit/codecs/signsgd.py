"""signSGD with majority vote (Bernstein et al., ICML 2018 and ICLR 2019, arXiv 1802.04434 and 1810.05291).

    every rank sends sign(x), one bit;   votes are added;   total / n = s sign(sum of signs);   a tie is 0

s: the mean of |x| over the block and all ranks (`scale=mean`), so that gradients keep their size; or 1, as published
(`scale=unit`): then a learning rate is the step of every parameter, and clipping or a mean of |x| has no meaning.

Votes are integers, so whoever adds may be a ring, a server or an aggregator in the network: one bit up, a lane of 8 bits down
(16 beyond 255 ranks). A minority has no voice, and large elements are worth what small ones are: biased, and not contracting. A rank's
contribution is its own vote and its part of what the majority made of all votes, so that the shares add up.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.few_bits import blocks_of, check_block, check_choice, of_lanes
from tacit.codecs.in_torch import kernels
from tacit.codecs.signs import SignFormat
from tacit.requests import Context, Conversation, Lanes, Payload, Reduced, Sum, TableSum, Total, Traits

_VOTES = (0, 1)
_ABSOLUTE = 1  # block_sums of |x|


@dataclass(frozen=True, slots=True)
class MajorityVote:
    """`signsgd(scale=mean, block=1024)`: 1 bit and 1/16 of a bit of scales up, 8 bits down."""

    scale: str = "mean"
    block: int = 1024
    traits = Traits(rounds=2, summable=True, lanes=Lanes(16, 1))

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, ("mean", "unit"))
        check_block(self.block)

    def __str__(self) -> str:
        return f"signsgd(scale={self.scale}, block={self.block})"

    def nbytes(self, numel: int) -> int:
        return 8 * blocks_of(numel, self.block) + (numel + 7) // 8

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x = recycled.cast(x, torch.float32)
        sizes = torch.empty(blocks_of(x.numel(), self.block), dtype=torch.float64, device=x.device)
        kernels(x).block_sums(x, self.block, _ABSOLUTE, sizes)
        size: Total = yield Sum(Payload.dense(sizes), to_all=True, small=True)
        scales = self.scales(size.value / size.count, x.numel())
        bits = SignFormat(self.block, 0).pack(x, 0)
        lanes = Lanes(8 if context.world <= 255 else 16, 1)
        total: Total = yield TableSum(bits, _VOTES, x.numel(), lanes, to_all=True)

        def decode(votes: Tensor, count: int, majority: bool) -> Tensor:
            out = recycled.empty(x.numel(), torch.float32, x.device)
            kernels(x).decode_votes(of_lanes(votes), 2, count, majority, self.block, scales, out)
            return out

        value = decode(total.value, total.count, True)

        def contribution() -> Tensor:
            rounded = value - decode(total.value, total.count, False)
            own = TableSum(bits, _VOTES, x.numel(), Lanes(8, 1)).look_up()
            return decode(own, 1, False).add_(rounded, alpha=1 / total.count)

        return Reduced(value, contribution)

    def scales(self, sizes: Tensor, numel: int) -> Tensor:
        """What a vote is worth in each block, where the ranks' sum of |x| is `sizes` on average; not finite where x is not."""
        if self.scale == "unit":
            return torch.where(sizes.isfinite(), (sizes > 0).double(), torch.nan).float()
        lengths = torch.full_like(sizes, self.block)
        if numel % self.block:
            lengths[-1] = numel % self.block
        return (sizes / lengths).float()
