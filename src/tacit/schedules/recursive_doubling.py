"""Recursive doubling (Thakur, Rabenseifner and Gropp 2005): the fewest stages, whole vectors.

    fold,   if n is no power of two:  of the first 2 (n - p) ranks, the even ones send to their right neighbour, which adds
    stage k of log2 p:                position i and position i xor 2^k send each other the vector, both add
    unfold:                           the sum goes back to the folded ranks

p is the largest power of two up to n; the p ranks that go on take positions 0 .. p-1 in order.

Stages: log2 n, or floor(log2 n) + 2 if n is no power of two. Chunks: 1. Bytes that leave a rank: log2 p vectors; 1 more
from a rank that unfolds; 1 from a folded rank.
"""

import numpy as np

from tacit.schedules.schedule import Ints, Phase, Schedule, Stage, backwards, check_world


def recursive_doubling(world: int) -> Schedule:
    world = check_world(world, "recursive_doubling")
    ranks, unfold = folded(world)
    place = np.arange(len(ranks))
    steps = [1 << k for k in range((len(ranks) - 1).bit_length())]
    pairs = tuple(Phase(Stage.of(ranks, ranks[place ^ step], add=True)) for step in steps)
    return Schedule("recursive_doubling", world, 1, backwards(unfold) + pairs + unfold)


def folded(world: int, chunks: int = 1) -> tuple[Ints, tuple[Phase, ...]]:
    """The ranks that go on, a power of two of them, and the stage (or none) that gives the others their result."""
    rest = world - (1 << (world.bit_length() - 1))
    out = 2 * np.arange(rest)
    ranks = np.r_[out + 1, np.arange(2 * rest, world)]
    return ranks, (Phase(Stage.of(out + 1, out, count=chunks)),) if rest else ()
