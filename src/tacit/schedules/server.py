"""One rank adds for all: the plain parameter server.

    stage 0:  every other rank sends its vector to rank 0, which adds
    stage 1:  rank 0 sends the sum to every other rank

Stages: 2. Chunks: 1. Bytes that leave a rank: 1 vector; n - 1 leave rank 0, whose link sets the time.
"""

import numpy as np

from tacit.schedules.schedule import Phase, Schedule, Stage, backwards, check_world


def server(world: int) -> Schedule:
    world = check_world(world, "server")
    spread = (Phase(Stage.of(0, np.arange(1, world))),) if world > 1 else ()
    return Schedule("server", world, 1, backwards(spread) + spread)
