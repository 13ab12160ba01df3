"""Ring all-reduce (Patarasuk and Yuan 2009): every rank exchanges with its two neighbours only, and sends the fewest bytes possible.

    reduce-scatter, stage k of n-1:  rank r sends chunk (r - k) mod n to r+1, which adds it
    all-gather,     stage k of n-1:  rank r sends chunk (r + 1 - k) mod n to r+1, which keeps it

Stages: 2 (n - 1). Chunks: n. Bytes that leave a rank: 2 (n - 1) / n of the vector: the least any all-reduce can send.
"""

import numpy as np

from tacit.schedules.schedule import Phase, Schedule, Stage, check_world


def ring(world: int) -> Schedule:
    world = check_world(world, "ring")
    rank = np.arange(world)
    after = (rank + 1) % world
    turns = [Stage.of(rank, after, chunk=rank, add=True), Stage.of(rank, after, chunk=after)]
    phases = tuple(Phase(turn, times=world - 1, stride=-1, span=world) for turn in turns if world > 1)
    return Schedule("ring", world, world, phases)
