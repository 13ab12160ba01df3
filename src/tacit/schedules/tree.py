"""Binary tree all-reduce: a binomial tree adds everything at rank 0 and spreads the sum the same way back.

    reduce,    stage k of L:  ranks whose lowest set bit is 2^k send the vector to r - 2^k, which adds it
    broadcast, stage k of L:  the same transfers turned round, from the last stage to the first, copied

L = ceil(log2 n). Stages: 2 L. Chunks: 1. Bytes that leave a rank: L vectors from rank 0, 1 + children from any other,
where r has a child r + 2^k for every 2^k below its lowest set bit, as far as such ranks exist; 2 (n - 1) vectors in all.
"""

import numpy as np

from tacit.schedules.schedule import Phase, Schedule, Stage, backwards, check_world


def tree(world: int) -> Schedule:
    world = check_world(world, "tree")
    steps = [1 << k for k in reversed(range((world - 1).bit_length()))]
    children = [np.arange(step, world, 2 * step) for step in steps]
    spread = tuple(Phase(Stage.of(r - step, r)) for step, r in zip(steps, children, strict=True))
    return Schedule("tree", world, 1, backwards(spread) + spread)
