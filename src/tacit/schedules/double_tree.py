"""Double binary trees (Sanders, Speck and Traeff 2009; in NCCL since 2.4): two trees, each adds half of the vector.

A rank that has children in one tree is a leaf of the other, so no rank works twice as much as another:

    tree 0:  position v hangs under (v ^ b) | 2b, b its lowest set bit; under v ^ b where that is not below n; 0 is the root
    tree 1:  the same tree with position v at rank n - 1 - v (n even) or v + 1 mod n (n odd)
    reduce,    stage k of L:  positions with lowest set bit 2^k send their half up, which is added
    broadcast, stage k of L:  the same, turned round, from the last stage to the first, copied

Pipelined, each half is cut in `pieces` that follow each other one stage apart. L = ceil(log2 n).

Stages: 2 L + pieces - 1. Chunks: 2 pieces. Bytes that leave a rank: (uplinks + children in both trees) / 2 vectors, so
2 at most; 2 (n - 1) vectors in all.
"""

import numpy as np

from tacit.schedules.schedule import Ints, Phase, Schedule, Stage, backwards, check_option, check_world


def double_tree(world: int, *, pieces: int = 1) -> Schedule:
    world = check_world(world, "double_tree")
    pieces = check_option("double_tree", "pieces", pieces, least=1)
    levels = (world - 1).bit_length()
    spread = tuple(Phase(_both(world, 1 << k, pieces)) for k in reversed(range(levels)))
    steps = [phase.stage for phase in backwards(spread) + spread]
    phases, t = [], 0
    while levels and t < len(steps) + pieces - 1:
        # All steps are busy while the pieces outnumber them: those stages are alike.
        times = pieces - t if t == len(steps) - 1 and t < pieces else 1
        running = range(max(0, t - pieces + 1), min(len(steps), t + 1))
        phases.append(Phase(_joined([(steps[s], t - s) for s in running]), times, 1, 2 * pieces))
        t += times
    return Schedule("double_tree", world, 2 * pieces, tuple(phases))


def _both(world: int, bit: int, pieces: int) -> Stage:
    """Down the edges of one level of both trees, each with the first piece of its half."""
    place = np.arange(bit, world, 2 * bit)
    above = (place ^ bit) | 2 * bit
    above = np.where(above < world, above, place ^ bit)
    src, dst = np.r_[above, _mirror(above, world)], np.r_[place, _mirror(place, world)]
    return Stage.of(src, dst, chunk=np.repeat([0, pieces], len(place)))


def _mirror(place: Ints, world: int) -> Ints:
    return (place + 1) % world if world % 2 else world - 1 - place


def _joined(parts: list[tuple[Stage, int]]) -> Stage:
    chunk = np.concatenate([stage.chunk + piece for stage, piece in parts])
    src, dst, add = (np.concatenate([getattr(s, name) for s, _ in parts]) for name in ("src", "dst", "add"))
    return Stage.of(src, dst, chunk, add=add)
