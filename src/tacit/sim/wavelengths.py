"""Which light goes where: routes, wavelengths and sub-stages of one stage on an optical ring, and the proof that none collide.

    arc i          the fibre between nodes i and i+1, one a direction
    path           the arcs that a transfer's light crosses, clockwise (towards higher numbers) or counter-clockwise
    load           how many paths cross an arc in one direction: no assignment needs fewer wavelengths than the largest load
    part           a sub-stage: where the load exceeds the wavelengths, or a node's transfers its transceivers, a stage runs in
                   several, one after the other, each set up anew
    band           neighbouring wavelengths of one path: a transfer may be striped over several

Way round: the shorter one. Half-way round is a tie: clockwise if dst > src, so never past the end of the numbering. A schedule may fix
the way and the wavelengths itself: `notes["optical"][phase]` = {"clockwise": a bool a transfer, "wavelength": an int a transfer or None}.

Colours: paths that pass some node nobody else passes form a line, where the sorted sweep below reaches the largest load exactly. On a
true circle finding the fewest is NP-hard; the sweep starts at the node that the fewest paths pass, c of them, and uses at most
load + c wavelengths; on the schedules of this library it is the load or a few more. Only bands of `check` are to be believed.

Transceivers: a sender holds one wavelength of one direction while a part lasts, and so does a receiver. A node with T of each takes part in
T transfers out and T in at a time, fewer if they are striped; what is more waits for the next part. It is not shared out in
time within a part: to serve another wavelength or another node is to set up again.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.errors import ConfigError, ScheduleError
from tacit.schedules.schedule import Ints, Schedule, Stage
from tacit.topology import OpticalRing

Bools = NDArray[np.bool_]
Colours = dict[tuple[bytes, bytes, int], Ints]
_MOST_BANDS = 2_000_000  # beyond that, striping keeps to equal bands
_VARIANTS = ((False, True), (False, True), (True, False))  # of a sweep: mirrored, long arcs first, packed
_MOST_PACKED, _FEW = 512, 2000  # colours up to which arcs are packed; arcs up to which more is tried


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """One path a transfer: it crosses arcs start, start + 1, ..., `hops` of them, modulo the nodes."""

    clockwise: Bools
    start: Ints
    hops: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The light of one stage. Band b gives wavelengths first[b] .. first[b] + width[b] - 1 to transfer[b]."""

    paths: Paths
    parts: int
    part: Ints  # one a transfer
    transfer: Ints  # one a band
    first: Ints
    width: Ints

    @property
    def stripes(self) -> Ints:
        """Wavelengths of every transfer."""
        return np.bincount(self.transfer, self.width, len(self.part)).astype(np.int64)

    @property
    def most_wavelengths(self) -> int:
        """Wavelengths in use on the fullest arc of the fullest part; of very many parts, the wavelengths in use at all."""
        if self.parts > 16:
            return int((self.first + self.width).max())
        nodes = int(self.paths.start.max(initial=0)) + 1 + int(self.paths.hops.max(initial=0))
        most = (
            loads(self.paths, nodes, np.where(self.part == p, self.stripes, 0)) for p in range(self.parts)
        )
        return max((int(load.max()) for load in most), default=0)


def optical_notes(schedule: Schedule, phase: int) -> tuple[ArrayLike | None, ArrayLike | None]:
    """The way round and the wavelengths that the schedule fixes for this phase, if it does."""
    notes = schedule.notes.get("optical")
    if not isinstance(notes, tuple | list) or phase >= len(notes) or not isinstance(notes[phase], dict):
        return None, None
    return notes[phase].get("clockwise"), notes[phase].get("wavelength")


def route(stage: Stage, ring: OpticalRing, clockwise: ArrayLike | None = None) -> Paths:
    """The path of every transfer: the given way round, or the shorter one."""
    n = ring.nodes
    outside = (stage.src >= n) | (stage.dst >= n) | (stage.src < 0) | (stage.dst < 0)
    if outside.any():
        i = int(outside.argmax())
        raise ConfigError(
            f"the transfer {stage.src[i]} -> {stage.dst[i]} leaves the optical ring of {n} nodes; give it more nodes"
        )
    ahead = (stage.dst - stage.src) % n
    shorter = (2 * ahead < n) | ((2 * ahead == n) & (stage.dst > stage.src))
    way = shorter if clockwise is None else np.asarray(clockwise, bool)
    if way.shape != stage.src.shape:
        raise ConfigError(f"{way.size} ways round for {len(stage)} transfers; give one each")
    return Paths(way, np.where(way, stage.src, stage.dst), np.where(way, ahead, (n - ahead) % n))


def loads(paths: Paths, nodes: int, weight: Ints | None = None) -> Ints:
    """Paths (or their weights) over every arc, clockwise [0] and counter-clockwise [1]. O(transfers + nodes)."""
    each = np.ones(len(paths.start), np.int64) if weight is None else weight
    ways = (paths.clockwise, ~paths.clockwise)
    return np.stack([_load(paths.start[way], paths.hops[way], nodes, each[way]) for way in ways])


def assign(
    stage: Stage,
    ring: OpticalRing,
    *,
    clockwise: ArrayLike | None = None,
    wavelength: ArrayLike | None = None,
    stripe: bool = False,
    known: Colours | None = None,
) -> Assignment:
    """Conflict-free light for `stage`, in as many parts as it needs.

    `stripe`: idle wavelengths are used too, in proportion to the bytes. `wavelength`: the schedule's own, one a
    transfer. `known` remembers colours between calls: a stage and the same stage backwards are coloured once.
    """
    paths, known = route(stage, ring, clockwise), {} if known is None else known
    fixed = None if wavelength is None else _fixed(paths, wavelength)
    striped = _striped(stage, paths, ring, known) if stripe else None
    if striped is not None and fixed is None:
        return striped
    even = _in_parts(stage, paths, ring, stripe, fixed, known)
    return striped if striped is not None and _chunks(stage, striped) <= _chunks(stage, even) else even


def check(stage: Stage, assignment: Assignment, ring: OpticalRing, name: str = "stage 0") -> None:
    """Raises ScheduleError naming the first fault unless every transfer has its own light from source to destination.

    Knows arcs, directions, wavelengths and transceivers, and nothing of how the assignment was found. O(b log b) for b
    wavelengths given.
    """
    _check_paths(stage, assignment, ring, name)
    _check_wavelengths(stage, assignment, ring, name)
    _check_transceivers(stage, assignment, ring, name)
    _check_collisions(stage, assignment, ring, name)


def check_schedule(schedule: Schedule, ring: OpticalRing, *, stripe: bool = False) -> None:
    """`check` of every distinct stage of `schedule`, with the light that `assign` gives it."""
    known: Colours = {}
    number = 0
    for i, phase in enumerate(schedule.phases):
        clockwise, wavelength = optical_notes(schedule, i)
        light = assign(
            phase.stage, ring, clockwise=clockwise, wavelength=wavelength, stripe=stripe, known=known
        )
        check(phase.stage, light, ring, f"{schedule.name}: stage {number}")
        number += phase.times


# ---- finding the light ----


def _load(start: Ints, hops: Ints, nodes: int, weight: Ints) -> Ints:
    edge = np.bincount(start, weight, 2 * nodes + 1) - np.bincount(start + hops, weight, 2 * nodes + 1)
    over = np.cumsum(edge)
    return np.asarray(over[:nodes] + over[nodes : 2 * nodes]).round().astype(np.int64)


def _fixed(paths: Paths, wavelength: ArrayLike) -> Ints:
    """The schedule's own wavelengths, one a transfer."""
    fixed = np.asarray(wavelength, np.int64)
    if fixed.shape != paths.start.shape or fixed.min(initial=0) < 0:
        raise ConfigError(
            f"{fixed.size} wavelengths for {len(paths.start)} transfers; give one each, from 0 on"
        )
    return fixed


def _both_ways(paths: Paths, nodes: int, w: int, known: Colours) -> Ints:
    """A colour for every path; the two directions are two fibres, so both count from 0.

    The fewest found, if they may fit into one part; otherwise as few parts, for which a few colours more do not matter.
    """
    peak = int(loads(paths, nodes).max(initial=0))
    limit = None if peak <= w else -(-peak // w) * w
    while True:
        colour, missing = np.zeros(len(paths.start), np.int64), False
        for way in (paths.clockwise, ~paths.clockwise):
            found = colours(paths.start[way], paths.hops[way], nodes, limit, known)
            missing |= len(found) != way.sum()
            colour[way] = 0 if missing else found
        if not missing:
            return colour
        limit = (limit or 0) + max(1, (limit or 0) // w // 16) * w


def _chunks(stage: Stage, light: Assignment) -> float:
    """Chunks that a wavelength carries in all parts together: the time, but for set-up."""
    return light.parts * float((stage.count / light.stripes).max(initial=0))


def _in_parts(
    stage: Stage, paths: Paths, ring: OpticalRing, stripe: bool, fixed: Ints | None, known: Colours
) -> Assignment:
    """Equal bands, and as many parts as it takes: first for the transceivers, then for the wavelengths of each of those.

    Wavelengths that the schedule names are kept, unless transceivers are short; where it counts on more than there are, the rest
    follows in further parts.
    """
    slot, w = _time_slots(stage, ring), ring.wavelengths
    fixed = fixed if not slot.any() else None
    part, first = np.zeros_like(slot), np.zeros_like(slot)
    parts, widest = 0, 1
    for now in np.split(np.argsort(slot, kind="stable"), np.cumsum(np.bincount(slot))[:-1]):
        some, nodes = (paths, ring.nodes) if not slot.any() else _squeezed(paths, now, ring.nodes)
        colour = _both_ways(some, nodes, w, known) if fixed is None else fixed[now]
        needed = int(colour.max(initial=0)) + 1
        more = -(-needed // w)
        each = w if fixed is not None and more > 1 else -(-needed // more)
        part[now], first[now] = parts + colour // each, colour % each
        parts, widest = parts + more, max(widest, each)
    width = min(w // widest, ring.senders // max(1, _busiest(stage, part, ring))) if stripe else 1
    bands = np.arange(len(slot))
    return Assignment(paths, parts, part, bands, first * width, np.full(len(slot), width))


def _squeezed(paths: Paths, which: Ints, nodes: int) -> tuple[Paths, int]:
    """Some of the paths on a ring of the nodes where they begin or end: they overlap as before, and few are coloured faster."""
    start, end = paths.start[which], (paths.start[which] + paths.hops[which]) % nodes
    ends, place = np.unique(np.concatenate([start, end]), return_inverse=True)
    begin, close = np.split(place, 2)
    return Paths(paths.clockwise[which], begin, (close - begin) % len(ends)), len(ends)


def _busiest(stage: Stage, part: Ints, ring: OpticalRing, weight: Ints | None = None) -> int:
    """Transfers (or their weights) that the busiest node sends, or receives, in one part."""
    return max(
        int(np.bincount(part * ring.nodes + end, weight).max(initial=0)) for end in (stage.src, stage.dst)
    )


def _time_slots(stage: Stage, ring: OpticalRing) -> Ints:
    """For every transfer the first time slot in which both its ends have a transceiver left; all 0 where there is no shortage.

    In the order of distances: of one distance a node has few transfers, so slots fill evenly.
    """
    slot = np.zeros(len(stage), np.int64)
    if ring.transceivers is None or _busiest(stage, slot, ring) <= ring.senders:
        return slot
    senders = ring.senders
    # a bit for every slot in which a node has no sender left; then likewise, no receiver
    full = [0] * (2 * ring.nodes)
    used: dict[tuple[int, int], int] = {}
    order = np.lexsort((stage.src, (stage.dst - stage.src) % ring.nodes))
    ends = zip(
        order.tolist(), stage.src[order].tolist(), (stage.dst[order] + ring.nodes).tolist(), strict=True
    )
    for i, a, b in ends:
        taken = full[a] | full[b]
        now = (~taken & (taken + 1)).bit_length() - 1  # the lowest bit that is not set
        slot[i] = now
        for end in (a, b):
            used[end, now] = count = used.get((end, now), 0) + 1
            if count == senders:
                full[end] |= 1 << now
    return slot


def _striped(stage: Stage, paths: Paths, ring: OpticalRing, known: Colours) -> Assignment | None:
    """One part, bands in proportion to the bytes: the least time found, or None if one part is not enough."""
    for t in _times(stage, paths, ring):
        width = _widths(stage.count, t)
        same = int(width[0]) if (width == width[0]).all() else 1
        if width.sum() > _MOST_BANDS and same == 1:
            return None
        found = _bands(paths, ring, width // same, ring.wavelengths // same, known)
        if found is None and same > 1 and width.sum() <= _MOST_BANDS:
            same, found = 1, _bands(paths, ring, width, ring.wavelengths, known)
        if found is not None:
            transfer, colour = found
            return Assignment(
                paths,
                1,
                np.zeros(len(stage), np.int64),
                transfer,
                colour * same,
                np.full(len(transfer), same),
            )
    return None


def _bands(
    paths: Paths, ring: OpticalRing, width: Ints, limit: int, known: Colours
) -> tuple[Ints, Ints] | None:
    """`width` colours below `limit` for every path, as (transfer, colour) pairs, or None."""
    transfer = np.repeat(np.arange(len(width)), width)
    colour = np.zeros(len(transfer), np.int64)
    for way in (True, False):
        mine = paths.clockwise[transfer] == way
        found = colours(paths.start[transfer[mine]], paths.hops[transfer[mine]], ring.nodes, limit, known)
        if len(found) != mine.sum():
            return None
        colour[mine] = found
    return transfer, colour


def _widths(count: Ints, t: float) -> Ints:
    return np.asarray(np.ceil(count / t - 1e-9), np.int64)


def _times(stage: Stage, paths: Paths, ring: OpticalRing) -> list[float]:
    """Chunks a wavelength may carry, from the least that loads and transceivers allow upwards, in steps of 1.5 % or more; a
    few of them, none if one part cannot do."""
    sizes, w, one_part = np.unique(stage.count), ring.wavelengths, np.zeros(len(stage), np.int64)
    every = np.unique(sizes[:, None] / np.arange(1, w + 1)[None, :])
    low, high = 0, len(every)
    while low < high:
        middle = (low + high) // 2
        width = _widths(stage.count, every[middle])
        fits = int(loads(paths, ring.nodes, width).max(initial=0)) <= w
        fits = fits and (ring.transceivers is None or _busiest(stage, one_part, ring, width) <= ring.senders)
        low, high = (low, middle) if fits else (middle + 1, high)
    some: list[float] = []
    for t in every[low:].tolist():
        if not some or t >= 1.015 * some[-1] or t == every[-1]:
            some.append(t)
    return some[:8] + some[8:][-1:]


def colours(
    start: Ints, hops: Ints, nodes: int, limit: int | None = None, known: Colours | None = None
) -> Ints:
    """A colour for every arc so that no two of a colour overlap: the fewest found, or none (empty) if `limit` is too low.

    O(m log m) for m short arcs; those around the cut are placed one by one.
    """
    known = {} if known is None else known
    key = (start.tobytes(), hops.tobytes(), limit or 0)
    if key not in known:
        known[key] = _fewest(start, hops, nodes, limit)
    return known[key]


def _fewest(start: Ints, hops: Ints, nodes: int, limit: int | None) -> Ints:
    if not len(start):
        return np.zeros(0, np.int64)
    regular = _from_every_node(start, hops, nodes)
    if regular is not None and (limit is None or regular.max() < limit):
        return regular
    cuts = _cuts(start, hops, nodes)
    peak = int(_load(start, hops, nodes, np.ones_like(start)).max())
    a_colour = max(1, nodes // int(hops.min()))  # arcs that one colour holds at most
    least, most = max(peak, -(-len(start) // a_colour)), peak + int(_through(start, hops, nodes)[cuts[0]])
    for number, colour_count in enumerate(_tries(least, max(least, most), limit)):
        for cut, mirrored, long_first, packed in product(cuts if number < 2 else cuts[:1], *_VARIANTS):
            if not (packed and colour_count > _MOST_PACKED) and not (long_first and len(start) > _FEW):
                found = _sweep(start, hops, nodes, colour_count, cut, mirrored, long_first, packed)
                if found is not None:
                    return found
    return np.zeros(0, np.int64)


def _from_every_node(start: Ints, hops: Ints, nodes: int) -> Ints | None:
    """If all arcs have one length and as many start at each node: the circle is cut in as many stretches as arcs fit, and the place
    in its stretch is an arc's colour. No fewer would do, if one arc starts at each node.
    """
    if len(start) % nodes or (hops != hops[0]).any() or np.ptp(np.bincount(start, minlength=nodes)):
        return None
    stretches = nodes // int(hops[0])
    # none is shorter than an arc, and none longer by more than one
    first = np.arange(stretches) * nodes // stretches
    place = start - first[np.searchsorted(first, start, side="right") - 1]
    again = np.zeros_like(start)
    again[np.argsort(start, kind="stable")] = np.arange(len(start)) % (len(start) // nodes)
    return np.asarray(place + again * -(-nodes // stretches), np.int64)


def _tries(least: int, most: int, limit: int | None) -> list[int]:
    """How many colours to try: from the least that may do, by one at first, to what always succeeds; or a few up to `limit`."""
    if limit is not None:
        return sorted({least, (least + limit) // 2, limit} & set(range(least, limit + 1)), reverse=True)
    tries = [least]
    while tries[-1] < most:
        tries.append(min(most, tries[-1] + 1 + (tries[-1] - least) // 3))
    return tries


def _through(start: Ints, hops: Ints, nodes: int) -> Ints:
    """Paths that pass each node without ending there."""
    return _load((start + 1) % nodes, np.maximum(hops - 1, 0), nodes, np.ones_like(start))


def _cuts(start: Ints, hops: Ints, nodes: int) -> list[int]:
    """Nodes to unroll the circle at, best first: the fewest paths pass there. Many short arcs need no second try."""
    through = _through(start, hops, nodes)
    ends = np.unique(start)
    tries = 6 if len(start) <= _FEW and through.min() > 0 else 1
    return [int(ends[i]) for i in np.argsort(through[ends], kind="stable")[:tries]]


def _sweep(
    start: Ints, hops: Ints, nodes: int, limit: int, cut: int, mirrored: bool, long_first: bool, packed: bool
) -> Ints | None:
    """Colours below `limit`, or None. The circle is unrolled at `cut`; arcs across it hold a colour each, at both ends."""
    at = (cut - start - hops) % nodes if mirrored else (start - cut) % nodes
    end = at + hops
    across, inner = np.flatnonzero(end > nodes), np.flatnonzero(end <= nodes)
    if len(across) > limit:
        return None
    free, due = np.zeros(limit, np.int64), np.full(limit, nodes)
    free[: len(across)], due[: len(across)] = end[across] - nodes, at[across]
    colour = np.zeros(len(start), np.int64)
    colour[across] = np.arange(len(across))
    order = inner[np.lexsort((-hops[inner] if long_first else hops[inner], at[inner]))]
    typical = int(np.median(hops)) if packed and len(across) else 0
    late = np.flatnonzero((end[order] > due.min()) | (at[order] > nodes - 20 * typical))
    split = int(late[0]) if len(late) else len(order)
    bulk, rest = order[:split], order[split:]
    taken = _first_come(at[bulk], end[bulk], free)
    if taken is None:
        return None
    colour[bulk], free = taken
    last = (
        _packed(at[rest], end[rest], free, due, typical)
        if typical
        else _soonest(at[rest], end[rest], free, due)
    )
    if last is None:
        return None
    colour[rest] = last
    return colour


def _first_come(at: Ints, end: Ints, free: Ints) -> tuple[Ints, Ints] | None:
    """Arcs sorted by start take the colours in the order in which they fall free: optimal on a line. The colours, and when each is free."""
    times = np.concatenate([free, end])
    order = np.argsort(times, kind="stable")
    taken, left = order[: len(at)], order[len(at) :]
    if (times[taken] > at).any():
        return None
    holder = np.concatenate([np.arange(len(free)), taken])
    while True:  # every arc asks its predecessor, whose predecessor it then knows: log2 of the longest chain
        further = holder[holder]
        if np.array_equal(further, holder):
            break
        holder = further
    after = np.zeros_like(free)
    after[holder[left]] = times[left]
    return holder[len(free) :], after


def _soonest(at: Ints, end: Ints, free: Ints, due: Ints) -> Ints | None:
    """Each arc takes, of the colours free then, the one that must be free again soonest after it, and of those the one used last.

    `due`: when a colour's holder across the cut comes back. O(m log m), but for moves in a list of the free ones.
    """
    colour, last = [], due.tolist()
    busy = sorted(zip(free.tolist(), range(len(free)), strict=True))  # a heap by when each falls free
    idle: list[tuple[int, int, int]] = []  # by when each is due
    for a, e in zip(at.tolist(), end.tolist(), strict=True):
        while busy and busy[0][0] <= a:
            since, which = heappop(busy)
            insort(idle, (last[which], -since, which))
        place = bisect_left(idle, (e,))
        if place == len(idle):
            return None
        _, _, which = idle.pop(place)
        colour.append(which)
        heappush(busy, (e, which))
    return np.array(colour, np.int64)


def _packed(at: Ints, end: Ints, free: Ints, due: Ints, typical: int) -> Ints | None:
    """As `_soonest`, but of the free colours each arc takes one whose time until it is due is then nearly filled by typical arcs."""
    colour, last, nodes = [], due.tolist(), int(due.max())
    busy = sorted(zip(free.tolist(), range(len(free)), strict=True))
    idle: list[tuple[int, int, int]] = []
    for a, e in zip(at.tolist(), end.tolist(), strict=True):
        while busy and busy[0][0] <= a:
            since, which = heappop(busy)
            idle.append((last[which], -since, which))
        fit = [(typical / 2 if c[0] == nodes else (c[0] - e) % typical, c) for c in idle if c[0] >= e]
        if not fit:
            return None
        best = min(fit)[1]
        idle.remove(best)
        colour.append(best[2])
        heappush(busy, (e, best[2]))
    return np.array(colour, np.int64)


# ---- the proof ----


def _check_paths(stage: Stage, light: Assignment, ring: OpticalRing, name: str) -> None:
    paths, n = light.paths, ring.nodes
    if not len(paths.start) == len(paths.hops) == len(paths.clockwise) == len(light.part) == len(stage):
        raise ScheduleError(
            f"{name}: light for {len(light.part)} of {len(stage)} transfers; every transfer needs a path"
        )
    begin, close = (
        np.where(paths.clockwise, stage.src, stage.dst),
        np.where(paths.clockwise, stage.dst, stage.src),
    )
    wrong = (
        (paths.start != begin)
        | ((paths.start + paths.hops) % n != close)
        | (paths.hops < 1)
        | (paths.hops >= n)
    )
    if wrong.any():
        i = int(wrong.argmax())
        raise ScheduleError(
            f"{name}: {_transfer(stage, i)} goes {_way(bool(paths.clockwise[i]))} over {paths.hops[i]} arcs from node {paths.start[i]}: that path does not join the two"
        )
    if ring.most_hops is not None and (paths.hops > ring.most_hops).any():
        i = int(paths.hops.argmax())
        raise ScheduleError(
            f"{name}: the path {_transfer(stage, i)} is {paths.hops[i]} hops long; the power budget allows {ring.most_hops}"
        )


def _check_wavelengths(stage: Stage, light: Assignment, ring: OpticalRing, name: str) -> None:
    if not len(light.transfer) == len(light.first) == len(light.width) or (
        len(light.transfer) and (light.transfer.min() < 0 or light.transfer.max() >= len(stage))
    ):
        raise ScheduleError(f"{name}: a band of light belongs to no transfer of the stage")
    dark = np.bincount(light.transfer, np.maximum(light.width, 0), len(stage)) < 1
    if dark.any():
        raise ScheduleError(f"{name}: {_transfer(stage, int(dark.argmax()))} has no wavelength")
    outside = (light.first < 0) | (light.width < 1) | (light.first + light.width > ring.wavelengths)
    if outside.any():
        i = int(outside.argmax())
        raise ScheduleError(
            f"{name}: {_transfer(stage, int(light.transfer[i]))} uses wavelengths {light.first[i]} to {light.first[i] + light.width[i] - 1}; there are 0 to {ring.wavelengths - 1}"
        )
    if len(light.part) and not 0 <= light.part.min() <= light.part.max() < light.parts:
        raise ScheduleError(f"{name}: a transfer runs in a part outside 0..{light.parts - 1}")


def _check_transceivers(stage: Stage, light: Assignment, ring: OpticalRing, name: str) -> None:
    stripes = light.stripes
    for end, verb in ((stage.src, "sends"), (stage.dst, "receives")):
        used = np.bincount(light.part * ring.nodes + end, stripes)
        if ring.transceivers is not None and used.max(initial=0) > ring.senders:
            part, node = divmod(int(used.argmax()), ring.nodes)
            raise ScheduleError(
                f"{name}: node {node} {verb} on {int(used.max())} wavelengths at once in part {part}; "
                f"it has {ring.senders} transceivers"
            )


def _check_collisions(stage: Stage, light: Assignment, ring: OpticalRing, name: str) -> None:
    """Sorted by fibre, wavelength and place, a path must begin where the last one has ended."""
    which = np.repeat(light.transfer, light.width)
    base = np.cumsum(light.width) - light.width
    wave = np.repeat(light.first, light.width) + np.arange(len(which)) - np.repeat(base, light.width)
    fibre = (light.part[which] * 2 + ~light.paths.clockwise[which]) * ring.wavelengths + wave
    begin, stop = light.paths.start[which], light.paths.start[which] + light.paths.hops[which]
    wraps = np.flatnonzero(stop > ring.nodes)  # seen as two pieces, before and after node 0
    fibre, which, wave = (np.concatenate([a, a[wraps]]) for a in (fibre, which, wave))
    begin = np.concatenate([begin, np.zeros_like(wraps)])
    stop = np.concatenate([np.minimum(stop, ring.nodes), stop[wraps] - ring.nodes])
    order = np.lexsort((begin, fibre))
    one, two = order[:-1], order[1:]
    hit = (fibre[one] == fibre[two]) & (stop[one] > begin[two])
    if hit.any():
        i = int(hit.argmax())
        a, b, node = one[i], two[i], int(begin[two[i]])
        raise ScheduleError(
            f"{name}: wavelength {wave[a]} {_way(bool(light.paths.clockwise[which[a]]))} is used twice between nodes {node} and {(node + 1) % ring.nodes}: "
            f"by {_transfer(stage, int(which[a]))} and {_transfer(stage, int(which[b]))}"
        )


def _transfer(stage: Stage, i: int) -> str:
    return f"{stage.src[i]} -> {stage.dst[i]}"


def _way(clockwise: bool) -> str:
    return "clockwise" if clockwise else "counter-clockwise"
