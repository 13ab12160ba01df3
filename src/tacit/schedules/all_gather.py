"""All-gather shapes: rank r starts with chunk r, every rank ends with all n.

    ring:                stage k of n-1:  rank r sends chunk (r - k) mod n to r+1
    neighbour exchange   stage 0:         ranks 2i and 2i+1 send each other their chunk
    (Chen et al. 2005):  stage k of n/2:  every rank turns to its other neighbour and sends the two chunks it got last
    direct:              one stage:       every rank sends its chunk to all others

Stages: n - 1; n / 2; 1. Chunks: n. Chunks that leave a rank: n - 1, in all three. An odd world has no pairs: there neighbour
exchange is the ring, as in Open MPI. Direct writes out n (n - 1) transfers and ends at 2048 ranks; neighbour exchange
n^2 / 2, at 4096.
"""

import numpy as np

from tacit.schedules.schedule import Phase, Schedule, Stage, all_pairs, check_world, check_written_out


def ring_all_gather(world: int) -> Schedule:
    world = check_world(world, "ring_all_gather")
    rank = np.arange(world)
    stage = Stage.of(rank, (rank + 1) % world, chunk=rank)
    phases = (Phase(stage, world - 1, -1, world),) if world > 1 else ()
    return Schedule("ring_all_gather", world, world, phases, "gather")


def neighbour_exchange(world: int) -> Schedule:
    world = check_world(world, "neighbour_exchange")
    if world % 2:
        return Schedule(
            "neighbour_exchange", world, world, ring_all_gather(world).phases, "gather", notes={"ring": True}
        )
    check_written_out(world, "neighbour_exchange", 4096, "use ring_all_gather, which counts by symmetry")
    rank = np.arange(world)
    partners = (rank ^ 1, (((rank + 1) ^ 1) - 1) % world)  # even ranks look right first, then left
    phases, last = [Phase(Stage.of(rank, partners[0], chunk=rank))], rank // 2 * 2
    for k in range(1, world // 2):
        phases.append(Phase(Stage.of(rank, partners[k % 2], chunk=last, count=2)))
        last = last[partners[k % 2]]
    return Schedule("neighbour_exchange", world, world, tuple(phases), "gather")


def direct_all_gather(world: int) -> Schedule:
    world = check_world(world, "direct_all_gather")
    src, dst = all_pairs(world, "direct_all_gather", "use ring_all_gather, which counts by symmetry")
    phases = (Phase(Stage.of(src, dst, chunk=src)),) if world > 1 else ()
    return Schedule("direct_all_gather", world, world, phases, "gather")
