"""Integers in blocks: one float32 scale for `block` elements (QSGD's rounding, Alistarh 2017, with block-wise ranges).

    scale = max |x_block| / qmax;   q = floor(x / scale + u),  u uniform in [0, 1);   E[q * scale] = x

Block integers with different scales cannot be added in flight: they are summed in float32 by whoever holds the
shard, and rounded once more on the way back. `rounding="nearest"` (u = 1/2) is for error feedback, which wants a
small error rather than an unbiased one.

A block that holds a NaN or an infinity travels as a NaN scale: every rank sees NaN there, as with plain floats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.in_torch import kernels
from tacit.errors import ConfigError
from tacit.requests import Context, Conversation, Payload, Sum, Total, Traits, even_cuts

_SCALE_NBYTES = 4

Rounding = Literal["stochastic", "nearest"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The form of block integers on the wire: records of (scale, codes), cut only between blocks. See native/blocks.h."""

    bits: int
    block: int
    rounding: Rounding
    adds = False

    def nbytes(self, numel: int) -> int:
        full, rest = divmod(numel, self.block)
        return full * self._record_nbytes(self.block) + (self._record_nbytes(rest) if rest else 0)

    def _record_nbytes(self, numel: int) -> int:
        return _SCALE_NBYTES + (numel * self.bits + 7) // 8

    def cuts(self, numel: int, shards: int) -> list[int]:
        return even_cuts(numel, shards, unit=self.block)

    def cut(self, data: Tensor, start: int, stop: int) -> Tensor:
        return data[self.nbytes(start) : self.nbytes(stop)]

    def pack(self, x: Tensor, seed: int) -> Tensor:
        out = recycled.empty(self.nbytes(x.numel()), torch.uint8, x.device)
        kernels(x).pack_blocks(x, self.bits, self.block, seed, self.rounding == "stochastic", out)
        return out

    def unpack(self, data: Tensor, numel: int) -> Tensor:
        out = recycled.empty(numel, torch.float32, data.device)
        kernels(data).unpack_blocks(data, numel, self.bits, self.block, 1.0, False, out)
        return out

    def unpack_add(self, data: Tensor, out: Tensor, gain: float = 1.0) -> None:
        kernels(data).unpack_blocks(data, out.numel(), self.bits, self.block, gain, True, out)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return recycled.join(parts)


@dataclass(frozen=True, slots=True)
class Int8:
    """8-bit integers, by default 260 bytes for 256 elements."""

    block: int = 256
    rounding: Rounding = "stochastic"
    bits = 8

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 2 or self.block % 2 or self.block > 2**20:
            raise ConfigError(
                f"block={self.block}: a block is an even number of elements from 2 to 1048576; try 256"
            )
        if self.rounding not in ("stochastic", "nearest"):
            raise ConfigError(f"rounding={self.rounding}: choose stochastic (unbiased) or nearest (for ef)")

    def __str__(self) -> str:
        options = f"block={self.block}" + (
            "" if self.rounding == "stochastic" else f", rounding={self.rounding}"
        )
        return f"int{self.bits}({options})"

    @property
    def format(self) -> Blocks:
        return Blocks(self.bits, self.block, self.rounding)

    @property
    def traits(self) -> Traits:
        stochastic = self.rounding == "stochastic"
        return Traits(rounds=1, summable=False, unbiased=stochastic, contracting=not stochastic)

    def nbytes(self, numel: int) -> int:
        return self.format.nbytes(numel)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        format = self.format
        payload = Payload(format.pack(recycled.cast(x, torch.float32), context.own_seed), format, x.numel())
        total: Total = yield Sum(payload)
        return total.reduced(payload)


@dataclass(frozen=True, slots=True)
class Int4(Int8):
    """4-bit integers, by default 36 bytes for 64 elements: 4.5 bits an element."""

    block: int = 64
    bits = 4

    __str__ = Int8.__str__
