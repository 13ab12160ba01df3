"""All rows of a table in one place: for evaluation, export and tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.rows.owners import Kind, Owners
from tacit.rows.shard import Shard
from tacit.rows.table import Table


def gathered_rows(owners: Owners, shard: Shard, to: int | None) -> tuple[Tensor, Tensor]:
    """Keys in order and their rows, of all owners, on rank `to` or (None) on all ranks; elsewhere none."""
    keys, weights, _ = shard.export()
    table = shard.table
    receivers = [member < owners.world and to in (None, member) for member in range(owners.members)]
    numbers = [[len(keys) if receives else 0] for receives in receivers]
    counts = [header[0] for header in owners.announce(Kind.GATHER, (table.name, to), numbers)]
    all_keys = torch.cat(owners.send_keys(_for(keys, receivers), counts))
    raw = weights.view(torch.uint8).view(-1)
    received = owners.send_rows(_for(raw, receivers), [count * table.row_nbytes for count in counts])
    all_weights = torch.cat(received).view(table.dtype).view(-1, table.width)
    all_keys, order = all_keys.sort()
    return all_keys, all_weights[order]


def _for(part: Tensor, receivers: Sequence[bool]) -> list[Tensor]:
    return [part if receives else part[:0] for receives in receivers]


def all_rows(table: Table, keys: Tensor, weights: Tensor) -> Tensor:
    """The weight of a plain table: the rows that were kept, and the others as they begin."""
    assert table.keys is not None
    whole = torch.empty(table.keys, table.width, dtype=table.dtype)
    absent = torch.ones(table.keys, dtype=torch.bool)
    absent[keys] = False
    others = absent.nonzero().view(-1)
    for some in others.split(1 << 20):  # so that what is computed in float32 stays small
        whole[some] = table.first_values(some)
    whole[keys] = weights
    return whole
