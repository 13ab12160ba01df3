"""Recursive halving and doubling (Rabenseifner 2004): as few bytes as the ring, in a logarithm of stages.

    fold:                           as in recursive doubling, if n is no power of two; p positions go on
    halving,  stage k of log2 p:    position i sends half of what it works on to i xor 2^k, which adds it, and keeps the other
    doubling, stage k of log2 p:    the same transfers turned round, from the last stage to the first, copied
    unfold:                         the sum goes back to the folded ranks

After stage k, position i works on the p / 2^(k+1) chunks from sum over j <= k of bit_j(i) p / 2^(j+1) on: neighbours
exchange the most, the farthest positions a single chunk.

Stages: 2 log2 n, or 2 floor(log2 n) + 2 if n is no power of two. Chunks: p. Bytes that leave a rank: 2 (p - 1) / p vectors;
1 more from a rank that unfolds; 1 from a folded rank.
"""

import numpy as np

from tacit.schedules.recursive_doubling import folded
from tacit.schedules.schedule import Phase, Schedule, Stage, backwards, check_world


def halving_doubling(world: int) -> Schedule:
    world = check_world(world, "halving_doubling")
    places = 1 << (world.bit_length() - 1)
    ranks, unfold = folded(world, chunks=places)
    place, start, halving = np.arange(places), np.zeros(places, np.int64), []
    for k in range(places.bit_length() - 1):
        size = places >> (k + 1)
        start = start + (place >> k & 1) * size
        halving.append(Phase(Stage.of(ranks, ranks[place ^ 1 << k], chunk=start, count=size)))
    spread = (*reversed(halving), *unfold)
    return Schedule("halving_doubling", world, places, backwards(spread) + spread)
