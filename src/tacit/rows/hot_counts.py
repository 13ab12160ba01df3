"""How often rows were touched lately, at the shard that owns them. Pure numpy.

Every touch has the weight 2^(t / half-life) of its time t, in touches of this owner: a count is a sum of weights over the present one, so
that old touches fade and nothing is recomputed. A touch is a rank that used the row in a step, however often.

`DecayedCounts` is exact and takes 4 bytes a row. `SketchedCounts` is for keys without bound: a count-min sketch of 4 x 2^17 cells,
conservative (a touch raises only the cells that hold the least), 2 MiB, and 12 bytes for each of a bounded number of candidates. It
never counts too little, and where most rows are touched once or twice it counts some of them too high.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tacit.errors import ConfigError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

HALF_LIFE_TOUCHES = 1_000_000
SKETCH_ROWS = 4
SKETCH_CELLS = 1 << 17
_MOST_EXPONENT = 20  # of the present weight: float32 then still adds 1 to a count of 16 million
_AT_ONCE = 1 << 18  # keys; bounds what an addition needs beside the sketch


class RowCounts(Protocol):
    """Counts of the rows of one owner. A slot is what the owner calls a row: its place in the shard, or its key."""

    def add(self, slots: ArrayLike, touches: ArrayLike | None = None, *, rank_steps: int = 1) -> None:
        """Counts what `rank_steps` ranks touched in a step; a slot may occur several times."""

    def of(self, slots: Ints) -> Floats:
        """The present counts of these slots."""

    def candidates(self, least: float) -> tuple[Ints, Floats]:
        """The slots whose count is at least `least`, ascending, and their counts."""

    @property
    def total(self) -> float:
        """The sum over all rows, those below any limit too."""

    @property
    def rank_steps(self) -> float:
        """Steps of ranks, faded as the counts are: count / rank_steps is the share of them that touches a row."""

    @property
    def nbytes(self) -> int:
        """Memory held."""


class DecayedCounts:
    """Exact counts of slots 0, 1, 2, ...: 4 bytes a row, in an array that grows with the highest slot."""

    def __init__(self, rows: int = 0, *, half_life_touches: float = HALF_LIFE_TOUCHES) -> None:
        self._clock = _Clock(half_life_touches)
        self._stored = np.zeros(rows, np.float32)

    def add(self, slots: ArrayLike, touches: ArrayLike | None = None, *, rank_steps: int = 1) -> None:
        where, counted = _as_touches(slots, touches)
        if len(where) and where[0] < 0:
            raise ConfigError(f"slot {where[0]}: a row's place in its shard is 0 or more")
        if len(where) and where[-1] >= len(self._stored):
            more = np.zeros(max(int(where[-1]) + 1, 2 * len(self._stored)), np.float32)
            more[: len(self._stored)] = self._stored
            self._stored = more
        self._stored[where] += counted * self._clock.weight
        self._clock.advance(float(counted.sum()), rank_steps)
        if self._clock.is_heavy:
            self._stored *= self._clock.rebase()

    def of(self, slots: Ints) -> Floats:
        inside = slots < len(self._stored)
        found = np.zeros(len(slots))
        found[inside] = _present(self._stored[slots[inside]], self._clock)
        return found

    def export(self, slots: Ints) -> tuple[NDArray[np.float32], list[float]]:
        """What is kept of these slots and of the time: for a checkpoint."""
        inside = slots < len(self._stored)
        found = np.zeros(len(slots), np.float32)
        found[inside] = self._stored[slots[inside]]
        return found, self._clock.export()

    def restore(self, slots: Ints, stored: NDArray[np.float32], time: Sequence[float]) -> None:
        """Goes on from what `export` returned; the slots may have other numbers now."""
        self._stored = np.zeros(int(slots.max()) + 1 if len(slots) else 0, np.float32)
        self._stored[slots] = stored
        self._clock.restore(time)

    def candidates(self, least: float) -> tuple[Ints, Floats]:
        slots = np.flatnonzero(self._stored >= np.float32(least * self._clock.weight))
        return slots.astype(np.int64), _present(self._stored[slots], self._clock)

    @property
    def total(self) -> float:
        return self._clock.touches

    @property
    def rank_steps(self) -> float:
        return self._clock.rank_steps

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes


class SketchedCounts:
    """Counts of any 64-bit keys in bounded memory: a count-min sketch, and the `most` keys that it counts highest."""

    def __init__(self, most: int, *, half_life_touches: float = HALF_LIFE_TOUCHES) -> None:
        if most < 1:
            raise ConfigError(f"most={most}: keep at least 1 candidate; 4 for each hot row are enough")
        self._clock = _Clock(half_life_touches)
        self._cells = np.zeros((SKETCH_ROWS, SKETCH_CELLS), np.float32)
        self._most = most
        self._keys = np.zeros(0, np.int64)  # the candidates, ascending
        self._stored = np.zeros(0, np.float32)

    def add(self, slots: ArrayLike, touches: ArrayLike | None = None, *, rank_steps: int = 1) -> None:
        keys, counted = _as_touches(slots, touches)
        for start in range(0, len(keys), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            self._raise(keys[part], counted[part] * self._clock.weight)
        self._clock.advance(float(counted.sum()), rank_steps)
        if self._clock.is_heavy:
            factor = self._clock.rebase()
            self._cells *= factor
            self._stored *= factor

    def of(self, slots: Ints) -> Floats:
        return _present(self._least(_cells_of(slots)), self._clock)

    def candidates(self, least: float) -> tuple[Ints, Floats]:
        enough = self._stored >= np.float32(least * self._clock.weight)
        return self._keys[enough], _present(self._stored[enough], self._clock)

    @property
    def total(self) -> float:
        return self._clock.touches

    @property
    def rank_steps(self) -> float:
        return self._clock.rank_steps

    @property
    def nbytes(self) -> int:
        """Never more than 2 MiB and 12 bytes a candidate."""
        return self._cells.nbytes + self._keys.nbytes + self._stored.nbytes

    def _raise(self, keys: Ints, weights: NDArray[np.float32]) -> None:
        cells = _cells_of(keys)
        counts = self._least(cells) + weights
        for row, places in zip(self._cells, cells, strict=True):
            np.maximum.at(row, places, counts)
        self._admit(keys, counts)

    def _least(self, cells: Ints) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._cells[0, cells[0]]
        for row, places in zip(self._cells[1:], cells[1:], strict=True):
            np.minimum(found, row[places], out=found)
        return found

    def _admit(self, keys: Ints, counts: NDArray[np.float32]) -> None:
        """Keeps the highest of the candidates and these keys; a key that is both has its new count."""
        old = ~np.isin(self._keys, keys, assume_unique=True)
        every = np.concatenate((self._keys[old], keys))
        stored = np.concatenate((self._stored[old], counts))
        if len(every) > self._most:
            kept = np.argpartition(stored, len(every) - self._most)[-self._most :]
            every, stored = every[kept], stored[kept]
        order = np.argsort(every)
        self._keys, self._stored = every[order], stored[order]


class _Clock:
    """The weight of a touch now, and the faded sums of touches and of steps of ranks."""

    def __init__(self, half_life_touches: float) -> None:
        if not half_life_touches > 0:
            raise ConfigError(
                f"half_life_touches={half_life_touches}: give the touches after which one counts half, above 0; inf forgets nothing"
            )
        self._half_life = half_life_touches
        self._exponent = 0.0
        self._touches = self._rank_steps = 0.0  # in units of the weight at exponent 0

    @property
    def weight(self) -> np.float32:
        return np.float32(2.0**self._exponent)

    @property
    def touches(self) -> float:
        return float(self._touches / 2.0**self._exponent)

    @property
    def rank_steps(self) -> float:
        return float(self._rank_steps / 2.0**self._exponent)

    @property
    def is_heavy(self) -> bool:
        return self._exponent > _MOST_EXPONENT

    def advance(self, touches: float, rank_steps: int) -> None:
        """After touches of the present weight."""
        self._touches += touches * 2.0**self._exponent
        self._rank_steps += rank_steps * 2.0**self._exponent
        self._exponent = min(self._exponent + touches / self._half_life, 1000.0)

    def export(self) -> list[float]:
        return [self._exponent, self._touches, self._rank_steps]

    def restore(self, time: Sequence[float]) -> None:
        self._exponent, self._touches, self._rank_steps = time

    def rebase(self) -> np.float32:
        """Starts at weight 1 again; what is stored is to be multiplied by this."""
        factor = 2.0**-self._exponent
        self._touches, self._rank_steps, self._exponent = (
            self._touches * factor,
            self._rank_steps * factor,
            0.0,
        )
        return np.float32(factor)


def _present(stored: NDArray[np.float32], clock: _Clock) -> Floats:
    """Stored counts over the present weight."""
    return stored.astype(np.float64) / float(clock.weight)


def _as_touches(slots: ArrayLike, touches: ArrayLike | None) -> tuple[Ints, NDArray[np.float32]]:
    """Different slots, ascending, and how many touches each has."""
    given = np.asarray(slots, np.int64).ravel()
    if touches is None:
        found, times = np.unique(given, return_counts=True)
        return found, times.astype(np.float32)
    weights = np.asarray(touches, np.float64).ravel()
    if weights.shape != given.shape:
        raise ConfigError(f"{len(weights)} touches for {len(given)} slots; give one for each")
    found, place = np.unique(given, return_inverse=True)
    return found, np.bincount(place, weights, len(found)).astype(np.float32)


def _cells_of(keys: Ints) -> Ints:
    """For each row of the sketch the cell of each key."""
    cells = np.empty((SKETCH_ROWS, len(keys)), np.int64)
    for row in range(SKETCH_ROWS):
        seed = np.uint64((row + 1) * 0x9E3779B97F4A7C15 % 2**64)
        cells[row] = mix(keys.view(np.uint64) + seed) % np.uint64(SKETCH_CELLS)
    return cells


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
