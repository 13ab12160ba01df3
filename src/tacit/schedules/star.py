"""Stars: nodes that are no ranks add in the path (SwitchML, ATP, THC: an aggregator in the network).

`star`, one aggregator, node n:

    stage 0:  every rank sends its vector to the aggregator, which adds
    stage 1:  the aggregator sends the sum to every rank

`tree_of_stars`, racks of `fan` ranks, each with its aggregator (nodes n, n+1, ...), and a spine above them (the last node):

    stages 0, 1:  ranks to their rack, racks to the spine, added
    stages 2, 3:  spine to the racks, racks to their ranks, copied

Stages: 2 and 4 (2 if one rack holds all). Chunks: 1. Bytes that leave a rank: 1 vector; an aggregator sends one for each
node it serves, and 1 to the spine. A world of 1 sends nothing.
"""

import numpy as np

from tacit.schedules.schedule import Phase, Schedule, Stage, backwards, check_option, check_world


def star(world: int) -> Schedule:
    world = check_world(world, "star")
    spread = (Phase(Stage.of(world, np.arange(world))),) if world > 1 else ()
    return Schedule("star", world, 1, backwards(spread) + spread, aggregators=len(spread))


def tree_of_stars(world: int, *, fan: int = 16) -> Schedule:
    world = check_world(world, "tree_of_stars")
    fan = check_option("tree_of_stars", "fan", fan, least=2)
    rank = np.arange(world)
    racks = -(-world // fan)
    spine = (Phase(Stage.of(world + racks, world + np.arange(racks))),) if racks > 1 else ()
    spread = (*spine, Phase(Stage.of(world + rank // fan, rank))) if world > 1 else ()
    aggregators = racks + len(spine) if spread else 0
    return Schedule("tree_of_stars", world, 1, backwards(spread) + spread, aggregators=aggregators)
