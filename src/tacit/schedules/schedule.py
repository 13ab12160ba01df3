"""WHO sends to whom, the contract: a schedule is integer arrays, verified, costed, run and drawn from the same data.

    vector of every rank:   [ chunk 0 | chunk 1 | ... ]             as even as whole elements allow
    stage:                  transfers that run at the same time; each reads what its source held before the stage
    transfer:               `count` chunks from `chunk` on go from node `src` to node `dst`, which adds or copies them
    phase:                  `times` stages alike: same sources, destinations and sizes; only the chunks move on

Nodes 0 .. world-1 are ranks; nodes from `world` on are aggregators: they contribute nothing and need not end with anything.
A node holds zeros where it has nothing yet: adding to nothing is the same as copying.
Within a stage a node adds what it receives and what it holds in the order of the sources, its own place among them: so all
ranks that add the same numbers in one stage get the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.errors import ConfigError

Ints = NDArray[np.int64]
Goal = Literal["sum", "gather", "exchange", "meet"]
MOST_RANKS = 10_000_000  # a schedule's arrays are about as long as its ranks are many
MOST_INT = 2**62  # what fits into the arrays, with room to add


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Transfers that run at the same time, one array entry each."""

    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints
    add: NDArray[np.bool_]

    @staticmethod
    def of(
        src: ArrayLike, dst: ArrayLike, chunk: ArrayLike = 0, count: ArrayLike = 1, add: ArrayLike = False
    ) -> "Stage":
        """A stage from anything that broadcasts: `Stage.of(ranks, ranks + 1, chunk=ranks, add=True)`."""
        arrays = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(a, np.int64)) for a in (src, dst, chunk, count)), np.asarray(add, bool)
        )
        return Stage(*arrays)

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """`times` stages alike. In the k-th, chunk c has become first + (c - first + k * stride) mod span."""

    stage: Stage
    times: int = 1
    stride: int = 0
    span: int = 1
    first: Ints | int = 0

    def at(self, k: int) -> Stage:
        """The k-th stage, chunks moved on."""
        if self.stride == 0:
            return self.stage
        s = self.stage
        return Stage(
            s.src, s.dst, self.first + (s.chunk - self.first + k * self.stride) % self.span, s.count, s.add
        )


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Who sends which chunks to whom, in which order. `verify()` proves that it reaches its `goal`:

    - sum: every rank ends with every rank's contribution to every chunk, exactly once (all-reduce);
    - gather: rank r starts with chunk r only; every rank ends with all (all-gather);
    - exchange: chunk s * world + d starts at rank s and ends at rank d (all-to-all);
    - meet: in every stage ranks pair off, and both of a pair end with the sum of the two (gossip).
    """

    name: str
    world: int
    chunks: int
    phases: tuple[Phase, ...]
    goal: Goal = "sum"
    aggregators: int = 0
    notes: dict[str, object] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return self.world + self.aggregators

    @property
    def stage_count(self) -> int:
        return sum(phase.times for phase in self.phases)

    @property
    def transfer_count(self) -> int:
        """All transfers; ring at 4096 ranks has 33 million, which nobody writes out: phases are counted, not expanded."""
        return sum(phase.times * len(phase.stage) for phase in self.phases)

    def stages(self) -> Iterator[Stage]:
        for phase in self.phases:
            for k in range(phase.times):
                yield phase.at(k)

    def sent_chunks(self) -> Ints:
        """Chunks that leave each node in the whole schedule, by symmetry of the phases."""
        sent = np.zeros(self.nodes, np.int64)
        for phase in self.phases:
            np.add.at(sent, phase.stage.src, phase.times * phase.stage.count)
        return sent

    def verify(self) -> None:
        """Raises ScheduleError naming the fault unless the goal is reached exactly."""
        from tacit.schedules.verify import verify

        verify(self)


def backwards(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """`phases` from the last stage to the first, every transfer turned round and added.

    What spreads (every rank gets every chunk once, by copies) gathers when run backwards: a broadcast becomes a reduction,
    an all-gather a reduce-scatter. So most schedules here are `backwards(spread) + spread`.
    """
    add = np.broadcast_to(np.True_, max((len(phase.stage) for phase in phases), default=0))
    turned = []
    for phase in reversed(phases):
        s = phase.at(phase.times - 1)
        stage = Stage(s.dst, s.src, s.chunk, s.count, add[: len(s)])
        turned.append(Phase(stage, phase.times, -phase.stride, phase.span, phase.first))
    return tuple(turned)


def check_world(world: int, name: str, least: int = 1) -> int:
    """`world` as a plain int; refuses one that no schedule can serve."""
    if not is_whole(world) or world < least:
        raise ConfigError(f"{name}: world={world!r}: give a whole number of ranks, {least} or more")
    if world > MOST_RANKS:
        raise ConfigError(f"{name}: world={world}: a schedule serves {MOST_RANKS:,} ranks at most")
    return int(world)


def check_option(name: str, option: str, value: object, least: int, most: int | None = None) -> int:
    """The option's value as a plain int; refuses what is no whole number from `least` to `most`."""
    if not is_whole(value) or not least <= value <= (MOST_INT if most is None else most):
        limit = f"from {least} to {most}" if most is not None else f"{least} or more"
        if most is None and is_whole(value) and value > MOST_INT:
            limit = f"{MOST_INT} or less"
        raise ConfigError(f"{name}: {option}={value!r}: give a whole number, {limit}")
    return int(value)


def check_written_out(world: int, name: str, most: int, instead: str) -> None:
    """Refuses a world whose transfers would not fit: some shapes grow with its square, and have no symmetry to count by."""
    if world > most:
        raise ConfigError(
            f"{name}: {world} ranks are too many to write out every transfer; the limit is {most}: {instead}"
        )


def all_pairs(nodes: int, name: str, instead: str) -> tuple[Ints, Ints]:
    """Every ordered pair of two different nodes, by source: one stage of them is as far as enumeration goes."""
    check_written_out(nodes, name, 2048, instead)
    src, dst = np.divmod(np.arange(nodes * nodes), nodes)
    return src[src != dst], dst[src != dst]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer; True and 2.0 are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
