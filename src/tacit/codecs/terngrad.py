"""TernGrad (Wen et al., NeurIPS 2017, arXiv 1705.07878): gradients of -1, 0 and 1.

    x is cut off at c sigma, sigma its standard deviation;   s = max over ranks of max |x|
    t_i = sign(x_i) with probability |x_i| / s, else 0;   E s t = x

All ranks share s ("scaler sharing"), so the sum of the t is a sum of small integers that anybody can add in flight: 2 bits up, a lane
of 8 bits down (16 beyond 127 ranks). sigma and s are a block's, where the paper has a layer's. Cutting at 2.5 sigma lowers s, and with it the
noise, but it is a bias: `clip=0` cuts nothing, and is unbiased.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.few_bits import blocks_of, check_block, of_lanes
from tacit.codecs.in_torch import kernels
from tacit.errors import ConfigError
from tacit.requests import Context, Conversation, Lanes, Max, Reduced, TableSum, Total, Traits

_TERNARY = (0, 1, 2, 1)  # what codes stand for, plus 1; nobody sends the last
_MEAN, _SQUARE, _LARGEST = 0, 2, 3  # kinds of block_sums


@dataclass(frozen=True, slots=True)
class TernGrad:
    """`terngrad(clip=2.5, block=1024)`: 2.03 bits up, 8 down."""

    clip: float = 2.5
    block: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.clip, int | float) or isinstance(self.clip, bool) or not 0 <= self.clip <= 100:
            raise ConfigError(
                f"clip={self.clip}: standard deviations at which x is cut off, to 100, or 0 for nowhere; try 2.5"
            )
        check_block(self.block)

    def __str__(self) -> str:
        return f"terngrad(clip={self.clip}, block={self.block})"

    @property
    def traits(self) -> Traits:
        return Traits(rounds=2, summable=True, unbiased=self.clip == 0, lanes=Lanes(16, 2))

    def nbytes(self, numel: int) -> int:
        return 4 * blocks_of(numel, self.block) + (numel + 3) // 4

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x = recycled.cast(x, torch.float32)
        limits = self.limits(x)
        scales: Tensor = yield Max(limits)
        codes = recycled.empty((x.numel() + 3) // 4, torch.uint8, x.device)
        kernels(x).pack_ternary(x, self.block, limits, scales, context.own_seed, codes)
        lanes = Lanes(8 if context.world <= 127 else 16, 2)
        total: Total = yield TableSum(codes, _TERNARY, x.numel(), lanes)

        def decode(sums: Tensor, count: int) -> Tensor:
            out = recycled.empty(x.numel(), torch.float32, x.device)
            kernels(x).decode_votes(of_lanes(sums), 1, count, False, self.block, scales, out)
            return out

        own = TableSum(codes, _TERNARY, x.numel(), Lanes(8, 2))
        return Reduced(decode(total.value, total.count), lambda: decode(own.look_up(), 1))

    def limits(self, x: Tensor) -> Tensor:
        """Where x is cut off in each block: at its largest, or at `clip` standard deviations; NaN where x is not finite."""
        blocks = blocks_of(x.numel(), self.block)
        found = torch.empty(3, blocks, dtype=torch.float64, device=x.device)
        for kind, out in zip((_LARGEST, _MEAN, _SQUARE), found, strict=True):
            if kind == _LARGEST or self.clip:
                kernels(x).block_sums(x, self.block, kind, out)
        most = found[0]
        if not self.clip or not blocks:
            return most.float()
        lengths = torch.full_like(most, self.block)
        lengths[-1] -= blocks * self.block - x.numel()
        mean, square = found[1:] / lengths
        sigma = (square - mean * mean).clamp_min(0).sqrt()
        # a block of equal numbers has no deviation, and one of one element none either: its largest then
        cut = torch.where(sigma > 1e-6 * most, self.clip * sigma, most)
        return torch.minimum(most, cut).float()
