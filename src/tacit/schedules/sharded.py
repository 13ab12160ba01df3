"""Sharded server: every rank is the server of one chunk; all send to it directly, and it sends the sum to all.

    reduce-scatter, stage k of n-1:  rank r + k mod n sends chunk r to rank r, which adds it (k falls from n-1 to 1)
    all-gather,     stage k of n-1:  rank r sends chunk r to rank r + k mod n

With `direct` all shifts of a half run in one stage: each rank then sends to all others at the same time.

Stages: 2 (n - 1); direct: 2. Chunks: n. Bytes that leave a rank: 2 (n - 1) / n of the vector, the least possible.
Direct stages write out n (n - 1) transfers each, so they end at 2048 ranks.
"""

import numpy as np

from tacit.errors import ConfigError
from tacit.schedules.schedule import Phase, Schedule, Stage, all_pairs, backwards, check_world


def sharded(world: int, *, direct: bool = False) -> Schedule:
    world = check_world(world, "sharded")
    if not isinstance(direct, bool):
        raise ConfigError(
            f"sharded: direct={direct!r}: give True (one stage a half) or False (one shift a stage)"
        )
    spread = _at_once(world) if direct else _shifts(world)
    return Schedule("sharded", world, world, backwards(spread) + spread)


def _at_once(world: int) -> tuple[Phase, ...]:
    src, dst = all_pairs(world, "sharded(direct=True)", "leave direct out: shifts count for any world")
    return (Phase(Stage.of(src, dst, chunk=src)),) if world > 1 else ()


def _shifts(world: int) -> tuple[Phase, ...]:
    """Views of one array, so that 100,000 ranks cost no more memory than their 200,000 stages."""
    rank, one, copy = np.arange(world), np.broadcast_to(np.int64(1), world), np.broadcast_to(np.False_, world)
    twice = np.r_[rank, rank]
    return tuple(Phase(Stage(rank, twice[k : k + world], rank, one, copy)) for k in range(1, world))
