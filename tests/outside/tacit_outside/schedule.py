"""A chain: the sum grows from rank 0 to rank n - 1, and travels back. Stages: 2 (n - 1). Chunks: 1."""

from __future__ import annotations

from tacit.schedules import Phase, Schedule, Stage


def chain(world: int) -> Schedule:
    up = [Phase(Stage.of(rank, rank + 1, add=True)) for rank in range(world - 1)]
    down = [Phase(Stage.of(rank + 1, rank)) for rank in reversed(range(world - 1))]
    return Schedule("chain", world, 1, (*up, *down))
