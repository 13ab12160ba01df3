"""Scheduled: any schedule that sums, run for real. Every stage is one batch of point-to-point transfers.

    every / bf16 / ring          every / thc / recursive_doubling          every / none / wrht(wavelengths=2)

- A vector is cut into the schedule's chunks, as even as whole elements allow. Consecutive chunks between two nodes go as
  one message; empty messages are not sent. Bytes that leave a rank: those of `schedule.sent_chunks()`, to the byte.
- Whoever adds, adds payloads as they stand: floats in their own dtype, rounded at every hop as in any all-reduce; lanes
  as integers, exactly. The order is the contract's (sources by node number, a node's own value at its own place), so
  that all ranks end with the same bits.
- Aggregators have no machine of their own yet: node world + i lives on rank i mod world, which sends its bytes too; what
  passes between the two is copied and not counted.
- FSDP2 on a 1-D mesh scatters sums by itself; there only sums to all in plain numbers take the schedule. Between replicas all do.
"""

import inspect
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tacit.errors import ConfigError, PairingError
from tacit.grammar import check_names, unfit
from tacit.registry import Plugin
from tacit.requests import Codec, Sum, TableSum, Total, even_cuts
from tacit.schedules import SCHEDULES, Phase, Schedule, Stage
from tacit.schemes.scheme import Scheme
from tacit.transports import Wire

Options = tuple[tuple[str, Any], ...]

# The schemes of these names are others: they decode where they add, or have a real aggregator.
_WRITTEN = {"sharded": "sharded_schedule", "server": "server_schedule", "star": "star_schedule"}
_MOST_RANKS = 2**20
_UNFIT = (
    ArithmeticError,
    AttributeError,
    MemoryError,
    TypeError,
    ValueError,
)  # text where a number is needed


@dataclass(frozen=True, slots=True, init=False)
class Scheduled(Scheme):
    """The schedule called `name`: `Scheduled("wrht", wavelengths=2)`. Options that equal the schedule's own are left out."""

    name: str
    options: Options

    def __init__(self, name: str, *args: Any, **options: Any):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", _bind(name, args, options))
        _check_some_world(self)

    def __str__(self) -> str:
        name = _WRITTEN.get(self.name, self.name)
        return f"{name}({_text(self.options)})" if self.options else name

    def check(self, codec: Codec, world: int | None) -> None:
        if not codec.traits.summable:
            raise PairingError(
                f"{codec} payloads cannot be added in flight by {self}; write '{codec} / sharded'"
            )
        if world is not None:
            self.schedule(world)

    def schedule(self, world: int) -> Schedule:
        """Who sends to whom among `world` ranks; raises ConfigError where this schedule cannot serve so many."""
        made = SCHEDULES[self.name](world, **dict(self.options))
        if made.goal != "sum":
            raise ConfigError(
                f"{self} is a schedule that ends in a {made.goal}, not in a sum; choose ring or tree"
            )
        return made

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload = request.payload
        data = payload.data.reshape(-1).clone()
        run(plan_of(self, wire.world, wire.rank), wire, data)
        return Total(payload.format.unpack(data.view(payload.data.shape), payload.numel), wire.world)

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        lanes = request.look_up()
        run(plan_of(self, wire.world, wire.rank), wire, lanes)
        return Total(lanes, wire.world)


def schemes() -> dict[str, Callable[..., Scheduled]]:
    """Every schedule as a scheme, by the name it has in a strategy's text."""
    return {_WRITTEN.get(name, name): partial(Scheduled, name) for name in SCHEDULES.built_in}


def added_schemes() -> dict[str, Plugin[Callable[..., Any]]]:
    """The schedules of installed packages, as schemes; nothing of them is imported yet."""
    return {
        name: Plugin(plugin.package, partial(partial, Scheduled, name))
        for name, plugin in SCHEDULES.plugins().items()
    }


# ---- one rank's part of a schedule ----


class Message(NamedTuple):
    """Chunks first..last-1 of node `src` for node `dst`. In this order, both ranks of a pair count their messages."""

    src: int
    dst: int
    add: bool
    first: int
    last: int


class Arrival(NamedTuple):
    """What comes to a node of this rank, from rank `peer`. `at_once`: it may be written where it belongs as it comes."""

    message: Message
    peer: int
    at_once: bool


class Fold(NamedTuple):
    """Chunks first..last-1 of `node` become: arrivals `before`, its own value if it `adds`, arrivals `after`, in this order."""

    node: int
    first: int
    last: int
    adds: bool
    before: tuple[int, ...]
    after: tuple[int, ...]


class Step(NamedTuple):
    """One rank's part of one stage."""

    sends: tuple[tuple[int, Message], ...]
    arrivals: tuple[Arrival, ...]
    folds: tuple[Fold, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's part of a schedule; `guests` are the aggregators it hosts, `spare` the chunks it puts aside at most."""

    rank: int
    chunks: int
    steps: tuple[Step, ...]
    guests: tuple[int, ...]
    spare: int


@lru_cache(maxsize=64)
def plan_of(scheme: Scheduled, world: int, rank: int) -> Plan:
    """What `rank` does in `scheme` among `world`; its size and cost are those of its own transfers."""
    return plan_for(scheme.schedule(world), rank)


def plan_for(schedule: Schedule, rank: int) -> Plan:
    steps = [
        _step(stage, schedule, rank)
        for phase in schedule.phases
        for stage in _own_stages(phase, schedule, rank)
    ]
    steps = [step for step in steps if step.sends or step.arrivals]
    here = [m.dst for step in steps for m, _, _ in step.arrivals]
    here += [m.src for step in steps for _, m in step.sends]
    guests = set(here) - {rank}
    spare = (sum(m.last - m.first for m, _, at_once in step.arrivals if not at_once) for step in steps)
    return Plan(rank, schedule.chunks, tuple(steps), tuple(sorted(guests)), max(spare, default=0))


def _host(schedule: Schedule, node: Any) -> Any:
    """The rank on which a node lives: a rank on itself, aggregators on rank 0, 1, ..."""
    return node % schedule.world


def _own_stages(phase: Phase, schedule: Schedule, rank: int) -> Iterator[Stage]:
    """The phase's stages with nothing but the transfers from and to this rank: found once, not once a stage."""
    s = phase.stage
    own = np.flatnonzero((_host(schedule, s.src) == rank) | (_host(schedule, s.dst) == rank))
    first = phase.first if isinstance(phase.first, int) else np.broadcast_to(phase.first, s.src.shape)[own]
    stage = Stage(s.src[own], s.dst[own], s.chunk[own], s.count[own], s.add[own])
    part = Phase(stage, phase.times, phase.stride, phase.span, first)
    return (part.at(k) for k in range(phase.times if len(own) else 0))


def _messages(stage: Stage) -> list[Message]:
    """The stage's transfers by source, destination and chunk; those that meet are one."""
    columns = (stage.src, stage.dst, stage.add, stage.chunk, stage.chunk + stage.count)
    found: list[Message] = []
    for message in sorted(map(Message._make, zip(*(column.tolist() for column in columns), strict=True))):
        if found and found[-1][:3] == message[:3] and found[-1].last == message.first:
            found[-1] = found[-1]._replace(last=message.last)
        else:
            found.append(message)
    return found


def _step(stage: Stage, schedule: Schedule, rank: int) -> Step:
    messages = _messages(stage)
    leaving = [m for m in messages if _host(schedule, m.src) == rank]
    coming = [m for m in messages if _host(schedule, m.dst) == rank]
    read = _Marks(schedule.chunks, leaving)
    arrivals = [Arrival(m, _host(schedule, m.src), not m.add and not read.meets(m)) for m in coming]
    aside = defaultdict(list)
    for i, arrival in enumerate(arrivals):
        if not arrival.at_once:
            aside[arrival.message.dst].append((i, arrival.message))
    folds = [fold for node, came in aside.items() for fold in _folds(node, came)]
    sends = [(_host(schedule, m.dst), m) for m in leaving if _host(schedule, m.dst) != rank]
    return Step(tuple(sends), tuple(arrivals), tuple(folds))


class _Marks:
    """Which chunks of which node a stage reads: those must not change before everything has left."""

    def __init__(self, chunks: int, messages: Iterable[Message]):
        self._read = {m.src: np.zeros(chunks, bool) for m in messages}
        for m in messages:
            self._read[m.src][m.first : m.last] = True

    def meets(self, m: Message) -> bool:
        return m.dst in self._read and bool(self._read[m.dst][m.first : m.last].any())


def _folds(node: int, aside: Sequence[tuple[int, Message]]) -> Iterator[Fold]:
    """How what came to `node` is added: for each run of chunks that the same arrivals cover, in the order of sources."""
    edges = sorted({edge for _, m in aside for edge in (m.first, m.last)})
    covers: list[list[tuple[int, Message]]] = [[] for _ in edges]
    for i, m in aside:  # already in the order of sources
        for at in range(bisect_left(edges, m.first), bisect_left(edges, m.last)):
            covers[at].append((i, m))
    for (first, last), cover in zip(pairwise(edges), covers, strict=False):
        if cover:
            before = tuple(i for i, m in cover if m.src < node)
            after = tuple(i for i, m in cover if m.src > node)
            yield Fold(node, first, last, cover[0][1].add, before, after)


# ---- running it ----


def run(plan: Plan, wire: Wire, value: Tensor) -> None:
    """Puts the sum over all ranks in place of `value`, a flat run of any dtype. All ranks call it with the same length."""
    cuts = even_cuts(value.numel(), plan.chunks)
    held = {plan.rank: value} | {node: value.new_zeros(value.numel()) for node in plan.guests}
    spare = value.new_empty(plan.spare * -(-value.numel() // plan.chunks))
    for step in plan.steps:
        came = _places(step, held, spare, cuts)
        for (m, peer, _), place in zip(step.arrivals, came, strict=True):
            if peer == plan.rank:
                place.copy_(held[m.src][cuts[m.first] : cuts[m.last]])
        wire.exchange(
            [(to, held[m.src][cuts[m.first] : cuts[m.last]]) for to, m in step.sends],
            [(a.peer, place) for a, place in zip(step.arrivals, came, strict=True) if a.peer != plan.rank],
        )
        for fold in step.folds:
            _fold(fold, step, held[fold.node], came, cuts)


def _places(step: Step, held: dict[int, Tensor], spare: Tensor, cuts: Sequence[int]) -> list[Tensor]:
    """Where each arrival goes: to its own place if nobody reads that in this stage, else aside."""
    places, used = [], 0
    for m, _, at_once in step.arrivals:
        start, stop = cuts[m.first], cuts[m.last]
        if at_once:
            places.append(held[m.dst][start:stop])
        else:
            places.append(spare[used : used + stop - start])
            used += stop - start
    return places


def _fold(fold: Fold, step: Step, node: Tensor, came: Sequence[Tensor], cuts: Sequence[int]) -> None:
    start, stop = cuts[fold.first], cuts[fold.last]

    def part(i: int) -> Tensor:
        offset = cuts[step.arrivals[i].message.first]
        return came[i][start - offset : stop - offset]

    own = node[start:stop]
    if not fold.adds:
        own.copy_(part((fold.before + fold.after)[0]))
        return
    if fold.before:
        total = part(fold.before[0])
        for i in fold.before[1:]:
            total.add_(part(i))
        own.add_(total)  # a + b is b + a to the bit, so the sum may stay where it belongs
    for i in fold.after:
        own.add_(part(i))


# ---- options ----


def _bind(name: str, args: Sequence[Any], options: dict[str, Any]) -> Options:
    """The options by name, as the schedule will get them; raises ConfigError if it knows no such option."""
    signature = inspect.signature(SCHEDULES.find(name))
    _, *known = signature.parameters
    check_names("schedule", name, known, options)
    try:
        given = signature.bind(1, *args, **options).arguments
    except TypeError as cause:
        raise unfit("schedule", name, known, cause) from cause
    found = tuple((key, _plain(given[key], name, key)) for key in known if key in given)
    return tuple((key, value) for key, value in found if value != signature.parameters[key].default)


def _plain(value: Any, name: str, key: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(item, name, key) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{name}: {key}={value} is no plain value; give a number, a word or a tuple of them")


def _text(options: Options) -> str:
    def word(value: Any) -> str:
        return value if isinstance(value, str) and value.isidentifier() else repr(value)

    return ", ".join(f"{key}={word(value)}" for key, value in options)


def _check_some_world(scheme: Scheduled) -> None:
    """Raises what the schedule raises for its options if they fit no world: bad ones are refused when a strategy is built."""
    numbers = (value for _, value in scheme.options if type(value) is int and 0 < value <= _MOST_RANKS)
    for world in (1, 2, 3, 4, *numbers):  # a torus of 6 rows needs 6, 12, ... ranks
        try:
            scheme.schedule(world)
            return
        except ConfigError as error:
            refused = error
        except _UNFIT as cause:
            raise ConfigError(f"{scheme} does not fit its options: {cause}") from cause
    raise refused
