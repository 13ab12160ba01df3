"""1-bit SGD without its memory (Seide 2014): the signs of x, and the mean of |x|.

sent_j = sign(x_j) mean |x|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import Context, Conversation, Gather, Reduced, Traits


@dataclass(frozen=True, slots=True)
class SignMean:
    """4 bytes for the mean, and a bit for each element."""

    traits = Traits(rounds=1, summable=False, contracting=True)

    def __str__(self) -> str:
        return "signmean"

    def nbytes(self, numel: int) -> int:
        return 4 + -(-numel // 8)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        mean = x.double().abs().mean().float().view(1)
        signs = torch.nn.functional.pad((x < 0).byte(), (0, -x.numel() % 8)).view(-1, 8)
        own = torch.cat([mean.view(torch.uint8), (signs << torch.arange(8)).sum(1, dtype=torch.uint8)])
        payloads = yield Gather(own)
        total = sum(_unpacked(payload, x.numel()) for payload in payloads)
        return Reduced(total, contribution=lambda: _unpacked(own, x.numel()))


def _unpacked(payload: Tensor, numel: int) -> Tensor:
    mean = payload[:4].clone().view(torch.float32)
    negative = (payload[4:, None] >> torch.arange(8) & 1).view(-1)[:numel]
    return mean * (1 - 2 * negative.float())
