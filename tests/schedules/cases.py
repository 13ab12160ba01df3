"""Every schedule the tests go over: all names with their defaults, and options that change the shape."""

from collections.abc import Callable
from functools import partial

from tacit.schedules import (
    SCHEDULES,
    SHAPES,
    Schedule,
    double_tree,
    hierarchical,
    random_gossip,
    sharded,
    tree_of_stars,
    wrht,
)

NAMED: dict[str, Callable[[int], Schedule]] = {**SCHEDULES, **SHAPES}
SHAPED: dict[str, Callable[[int], Schedule]] = {
    "double_tree(pieces=3)": partial(double_tree, pieces=3),
    "double_tree(pieces=20)": partial(double_tree, pieces=20),
    "hierarchical(group=1)": partial(hierarchical, group=1),
    "hierarchical(group=4)": partial(hierarchical, group=4),
    "hierarchical(group=7)": partial(hierarchical, group=7),
    "tree_of_stars(fan=3)": partial(tree_of_stars, fan=3),
    "sharded(direct=True)": partial(sharded, direct=True),
    "wrht(wavelengths=1)": partial(wrht, wavelengths=1),
    "wrht(wavelengths=2, group=2)": partial(wrht, wavelengths=2, group=2),
    "wrht(wavelengths=2, all_to_all=True)": partial(wrht, wavelengths=2, all_to_all=True),
    "wrht(all_to_all=True)": partial(wrht, all_to_all=True),
    "random_gossip(stages=5, seed=7)": partial(random_gossip, stages=5, seed=7),
}
ALL = NAMED | SHAPED
