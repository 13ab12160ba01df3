"""Hierarchical ring, H-Ring (Jia et al. 2018): rings inside groups of m, one ring of the groups' leaders.

The first rank of a group leads it. The vector is cut in m pieces inside groups, in g = ceil(n / m) between them:

    2 (m-1) stages of x/m:  reduce to the leader: the last two lines, turned round and added
    2 (g-1) stages of x/g:  ring all-reduce of the leaders
      m-1   stages of x/m:  scatter: the leader sends piece q to member q
      m-1   stages of x/m:  ring all-gather: in stage k member j sends piece (j - k) mod m to j+1; nothing goes back to the leader

If m does not divide n the last group is short, with s = n - (g-1) m members. Its last member then plays the m - s missing
ones too: it is sent their pieces, and what it would send to itself is left out. Every transfer is still x/m, so a short
group costs what a full one does. A world below m is one group, m = n.

Stages: 4 (m - 1) + 2 (g - 1). Chunks: lcm(m, g). Bytes that leave a rank, in vectors: 2 (m-1)/m + 2 (g-1)/g from the leader
of a full group, 1 + (m-1)/m from its other members, 1 from the last. In a short group member s-2, which sends to the last,
sends s-1 pieces in the all-gather instead of m-1; a leader alone sends 2 (g-1)/g.
"""

import math

import numpy as np

from tacit.schedules.schedule import Ints, Phase, Schedule, Stage, backwards, check_option, check_world


def hierarchical(world: int, *, group: int = 5) -> Schedule:
    world = check_world(world, "hierarchical")
    group = check_option("hierarchical", "group", group, least=1)
    m = min(group, world)
    leaders = np.arange(0, world, m)
    g = len(leaders)
    chunks = math.lcm(m, g)
    spread = _spread(leaders, np.minimum(m, world - leaders), m, chunks)
    return Schedule(
        "hierarchical",
        world,
        chunks,
        backwards(spread) + _ring(leaders, chunks) + spread,
        notes={"group": m, "groups": g},
    )


def _spread(leaders: Ints, sizes: Ints, m: int, chunks: int) -> tuple[Phase, ...]:
    """From the leaders to their groups: scatter, then all-gather along the members."""
    piece = chunks // m
    many = sizes > 1  # a leader alone has no destination
    leaders, sizes = leaders[many], sizes[many]
    scatter = [
        Phase(Stage.of(leaders, leaders + np.minimum(q, sizes - 1), chunk=q * piece, count=piece))
        for q in range(1, m)
        if len(leaders)
    ]
    short = int(sizes[-1]) if len(sizes) else m
    return (
        *scatter,
        *_gather(leaders, sizes, m, piece, start=0, stop=short - 1),
        *_gather(leaders, np.where(sizes < m, sizes - 1, m), m, piece, start=short - 1, stop=m - 1),
    )


def _gather(leaders: Ints, counts: Ints, m: int, piece: int, start: int, stop: int) -> tuple[Phase, ...]:
    """Stages start..stop of the all-gather, along the first `counts` members of every group."""
    member = np.arange(m - 1)[None, :] + np.zeros_like(leaders)[:, None]
    sends = member < counts[:, None] - 1
    member, src = member[sends], (leaders[:, None] + member)[sends]
    stage = Stage.of(src, src + 1, chunk=(member - start) % m * piece, count=piece)
    return (Phase(stage, stop - start, -piece, m * piece),) if stop > start and len(src) else ()


def _ring(leaders: Ints, chunks: int) -> tuple[Phase, ...]:
    piece, after = chunks // len(leaders), np.roll(leaders, -1)
    stage = Stage.of(leaders, after, chunk=np.arange(len(leaders)) * piece, count=piece)
    gather = (Phase(stage, len(leaders) - 1, -piece, chunks),) if len(leaders) > 1 else ()
    return backwards(gather) + gather
