"""All-to-all shapes: chunk s n + d starts at rank s and ends at rank d.

    shifts, stage k of n-1:  rank r sends chunk r n + d to d = r + k mod n
    direct, one stage:       all of these at the same time

Stages: n - 1; 1. Chunks: n^2. Chunks that leave a rank: n - 1. All n (n - 1) transfers are written out: shifts end at 4096
ranks, direct at 2048.
"""

import numpy as np

from tacit.schedules.schedule import Phase, Schedule, Stage, all_pairs, check_world, check_written_out


def shift_all_to_all(world: int) -> Schedule:
    world = check_world(world, "shift_all_to_all")
    check_written_out(world, "shift_all_to_all", 4096, "exchange inside smaller groups")
    rank = np.arange(world)
    twice = np.r_[rank, rank]
    to = [twice[k : k + world] for k in range(1, world)]
    phases = tuple(Phase(Stage.of(rank, dst, chunk=rank * world + dst)) for dst in to)
    return Schedule("shift_all_to_all", world, world * world, phases, "exchange")


def direct_all_to_all(world: int) -> Schedule:
    world = check_world(world, "direct_all_to_all")
    src, dst = all_pairs(world, "direct_all_to_all", "use shift_all_to_all, up to 4096")
    phases = (Phase(Stage.of(src, dst, chunk=src * world + dst)),) if world > 1 else ()
    return Schedule("direct_all_to_all", world, world * world, phases, "exchange")
