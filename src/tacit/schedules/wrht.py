"""WRHT, the wavelength-reused hierarchical tree (Dai et al. 2022, arXiv 2207.10982): all-reduce on an optical ring.

    reduce, level k:   the nodes that are left, in ring order, are cut into groups of m; the middle one (position size // 2)
                       represents its group: all others send it their whole vector in ONE stage, and it adds
    top, all_to_all:   as soon as all pairs of the n* nodes left fit into the wavelengths, ceil(floor(n*^2 / 4) / 2) <= w,
                       they send each other their vectors in one stage; otherwise go on to one node. No assignment needs fewer
                       wavelengths, and `_circles` below needs no more, for every n*
    broadcast:         the reduce levels backwards, copied

Left of the middle light travels clockwise (towards higher ranks), right of it counter-clockwise; the wavelength is the
distance in the group - 1, so floor(m/2) wavelengths serve every group of a level. Hence 2 <= m <= 2 w + 1; the largest m,
the default, makes the fewest stages.

Stages: 2 ceil(log_m n); with all_to_all 2 L + 1, where it applies after L levels. Chunks: 1. Bytes that leave a rank: 1 vector
from a rank that represents nobody; a representative sends one to each that it represents, at every level, and 1 up or n* - 1
across; 2 (n - 1) vectors in all, with all_to_all 2 (n - n*) + n* (n* - 1).

`notes["optical"]` has one entry a stage, the wavelength rule spelled out: {"level", "kind": "reduce" | "all_to_all" |
"broadcast", "wavelengths": how many the stage needs a direction, "clockwise": a bool a transfer, "wavelength": an int a
transfer}. In the all_to_all light goes the shorter way round; of the pairs half-way apart every other one goes clockwise.
"""

from typing import Any

import numpy as np

from tacit.errors import ConfigError
from tacit.schedules.schedule import (
    Ints,
    Phase,
    Schedule,
    Stage,
    all_pairs,
    backwards,
    check_option,
    check_world,
)

_MOST_WAVELENGTHS = 10_000_000


def wrht(
    world: int, *, wavelengths: int = 64, group: int | None = None, all_to_all: bool = False
) -> Schedule:
    world, wavelengths, m = _checked(world, wavelengths, group, all_to_all)
    left, spread, notes = np.arange(world), [], []
    for level, (_, most, times) in enumerate(wrht_levels(world, wavelengths, m, all_to_all)):
        if times == 2:
            left, stage, note = _level(left, m, level)
            spread.append(Phase(stage))
            notes.append(note | {"wavelengths": most})
    top, top_note = _top(left, len(spread)) if len(left) > 1 else ((), ())
    phases = backwards(tuple(reversed(spread))) + top + tuple(reversed(spread))
    optical = ([_turned(note) for note in notes], top_note, reversed(notes))
    return Schedule(
        "wrht",
        world,
        1,
        phases,
        notes={
            "wavelengths": wavelengths,
            "group": m,
            "all_to_all": bool(top),
            "optical": tuple(note for part in optical for note in part),
        },
    )


def wrht_stage_count(world: int, wavelengths: int, group: int | None = None, all_to_all: bool = False) -> int:
    """Stages of `wrht` without building it: two a level, and one if an all-to-all ends it."""
    return len(wrht_wavelengths(world, wavelengths, group, all_to_all))


def wrht_wavelengths(
    world: int, wavelengths: int, group: int | None = None, all_to_all: bool = False
) -> list[int]:
    """Wavelengths a direction that each stage of `wrht` needs, without building it."""
    levels = wrht_levels(world, wavelengths, group, all_to_all)
    spread = [needed for _, needed, times in levels if times == 2]
    return spread + [needed for _, needed, times in levels if times == 1] + spread[::-1]


def wrht_levels(
    world: int, wavelengths: int, group: int | None = None, all_to_all: bool = False
) -> list[tuple[int, int, int]]:
    """Of every level, bottom first, and of the all-to-all: the largest group, the wavelengths it needs, and its stages (2, or 1)."""
    world, wavelengths, m = _checked(world, wavelengths, group, all_to_all)
    levels, left = [], world
    while left > 1 and not (all_to_all and all_to_all_wavelengths(left) <= wavelengths):
        levels.append((min(m, left), min(m, left) // 2, 2))
        left = -(-left // m)
    return levels + [(left, all_to_all_wavelengths(left), 1)] * (left > 1)


def all_to_all_wavelengths(nodes: int) -> int:
    """Wavelengths a direction for all pairs of `nodes` on a ring at once: ceil(floor(n^2 / 4) / 2)."""
    return -(-(nodes * nodes // 4) // 2)


def _level(left: Ints, m: int, level: int) -> tuple[Ints, Stage, dict[str, Any]]:
    """The representatives of `left`, the stage in which they send to their groups, and its light."""
    place = np.arange(len(left))
    first = place // m * m
    middle = first + np.minimum(m, len(left) - first) // 2
    others = place != middle
    away = (place - middle)[others]
    stage = Stage.of(left[middle[others]], left[others])
    note = {"level": level, "kind": "broadcast", "clockwise": away > 0, "wavelength": np.abs(away) - 1}
    return left[np.unique(middle)], stage, note


def _top(left: Ints, level: int) -> tuple[tuple[Phase, ...], tuple[dict[str, Any], ...]]:
    n = len(left)
    src, dst = all_pairs(n, "the all-to-all of wrht", "leave all_to_all out or lower wavelengths")
    ahead = (dst - src) % n
    clockwise = (2 * ahead < n) | ((2 * ahead == n) & (src % max(1, n // 2) % 2 == 0))
    wavelength = _circles(np.where(clockwise, src, dst), np.where(clockwise, ahead, n - ahead), n)
    note = {"level": level, "kind": "all_to_all", "clockwise": clockwise, "wavelength": wavelength}
    return (Phase(Stage.of(left[src], left[dst], add=True)),), (
        note | {"wavelengths": all_to_all_wavelengths(n)},
    )


def _circles(start: Ints, hops: Ints, n: int) -> Ints:
    """The wavelength of every arc of an all-to-all: arcs of one wavelength follow one another round the ring and leave no gap.

    n even, h = n / 2: arcs of d and h - d hops alternate, from s, s + d, s + h and s + h + d; so do two of h hops.
    n odd: nodes 0 = A and (n + 1) / 2 = B leave x on the way from A to B, y on the way back: A -> x -> B -> y -> A is a circle,
    for the one x without a y A -> x -> B -> A; the n - 2 nodes without A and B are an all-to-all of the same kind.
    """
    if n % 2:
        return np.asarray(_odd_circles(n)[start, (start + hops) % n], np.int64)
    half, quarter = n // 2, n // 4
    short = np.minimum(hops, half - hops)
    alternate = (short - 1) * half + (start - np.where(2 * hops > half, short, 0)) % half
    square = (quarter - 1) * half + start % max(1, quarter)  # n / 4 hops, four times
    wide = (quarter * half if half % 2 else (quarter - 1) * half + quarter) + start % half // 2
    return np.asarray(np.where(hops == half, wide, np.where(2 * hops == half, square, alternate)), np.int64)


def _odd_circles(n: int) -> Ints:
    """table[i, j]: the wavelength of the clockwise arc i -> j, where that is the shorter way round."""
    table, left, used = np.zeros((n, n), np.int64), np.arange(n), 0
    while len(left) > 1:
        middle = (len(left) + 1) // 2
        a, b, there, back = left[0], left[middle], left[1:middle], left[middle + 1 :]
        new = used + np.arange(len(there))
        table[a, there], table[there, b] = new, new
        table[b, back], table[back, a] = new[:-1], new[:-1]
        table[b, a] = new[-1]
        left, used = np.concatenate([there, back]), used + len(there)
    return table


def _turned(note: dict[str, Any]) -> dict[str, Any]:
    return note | {"kind": "reduce", "clockwise": ~note["clockwise"]}


def _checked(world: int, wavelengths: int, group: int | None, all_to_all: bool) -> tuple[int, int, int]:
    """World, wavelengths and group size, once all options are known to be good."""
    world = check_world(world, "wrht")
    wavelengths = check_option("wrht", "wavelengths", wavelengths, least=1, most=_MOST_WAVELENGTHS)
    m = 2 * wavelengths + 1 if group is None else group
    m = check_option("wrht", "group", m, least=2)
    if m > 2 * wavelengths + 1:
        raise ConfigError(
            f"wrht: group={m}: {wavelengths} wavelengths serve groups of {2 * wavelengths + 1} at most; lower group or give {m // 2} wavelengths"
        )
    if not isinstance(all_to_all, bool):
        raise ConfigError(
            f"wrht: all_to_all={all_to_all!r}: give True (one stage ends the sum where it fits) or False"
        )
    return world, wavelengths, m
