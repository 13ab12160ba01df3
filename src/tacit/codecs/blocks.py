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

from tacit import _core
from tacit.errors import ConfigError
from tacit.requests import Conversation, Payload, Sum, Total, Traits, Turn, even_cuts

_SCALE_NBYTES = 4
_TINY = 1e-30  # below this a block counts as zero: 1 / scale must stay finite

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
        out = torch.empty(self.nbytes(x.numel()), dtype=torch.uint8, device=x.device)
        if x.device.type == "cpu":
            _core.pack_blocks(x, self.bits, self.block, seed, self.rounding == "stochastic", out)
            return out
        return _pack_torch(x, self, seed, out)

    def unpack(self, data: Tensor, numel: int) -> Tensor:
        out = torch.empty(numel, device=data.device)
        self._decode(data, out, 1.0, add=False)
        return out

    def unpack_add(self, data: Tensor, out: Tensor, gain: float = 1.0) -> None:
        self._decode(data, out, gain, add=True)

    def _decode(self, data: Tensor, out: Tensor, gain: float, *, add: bool) -> None:
        if data.device.type == "cpu":
            _core.unpack_blocks(data, out.numel(), self.bits, self.block, gain, add, out)
        elif add:
            out.add_(_unpack_torch(data, self, out.numel()).mul_(gain))
        else:
            out.copy_(_unpack_torch(data, self, out.numel()).mul_(gain))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))


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
    def form(self) -> Blocks:
        return Blocks(self.bits, self.block, self.rounding)

    @property
    def traits(self) -> Traits:
        stochastic = self.rounding == "stochastic"
        return Traits(rounds=1, summable=False, unbiased=stochastic, contracting=not stochastic)

    def nbytes(self, numel: int) -> int:
        return self.form.nbytes(numel)

    def reduce(self, x: Tensor, turn: Turn) -> Conversation:
        form = self.form
        payload = Payload(form.pack(x.float(), turn.own_seed), form, x.numel())
        total: Total = yield Sum(payload)
        return total.heard(payload)


@dataclass(frozen=True, slots=True)
class Int4(Int8):
    """4-bit integers, by default 36 bytes for 64 elements: 4.5 bits an element."""

    block: int = 64
    bits = 4

    __str__ = Int8.__str__


# ---- the same bits in device-agnostic torch: what a CUDA tensor takes, and the native kernel's twin in the tests ----


def random_bits(seed: int, numel: int, device: torch.device) -> Tensor:
    """The counter-based generator of native/random.h: 32 bits for each index below 2^32, as int64."""
    low, high, mask = seed & 0xFFFFFFFF, seed >> 32, 0xFFFFFFFF
    x = torch.arange(numel, dtype=torch.int64, device=device)
    x = ((x * 0x9E3779B9 + low) & mask) ^ high
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)


def _pack_torch(x: Tensor, form: Blocks, seed: int, out: Tensor) -> Tensor:
    qmax = float(2 ** (form.bits - 1) - 1)
    rows = _rows(x, form.block)
    absmax = rows.abs().amax(1)
    finite, large = absmax.isfinite(), absmax >= _TINY
    scale = torch.where(finite & large, absmax / qmax, torch.where(finite, 0.0, torch.nan))
    inverse = torch.where(finite & large, 1.0 / scale, 0.0)
    if form.rounding == "stochastic":
        noise = (random_bits(seed, x.numel(), x.device) >> 8).float() * 2.0**-24
    else:
        noise = torch.full_like(x, 0.5)
    rows = torch.where((finite & large)[:, None], rows, 0.0)
    code = (rows * inverse[:, None] + _rows(noise, form.block)).floor().clamp_(-qmax, qmax)
    code = torch.where((finite & large)[:, None], code, 0.0).to(torch.int16)
    if form.bits == 4:
        code = (code + 8).to(torch.uint8)
        code.view(-1)[x.numel() :] = 0
        body = code[:, 0::2] | (code[:, 1::2] << 4)
    else:
        body = code.to(torch.int8).view(torch.uint8)
    records = torch.cat([scale.float()[:, None].contiguous().view(torch.uint8), body], dim=1)
    return out.copy_(records.reshape(-1)[: out.numel()])


def _unpack_torch(data: Tensor, form: Blocks, numel: int) -> Tensor:
    record = form._record_nbytes(form.block)
    blocks = -(-numel // form.block)
    padded = torch.zeros(blocks * record, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    rows = padded.view(blocks, record)
    scale = rows[:, :_SCALE_NBYTES].reshape(-1).view(torch.float32)[:, None]
    body = rows[:, _SCALE_NBYTES:].contiguous()
    if form.bits == 8:
        code = body.view(torch.int8).float()
    else:
        code = (
            torch.stack([body & 15, body >> 4], dim=2).reshape(blocks, form.block).to(torch.int16) - 8
        ).float()
    return (code * scale).reshape(-1)[:numel]


def _rows(x: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)
