"""Braid: many rotated copies of the shortest tree, each for its own piece of the vector. Our own; for optical rings.

A chunk is summed up a tree to its root and comes back down. On a ring with wavelengths what counts is how long the light paths
are altogether, and how many stages the tree takes. So a *strand* is the shortest tree of a given depth, and the vector is cut
over many strands, each turned a bit further round the ring, so that every arc and both directions carry the same load:

    shortest tree   n nodes, k stages: the n points of Z^k nearest to 0 by |z_1| + ... + |z_k|. The sum of those norms is the
                    length of all its paths together, and no tree of depth k on a ring or a line is shorter (proof: below).
                    k = 1 is the star of WRHT's groups, k >= n/2 the chain of a ring all-reduce; the rest lies between.
    levels          "5/2 */7": groups of 5 neighbours, trees 2 deep; then one tree 7 deep over all (*) groups' roots.
                    "5" is "5/1". Inner levels make strands alike at the bottom, so that they share transfers.
    strands         how many pieces the vector is cut into; one chunk each

Stages: 2 (k_1 + k_2 + ...), no more than the groups need. Chunks: strands. Bytes that leave a rank: what its places in
the strands send; (n - 1) / n of two vectors on average, the least any all-reduce can send.

Bits: every chunk is added up at one root and copied from there, so all ranks end with the same bits. A node adds what it receives in
one stage, and what it holds, in the order of the ranks.

Why no tree is shorter. Let a root at both ends of a gap of nodes serve it in k stages. In the first it sends to some of them: r on
the left, counted towards the middle. The path to a node passes, or ends at, every node before it: the gap before the c-th from the
middle is passed by c paths, so each node in it, and the c-th itself, costs c there, on top of what it costs inside its gap,
which is a problem of k-1 stages between two senders. By induction a node's cost is |z_1| + ... + |z_k|, where z_1 = c (negative on the
right, 0 in the middle gap): different nodes have different z, and the cheapest set of n is the ball.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import comb, log2, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ConfigError
from tacit.schedules.schedule import Ints, Phase, Schedule, Stage, backwards, check_option, check_world

Bools = NDArray[np.bool_]
Pair = tuple[Ints, Ints]
_MOST_TRANSFERS = 20_000_000
_MOST_DEPTH = 900  # the tree is built by recursion
_MOST_BLOCK = 10_000_000


def braid(world: int, *, levels: str | None = None, strands: int | None = None) -> Schedule:
    world = check_world(world, "braid")
    text = default_levels(world) if levels is None else levels
    parsed = parse_levels(text)
    cut = min(world, 64) if strands is None else strands
    cut = check_option("braid", "strands", cut, least=1)
    if world * cut > _MOST_TRANSFERS:
        raise ConfigError(
            f"braid: {cut} strands of {world} ranks are too many transfers to write out; the limit is {_MOST_TRANSFERS // world} strands"
        )
    turn = turns(world, parsed, cut)
    made = [_stage(world, turn, src, dst) for _, src, dst in strand(world, parsed)]
    spread = tuple(Phase(stage) for stage, _ in made)
    ways = [clockwise for _, clockwise in made]
    optical = [_light(~way) for way in reversed(ways)] + [_light(way) for way in ways]
    return Schedule(
        "braid", world, cut, backwards(spread) + spread,
        notes={"levels": text, "strands": cut, "optical": tuple(optical)},
    )  # fmt: skip


def default_levels(world: int) -> str:
    """Levels that suit most vectors: about as many stages as a binary tree, in far less fibre."""
    inner, left = [], world
    while left > 4096:
        inner.append("5/2")
        left = -(-left // 5)
    depth = max(1, round(0.75 * log2(left))) if left > 1 else 1
    return " ".join([*inner, f"*/{depth}"])


def parse_levels(text: str) -> list[tuple[int | None, int]]:
    """`"5/2 */7"` -> [(5, 2), (None, 7)]; the last level must be `*`."""
    if not isinstance(text, str):
        raise ConfigError(f"braid: levels={text!r}: give text, such as '5/2 */7'")
    levels = [_parse_level(item, text) for item in text.split()]
    if not levels or levels[-1][0] is not None or any(group is None for group, _ in levels[:-1]):
        raise ConfigError(
            f"braid: levels={text!r}: the last level, and no other, joins all that are left: write it as */depth"
        )
    if (block := prod(group for group, _ in levels if group)) > _MOST_BLOCK:
        raise ConfigError(
            f"braid: levels={text!r}: inner groups hold {block:,} nodes together; the limit is {_MOST_BLOCK:,}"
        )
    return levels


def _parse_level(item: str, text: str) -> tuple[int | None, int]:
    group, _, depth = item.partition("/")
    size = None if group == "*" else int(group) if group.isdecimal() else 0
    deep = int(depth) if depth.isdecimal() else 0 if depth else 1
    if not 1 <= deep <= _MOST_DEPTH or (size is not None and size < 2):
        raise ConfigError(
            f"braid: {item!r} in levels={text!r} is no level; write group/depth, as in '5/2 */7', with a group of 2 or more and a depth from 1 to {_MOST_DEPTH}"
        )
    return size, deep


# ---- the shortest tree ----


@lru_cache(maxsize=4096)
def sphere(dimensions: int, radius: int) -> int:
    """Points of Z^k with |z_1| + ... + |z_k| = radius: the coefficient of x^radius in ((1 + x) / (1 - x))^k."""
    if radius == 0:
        return 1
    # how many coordinates are not 0, which, how the radius is shared, signs
    kinds = range(1, min(dimensions, radius) + 1)
    return sum(comb(dimensions, i) * comb(radius - 1, i - 1) * 2**i for i in kinds)


def shortest_length(nodes: int, depth: int) -> int:
    """Hops of all paths of the shortest tree together: the sum of the `nodes` smallest norms in Z^depth."""
    left, radius, total = nodes - 1, 0, 0
    while left > 0:
        radius += 1
        here = min(left, sphere(depth, radius))
        total, left = total + radius * here, left - here
    return total


@lru_cache(maxsize=256)
def shortest_tree(nodes: int, depth: int) -> tuple[Ints, Ints, int]:
    """Nodes 0 .. nodes-1 of a line: the stage in which each receives (1 .. depth), its parent, and the root. O(nodes x depth)."""
    radius, left = 0, nodes - 1
    while left >= sphere(depth, radius + 1):
        radius += 1
        left -= sphere(depth, radius)
    stage, sent_from_left = _gap(depth, radius, left)
    stage = np.concatenate([[0], depth + 1 - stage])
    sent_from_left = np.concatenate([[True], sent_from_left])
    return _unrolled(stage, _parents(stage, sent_from_left), sent_from_left)


@lru_cache(maxsize=4096)
def _gap(k: int, radius: int, extra: int) -> tuple[Ints, Bools]:
    """The nodes of a gap between two senders: stages to go when each receives (k at first), and whether from its left.

    They are the points of Z^k up to `radius`, without 0, and `extra` of those one further out, shared out evenly.
    """
    if k == 0 or (radius == 0 and extra == 0):
        return np.zeros(0, np.int64), np.zeros(0, bool)
    layers = [*range(radius + 1, -1, -1), *range(-1, -radius - 2, -1)]
    sizes = np.cumsum([sphere(k - 1, radius + 1 - abs(c)) for c in layers])
    shares = np.diff(sizes * extra // int(sizes[-1]), prepend=0)
    stages, sides = [], []
    for c, share in zip(layers, shares.tolist(), strict=True):
        for part in _layer(k, c, radius - abs(c), share):
            stages.append(part[0])
            sides.append(part[1])
    return np.concatenate(stages), np.concatenate(sides)


def _layer(k: int, c: int, radius: int, extra: int) -> list[tuple[Ints, Bools]]:
    """Layer z_1 = c: the gap before the c-th node that receives, and the node, which lies on the middle's side."""
    if radius < 0:  # the outermost: its one point is the node itself
        return [(np.full(extra, k), np.full(extra, c > 0))]
    gap, node = _gap(k - 1, radius, extra), (np.array([k]), np.array([c > 0]))
    return [gap] if c == 0 else [gap, node] if c > 0 else [node, gap]


def _parents(stage: Ints, sent_from_left: Bools) -> Ints:
    """On the circle: the next node on that side that receives earlier."""
    parent = np.zeros_like(stage)
    for k in range(1, int(stage.max(initial=0)) + 1):
        earlier, me = np.flatnonzero(stage < k), np.flatnonzero(stage == k)
        after = np.searchsorted(earlier, me)
        parent[me] = np.where(sent_from_left[me], earlier[after - 1], earlier[after % len(earlier)])
    return parent


def _unrolled(stage: Ints, parent: Ints, sent_from_left: Bools) -> tuple[Ints, Ints, int]:
    """The circle cut open where no path passes, as far from the root as can be."""
    n, node = len(stage), np.arange(len(stage))
    low = np.where(sent_from_left, parent, node)
    # the root is node 0, and node n
    high = np.where(sent_from_left, node, np.where(parent > node, parent, n))
    over = np.cumsum(np.bincount(low, minlength=n + 1) - np.bincount(high, minlength=n + 1))[:n]
    unused = np.flatnonzero(over == 0)
    cut = int(unused[np.abs(unused + 1 - n / 2).argmin()]) + 1
    return np.roll(stage, -cut), np.roll((parent - cut) % n, -cut), -cut % n


# ---- strands ----


def strand(world: int, levels: list[tuple[int | None, int]]) -> Iterator[tuple[int, Ints, Ints]]:
    """Who sends to whom on a line of `world` nodes, from the root down: (level, sources, destinations) of every stage that has any."""
    left, spread = np.arange(world), []
    for group, depth in levels:
        left, stages = _level(left, group or max(1, len(left)), depth)
        spread.append(stages)
    for level, stages in reversed(list(enumerate(spread))):
        yield from ((level, src, dst) for src, dst in stages if len(src))


def _level(left: Ints, group: int, depth: int) -> tuple[Ints, list[Pair]]:
    """The roots of groups of `group` neighbours (the last may be smaller), and the stages in which they send to their groups."""
    first = np.arange(0, len(left), group)
    sizes = np.minimum(group, len(left) - first)
    roots, sent = np.zeros_like(first), []
    for size in np.unique(sizes).tolist():
        stage, parent, root = shortest_tree(size, min(depth, max(1, size // 2)))
        mine = np.flatnonzero(sizes == size)
        roots[mine] = first[mine] + root
        sent.append([(stage == k, parent[stage == k], first[mine, None]) for k in range(1, depth + 1)])
    return left[roots], [_joined(left, [size[k] for size in sent]) for k in range(depth)]


def _joined(left: Ints, parts: list[tuple[Bools, Ints, Ints]]) -> Pair:
    src = [(first + parent).ravel() for _, parent, first in parts]
    dst = [(first + np.flatnonzero(now)).ravel() for now, _, first in parts]
    return left[np.concatenate(src)], left[np.concatenate(dst)]


def turns(world: int, levels: list[tuple[int | None, int]], strands: int) -> Ints:
    """How far each strand is turned: evenly round the ring, and evenly within the blocks of every inner level.

    Strand c looks in its own stretch of the ring for the place in the blocks that was used least. Strands that are alike at
    the bottom, that is turned by the same rest within a block, become neighbours, so that they share transfers.
    """
    blocks = np.cumprod([group for group, _ in levels if group], dtype=np.int64).tolist()
    used = [np.zeros(block) for block in blocks]
    turn = np.arange(strands) * world // strands
    for c in range(strands if blocks else 0):
        near = turn[c] + np.arange(max(1, world // strands, min(blocks[-1], world)))
        worn = sum(block * count[near % block] for block, count in zip(blocks, used, strict=True))
        turn[c] = near[int(np.argmin(worn))]
        for block, count in zip(blocks, used, strict=True):
            count[turn[c] % block] += 1
    return turn[np.lexsort([turn, *(turn % block for block in reversed(blocks))])] % world


def _stage(world: int, turn: Ints, src: Ints, dst: Ints) -> tuple[Stage, Bools]:
    """All strands' transfers of one stage, neighbours with the same source and destination joined; and their way round."""
    strands = len(turn)
    at, to = (src[None, :] + turn[:, None]) % world, (dst[None, :] + turn[:, None]) % world
    pair = (at * world + to) * 2 + (dst > src)
    key = np.sort((pair * strands + np.arange(strands)[:, None]).ravel())
    pair, chunk = np.divmod(key, strands)
    new = np.flatnonzero(np.r_[True, (np.diff(key) != 1) | (np.diff(pair) != 0)])
    count = np.diff(np.r_[new, len(key)])
    ends, clockwise = np.divmod(pair[new], 2)
    return Stage.of(ends // world, ends % world, chunk[new], count), clockwise.astype(bool)


def _light(clockwise: Bools) -> dict[str, Any]:
    return {"clockwise": clockwise, "wavelength": None}
