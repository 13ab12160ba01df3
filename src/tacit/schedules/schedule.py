"""The contract of WHO tells whom: a schedule is integer arrays, verified, costed, run and drawn from the same data.

    vector of every rank:   [ chunk 0 | chunk 1 | ... ]             as even as whole elements allow
    stage:                  transfers that run at the same time; each reads what its source held before the stage
    transfer:               `count` chunks from `chunk` on go from node `src` to node `dst`, which adds or copies them
    phase:                  `times` stages alike: same sources, destinations and sizes; only the chunks move on

Nodes 0 .. world-1 are ranks; nodes from `world` on are aggregators: they contribute nothing and need not end with anything.
Within a stage a node adds what it receives and what it holds in the order of the sources, its own place among them: so all
ranks that add the same numbers in one stage get the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.errors import ConfigError

Ints = NDArray[np.int64]
Goal = Literal["sum", "gather", "exchange", "meet"]


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
    """Who sends which chunks to whom, in which order. `verify()` proves that it does what `goal` says.

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


def check_world(world: int, name: str, least: int = 1) -> None:
    """Refuses a world that no schedule can serve."""
    if not isinstance(world, int | np.integer) or world < least:
        raise ConfigError(f"{name}: {world} ranks; give {least} or more")
