"""Gossip matchings: in every stage ranks pair off, and both of a pair end with the sum of the two.

    exponential, stage k of ceil(log2 n):  rank r meets r xor 2^k, if there is such a rank
    random:                                every stage a new matching, from a seed that all ranks share

Exponential is the one-peer exponential graph (Ying et al. 2021) in its mutual form: their rank r receives from r - 2^k and sends
to r + 2^k, which is no pair. If n is a power of two, ranks that have met everybody in turn hold the sum of all.

Stages: ceil(log2 n); `stages`. Chunks: 1. Vectors that leave a rank: one a stage; none where a rank finds no partner: in a
random matching of an odd world just one rank.
"""

import numpy as np

from tacit.errors import ConfigError
from tacit.schedules.schedule import Phase, Schedule, Stage, check_option, check_world

_MOST_TRANSFERS = 20_000_000


def exponential_gossip(world: int) -> Schedule:
    world = check_world(world, "exponential_gossip")
    rank, phases = np.arange(world), []
    for k in range((world - 1).bit_length()):
        meets = rank[rank ^ 1 << k < world]
        phases.append(Phase(Stage.of(meets, meets ^ 1 << k, add=True)))
    return Schedule("exponential_gossip", world, 1, tuple(phases), "meet")


def random_gossip(world: int, *, stages: int = 1, seed: int = 0) -> Schedule:
    world = check_world(world, "random_gossip")
    stages = check_option("random_gossip", "stages", stages, least=1)
    if stages * world > _MOST_TRANSFERS:
        raise ConfigError(
            f"random_gossip: {stages} stages of {world} ranks are too many transfers to write out; the limit is {_MOST_TRANSFERS // world} stages"
        )
    seed = check_option("random_gossip", "seed", seed, least=0)
    rng, half, phases = np.random.default_rng(seed), world // 2, []
    for _ in range(stages if half else 0):
        order = rng.permutation(world)[: 2 * half]
        phases.append(Phase(Stage.of(order, np.roll(order, half), add=True)))
    return Schedule("random_gossip", world, 1, tuple(phases), "meet")
