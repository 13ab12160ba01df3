"""Chunked top-k (as SparseLoCo has it, Sarfi et al. 2025): of every 4096 numbers the 64 largest, in 2 bits each.

    said_j = sign(x_j) level(|x_j|)  for the k largest |x_j| of a chunk,  0 for the rest

A chunk always sends k of n, so that the payloads of all ranks are of one length:
- 2^(bits - 1) levels in bfloat16, fitted to the chunk: each is the mean of the |x_j| it stands for, so that what is sent shrinks x;
- which k, as Elias and Fano wrote sorted numbers: the low bits of each, then a row of bits that steps through the high parts, a 1
  for a number and a 0 for the next high part. 64 of 4096 take 8 bits each where plain indices take 12;
- for each of them its sign and its level.

Sparse payloads do not add: every rank receives every other's, (n - 1) payloads. What is small is not sent at all, so it belongs into
error feedback, `ef(topk)`, and into rounds that are rare. A chunk that holds a NaN or an infinity travels as NaN levels, and all of it
is NaN for every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import _core, recycled
from tacit.errors import ConfigError, PairingError
from tacit.requests import (
    Codec,
    Context,
    Conversation,
    Dense,
    Gather,
    HasFormat,
    Reduced,
    Traits,
    WireFormat,
)

_BITS = 2
_BUCKET = "bucket"
_FITTING = 8  # Lloyd's steps: 2 levels are then within 1 % of where they settle, for normal, log-normal and t-distributed x


@dataclass(frozen=True, slots=True)
class TopK:
    """`topk(share=0.015625, bits=2, chunk=4096)`: 0.16 bits an element. `topk(0.001, chunk=bucket) > none`: of all that a bucket holds."""

    share: float = 1 / 64
    bits: int = _BITS
    chunk: int | str = 4096

    def __post_init__(self) -> None:
        if not isinstance(self.share, int | float) or isinstance(self.share, bool) or not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share}: the part that is sent, above 0 and at most 1; try 0.0156")
        if not isinstance(self.bits, int) or isinstance(self.bits, bool) or not 1 <= self.bits <= 4:
            raise ConfigError(f"bits={self.bits}: a sign and up to 3 bits of magnitude, so 1 to 4; try 2")
        whole = isinstance(self.chunk, int) and not isinstance(self.chunk, bool)
        if self.chunk != _BUCKET and not (whole and 2 <= int(self.chunk) <= 2**20):
            raise ConfigError(
                f"chunk={self.chunk}: 2 to 1048576 elements, or bucket for all of a bucket; try 4096"
            )

    def __str__(self) -> str:
        return f"topk(share={self.share}, bits={self.bits}, chunk={self.chunk})"

    @property
    def traits(self) -> Traits:
        return Traits(rounds=1, summable=False, contracting=True)

    def over(self, values: Codec) -> Codec:
        """`topk > int8`: the same elements, their numbers in the format of another codec."""
        if self.bits != _BITS:
            raise ConfigError(f"bits={self.bits}: {values} writes the numbers; leave bits out")
        return TopKValues(self, values)

    def nbytes(self, numel: int) -> int:
        return sum(rows.nbytes for rows in self.rows(numel))

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        own = self.pack(x.float())
        payloads: list[Tensor] = yield Gather(own)
        total = recycled.zeros(x.numel(), torch.float32, x.device)
        for payload in payloads:
            self.unpack_add(payload, total)
        return Reduced(
            total,
            contribution=lambda: self.unpack_add(own, recycled.zeros(x.numel(), torch.float32, x.device)),
        )

    def rows(self, numel: int) -> "list[Rows]":
        """The chunks of `numel` elements: the whole ones, and what is left as a shorter one."""
        chunk = max(1, numel) if self.chunk == _BUCKET else int(self.chunk)
        whole, rest = divmod(numel, chunk)
        cut = [(whole, chunk)] * (whole > 0) + [(1, rest)] * (rest > 0)
        return [Rows(count, length, max(1, round(self.share * length)), self.bits) for count, length in cut]

    def pack(self, x: Tensor) -> Tensor:
        """What is sent of x, as bytes."""
        parts = [rows.pack(part).view(-1) for rows, part in self.cut(x)]
        return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)

    def unpack_add(self, payload: Tensor, out: Tensor) -> Tensor:
        """out += what `payload` holds; `out` itself."""
        at = 0
        for rows, part in self.cut(out):
            rows.unpack_add(payload[at : at + rows.nbytes].view(rows.count, -1), part)
            at += rows.nbytes
        return out

    def cut(self, x: Tensor) -> "Iterator[tuple[Rows, Tensor]]":
        """The chunks of x, those of one length together, as rows."""
        at = 0
        for rows in self.rows(x.numel()):
            yield rows, x[at : at + rows.count * rows.length].view(rows.count, rows.length)
            at += rows.count * rows.length


@dataclass(frozen=True, slots=True)
class TopKValues:
    """`topk(0.01) > int8`: the indices of `picked`, a row of bytes for each chunk, then all numbers in the format of `values`.

    A NaN or an infinity stays in the numbers, as the format writes it.
    """

    picked: TopK
    values: Codec

    def __post_init__(self) -> None:
        format_of(self.values, "topk")

    def __str__(self) -> str:
        return f"topk(share={self.picked.share}, chunk={self.picked.chunk}) > {self.values}"

    @property
    def _format(self) -> WireFormat:
        return format_of(self.values, "topk")

    @property
    def traits(self) -> Traits:
        return Traits(rounds=1, summable=False, contracting=self.values.traits.contracting)

    def nbytes(self, numel: int) -> int:
        rows = self.picked.rows(numel)
        kept = sum(each.count * each.kept for each in rows)
        return sum(each.count * (each.index_nbits + 7 >> 3) for each in rows) + self._format.nbytes(kept)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        own = self.pack(x.float(), context.own_seed)
        payloads: list[Tensor] = yield Gather(own)
        total = recycled.zeros(x.numel(), torch.float32, x.device)
        for payload in payloads:
            self.unpack_add(payload, total)
        return Reduced(
            total,
            contribution=lambda: self.unpack_add(own, recycled.zeros(x.numel(), torch.float32, x.device)),
        )

    def pack(self, x: Tensor, seed: int) -> Tensor:
        written, numbers = [], [x.new_empty(0)]
        for rows, part in self.picked.cut(x):
            index = rows.largest(part)
            written.append(rows.pack_places(index).view(-1))
            numbers.append(part.gather(1, index).view(-1))
        return torch.cat([*written, self._format.pack(torch.cat(numbers), seed).view(torch.uint8)])

    def unpack_add(self, payload: Tensor, out: Tensor) -> Tensor:
        """out += what `payload` holds; `out` itself."""
        cut, at, indices = list(self.picked.cut(out)), 0, []
        for rows, _ in cut:
            nbytes = rows.count * (rows.index_nbits + 7 >> 3)
            indices.append(rows.unpack_places(payload[at : at + nbytes].view(rows.count, -1)))
            at += nbytes
        sizes = [index.numel() for index in indices]
        numbers = torch.zeros(sum(sizes), device=out.device)
        self._format.unpack_add(typed(payload[at:], self._format), numbers)
        for (_, part), index, number in zip(cut, indices, numbers.split(sizes), strict=True):
            part.scatter_add_(1, index, number.view_as(index))
        return out


def typed(data: Tensor, format: WireFormat) -> Tensor:
    """A payload's bytes as the format packed them."""
    return data.clone().view(format.dtype) if isinstance(format, Dense) else data


def format_of(values: Codec, name: str) -> WireFormat:
    """The format in which `name > values` writes its numbers; PairingError if `values` has none."""
    if not isinstance(values, HasFormat):
        raise PairingError(
            f"{name} > {values}: {values} has no format for single numbers; write {name} > int8, int4, bf16 or none"
        )
    return values.format


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
        """The bits that encode the high parts of all indices."""
        return self.index_nbits - self.kept * self.low

    @property
    def index_nbits(self) -> int:
        """The bits of a row's indices."""
        return self._index_nbits(self.low)

    def _index_nbits(self, low: int) -> int:
        return self.kept * (low + 1) + (self.length - 1 >> low)

    @property
    def nbytes(self) -> int:
        nbits = self.index_nbits + self.kept * self.bits
        return self.count * (2 * self.levels + (nbits + 7) // 8)

    def pack(self, x: Tensor) -> Tensor:
        """The rows of x, which has `count` of `length`: in C++ where x lies on a CPU."""
        if x.device.type != "cpu":
            return self.pack_in_torch(x)
        out = torch.empty(self.count, self.nbytes // self.count, dtype=torch.uint8)
        _core.topk_pack(x.reshape(-1), self.length, self.kept, self.bits, self.low, self.high, out.view(-1))
        return out

    def unpack_add(self, data: Tensor, out: Tensor) -> None:
        """out += what the rows of `data` hold; `out` is contiguous, as `data` is."""
        if out.device.type != "cpu":
            self.unpack_add_in_torch(data, out)
        else:
            _core.topk_add(
                data.reshape(-1), self.length, self.kept, self.bits, self.low, self.high, out.view(-1)
            )

    def pack_in_torch(self, x: Tensor) -> Tensor:
        """For other devices, and the twin of the C++ in the tests. Of equal ones another may be picked."""
        index = self.largest(x)
        picked = x.gather(1, index)
        levels = fitted(picked.abs(), self.levels).bfloat16()
        # topk counts a NaN as the largest, so one that is not finite has been picked
        levels = levels.masked_fill(~picked.isfinite().all(1, keepdim=True), torch.nan)
        code = nearest(picked.abs(), levels.float()) << 1 | (picked < 0)
        written = torch.cat([self.index_bits(index), to_bits(code, self.bits)], dim=1)
        return torch.cat([levels.view(torch.uint8), to_bytes(written)], dim=1)

    def unpack_add_in_torch(self, data: Tensor, out: Tensor) -> None:
        levels = (
            data[:, : 2 * self.levels]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.bfloat16)
            .float()
        )
        written = of_bytes(data[:, 2 * self.levels :])
        index, code = self.index_of(written), written[:, self.index_nbits :]
        codes = of_bits(code[:, : self.kept * self.bits], self.kept)
        value = levels.gather(1, codes >> 1) * (1 - 2 * (codes & 1))
        out.scatter_(1, index, out.gather(1, index) + value)
        out.masked_fill_(~levels.isfinite().all(1, keepdim=True), torch.nan)

    def largest(self, x: Tensor) -> Tensor:
        """Which elements of every row are sent, in order; a NaN counts as the largest."""
        if x.device.type == "cpu":
            out = torch.empty(len(x) * self.kept, dtype=torch.int64)
            _core.select_largest(x.contiguous().view(-1), self.length, self.kept, out)
            return out.view(len(x), self.kept)
        return x.abs().topk(self.kept, dim=1, sorted=False).indices.sort(dim=1).values

    def pack_places(self, index: Tensor) -> Tensor:
        """Every row's indices in bytes."""
        if index.device.type != "cpu":
            return to_bytes(self.index_bits(index))
        out = torch.empty(len(index), self.index_nbits + 7 >> 3, dtype=torch.uint8)
        for own, packed in zip(index, out, strict=True):
            _core.pack_places(own, self.length, self.low, packed)
        return out

    def unpack_places(self, data: Tensor) -> Tensor:
        """The indices that `pack_places` wrote; ValueError if they are none."""
        if data.device.type != "cpu":
            return self.index_of(of_bytes(data))
        out = torch.empty(len(data), self.kept, dtype=torch.int64)
        for own, packed in zip(out, data.contiguous(), strict=True):
            _core.unpack_places(packed, self.length, self.low, own)
        return out

    def index_bits(self, index: Tensor) -> Tensor:
        """The low parts and the high parts of every row's indices, a bit an element."""
        place = torch.arange(self.kept, device=index.device)
        high = torch.zeros(len(index), self.high, dtype=torch.uint8, device=index.device)
        high.scatter_(1, (index >> self.low) + place, 1)
        return torch.cat([to_bits(index, self.low), high], dim=1)

    def index_of(self, bits: Tensor) -> Tensor:
        """The indices that `index_bits` wrote at the beginning of every row; ValueError if they are none."""
        low, high = bits[:, : self.index_nbits].split([self.kept * self.low, self.high], dim=1)
        place = torch.arange(self.kept, device=bits.device)
        ones = high.sort(dim=1, descending=True, stable=True).indices[:, : self.kept]
        index: Tensor = (ones - place << self.low) | of_bits(low, self.kept)
        wrong = (
            (high.sum(1) != self.kept).any() | (index >= self.length).any() | (index.diff(dim=1) <= 0).any()
        )
        if bits.device.type != "meta" and wrong.item():  # a GPU would not survive it
            raise ValueError("a row names elements that are not there, or not in order")
        return index


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
