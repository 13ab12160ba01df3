"""How often each row of a model's tables is looked up, and what a step of all ranks touches: expected values, not samples.

p_i is the chance that a look-up of row i's table is of row i, n how many look-ups of that table a rank makes in a step, W the ranks:

    q_i = 1 - (1 - p_i)^n        a rank touches row i in a step        Q = sum q_i: unique rows of a rank
    U_i = 1 - (1 - q_i)^W        at least one rank touches it          U = sum U_i: rows in the union of all ranks

Rows with one chance are counted together, so that 5 million rows, or a trace of 20 million look-ups, are some thousand numbers. A
Zipf law's first 65,536 rows are taken one by one, later ones in runs of at most 1/4096 of their place, with their mean chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tacit.errors import ConfigError
from tacit.topology import Floats, Ints

ZIPF_ROWS = 5_000_000
# Distinct values of the 26 categorical features of the Criteo Kaggle display advertising challenge (2014): one table each.
CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4,
    7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
MOST_ROWS = 10**12
MOST_SKEW = 10.0
_ONE_BY_ONE = 1 << 16  # rows that a Zipf law's head takes one by one
_RUNS = 1 << 12  # runs in an octave of the tail


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Which rows are looked up how often, most often first. `rows[k]` rows have each the chance `chance[k]`."""

    text: str
    chance: Floats  # of one row, among the look-ups of its table
    rows: Ints
    share: Floats  # of all look-ups, those of its table: 1 where there is one table
    tables: int = 1
    look_ups: int | None = None  # in the trace; None for a law
    skew: float | None = None  # of the law; of a trace: minus the slope of log count over log place

    @property
    def row_count(self) -> int:
        return int(self.rows.sum())

    def touched(self, look_ups: float, world: int) -> "Touched":
        """What a step touches in which each of `world` ranks makes `look_ups` look-ups."""
        with np.errstate(divide="ignore"):  # a chance of 1
            q = -np.expm1(look_ups * self.share * np.log1p(-self.chance))
            u = -np.expm1(world * np.log1p(-q))
        parts = (self.rows, self.rows * self.chance * self.share, self.rows * q, self.rows * u)
        return Touched(*(np.concatenate(([0.0], np.cumsum(part))) for part in parts))


@dataclass(frozen=True, slots=True, eq=False)
class Touched:
    """Expected values of a step, summed from the hottest row on: at place k, over the `rows[k]` hottest rows."""

    rows: Floats
    look_ups: Floats  # their share of all look-ups
    unique: Floats  # rows that one rank touches: Q at the end
    union: Floats  # rows that some rank touches: U at the end

    def of_hottest(self, hot: float) -> tuple[float, float, float]:
        """The share of look-ups, Q_h and U_h of the `hot` hottest rows."""
        look_ups, unique, union = (
            float(np.interp(hot, self.rows, part)) for part in (self.look_ups, self.unique, self.union)
        )
        return look_ups, unique, union


def zipf(skew: float, rows: int = ZIPF_ROWS) -> Popularity:
    """One table whose row at place i is looked up with a chance in proportion to i^-skew."""
    _check_law(skew, rows)
    chance, count = _zipf(skew, rows)
    return Popularity(f"zipf(s={skew:g}, rows={rows})", chance, count, np.ones(len(count)), skew=skew)


def criteo(skew: float) -> Popularity:
    """26 tables with Criteo's cardinalities, each a Zipf law of that skew, and each with the same number of look-ups."""
    _check_law(skew, max(CRITEO_ROWS))
    laws = [_zipf(skew, rows) for rows in CRITEO_ROWS]
    chance, count = (np.concatenate(parts) for parts in zip(*laws, strict=True))
    order = np.argsort(-chance, kind="stable")
    share = np.full(len(count), 1 / len(CRITEO_ROWS))
    text = f"criteo(s={skew:g})"
    return Popularity(text, chance[order], count[order], share, tables=len(CRITEO_ROWS), skew=skew)


def of_counts(text: str, counts: Sequence[int] | Ints) -> Popularity:
    """One table, from how often a trace looks each of its rows up; rows that it never looks up are left out."""
    found = np.asarray(counts, np.int64)
    found = found[found > 0]
    if not len(found):
        raise ConfigError(f"{text} holds no look-up; give a trace of at least one key")
    values, rows = np.unique(found, return_counts=True)
    total = int(found.sum())
    chance, rows = values[::-1] / total, rows[::-1].astype(np.int64)
    ones = np.ones(len(rows))
    return Popularity(text, chance, rows, ones, look_ups=total, skew=_slope(chance, rows))


def _check_law(skew: float, rows: int) -> None:
    if not 0 <= skew <= MOST_SKEW:
        raise ConfigError(
            f"s={skew}: the skew of a Zipf law lies between 0 (all rows alike) and {MOST_SKEW:g}"
        )
    if not 1 <= rows <= MOST_ROWS:
        raise ConfigError(f"rows={rows}: give a table 1 to {MOST_ROWS:,} rows")


def _zipf(skew: float, rows: int) -> tuple[Floats, Ints]:
    """Chances and how many rows have each."""
    head = np.arange(1, min(rows, _ONE_BY_ONE) + 1, dtype=np.float64)
    edges = _edges(rows)
    weight = np.concatenate((head**-skew, _integrals(edges + 0.5, skew)))
    count = np.concatenate((np.ones(len(head), np.int64), np.diff(edges).astype(np.int64)))
    return weight / weight.sum() / count, count


def _edges(rows: int) -> Floats:
    """The last places of the runs behind the head; powers of two are among them."""
    if rows <= _ONE_BY_ONE:
        return np.array([float(min(rows, _ONE_BY_ONE))])
    octave = np.arange(_RUNS) / _RUNS + 1
    starts = [octave * float(1 << k) for k in range(_ONE_BY_ONE.bit_length() - 1, rows.bit_length())]
    places = np.concatenate(starts)
    return np.append(places[places < rows], float(rows))


def _integrals(edges: Floats, skew: float) -> Floats:
    """The integral of x^-skew between neighbouring edges: the sum over the whole places between, to 1e-10 of it behind 65,536."""
    start, ratio = edges[:-1], np.log(edges[1:] / edges[:-1])
    power = 1 - skew
    if abs(power) < 1e-9:
        return ratio
    return start**power * np.expm1(power * ratio) / power


def _slope(chance: Floats, rows: Ints) -> float | None:
    """Minus the slope of log chance over log place between the 10th and the 100,000th row; None for fewer than 100 rows."""
    last = min(int(rows.sum()), 100_000)
    if last < 100:
        return None
    places = np.arange(10, last)
    heights = chance[np.searchsorted(np.cumsum(rows), places, side="right")]
    return -float(np.polyfit(np.log(places + 1), np.log(heights), 1)[0])
