"""Two-way ring: two ring all-reduces at once, one a direction, each for half of the vector: the fair baseline on an optical ring.

    first half, clockwise:           reduce-scatter, stage k:  rank r sends chunk (r - k) mod n to r+1, which adds it; then all-gather
    second half, counter-clockwise:  the mirror image: rank r sends chunk n + (-r - k) mod n to r-1

Stages: 2 (n - 1). Chunks: 2 n. Bytes that leave a rank: 2 (n - 1) / n of the vector, half of them each way: with transfers striped over
all wavelengths of both directions nothing is dark, and only the number of stages can be improved upon (`braid` does).
"""

import numpy as np

from tacit.schedules.schedule import Phase, Schedule, Stage, check_world


def two_way_ring(world: int) -> Schedule:
    world = check_world(world, "two_way_ring")
    rank = np.arange(world)
    src, place = np.r_[rank, -rank % world], np.r_[rank, rank]  # place: the rank as its own direction counts
    dst, half = np.r_[(rank + 1) % world, (-rank - 1) % world], np.repeat([0, world], world)
    turns = [Stage.of(src, dst, half + place, add=True), Stage.of(src, dst, half + (place + 1) % world)]
    phases = tuple(Phase(turn, world - 1, stride=-1, span=world, first=half) for turn in turns if world > 1)
    light = {"clockwise": half == 0, "wavelength": None}
    return Schedule("two_way_ring", world, 2 * world, phases, notes={"optical": (light,) * len(phases)})
