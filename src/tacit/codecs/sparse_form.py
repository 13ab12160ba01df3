"""Few numbers of many on the wire, for codecs that pick among all elements of a bucket.

    places, as Elias and Fano wrote rising numbers, filled up to bytes  |  the numbers, in the format of a codec

A place takes about 2 + log2(numel / kept) bits: 12 where one of 1000 is sent, 8.6 where one of 100 is. `kept` and `numel` decide how
long it is, not the numbers. Selection and places run in C++ on the CPU (native/sparse_select.h), in torch elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import _core, recycled
from tacit.codecs.topk import Rows, typed
from tacit.errors import ConfigError
from tacit.requests import WireFormat


@dataclass(frozen=True, slots=True)
class Places:
    """`kept` rising places below `numel`, in bytes."""

    numel: int
    kept: int

    @property
    def _row(self) -> Rows:
        return Rows(1, self.numel, self.kept, 1)

    @property
    def nbytes(self) -> int:
        return self._row.index_nbits + 7 >> 3 if self.numel else 0

    def pack(self, index: Tensor) -> Tensor:
        if not self.numel:
            return index.new_empty(0, dtype=torch.uint8)
        return self._row.pack_places(index[None]).view(-1)

    def unpack(self, data: Tensor) -> Tensor:
        """The places that `pack` wrote; ValueError if they are none."""
        if not self.numel:
            return data.new_empty(0, dtype=torch.int64)
        return self._row.unpack_places(data[None]).view(-1)


@dataclass(frozen=True, slots=True)
class SparseForm:
    """`kept` of `numel` elements: their places, then their numbers in the format `values`."""

    numel: int
    kept: int
    values: WireFormat

    @property
    def places(self) -> Places:
        return Places(self.numel, self.kept)

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.values.nbytes(self.kept)

    def pack(self, index: Tensor, numbers: Tensor, seed: int) -> Tensor:
        return torch.cat([self.places.pack(index), self.values.pack(numbers, seed).view(torch.uint8)])

    def unpack(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Places and float32 numbers."""
        cut = self.places.nbytes
        return self.places.unpack(data[:cut]), self.values.unpack(typed(data[cut:], self.values), self.kept)

    def add(self, data: Tensor, out: Tensor) -> Tensor:
        """out += what `data` holds; `out` itself."""
        index, numbers = self.unpack(data)
        return out.index_add_(0, index, numbers)

    def sum_of(self, payloads: Sequence[Tensor]) -> Tensor:
        """What the payloads, one or more, hold together, in float32."""
        out = recycled.zeros(self.numel, torch.float32, payloads[0].device)
        for payload in payloads:
            self.add(payload, out)
        return out


def largest(x: Tensor, kept: int) -> Tensor:
    """The places of the `kept` largest magnitudes, rising; of equal ones the first, and a NaN before all others."""
    if not kept:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    return Rows(1, x.numel(), kept, 1).largest(x[None]).view(-1)


def above(x: Tensor, least: float) -> Tensor:
    """The places of all that are `least` or more in magnitude, or NaN, rising. On an accelerator it waits for their number."""
    if x.device.type != "cpu":
        return (~(x.abs() < least)).nonzero().view(-1)
    out = torch.empty(_core.count_above(x, least), dtype=torch.int64)
    _core.select_above(x, least, out)
    return out


def kept_of(share: float, numel: int) -> int:
    """How many of `numel` a share is: at least one, where there are any."""
    return max(1, round(share * numel)) if numel else 0


def check_share(share: object, usual: float) -> None:
    """Raises ConfigError for what is no share of a vector."""
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ConfigError(f"share={share}: the part that is sent, above 0 and at most 1; try {usual}")


def with_values(text: str, values: object) -> str:
    """How a codec with its numbers in the format of another is written."""
    return text if str(values) == "none" else f"{text} > {values}"
