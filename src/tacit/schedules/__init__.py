"""WHO sends to whom: one file a schedule, each opens with its stages and bytes in closed form. Pure numpy.

`SCHEDULES` maps names to all-reduces, `SHAPES` to the other collectives; every entry takes (world, **options).
"""

import inspect
from collections.abc import Callable

from tacit.grammar import check_names
from tacit.registry import Registry, unknown_name
from tacit.schedules.all_gather import direct_all_gather, neighbour_exchange, ring_all_gather
from tacit.schedules.all_to_all import direct_all_to_all, shift_all_to_all
from tacit.schedules.braid import braid
from tacit.schedules.double_tree import double_tree
from tacit.schedules.gossip import exponential_gossip, random_gossip
from tacit.schedules.halving_doubling import halving_doubling
from tacit.schedules.hierarchical import hierarchical
from tacit.schedules.own import from_data, load, to_data
from tacit.schedules.recursive_doubling import recursive_doubling
from tacit.schedules.ring import ring
from tacit.schedules.schedule import Goal, Phase, Schedule, Stage
from tacit.schedules.server import server
from tacit.schedules.sharded import sharded
from tacit.schedules.star import star, tree_of_stars
from tacit.schedules.torus import torus
from tacit.schedules.tree import tree
from tacit.schedules.two_way_ring import two_way_ring
from tacit.schedules.wrht import wrht, wrht_stage_count, wrht_wavelengths

_BUILT_IN: dict[str, Callable[..., Schedule]] = {
    "ring": ring,
    "tree": tree,
    "double_tree": double_tree,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "torus": torus,
    "star": star,
    "tree_of_stars": tree_of_stars,
    "sharded": sharded,
    "server": server,
    "two_way_ring": two_way_ring,
    "wrht": wrht,
    "braid": braid,
}
SCHEDULES: Registry[Callable[..., Schedule]] = Registry("schedule", "tacit.schedules", _BUILT_IN)

SHAPES: dict[str, Callable[..., Schedule]] = {
    "ring_all_gather": ring_all_gather,
    "neighbour_exchange": neighbour_exchange,
    "direct_all_gather": direct_all_gather,
    "shift_all_to_all": shift_all_to_all,
    "direct_all_to_all": direct_all_to_all,
    "exponential_gossip": exponential_gossip,
    "random_gossip": random_gossip,
}


def build(name: str, world: int, /, **options: object) -> Schedule:
    """The schedule or shape called `name`; a name or an option that does not exist gets one sentence."""
    maker, known = _maker(name), options_of(name)
    check_names("schedule", name, known, options)
    return maker(world, **options)


def options_of(name: str) -> tuple[str, ...]:
    """The options of the schedule or shape called `name`: all that its maker takes beside the world."""
    return tuple(inspect.signature(_maker(name)).parameters)[1:]


def _maker(name: str) -> Callable[..., Schedule]:
    if name in SHAPES:
        return SHAPES[name]
    if name in SCHEDULES:
        return SCHEDULES[name]
    raise unknown_name("schedule", name, (*SCHEDULES, *SHAPES))


__all__ = [
    "SCHEDULES",
    "SHAPES",
    "Goal",
    "Phase",
    "Schedule",
    "Stage",
    "braid",
    "build",
    "direct_all_gather",
    "direct_all_to_all",
    "double_tree",
    "exponential_gossip",
    "from_data",
    "halving_doubling",
    "hierarchical",
    "load",
    "neighbour_exchange",
    "options_of",
    "random_gossip",
    "recursive_doubling",
    "ring",
    "ring_all_gather",
    "server",
    "sharded",
    "shift_all_to_all",
    "star",
    "to_data",
    "torus",
    "tree",
    "tree_of_stars",
    "two_way_ring",
    "wrht",
    "wrht_stage_count",
    "wrht_wavelengths",
]
