"""Tables with sparse gradients: what a step touches of them. All ranks call it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.buckets import makes_sparse
from tacit.plan.recorder import layers_of
from tacit.plan.values import TouchedTable


def touched_tables(model: nn.Module, group: dist.ProcessGroup | None = None) -> tuple[TouchedTable, ...]:
    """The tables that make sparse gradients, with the rows that one rank and all of `group` touch; no gradient is one of no rows."""
    found = []
    for name, (module, own) in layers_of(model).items():
        for table in own if makes_sparse(module) else ():  # alike on all ranks, whatever gradients each has
            unique, union = _touched(_rows_of(table.grad), group)
            found.append(TouchedTable(name, table.shape[0], table.shape[1], unique, union))
    return tuple(found)


def _rows_of(gradient: Tensor | None) -> Tensor:
    """The rows of a sparse gradient, each once."""
    if gradient is None or not gradient.is_sparse:
        return torch.empty(0, dtype=torch.int64)
    return gradient.coalesce().indices()[0].cpu()


def _touched(rows: Tensor, group: dist.ProcessGroup | None) -> tuple[float, int]:
    """Rows of a rank in the mean, and of all ranks, each counted once."""
    world = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([rows.numel()]), group=group)
    longest = max(int(count) for count in counts)
    if not longest:
        return 0.0, 0
    padded = torch.cat([rows, rows.new_full((longest - rows.numel(),), -1)])
    everyone = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(everyone, padded, group=group)
    union = torch.cat(everyone).unique()
    return sum(int(count) for count in counts) / world, int((union >= 0).sum())
