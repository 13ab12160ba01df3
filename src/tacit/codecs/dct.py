"""The largest parts of a cosine transform, tile by tile: what DeMo sends (Peng, Quesnelle, Kingma 2024, arXiv 2411.19870).

    c = D t D'  of every tile t of a matrix, 64 x 64;   send the `share` of c that is largest;   t' = D' c' D
    D_kj = sqrt(2 / s) cos(pi (2 j + 1) k / (2 s)),  the first row divided by sqrt(2)

A tensor of more dimensions is a matrix with its first one as rows, a vector is one row. A side is cut into equal parts of at most `chunk`,
filled up with zeros, where the paper takes a divisor: sides that have none are not torn into single rows.

`ef(dct, decay=0.999)` under tacit.optim.SignSgd is DeMo: its momentum m = 0.999 m + g, which loses what it sends, is the memory of `ef`, and the
optimizer has none. Numbers are sent as `topk` sends them, in 2 bits with levels of the tile; `dct > bf16` writes them as the paper does.
Every rank receives the others' (n - 1 payloads). Ranks transform back what they received, with products of matrices: all hold the same bits if their
torch and CPUs are of one kind, which the guard watches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit import recycled
from tacit.codecs.topk import Rows, TopK, TopKValues, format_of
from tacit.errors import ConfigError
from tacit.layout import Layout, Span
from tacit.requests import Codec, Context, Conversation, Gather, Reduced, Traits

_BITS = 2
_LONGEST = 1024


@dataclass(frozen=True, slots=True)
class Dct:
    """`dct(share=0.015625, bits=2, chunk=64)`: 0.16 bits an element; `dct(0.0078125) > bf16`: 0.2."""

    share: float = 1 / 64
    bits: int = _BITS
    chunk: int = 64
    values: Codec | None = None

    def __post_init__(self) -> None:
        TopK(self.share, self.bits)  # which checks them
        if not isinstance(self.chunk, int) or isinstance(self.chunk, bool) or not 2 <= self.chunk <= _LONGEST:
            raise ConfigError(f"chunk={self.chunk}: the longest side of a tile, 2 to {_LONGEST}; try 64")
        if self.values is not None:
            if self.bits != _BITS:
                raise ConfigError(f"bits={self.bits}: {self.values} writes the numbers; leave bits out")
            format_of(self.values, "dct")

    def __str__(self) -> str:
        if self.values is None:
            return f"dct(share={self.share}, bits={self.bits}, chunk={self.chunk})"
        return f"dct(share={self.share}, chunk={self.chunk}) > {self.values}"

    def over(self, values: Codec) -> Codec:
        """`dct > bf16`: the same parts, their numbers in the format of another codec."""
        return replace(self, values=values)

    @property
    def traits(self) -> Traits:
        contracting = self.values is None or self.values.traits.contracting
        return Traits(rounds=1, summable=False, contracting=contracting)

    def nbytes(self, numel: int) -> int:
        return self.nbytes_of(Layout.flat(numel))

    def nbytes_of(self, layout: Layout) -> int:
        tiles = tiles_of(layout, self.chunk)
        return self._wire(tiles).nbytes(sum(tile.numel for tile in tiles))

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        tiles = tiles_of(context.layout, self.chunk)
        wire = self._wire(tiles)
        parts = torch.cat([x.new_empty(0, dtype=torch.float32), *(tile.parts_of(x) for tile in tiles)])
        own = wire.pack(parts, context.own_seed) if isinstance(wire, TopKValues) else wire.pack(parts)
        payloads: list[Tensor] = yield Gather(own)

        def decoded(payloads: Sequence[Tensor]) -> Tensor:
            total = torch.zeros_like(parts)
            for payload in payloads:
                wire.unpack_add(payload, total)
            out = recycled.zeros(x.numel(), torch.float32, x.device)  # padding stays zero
            for tile, part in zip(tiles, total.split([tile.numel for tile in tiles]), strict=True):
                tile.write(part, out)
            return out

        return Reduced(decoded(payloads), lambda: decoded([own]))

    def _wire(self, tiles: "Sequence[Tiles]") -> TopK | TopKValues:
        """How the parts are picked and written: as those of `topk`, with tiles as chunks."""
        kept = [max(1, round(self.share * tile.length)) for tile in tiles]
        rows = tuple(Rows(tile.count, tile.length, k, self.bits) for tile, k in zip(tiles, kept, strict=True))
        picked = _TopKOfTiles(self.share, self.bits, given=rows)
        return picked if self.values is None else TopKValues(picked, self.values)


@dataclass(frozen=True, slots=True)
class _TopKOfTiles(TopK):
    """`topk`, where the chunks are given."""

    given: tuple[Rows, ...] = ()

    def rows(self, numel: int) -> list[Rows]:
        return list(self.given)


@dataclass(frozen=True, slots=True)
class Tiles:
    """One parameter as `down` x `across` tiles of `height` x `width`; the last ones are filled up with zeros."""

    span: Span
    down: int
    across: int
    height: int
    width: int

    @property
    def count(self) -> int:
        return self.down * self.across

    @property
    def length(self) -> int:
        return self.height * self.width

    @property
    def numel(self) -> int:
        return self.count * self.length

    @property
    def _matrix(self) -> tuple[int, int]:
        return matrix_of(self.span)

    def parts_of(self, x: Tensor) -> Tensor:
        """The transforms of all tiles, one behind the other."""
        rows, columns = self._matrix
        matrix = x[self.span.start : self.span.stop].view(rows, columns).float()
        filled = pad(matrix, (0, self.across * self.width - columns, 0, self.down * self.height - rows))
        tiles = filled.view(self.down, self.height, self.across, self.width).transpose(1, 2)
        return (cosines(self.height, x.device) @ tiles @ cosines(self.width, x.device).T).reshape(-1)

    def write(self, parts: Tensor, out: Tensor) -> None:
        """The transform back, at its place of the whole vector."""
        rows, columns = self._matrix
        tiles = parts.view(self.down, self.across, self.height, self.width)
        back = cosines(self.height, out.device).T @ tiles @ cosines(self.width, out.device)
        matrix = back.transpose(1, 2).reshape(self.down * self.height, self.across * self.width)
        out[self.span.start : self.span.stop] = matrix[:rows, :columns].reshape(-1)


def tiles_of(layout: Layout, chunk: int) -> list[Tiles]:
    """The tiles of every parameter that has elements, of sides of at most `chunk`."""
    found = []
    for span in layout.spans:
        if span.numel:
            rows, columns = matrix_of(span)
            down, across = -(-rows // chunk), -(-columns // chunk)
            found.append(Tiles(span, down, across, -(-rows // down), -(-columns // across)))
    return found


def matrix_of(span: Span) -> tuple[int, int]:
    """Rows and columns of a parameter: its first dimension and all others, or one row."""
    rows = span.shape[0] if len(span.full_shape) > 1 else 1
    return rows, span.numel // rows


@lru_cache(maxsize=64)
def cosines(size: int, device: torch.device) -> Tensor:
    """The orthonormal matrix D of the cosine transform (DCT-II), computed in float64."""
    k = torch.arange(size, dtype=torch.float64)
    found = math.sqrt(2 / size) * torch.cos(math.pi * (2 * k + 1) * k[:, None] / (2 * size))
    found[0] /= math.sqrt(2)
    return found.float().to(device)
