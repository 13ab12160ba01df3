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
    every = owners.send_hot(torch.from_numpy(values), [len(values)] * owners.world)
    total: Floats = np.sum([each.numpy() for each in every], axis=0)
    return total


def _gathered(owners: Owners, own: Announced) -> list[Announced]:
    parts = own.enter, own.enter_counts.view(np.int64), own.weak, own.weak_counts.view(np.int64), own.leave
    lengths = [len(own.enter), len(own.weak)]
    packed = torch.from_numpy(np.concatenate([lengths, *parts]))
    numbers = [[len(packed)]] * owners.world
    sizes = [header[0] for header in owners.announce(Kind.HOT, "counts", numbers)]
    return [_announced(each.numpy()) for each in owners.send_hot(packed, sizes)]


def _announced(packed: Ints) -> Announced:
    enter, weak = packed[:2]
    cuts = np.cumsum([2, enter, enter, weak, weak])
    _, *parts = np.split(packed, cuts)
    return Announced(parts[0], parts[1].view(np.float64), parts[2], parts[3].view(np.float64), parts[4])


# ---- rows


@dataclass(frozen=True, slots=True)
class Moves:
    """Keys of one table that become hot, and that are no longer."""

    enter: Tensor
    leave: Tensor


def hand_out(
    owners: Owners, copies: Mapping[str, HotCopies], optimizer: RowOptimizer, moves: Mapping[str, Moves]
) -> None:
    """Each owner's moves are everybody's; all ranks receive the rows that enter."""
    own = [number for name in copies for number in (len(moves[name].enter), len(moves[name].leave))]
    headers = owners.announce(Kind.HOT, "rows", [own] * owners.world)
    packed = torch.cat([_packed(copies[name].shard, moves[name]) for name in copies])
    sizes = [_sizes(table.shard, optimizer) for table in copies.values()]
    nbytes = [_nbytes(header, sizes) for header in headers]
    received = owners.send_hot(packed, nbytes)
    offsets = [0] * owners.world
    for at, table in enumerate(copies.values()):
        if not any(header[2 * at] or header[2 * at + 1] for header in headers):
            continue
        parts, leaves = [], []
        for rank, header in enumerate(headers):
            enter, leave = header[2 * at : 2 * at + 2]
            *fields, gone = _cut(received[rank], offsets, rank, enter, leave, sizes[at])
            parts.append(_rows_of(fields, table.shard, optimizer))
            leaves.append(gone.view(torch.int64))
        state = {name: torch.cat([part.state[name] for part in parts]) for name in optimizer.state}
        keys, weights = torch.cat([part.keys for part in parts]), torch.cat([part.weights for part in parts])
        table.change(RowsToCopy(keys, weights, state), torch.cat(leaves))


def _packed(shard: Shard, moves: Moves) -> Tensor:
    weights, state = shard.take(moves.enter)
    fields = [moves.enter, weights, *state.values(), moves.leave]
    return torch.cat([field.contiguous().view(torch.uint8).view(-1) for field in fields])


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
