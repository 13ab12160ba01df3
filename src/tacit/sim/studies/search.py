"""The fastest braid for a vector on an optical ring, found in three sieves, each exact about less and cheaper than the next.

    1. every list of levels: stages x set-up + length of the shortest trees, as if light filled every arc (closed form)
    2. the best of them, with several numbers of strands: the true load of every arc (one strand's, turned: a convolution)
    3. the best of those: built, wavelengths assigned, costed

A braid's stages, its share of x / w and how far its light travels do not depend on the vector, so the sieves are remembered between
searches on one ring. The first sieve leaves propagation out: in whatever stages, light goes about once round the ring in all.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement, product
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ConfigError, ScheduleError
from tacit.schedules.braid import braid, parse_levels, shortest_length, sphere, strand, turns
from tacit.schedules.schedule import Schedule
from tacit.sim.bounds import Bounds, lower_bounds
from tacit.sim.costs import Cost
from tacit.sim.optical import cost, rescaled
from tacit.sim.studies.rivals import unit_ring
from tacit.sim.wavelengths import check_schedule
from tacit.topology import OpticalRing

_GROUPS = (
    (3, 1), (4, 1), (5, 1), (6, 1), (8, 1), (10, 1), (12, 1), (16, 1), (5, 2), (7, 2), (9, 2), (13, 2), (16, 2), (25, 2), (7, 3), (8, 3),
    (16, 3), (25, 3), (9, 4), (33, 4), (11, 5), (32, 5), (17, 8), (33, 16), (65, 32),
)  # fmt: skip
_MOST_BLOCK = 100  # nodes in an inner block: each should see a strand at each of its places
_MOST_DEPTH = 64
MOST_FINALISTS, MOST_SEARCHED = 1000, 200_000
_MOST_IDEAL = 60
_LARGE = 8192  # nodes; beyond, fewer candidates
_MOST_TRANSFERS = 1_500_000


Spectrum = NDArray[np.complex128]


@dataclass(frozen=True, slots=True)
class Found:
    """A braid, what it costs, and what nothing can beat."""

    levels: str
    strands: int
    cost: Cost
    bounds: Bounds

    @property
    def ratio(self) -> float:
        """How many times the combined lower bound it takes."""
        return self.cost.time_s / self.bounds.combined_s if self.bounds.combined_s else 1.0

    @property
    def text(self) -> str:
        """The braid as it is typed."""
        return f"braid(levels='{self.levels}', strands={self.strands})"

    def schedule(self) -> Schedule:
        return braid(self.cost.world, levels=self.levels, strands=self.strands)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Time = stages x set-up + share x (x / w) + travel x time a hop, whatever the vector."""

    levels: str
    strands: int
    stages: float
    share: float
    hops: float = 0  # the longest path, about
    travel: float = 0  # the longest paths of all stages together

    def time_s(self, nbytes: float, ring: OpticalRing) -> float:
        share_s = 8 * nbytes / ring.rate_bps / ring.wavelengths
        return self.stages * ring.setup_s + self.share * share_s + self.travel * ring.hop_s


def search(world: int, nbytes: float, ring: OpticalRing, *, finalists: int = 4, proven: bool = True) -> Found:
    """The fastest braid found for an all-reduce of `nbytes` over the whole ring.

    `finalists` are built and costed, up to a second each at 4096 nodes. `proven`: the winner is verified, and the light of
    every stage checked, before it is returned (some seconds at 4096 nodes).
    """
    if world != ring.nodes:
        raise ConfigError(
            f"search among {world} ranks on a ring of {ring.nodes} nodes; give the ring as many nodes"
        )
    if world > MOST_SEARCHED:
        raise ConfigError(f"search among {world:,} ranks takes hours; the limit is {MOST_SEARCHED:,}")
    if not 1 <= finalists <= MOST_FINALISTS:
        raise ConfigError(f"finalists={finalists}: give 1 or more, up to {MOST_FINALISTS}")
    light = unit_ring(ring)

    def time_s(plan: _Plan) -> float:
        return plan.time_s(nbytes, ring)

    reach = world if ring.most_hops is None else ring.most_hops
    ideal = sorted((plan for plan in _ideal(world) if plan.hops <= reach), key=time_s)[
        : _MOST_IDEAL if world <= _LARGE else _MOST_IDEAL // 6
    ]
    loaded = [plan for one in ideal for plan in _loaded(one.levels, light)]
    if not loaded:
        raise ConfigError(
            f"no braid of {world} nodes has paths of {ring.most_hops} hops or fewer; raise most_hops"
        )
    last = _varied(sorted(loaded, key=time_s), finalists)
    built = [(plan, rescaled(_built(plan.levels, plan.strands, light), nbytes, light, ring)) for plan in last]
    best, found = min(built, key=lambda candidate: candidate[1].time_s)
    if proven:
        prove(best.levels, best.strands, light)
    return Found(best.levels, best.strands, found, lower_bounds(world, nbytes, ring))


def _varied(plans: list[_Plan], most: int) -> list[_Plan]:
    """The first of them, but of one list of levels no more than two: what the loads promise, the colours may not keep."""
    seen: Counter[str] = Counter()
    some: list[_Plan] = []
    for plan in plans:
        if seen[plan.levels] < 2 and len(some) < most:
            seen[plan.levels] += 1
            some.append(plan)
    return some


@lru_cache(maxsize=256)
def prove(levels: str, strands: int, ring: OpticalRing) -> None:
    """Raises ScheduleError unless the braid sums everything once and no light collides.

    Exactly, up to 4096 nodes; beyond, every rank holds a random 64-bit number, and the sums must agree.
    """
    made = braid(ring.nodes, levels=levels, strands=strands)
    if ring.nodes <= 4096:
        made.verify()
    else:
        check_by_numbers(made)
    check_schedule(made, ring, stripe=True)


def check_by_numbers(schedule: Schedule) -> None:
    """Raises ScheduleError unless numbers, one a rank, end up as their sum everywhere. O(transfers).

    The numbers are random: a contribution that is missing or counted twice stays unseen with a chance below 2^-60.
    """
    numbers = np.random.default_rng(0).integers(0, 2**64, schedule.nodes, np.uint64)
    numbers[schedule.world :] = 0
    held = np.repeat(numbers[:, None], schedule.chunks, axis=1)
    for stage in schedule.stages():
        which = np.repeat(np.arange(len(stage)), stage.count)
        first = np.repeat(np.cumsum(stage.count) - stage.count, stage.count)
        chunk = stage.chunk[which] + np.arange(len(which)) - first
        said, add = held[stage.src[which], chunk], stage.add[which]
        held[stage.dst[which][~add], chunk[~add]] = said[~add]
        np.add.at(held, (stage.dst[which][add], chunk[add]), said[add])
    wrong = held[: schedule.world] != numbers.sum(dtype=np.uint64)
    if wrong.any():
        rank, at = (int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
        raise ScheduleError(
            f"{schedule.name}: rank {rank} ends with chunk {at} that is not the sum of all ranks"
        )


@lru_cache(maxsize=16)
def _ideal(world: int) -> tuple[_Plan, ...]:
    """Every list of levels, as if every arc were full."""
    plans = []
    for inner in _inner(world):
        left, stages, share = world, 0, 0.0
        for group, depth in inner:
            left, stages, share = (
                -(-left // group),
                stages + depth,
                share + shortest_length(group, depth) / group,
            )
        text = "".join(f"{group}/{depth} " for group, depth in inner)
        for depth in range(1, min(_MOST_DEPTH, max(1, left // 2)) + 1):
            more, hops = shortest_length(left, depth) / left, _reach(left, depth) * world / left
            plans.append(_Plan(f"{text}*/{depth}", 0, 2 * (stages + depth), share + more, hops))
            if shortest_length(left, depth) == left - 1:
                break  # a chain: deeper is not shorter
    return tuple(plans)


def _reach(nodes: int, depth: int) -> float:
    """About how far the root of a shortest tree sends: half of all but those that it leaves to later stages."""
    radius, left = 0, nodes
    while left > sphere(depth, radius):
        left, radius = left - sphere(depth, radius), radius + 1
    middle = sum(sphere(depth - 1, r) for r in range(radius)) + left * sphere(depth - 1, radius) / sphere(
        depth, radius
    )
    return max(1.0, 0.9 * (nodes - middle) / 2)


def _inner(world: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Lists of inner levels, small groups first."""
    for levels in range(4):
        for inner in combinations_with_replacement(_GROUPS, levels):
            if prod(group for group, _ in inner) <= max(1, min(_MOST_BLOCK, world // 2)):
                yield inner


@lru_cache(maxsize=4096)
def _loaded(levels: str, ring: OpticalRing) -> tuple[_Plan, ...]:
    """`levels` with several numbers of strands, by their true loads; none if a path is too long."""
    world, w = ring.nodes, ring.wavelengths
    stages = _profiles(world, levels)
    if ring.most_hops is not None and max((stage.hops for stage in stages), default=0) > ring.most_hops:
        return ()
    plans: list[_Plan] = []
    for strands in _strand_counts(levels, stages, ring):
        marks = np.fft.rfft(np.bincount(turns(world, parse_levels(levels), strands), minlength=world))
        parts, share, travel = 0, 0.0, 0
        for stage in stages:
            alike = max(1, strands // stage.block)
            peak = ceil(1.01 * _most(stage.load * marks, world) - 1e-6)
            busy = ceil(_most(stage.sent * marks, world) / alike - 1e-6)  # transfers out of one node
            now = max(ceil(peak / w), ceil(busy / ring.senders))
            stripes = (w * alike // ceil(peak / now)) / alike
            if ring.transceivers is not None:
                stripes = min(stripes, max(1, ring.senders // ceil(busy / now)) / alike)
            parts, share, travel = (
                parts + now,
                share + now * w / (strands * stripes),
                travel + now * stage.hops,
            )
        plans.append(_Plan(levels, strands, 2 * parts, 2 * share, travel=2 * travel))
    return tuple(plans)


def _most(spectrum: Spectrum, world: int) -> float:
    return float(np.fft.irfft(spectrum, world, axis=-1).max())


@dataclass(frozen=True, slots=True, eq=False)
class _Profile:
    """A stage of one strand, unturned."""

    load: Spectrum  # of the paths over every arc, both ways round
    sent: Spectrum  # of the transfers out of every node
    block: int  # nodes after which strands are alike
    hops: int  # the longest path
    transfers: int


def _profiles(world: int, levels: str) -> list[_Profile]:
    """Every stage of one strand."""
    parsed, found = parse_levels(levels), []
    for level, src, dst in strand(world, parsed):
        block = prod(group or world for group, _ in parsed[: level + 1])
        low, high = np.minimum(src, dst), np.maximum(src, dst)
        load = np.zeros((2, world + 1))
        for way, mine in enumerate((dst > src, dst < src)):
            load[way] = np.cumsum(
                np.bincount(low[mine], minlength=world + 1) - np.bincount(high[mine], minlength=world + 1)
            )
        sent = np.fft.rfft(np.bincount(src, minlength=world))
        arcs = np.fft.rfft(load[:, :world], axis=-1)
        found.append(_Profile(arcs, sent, block, int((high - low).max()), len(src)))
    return found


def _strand_counts(levels: str, stages: list[_Profile], ring: OpticalRing) -> list[int]:
    """Numbers of strands that about fill the wavelengths of the fullest stage once, twice, ..., or the transceivers of every node;
    whole blocks and not."""
    world, block = ring.nodes, prod(group for group, _ in parse_levels(levels) if group)
    load = max((float(stage.load[:, 0].real.max()) / world for stage in stages), default=1.0)
    sent = max((stage.transfers / world for stage in stages), default=1.0)
    room = [ring.wavelengths / load] + ([] if ring.transceivers is None else [ring.senders / sent])
    most = max(2 * block, min(world, 640, max(64, _MOST_TRANSFERS // world)))
    counts: set[int] = set()
    fills, slacks = (
        ((1, 2, 3, 4, 6, 8), (1.02, 1.06, 1.1, 1.16, 1.25)) if world <= _LARGE else ((1, 2, 4), (1.06, 1.16))
    )
    for most_strands, times, slack in product(room, fills, slacks):
        strands = min(most, int(most_strands / (slack * times)))
        counts |= {strands, strands // block * block}
    if ring.transceivers is not None:  # several time slots for the transceivers
        counts |= {min(most, int(times * room[1])) for times in (2, 3, 4, 6, 8, 12, 16)}
    return sorted(count for count in counts if count >= min(block, world)) or [min(block, world)]


@lru_cache(maxsize=256)
def _built(levels: str, strands: int, unit: OpticalRing) -> Cost:
    """The braid's true cost for one byte on the unit ring."""
    return cost(braid(unit.nodes, levels=levels, strands=strands), 1.0, unit, stripe=True)
