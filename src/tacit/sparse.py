"""Sparse gradients: of the tables of a bucket, only the rows that some rank used in this step.

    own   = the rows that this rank used, and their gradients     keys: rows of all tables, numbered one table after the other
    union = yield Gather(own keys), sorted                        the same on all ranks; about 9 bits a key
    mean  = the strategy's codec over the union's rows, one vector with a layout (rows of the union x width, a table a span)

So any codec and any scheme take sparse gradients, and what travels depends on the rows that are used, not on the tables. What a codec
keeps of a row lies in the table's own memory, at that row: it is read and written where the union is, and stays where it is elsewhere.
Tables of one bucket share the conversation: 26 tables cost as many requests as one (docs/decisions/0016-sparse-gradients.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.errors import CheckpointError, ConfigError
from tacit.layout import Layout
from tacit.requests import Codec, Context, Conversation, Gather, Memory, as_reduced


class TouchedRows:
    """One step's gradients of a bucket's tables, COO tensors. `layout`, `x` (this rank's part) and `split` are there from the second
    request of the conversation on."""

    def __init__(self, tables: Layout, gradients: Sequence[Tensor]):
        self._tables, self._gradients = tables, gradients
        self.rows: list[Tensor] = []  # of the union, table by table

    def talk(self, codec: Codec, context: Context) -> Conversation:
        """The conversation about the rows; its total is a vector with `layout`. One request more than the codec's own."""
        own = [_coalesced(gradient) for gradient in self._gradients]
        keys = torch.cat([part.indices()[0] + a for part, (a, _) in zip(own, self._ranges(), strict=True)])
        count = self._ranges()[-1][1]
        found: list[Tensor] = yield Gather(pack_keys(keys, count), ragged=True)
        union = torch.cat([unpack_keys(packed, count) for packed in found]).unique()
        self.rows = self._by_table(union)
        shapes = {
            s.name: (len(rows), s.shape[1]) for s, rows in zip(self._tables.spans, self.rows, strict=True)
        }
        self.layout = Layout.of(shapes, {span.name for span in self._tables.spans if span.outer})
        self.x = torch.cat([_placed(part, rows) for part, rows in zip(own, self.rows, strict=True)])
        memory = RowMemory(context.memory, self._tables, self.rows, self.layout)
        reduced = as_reduced((yield from codec.reduce(self.x, replace(context, memory=memory))))
        memory.keep()
        return reduced

    def split(self, flat: Tensor) -> list[Tensor]:
        """A vector over the union as COO tensors of the tables' shapes, coalesced."""
        values = self.layout.split(flat).values()
        shapes = [span.shape for span in self._tables.spans]
        return [rows_of(*part) for part in zip(self.rows, values, shapes, strict=True)]

    def _by_table(self, union: Tensor) -> list[Tensor]:
        ranges = self._ranges()
        stops = torch.tensor([stop for _, stop in ranges], device=union.device)
        sizes = torch.searchsorted(union, stops).diff(prepend=stops.new_zeros(1)).tolist()
        return [part - first for part, (first, _) in zip(union.split(sizes), ranges, strict=True)]

    def _ranges(self) -> list[tuple[int, int]]:
        """The keys of each table, first..stop."""
        return list(pairwise(accumulate((span.shape[0] for span in self._tables.spans), initial=0)))


@dataclass(slots=True)
class RowMemory:
    """The memory of some rows of the tables. Its vectors are copies, which `keep` writes back at the end of the conversation."""

    whole: Memory
    tables: Layout
    rows: Sequence[Tensor]
    layout: Layout
    vectors: dict[str, Tensor] = field(default_factory=dict)

    def vector(self, slot: str) -> Tensor:
        if slot not in self.vectors:
            tables = self.tables.split(self.whole.vector(slot)).values()
            parts = [
                table.index_select(0, rows).view(-1) for table, rows in zip(tables, self.rows, strict=True)
            ]
            self.vectors[slot] = torch.cat(parts)
        return self.vectors[slot]

    def tensor(self, slot: str, name: str, shape: Sequence[int | None], **how: Any) -> Tensor:
        try:
            return self.whole.tensor(slot, name, shape, **how)
        except CheckpointError as cause:
            raise ConfigError(
                f"memory {slot!r} of table {name!r} has another shape in each step, as the rows of a sparse gradient do; choose a codec "
                f"that keeps vectors, such as int4, or build the table with sparse=False"
            ) from cause

    def keep(self) -> None:
        for slot, values in self.vectors.items():
            tables = self.tables.split(self.whole.vector(slot)).values()
            parts = self.layout.split(values).values()
            for table, rows, part in zip(tables, self.rows, parts, strict=True):
                table.index_copy_(0, rows, part)


# ---- keys on the wire: sorted numbers as Elias and Fano wrote them, with low parts of whole bytes, which are only copied
#
#     how many (8 bytes)  |  high parts: after a zero for each of 0, 1, 2, ... a one for each key that has it  |  low parts


def pack_keys(keys: Tensor, count: int) -> Tensor:
    """Bytes that stand for `keys`, int64, which rise and lie below `count`."""
    own = keys.cpu().numpy()
    low = _low_nbytes(len(own), count)
    high = np.zeros(_high_nbits(len(own), count, low), dtype=np.uint8)
    high[(own >> 8 * low) + np.arange(len(own)) + 1] = 1
    lows = own.astype("<i8").view(np.uint8).reshape(len(own), 8)[:, :low]
    head = np.array([len(own)], dtype="<i8").view(np.uint8)
    packed = np.concatenate([head, np.packbits(high, bitorder="little"), lows.reshape(-1)])
    return torch.from_numpy(packed).to(keys.device)


def unpack_keys(packed: Tensor, count: int) -> Tensor:
    """The keys that `pack_keys` wrote."""
    data = packed.cpu().numpy()
    found = int(data[:8].copy().view("<i8")[0])
    low = _low_nbytes(found, count)
    bits = _high_nbits(found, count, low)
    stop = 8 + (bits + 7) // 8
    ones = np.flatnonzero(np.unpackbits(data[8:stop], count=bits, bitorder="little"))
    keys = np.zeros((found, 8), dtype=np.uint8)
    keys[:, :low] = data[stop:].reshape(found, low)
    whole = keys.reshape(-1).view("<i8") + (ones - np.arange(found) - 1 << 8 * low)
    return torch.from_numpy(whole).to(packed.device)


def keys_nbytes(keys: int, count: int) -> int:
    """The bytes of `keys` keys below `count`."""
    low = _low_nbytes(keys, count)
    return 8 + (_high_nbits(keys, count, low) + 7) // 8 + low * keys


def _low_nbytes(keys: int, count: int) -> int:
    """The bytes of a key that are written out: as many as make the whole shortest."""
    return min(range(8), key=lambda low: _high_nbits(keys, count, low) + 8 * low * keys)


def _high_nbits(keys: int, count: int, low: int) -> int:
    return keys + (max(count - 1, 0) >> 8 * low) + 1


def rows_of(rows: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A coalesced COO tensor: `values`, one row each, at `rows`, which rise."""
    return torch.sparse_coo_tensor(
        rows[None], values, tuple(shape), is_coalesced=True, check_invariants=False
    )


def no_rows(like: Tensor) -> Tensor:
    """The gradient of a table that this rank did not use."""
    return rows_of(
        torch.empty(0, dtype=torch.int64, device=like.device), like.new_empty(0, *like.shape[1:]), like.shape
    )


def _coalesced(gradient: Tensor) -> Tensor:
    """Rows in order, each once; 16-bit gradients of the same row are added in float32, and rounded once."""
    if gradient.dtype.itemsize < 4 and not gradient.is_coalesced():
        return gradient.float().coalesce().to(gradient.dtype)
    return gradient.coalesce()


def _placed(own: Tensor, rows: Tensor) -> Tensor:
    """The values of `own` among `rows`, of which its own are a part; zeros for the others. Flat."""
    values = own.values()
    found = values.new_zeros(len(rows), values.shape[1])
    found[torch.searchsorted(rows, own.indices()[0])] = values
    return found.view(-1)
