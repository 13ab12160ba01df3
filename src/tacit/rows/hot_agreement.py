"""The owners agree on which rows are hot, over the process group, and hand the entering ones to all ranks.

agree        two sums of histograms, one gather of what each owner would change: hot_set.py
hand out     header: rows that enter and leave, by table;  then their keys, weights and optimizer state, each owner's to all
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tacit.rows.hot_copies import HotCopies, RowsToCopy
from tacit.rows.hot_counts import Floats, Ints
from tacit.rows.hot_set import Announced, HotChange, HotSet, SumOver
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.owners import Kind, Owners
from tacit.rows.shard import Shard


def agree(owners: Owners, hot: HotSet) -> HotChange:
    """Drives one agreement, in step with the other owners."""
    talk = hot.agree()
    request = next(talk)
    while True:
        try:
            if isinstance(request, SumOver):
                request = talk.send(_summed(owners, request.values))
            else:
                request = talk.send(_gathered(owners, request.announced))
        except StopIteration as end:
            change: HotChange = end.value
            return change


def _summed(owners: Owners, values: Floats) -> Floats:
    """In the order of the ranks: the same bits everywhere."""
    every = owners.send_hot([torch.from_numpy(values)] * owners.members, [len(values)] * owners.members)
    total: Floats = np.sum([each.numpy() for each in every], axis=0)
    return total


def _gathered(owners: Owners, own: Announced) -> list[Announced]:
    parts = own.enter, own.enter_counts.view(np.int64), own.weak, own.weak_counts.view(np.int64), own.leave
    lengths = [len(own.enter), len(own.weak)]
    packed = torch.from_numpy(np.concatenate([lengths, *parts]))
    sent = [packed if member in owners.holders else packed[:0] for member in range(owners.members)]
    sizes = [header[0] for header in owners.announce(Kind.HOT, "counts", [[len(part)] for part in sent])]
    received = owners.send_hot(sent, sizes)
    return [_announced(received[holder].numpy()) for holder in owners.holders]


def _announced(packed: Ints) -> Announced:
    """What a holder proposes; a rank that is none receives nothing, and learns what comes of it with the rows."""
    enter, weak = packed[:2] if len(packed) else (0, 0)
    cuts = np.cumsum([2, enter, enter, weak, weak])
    _, *parts = np.split(packed, cuts)
    return Announced(parts[0], parts[1].view(np.float64), parts[2], parts[3].view(np.float64), parts[4])


# ---- rows


@dataclass(frozen=True, slots=True)
class Moves:
    """Keys of one table that become hot, and that are no longer."""

    enter: Tensor
    leave: Tensor


@dataclass(frozen=True, slots=True)
class Handed:
    """What one holder hands out of one table: rows that enter, and keys that leave."""

    rows: RowsToCopy
    leave: Tensor


def hand_out(
    owners: Owners, copies: Mapping[str, HotCopies], optimizer: RowOptimizer, moves: Mapping[str, Moves]
) -> None:
    """Each owner's moves are everybody's; all ranks receive the rows that enter, and row servers the rows that leave."""
    own = [number for name in copies for number in (len(moves[name].enter), len(moves[name].leave))]
    headers = owners.announce(Kind.HOT, "rows", [own] * owners.members)
    packed = torch.cat([_packed(copies[name].shard, moves[name]) for name in copies])
    sizes = [_sizes(table.shard, optimizer) for table in copies.values()]
    received = _spread(owners, packed, [_nbytes(header, sizes) for header in headers])
    offsets = [0] * owners.members
    handed: dict[str, list[Handed]] = {}
    for at, (name, table) in enumerate(copies.items()):
        handed[name] = []
        for holder in owners.holders:
            enter, leave = headers[holder][2 * at : 2 * at + 2] if received[holder].numel() else (0, 0)
            *fields, gone = _cut(received[holder], offsets, holder, enter, leave, sizes[at])
            rows = _rows_of(fields, table.shard, optimizer)
            handed[name].append(Handed(rows, gone.view(torch.int64)))
    if owners.servers:
        leave_by_table = {name: [each.leave for each in some] for name, some in handed.items()}
        bring_back(owners, copies, optimizer, leave_by_table)
    for at, (name, table) in enumerate(copies.items()):
        if any(header[2 * at] or header[2 * at + 1] for header in headers):
            parts = [each.rows for each in handed[name]]
            state = {field: torch.cat([part.state[field] for part in parts]) for field in optimizer.state}
            keys = torch.cat([part.keys for part in parts])
            rows = RowsToCopy(keys, torch.cat([part.weights for part in parts]), state)
            table.change(rows, torch.cat([each.leave for each in handed[name]]))


def bring_back(
    owners: Owners,
    copies: Mapping[str, HotCopies],
    optimizer: RowOptimizer,
    keys: Mapping[str, Sequence[Tensor]],
) -> None:
    """The rows of keys[table][holder], as ranks have trained them, into the shards of row servers: each rank sends a part of each server's."""
    parts: list[list[Tensor]] = [[] for _ in range(owners.members)]
    nbytes = [0] * owners.members
    for name, table in copies.items():
        row_nbytes = sum(_sizes(table.shard, optimizer)[1:])
        for place, (holder, some) in enumerate(zip(owners.holders, keys[name], strict=True)):
            if not owners.serves:
                parts[holder].append(_packed_rows(table.take(_slice(some, owners.world, owners.rank))))
            elif place == owners.part:
                for rank in range(owners.world):
                    nbytes[rank] += row_nbytes * len(_slice(some, owners.world, rank))
    joined = [torch.cat(each) if each else torch.empty(0, dtype=torch.uint8) for each in parts]
    received = owners.send_hot(joined, nbytes)
    if owners.serves:
        _take_back(owners, copies, optimizer, keys, received)


def _take_back(
    owners: Owners,
    copies: Mapping[str, HotCopies],
    optimizer: RowOptimizer,
    keys: Mapping[str, Sequence[Tensor]],
    received: Sequence[Tensor],
) -> None:
    offsets = [0] * owners.members
    assert owners.part is not None
    for name, table in copies.items():
        _, *sizes = _sizes(table.shard, optimizer)
        for rank in range(owners.world):
            own = _slice(keys[name][owners.part], owners.world, rank)
            *fields, _ = _cut(received[rank], offsets, rank, len(own), 0, sizes)
            rows = _rows_of([own.view(torch.uint8), *fields], table.shard, optimizer)
            table.shard.replace(rows.keys, rows.weights, rows.state)


def _slice(keys: Tensor, world: int, rank: int) -> Tensor:
    """The part of some keys that one rank sends."""
    return keys[len(keys) * rank // world : len(keys) * (rank + 1) // world]


def _spread(owners: Owners, packed: Tensor, nbytes: Sequence[int]) -> list[Tensor]:
    """nbytes[m] bytes of each member m, on all ranks (row servers keep their own). A row server sends them once: a part to each rank, which
    ranks hand on to each other, for its link is the busiest."""
    if not owners.servers:
        return owners.send_hot([packed] * owners.members, nbytes)
    none, world = packed[:0], owners.world
    parts = [_slice(packed, world, rank) if owners.serves else none for rank in range(world)]
    sizes = [0] * owners.members
    for holder in owners.holders if not owners.serves else ():
        sizes[holder] = _length(nbytes[holder], world, owners.rank)
    own = owners.send_hot([*parts, *[none] * owners.servers], sizes)
    if owners.serves:
        owners.send_hot([none] * owners.members, [0] * owners.members)
        return [packed if member == owners.rank else none for member in range(owners.members)]
    mine = torch.cat([own[holder] for holder in owners.holders])
    lengths = [[_length(nbytes[holder], world, rank) for holder in owners.holders] for rank in range(world)]
    totals = [sum(each) for each in lengths] + [0] * owners.servers
    every = owners.send_hot([mine] * world + [none] * owners.servers, totals)
    by_rank = [every[rank].split(lengths[rank]) for rank in range(world)]
    whole = [torch.cat(each) for each in zip(*by_rank, strict=True)]
    return [none] * world + whole


def _length(total: int, world: int, rank: int) -> int:
    """Of the part of `_slice`."""
    return total * (rank + 1) // world - total * rank // world


def _packed(shard: Shard, moves: Moves) -> Tensor:
    rows = _packed_rows(shard.take(moves.enter))
    return torch.cat([moves.enter.view(torch.uint8), rows, moves.leave.view(torch.uint8)])


def _packed_rows(rows: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
    weights, state = rows
    return torch.cat([field.contiguous().view(torch.uint8).view(-1) for field in (weights, *state.values())])


def _sizes(shard: Shard, optimizer: RowOptimizer) -> list[int]:
    """Bytes a row of each field, keys first."""
    width = shard.table.width
    return [8, shard.table.row_nbytes, *(4 * width if wide else 4 for wide in optimizer.state.values())]


def _nbytes(header: Sequence[int], sizes: Sequence[Sequence[int]]) -> int:
    return sum(header[2 * at] * sum(fields) + 8 * header[2 * at + 1] for at, fields in enumerate(sizes))


def _cut(
    packed: Tensor, offsets: list[int], rank: int, enter: int, leave: int, sizes: Sequence[int]
) -> list[Tensor]:
    """The next fields of a rank's bytes, and the keys that leave; copies, which are aligned for any dtype."""
    cuts = [enter * size for size in sizes] + [8 * leave]
    start = offsets[rank]
    offsets[rank] += sum(cuts)
    return [part.clone() for part in packed[start : offsets[rank]].split(cuts)]


def _rows_of(fields: Sequence[Tensor], shard: Shard, optimizer: RowOptimizer) -> RowsToCopy:
    keys, weights, *state = fields
    table = shard.table
    shapes = {name: (-1, table.width) if wide else (-1,) for name, wide in optimizer.state.items()}
    return RowsToCopy(
        keys.view(torch.int64),
        weights.view(table.dtype).view(-1, table.width),
        {
            name: kept.view(torch.float32).view(shape)
            for (name, shape), kept in zip(shapes.items(), state, strict=True)
        },
    )
