"""Every schedule the tests go over: all names with their defaults, and options that change the shape."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

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


def for_each(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but one test: checks of microseconds would pay milliseconds each. A failure tells the value."""
    chosen = list(values)

    def fold(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def folded(**others: Any) -> None:
            for value in chosen:
                try:
                    test(**others, **{name: value})
                except BaseException as error:
                    error.add_note(f"with {name}={value!r}")
                    raise

        asked = inspect.signature(test)
        kept = [parameter for parameter in asked.parameters.values() if parameter.name != name]
        folded.__signature__ = asked.replace(parameters=kept)  # type: ignore[attr-defined]
        return folded

    return fold
