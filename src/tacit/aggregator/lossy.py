"""When a chunk of a lossy job is closed without some ranks: the specification of native/lossy.h.

A chunk is closed as soon as it waits for nobody. It waits for a rank that is not in it, unless

- that rank has sent a chunk LOSSY_GAP or more later, or has reported (SETTLE) that it has sent all up to here: its packet is lost;
- or the rank is absent: a chunk was open for the deadline without it. It is back once its packet of some chunk, closed or not,
  comes within the deadline after the first rank's.

Half of the ranks must be in. What is closed stays closed, and goes to all ranks.

Late ranks take what the others have closed, from the cells: so a chunk is held back while a rank may lack what its cell holds. Ranks
send a chunk only if they have the results of all chunks that lie half the slots or more before it. Chunks start at 0.
"""

from dataclasses import dataclass, field
from functools import reduce

from tacit.aggregator.wire import CHUNKS, after

LEAST_LOSSY_SLOTS = 8
LOSSY_GAP = 4  # later chunks of a rank, after which its packet of this one is lost: paths reorder a little
MOST_DEADLINE_MS = 60_000


@dataclass(slots=True)
class Lossy:
    """What a plane remembers of the ranks of one job."""

    world: int
    slots: int
    deadline_ns: int
    newest: list[int] = field(default_factory=list)  # chunk that each rank has sent
    passed: list[int] = field(default_factory=list)  # up to which each has reported that it has sent all
    absent: set[int] = field(default_factory=set)
    left_out: list[int] = field(default_factory=list)  # chunks that were closed without each

    def __post_init__(self) -> None:
        self.newest = [CHUNKS - 1] * self.world
        self.passed = [CHUNKS - 1] * self.world
        self.left_out = [0] * self.world

    @property
    def least(self) -> int:
        """Ranks that must be in a sum."""
        return (self.world + 1) // 2

    @property
    def reach(self) -> int:
        return self.slots // 2

    def holds(self, chunk: int) -> bool:
        """Whether a rank may still need what the chunk's cell holds."""
        last = reduce(lambda a, b: b if after(a, b) else a, self.newest)
        return after(chunk, (last + 2 * self.slots - self.reach) % CHUNKS)

    def sent(self, rank: int, chunk: int) -> list[int]:
        """Chunks that no longer wait for the rank, now that it has sent this one."""
        return [(each - LOSSY_GAP) % CHUNKS for each in self._advance(self.newest, rank, chunk)]

    def reported(self, rank: int, chunk: int) -> list[int]:
        """The same, now that it has reported that it has sent all up to this one."""
        return self._advance(self.passed, rank, chunk)

    def _advance(self, at: list[int], rank: int, chunk: int) -> list[int]:
        if not after(chunk, at[rank]):
            return []
        count = min((chunk - at[rank]) % CHUNKS, self.reach)
        at[rank] = chunk
        return [(chunk - back) % CHUNKS for back in reversed(range(count))]

    def waits(self, chunk: int, seen: set[int]) -> bool:
        """Whether a chunk that these ranks are in waits for another."""
        return len(seen) < self.least or any(
            not self._is_past(rank, chunk) for rank in self._missing(seen) - self.absent
        )

    def is_over(self, since_ns: int, now_ns: int) -> bool:
        """Whether the deadline of a chunk is over whose first packet came then."""
        return max(0, now_ns - since_ns) >= self.deadline_ns

    def late(self, chunk: int, seen: set[int]) -> None:
        """The deadline of a chunk is over: whom it waits for is absent."""
        if len(seen) >= self.least:
            self.absent |= {rank for rank in self._missing(seen) if not self._is_past(rank, chunk)}

    def close(self, seen: set[int]) -> None:
        for rank in self._missing(seen):
            self.left_out[rank] += 1

    def _missing(self, seen: set[int]) -> set[int]:
        return set(range(self.world)) - seen

    def _is_past(self, rank: int, chunk: int) -> bool:
        return not after((chunk + LOSSY_GAP) % CHUNKS, self.newest[rank]) or not after(
            chunk, self.passed[rank]
        )
