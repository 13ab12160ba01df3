"""Exact sums of rows over ranks in 32-bit lanes, which any node may add, whatever the size of the numbers.

    touch     a nibble a hot row: 1 where this rank has touched it (a byte from 16 ranks on). The sum is how many ranks did.
    lanes     [a flag a chunk of 32 rows | round(g 2^e), row behind row]
    repair    [round(g 2^e) of flagged chunks in parts, the lowest bits first | a lane a row: it has a number that is not finite]

A lane holds the sum of W numbers up to (2^31 - 1) / W. A rank with a larger one in a chunk, or with one that is not finite, sends zeros there and
raises the flag, which all ranks see; all send the chunk again in parts of 31 - log2(W) bits: two up to 32 ranks, three beyond. Numbers
have 50 bits (adding.py), so the sums are exact in 64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32  # rows
_NUMBER_BITS = 50  # of adding.py

Add = Callable[[Tensor], Tensor]  # the sum over ranks of int32 lanes


@dataclass(frozen=True, slots=True)
class FixedRows:
    """Rows of one table as integers, and which of them are broken: some number in them was not finite."""

    values: Tensor  # int64 [n, width]
    broken: Tensor  # bool [n]


# ---- touches


def touch_bits(world: int) -> int:
    """Bits of a row in the sum that counts the ranks that have touched it."""
    return 4 if world < 16 else 8


def pack_touches(touched: Tensor, world: int) -> Tensor:
    """Lanes of a bool vector, or of numbers of ranks."""
    bits = touch_bits(world)
    padded = torch.nn.functional.pad(touched.int(), (0, -len(touched) % (32 // bits)))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (padded.view(-1, 32 // bits) << shifts).sum(1, dtype=torch.int32)


def unpack_touches(lanes: Tensor, count: int, world: int) -> Tensor:
    """How many ranks have touched each of `count` rows, int64."""
    bits = touch_bits(world)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (lanes[:, None] >> shifts & (1 << bits) - 1).view(-1)[:count].long()


# ---- rows


def sum_rows(tables: Sequence[FixedRows], world: int, add: Add) -> tuple[list[FixedRows], int]:
    """The sum over ranks of rows that all ranks pass in the same order, and how many had to be sent again."""
    broken = torch.cat([table.broken for table in tables])
    if not len(broken):
        return list(tables), 0
    limit = (2**31 - 1) // world
    fits = torch.cat([(table.values.abs() <= limit).all(1) for table in tables]) & ~broken
    chunks = torch.arange(len(fits)) // CHUNK
    flags = torch.zeros(int(chunks[-1]) + 1, dtype=torch.int32)
    flags[chunks[~fits]] = 1
    kept = _of_tables(flags[chunks] == 0, tables)
    sent = [table.values * keeps[:, None] for table, keeps in zip(tables, kept, strict=True)]
    total = add(torch.cat([flags, *(values.view(-1).int() for values in sent)]))
    sums = _as_tables(total[len(flags) :].long(), tables)
    again = (total[: len(flags)] != 0)[chunks]
    if bool(again.any()):
        repeated = _of_tables(again, tables)
        for rows, into, which in zip(_in_parts(tables, repeated, world, add), sums, repeated, strict=True):
            into.values[which], into.broken[which] = rows.values, rows.broken
    return sums, int(again.sum())


def _in_parts(tables: Sequence[FixedRows], which: Sequence[Tensor], world: int, add: Add) -> list[FixedRows]:
    """The sums of some rows, whatever the size of their numbers."""
    some = [FixedRows(t.values[w], t.broken[w]) for t, w in zip(tables, which, strict=True)]
    flat, broken = torch.cat([t.values.view(-1) for t in some]), torch.cat([t.broken for t in some])
    shift = 31 - (world - 1).bit_length()
    parts = [flat >> shift * part for part in range(_NUMBER_BITS // shift + 1)]
    lanes = [part & (1 << shift) - 1 for part in parts[:-1]] + parts[-1:]  # the highest keeps the sign
    total = add(torch.cat([*(lane.int() for lane in lanes), broken.int()])).long()
    *summed, breaks = total.split([len(flat)] * len(lanes) + [len(broken)])
    values = torch.stack([each << shift * part for part, each in enumerate(summed)]).sum(0)
    sums = _as_tables(values, some)
    for table, found in zip(sums, _of_tables(breaks != 0, some), strict=True):
        table.broken.copy_(found)
    return sums


def _of_tables(rows: Tensor, tables: Sequence[FixedRows]) -> list[Tensor]:
    """Something a row, by table."""
    return list(rows.split([len(table.broken) for table in tables]))


def _as_tables(values: Tensor, tables: Sequence[FixedRows]) -> list[FixedRows]:
    """Numbers, row behind row, by table."""
    parts = values.split([table.values.numel() for table in tables])
    return [
        FixedRows(part.view(table.values.shape), torch.zeros_like(table.broken))
        for part, table in zip(parts, tables, strict=True)
    ]
