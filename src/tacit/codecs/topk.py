"""Chunked top-k (as SparseLoCo has it, Sarfi et al. 2025): of every 4096 numbers the 64 largest, in 2 bits each.

    said_j = sign(x_j) level(|x_j|)  for the k largest |x_j| of a chunk,  0 for the rest

A chunk says always k of n, so that the payloads of all ranks are of one length:
- 2^(bits - 1) levels in bfloat16, fitted to the chunk: each is the mean of the |x_j| it stands for, so that `said` shrinks x;
- which k, as Elias and Fano wrote sorted numbers: the low bits of each, then a row of bits that steps through the high parts, a 1
  for a number and a 0 for the next high part. 64 of 4096 take 8 bits each where plain indices take 12;
- for each of them its sign and its level.

Sparse payloads do not add: everybody hears everybody's, (n - 1) payloads a rank. What is small is not said at all, so it belongs into
error feedback, `ef(topk)`, and into rounds that are rare. A chunk that holds a NaN or an infinity travels as NaN levels, and all of it
is NaN for every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import _core
from tacit.errors import ConfigError
from tacit.requests import Conversation, Gather, Heard, Traits, Turn

_FITTING = 8  # Lloyd's steps: 2 levels are then within 1 % of where they settle, for normal, log-normal and t-distributed x


@dataclass(frozen=True, slots=True)
class TopK:
    """`topk(share=0.015625, bits=2, chunk=4096)`: 0.16 bits an element."""

    share: float = 1 / 64
    bits: int = 2
    chunk: int = 4096

    def __post_init__(self) -> None:
        if not isinstance(self.share, int | float) or isinstance(self.share, bool) or not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share}: the part that is said, above 0 and at most 1; try 0.0156")
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or not 1 <= self.bits <= 4:
            raise ConfigError(f"bits={self.bits}: a sign and up to 3 bits of magnitude, so 1 to 4; try 2")
        if not isinstance(self.chunk, int) or isinstance(self.chunk, bool) or not 2 <= self.chunk <= 2**20:
            raise ConfigError(f"chunk={self.chunk}: 2 to 1048576 elements; try 4096")

    def __str__(self) -> str:
        return f"topk(share={self.share}, bits={self.bits}, chunk={self.chunk})"

    @property
    def traits(self) -> Traits:
        return Traits(rounds=1, summable=False, contracting=True)

    def nbytes(self, numel: int) -> int:
        return sum(rows.nbytes for rows in self.rows(numel))

    def reduce(self, x: Tensor, turn: Turn) -> Conversation:
        own = self.pack(x.float())
        payloads: list[Tensor] = yield Gather(own)
        total = torch.zeros_like(x, dtype=torch.float32)
        for payload in payloads:
            self.unpack_add(payload, total)
        return Heard(total, said=lambda: self.unpack_add(own, torch.zeros_like(total)))

    def rows(self, numel: int) -> "list[Rows]":
        """The chunks of `numel` elements: the whole ones, and what is left as a shorter one."""
        whole, rest = divmod(numel, self.chunk)
        cut = [(whole, self.chunk)] * (whole > 0) + [(1, rest)] * (rest > 0)
        return [Rows(count, length, max(1, round(self.share * length)), self.bits) for count, length in cut]

    def pack(self, x: Tensor) -> Tensor:
        """What is said of x, as bytes."""
        parts = [rows.pack(part).view(-1) for rows, part in self._cut(x)]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)

    def unpack_add(self, payload: Tensor, out: Tensor) -> Tensor:
        """out += what `payload` says; `out` itself."""
        at = 0
        for rows, part in self._cut(out):
            rows.unpack_add(payload[at : at + rows.nbytes].view(rows.count, -1), part)
            at += rows.nbytes
        return out

    def _cut(self, x: Tensor) -> "Iterator[tuple[Rows, Tensor]]":
        at = 0
        for rows in self.rows(x.numel()):
            yield rows, x[at : at + rows.count * rows.length].view(rows.count, rows.length)
            at += rows.count * rows.length


@dataclass(frozen=True, slots=True)
class Rows:
    """How `count` chunks of `length` elements lie on the wire, a row each: levels, low parts, high parts, signs and levels."""

    count: int
    length: int
    kept: int
    bits: int

    @property
    def levels(self) -> int:
        return int(2 ** (self.bits - 1))

    @property
    def low(self) -> int:
        """The bits of an index that are written out: as many as make a row shortest, and of those the most."""
        return min(range(self.length.bit_length()), key=lambda low: (self._index_nbits(low), -low))

    @property
    def high(self) -> int:
        """The bits that tell the high parts of all indices."""
        return self._index_nbits(self.low) - self.kept * self.low

    def _index_nbits(self, low: int) -> int:
        return self.kept * (low + 1) + (self.length - 1 >> low)

    @property
    def nbytes(self) -> int:
        nbits = self._index_nbits(self.low) + self.kept * self.bits
        return self.count * (2 * self.levels + (nbits + 7) // 8)

    def pack(self, x: Tensor) -> Tensor:
        """The rows of x, which has `count` of `length`: in C++ where x lies on a CPU."""
        if x.device.type != "cpu":
            return self.pack_in_torch(x)
        out = torch.empty(self.count, self.nbytes // self.count, dtype=torch.uint8)
        _core.topk_pack(x.reshape(-1), self.length, self.kept, self.bits, self.low, self.high, out.view(-1))
        return out

    def unpack_add(self, data: Tensor, out: Tensor) -> None:
        """out += what the rows of `data` say; `out` is contiguous, as `data` is."""
        if out.device.type != "cpu":
            self.unpack_add_in_torch(data, out)
        else:
            _core.topk_add(
                data.reshape(-1), self.length, self.kept, self.bits, self.low, self.high, out.view(-1)
            )

    def pack_in_torch(self, x: Tensor) -> Tensor:
        """For other devices, and the twin of the C++ in the tests. Of equal ones another may be picked."""
        index = x.abs().topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values
        picked = x.gather(1, index)
        levels = fitted(picked.abs(), self.levels).bfloat16()
        # topk counts a NaN as the largest, so one that is not finite has been picked
        levels = levels.masked_fill(~picked.isfinite().all(1, keepdim=True), torch.nan)
        code = nearest(picked.abs(), levels.float()) << 1 | (picked < 0)
        place = torch.arange(self.kept, device=x.device)
        high = torch.zeros(len(x), self.high, dtype=torch.uint8, device=x.device)
        high.scatter_(1, (index >> self.low) + place, 1)
        written = torch.cat([to_bits(index, self.low), high, to_bits(code, self.bits)], dim=1)
        return torch.cat([levels.view(torch.uint8), to_bytes(written)], dim=1)

    def unpack_add_in_torch(self, data: Tensor, out: Tensor) -> None:
        levels = (
            data[:, : 2 * self.levels]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.bfloat16)
            .float()
        )
        written = of_bytes(data[:, 2 * self.levels :])
        sizes = [self.kept * self.low, self.high, self.kept * self.bits]
        low, high, code = written[:, : sum(sizes)].split(sizes, dim=1)
        place = torch.arange(self.kept, device=data.device)
        ones = high.sort(dim=1, descending=True, stable=True).indices[:, : self.kept]
        index = (ones - place << self.low) | of_bits(low, self.kept)
        wrong = (
            (high.sum(1) != self.kept).any() | (index >= self.length).any() | (index.diff(dim=1) <= 0).any()
        )
        if data.device.type != "meta" and wrong.item():  # a GPU would not survive it
            raise ValueError("a row names elements that are not there, or not in order")
        codes = of_bits(code, self.kept)
        value = levels.gather(1, codes >> 1) * (1 - 2 * (codes & 1))
        out.scatter_(1, index, out.gather(1, index) + value)
        out.masked_fill_(~levels.isfinite().all(1, keepdim=True), torch.nan)


def fitted(size: Tensor, count: int) -> Tensor:
    """`count` levels for each row of magnitudes, rising, each the mean of those it is nearest to (Lloyd's steps from the quantiles)."""
    kept = size.shape[1]
    middles = (2 * torch.arange(count, device=size.device) + 1) * kept // (2 * count)
    levels = size.sort(dim=1).values[:, middles]
    for _ in range(_FITTING if count > 1 else 1):
        members = nearest(size, levels)[:, :, None] == torch.arange(count, device=size.device)
        number = members.sum(1)
        mean = (size[:, :, None] * members).sum(1) / number.clamp_min(1)
        levels = torch.where(number > 0, mean, levels)
    return levels


def nearest(size: Tensor, levels: Tensor) -> Tensor:
    """The number of the level that each magnitude of a row is nearest to."""
    middles = (levels[:, 1:] + levels[:, :-1]) / 2
    return (size[:, :, None] > middles[:, None, :]).sum(2)


def to_bits(values: Tensor, width: int) -> Tensor:
    """Every row's whole numbers as `width` bits each, the lowest first."""
    bits = values[:, :, None] >> torch.arange(width, device=values.device) & 1
    return bits.to(torch.uint8).flatten(1)


def of_bits(bits: Tensor, count: int) -> Tensor:
    """`count` whole numbers a row, from what `to_bits` wrote."""
    wide = bits.reshape(len(bits), count, -1).long()
    return (wide << torch.arange(wide.shape[2], device=bits.device)).sum(2)


def to_bytes(bits: Tensor) -> Tensor:
    """Every row's bits, 8 a byte, the first in the lowest; filled up with zeros."""
    filled = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    packed: Tensor = (filled << _shifts(bits)).sum(2, dtype=torch.uint8)
    return packed


def of_bytes(data: Tensor) -> Tensor:
    bits: Tensor = data[:, :, None] >> _shifts(data) & 1
    return bits.flatten(1)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
