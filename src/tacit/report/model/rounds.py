"""Trainings under rules of rounds/ and gossip: a trial is one job of one run at one link rate, and its first strategy the baseline.

Each training is set against the baseline's of the same seed; what is shown is the mean over the seeds, with extremes and count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from tacit.record_types import RoundsPoint, RoundsRecord
from tacit.report.model.runs import Run
from tacit.report.text import rate_text

POINTS = 0.003  # an accuracy at most 0.3 points below the baseline's is as good,
LOSS = 0.01  # and so is a loss at most 1 % above


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A point of a training's curve: the ranks' mean model after `step`; time is the slowest rank's, the rest means over ranks."""

    step: int
    seconds: float
    nbytes: float
    metric: float | None
    apart: float | None
    exchanges: float
    drift: float | None


@dataclass(frozen=True, slots=True)
class Over:
    """A mean over seeds, with its extremes and count."""

    mean: float
    least: float
    most: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Over | None:
        known = [value for value in values if value is not None]
        return cls(fmean(known), min(known), max(known), len(known)) if known else None


@dataclass(frozen=True, slots=True)
class StrategyTrainings:
    """One strategy of a trial: its trainings, each beside the baseline's of the same seed (None: that is missing)."""

    pairs: tuple[tuple[RoundsRecord, RoundsRecord | None], ...]

    @property
    def first(self) -> RoundsRecord:
        return self.pairs[0][0]

    @property
    def name(self) -> str:
        return self.first.configuration

    @property
    def trainings(self) -> list[RoundsRecord]:
        return [own for own, _ in self.pairs]

    def over(self, figure: Callable[[RoundsRecord], float | None]) -> Over | None:
        return Over.of(figure(own) for own in self.trainings)

    @property
    def bytes_share(self) -> Over | None:
        return self._against(lambda own, base: _ratio(own.nbytes, base.nbytes))

    @property
    def time_ratio(self) -> Over | None:
        return self._against(lambda own, base: _ratio(own.seconds, base.seconds))

    @property
    def difference(self) -> Over | None:
        """Own metric less the baseline's: of an accuracy the difference, of a loss its share of the baseline's."""

        def less(own: RoundsRecord, base: RoundsRecord) -> float | None:
            if own.final is None or base.final is None:
                return None
            apart = own.final - base.final
            return apart if own.higher_is_better else _ratio(apart, base.final)

        return self._against(less)

    @property
    def keeps_quality(self) -> bool:
        """Whether it learned as well as the baseline, in the mean over the seeds; no seed may be without a metric."""
        if self.difference is None or self.difference.n < len(self.pairs):
            return False
        mean = self.difference.mean
        return mean >= -POINTS - 1e-9 if self.first.higher_is_better else mean <= LOSS + 1e-9

    def _against(self, figure: Callable[[RoundsRecord, RoundsRecord], float | None]) -> Over | None:
        return Over.of(figure(own, base) for own, base in self.pairs if base is not None)


@dataclass(frozen=True, slots=True)
class Trial:
    """The strategies of one job at one rate, as recorded."""

    run: str
    strategies: tuple[StrategyTrainings, ...]
    job_named: bool = False  # another trial of the run has the same workload and rate

    @property
    def first(self) -> RoundsRecord:
        return self.strategies[0].first

    @property
    def baseline(self) -> StrategyTrainings | None:
        return next((one for one in self.strategies if one.first.baseline), None)

    @property
    def others(self) -> list[StrategyTrainings]:
        return [one for one in self.strategies if not one.first.baseline]

    @property
    def link(self) -> str:
        if not self.first.shaped:
            return f"{self.first.network or 'loopback'}, unshaped".replace("unshaped, unshaped", "unshaped")
        return (
            rate_text(self.first.rate_bps) if self.first.rate_bps else self.first.network or "an unnamed link"
        )

    @property
    def title(self) -> str:
        job = f" ({self.first.job})" if self.job_named else ""
        return f"{self.first.workload}{job} · {self.link}"

    @property
    def interface(self) -> bool:
        """Whether bytes are those at the interfaces, of all trainings."""
        return all(own.interface_nbytes is not None for one in self.strategies for own in one.trainings)

    @property
    def best(self) -> StrategyTrainings | None:
        """The strategy that sends least of those that learn as well as the baseline."""
        good = [(share.mean, one) for one in self.others if one.keeps_quality and (share := one.bytes_share)]
        return min(good, key=lambda pair: pair[0])[1] if good else None

    @property
    def nearest(self) -> StrategyTrainings | None:
        """The strategy whose metric is the best beside the baseline's."""
        sign = 1 if self.first.higher_is_better else -1
        ranked = [(sign * apart.mean, one) for one in self.others if (apart := one.difference)]
        return max(ranked, key=lambda pair: pair[0])[1] if ranked else None


def trials(runs: Sequence[Run]) -> list[Trial]:
    """Every trial of the runs, as recorded; of a strategy trained twice with one seed the last counts."""
    found: list[Trial] = []
    for run in runs:
        groups: dict[tuple[Any, ...], dict[tuple[Any, ...], RoundsRecord]] = {}
        for own in trainings_of(run):
            key = (own.job, own.workload, own.rate_bps, own.network, own.ranks)
            groups.setdefault(key, {})[own.configuration, own.seed] = own
        for key, group in groups.items():
            twins = [other for other in groups if other[1:3] == key[1:3]]
            found.append(Trial(run.label, by_strategy(list(group.values())), len(twins) > 1))
    return found


def by_strategy(trainings: Sequence[RoundsRecord]) -> tuple[StrategyTrainings, ...]:
    """The strategies of one job at one rate, each training beside its baseline; the baseline comes first."""
    base = {own.seed: own for own in trainings if own.baseline}
    names = list(dict.fromkeys(own.configuration for own in trainings))
    found = [
        StrategyTrainings(tuple((own, base.get(own.seed)) for own in trainings if own.configuration == name))
        for name in names
    ]
    return tuple(sorted(found, key=lambda one: not one.first.baseline))


def trainings_of(run: Run) -> list[RoundsRecord]:
    """The run's records of kind `rounds`; one without a time is left out."""
    found = run.typed(RoundsRecord)
    return [replace(r, workload=r.workload or r.job or "?") for r in found if r.seconds]


def curve_points(training: RoundsRecord) -> list[CurvePoint]:
    """The points at which every figure of a curve is known; bytes are those at the interface where it was counted."""
    found = (_point(point) for point in training.curve)
    return [point for point in found if point is not None]


def exchange_times_s(training: RoundsRecord) -> list[list[float]]:
    """When each rank's exchanges began."""
    return [_known(rank) for rank in training.exchange_times_s]


def most_first(counts: Mapping[str, float]) -> dict[str, int]:
    """What was counted, most first; what never happened is left out."""
    known = [(name, round(n)) for name, n in counts.items() if n]
    return dict(sorted(known, key=lambda item: -item[1]))


def _point(point: RoundsPoint) -> CurvePoint | None:
    seconds, drift = _known(point.seconds), _known(point.drift)
    sent = _known(point.interface_nbytes) or _known(point.sent_nbytes)
    if point.step is None or not seconds or not sent:
        return None
    return CurvePoint(
        round(point.step),
        max(seconds),
        fmean(sent),
        point.metric,
        point.apart,
        fmean(_known(point.exchanges) or [0.0]),
        fmean(drift) if drift else None,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _ratio(own: float | None, base: float | None) -> float | None:
    return own / base if own is not None and base else None
