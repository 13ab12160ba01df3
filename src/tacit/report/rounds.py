"""Trainings under rules of rounds/ and gossip: a trial is one job of one run at one link rate, and its first strategy the baseline.

Each training is set against the baseline's of the same seed; what is told is the mean over the seeds, with extremes and count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tacit.records import Record
from tacit.report.contests import number
from tacit.report.runs import Run
from tacit.report.text import rate_text

POINTS = 0.003  # an accuracy at most 0.3 points below the baseline's is as good,
LOSS = 0.01  # and so is a loss at most 1 % above


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a training's curve: the ranks' mean model after `step`; time is the slowest rank's, the rest means over ranks."""

    step: int
    seconds: float
    nbytes: float
    metric: float | None
    apart: float | None
    exchanges: float
    drift: float | None


@dataclass(frozen=True, slots=True)
class Trained:
    """One strategy trained with one seed, as recorded; None is what the record does not tell."""

    job: str
    workload: str
    configuration: str
    baseline: bool
    seed: str
    ranks: int | None
    steps: int | None
    metric: str
    higher_is_better: bool
    network: str
    shaped: bool
    rate_bps: float | None
    seconds: float
    final: float | None = None
    apart: float | None = None
    compute_s: float | None = None
    communicating: float | None = None
    sent_nbytes: float | None = None
    interface_nbytes: float | None = None
    merge_nbytes: float | None = None
    exchanges: float | None = None
    meeting_p50_s: float | None = None
    meeting_p90_s: float | None = None
    outcomes: tuple[tuple[str, int], ...] = ()
    why: tuple[tuple[str, int], ...] = ()
    curve: tuple[Point, ...] = ()
    times_s: tuple[tuple[float, ...], ...] = ()

    @property
    def nbytes(self) -> float | None:
        """Bytes a rank sent: at its interface, else as counted where they leave."""
        return self.sent_nbytes if self.interface_nbytes is None else self.interface_nbytes


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
class Rule:
    """One strategy of a trial: its trainings, each beside the baseline's of the same seed (None: that is missing)."""

    pairs: tuple[tuple[Trained, Trained | None], ...]

    @property
    def first(self) -> Trained:
        return self.pairs[0][0]

    @property
    def name(self) -> str:
        return self.first.configuration

    @property
    def trainings(self) -> list[Trained]:
        return [own for own, _ in self.pairs]

    def over(self, figure: Callable[[Trained], float | None]) -> Over | None:
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

        def less(own: Trained, base: Trained) -> float | None:
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

    def _against(self, figure: Callable[[Trained, Trained], float | None]) -> Over | None:
        return Over.of(figure(own, base) for own, base in self.pairs if base is not None)


@dataclass(frozen=True, slots=True)
class Trial:
    """The strategies of one job at one rate, as recorded."""

    run: str
    rules: tuple[Rule, ...]
    job_named: bool = False  # another trial of the run has the same workload and rate

    @property
    def first(self) -> Trained:
        return self.rules[0].first

    @property
    def baseline(self) -> Rule | None:
        return next((rule for rule in self.rules if rule.first.baseline), None)

    @property
    def others(self) -> list[Rule]:
        return [rule for rule in self.rules if not rule.first.baseline]

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
        return all(own.interface_nbytes is not None for rule in self.rules for own in rule.trainings)

    @property
    def best(self) -> Rule | None:
        """Who says least of those that learn as well as the baseline."""
        good = [
            (share.mean, rule) for rule in self.others if rule.keeps_quality and (share := rule.bytes_share)
        ]
        return min(good, key=lambda pair: pair[0])[1] if good else None

    @property
    def nearest(self) -> Rule | None:
        """Whose metric is the best beside the baseline's."""
        sign = 1 if self.first.higher_is_better else -1
        told = [(sign * apart.mean, rule) for rule in self.others if (apart := rule.difference)]
        return max(told, key=lambda pair: pair[0])[1] if told else None


def trials(runs: Sequence[Run]) -> list[Trial]:
    """Every trial of the runs, as recorded; of a strategy trained twice with one seed the last counts."""
    found: list[Trial] = []
    for run in runs:
        groups: dict[tuple[Any, ...], dict[tuple[str, str], Trained]] = {}
        for own in trained(run.of("rounds")):
            key = (own.job, own.workload, own.rate_bps, own.network, own.ranks)
            groups.setdefault(key, {})[own.configuration, own.seed] = own
        for key, group in groups.items():
            twins = [other for other in groups if other[1:3] == key[1:3]]
            found.append(Trial(run.label, rules(list(group.values())), len(twins) > 1))
    return found


def rules(trainings: Sequence[Trained]) -> tuple[Rule, ...]:
    """The strategies of one job at one rate, each training beside its baseline; the baseline comes first."""
    base = {own.seed: own for own in trainings if own.baseline}
    names = list(dict.fromkeys(own.configuration for own in trainings))
    found = [
        Rule(tuple((own, base.get(own.seed)) for own in trainings if own.configuration == name))
        for name in names
    ]
    return tuple(sorted(found, key=lambda rule: not rule.first.baseline))


def trained(records: Iterable[Record]) -> list[Trained]:
    """The trainings that records of kind `rounds` tell of; one without a time is left out."""
    return [_trained(r, seconds) for r in records if (seconds := number(r, "seconds"))]


def _trained(record: Record, seconds: float) -> Trained:
    times = record.get("exchange_times_s")
    figures: Any = {key: number(record, key) for key in _NUMBERS}
    return Trained(
        job=str(record.get("job") or ""),
        workload=str(record.get("workload") or record.get("job") or "?"),
        configuration=str(record.get("configuration") or "?"),
        baseline=record.get("baseline") is True,
        seed=str(record.get("seed", "")),
        ranks=_whole(record, "ranks"),
        steps=_whole(record, "steps"),
        metric=str(record.get("metric") or "accuracy"),
        higher_is_better=record.get("higher_is_better", "loss" not in str(record.get("metric"))) is not False,
        network=str(record.get("network") or ""),
        shaped=record.get("shaped") is True,
        rate_bps=number(record, "rate_bps"),
        seconds=seconds,
        outcomes=_counts(record.get("outcomes")),
        why=_counts(record.get("why")),
        curve=_curve(record.get("curve")),
        times_s=tuple(tuple(_numbers(rank)) for rank in times) if isinstance(times, list) else (),
        **figures,
    )


_NUMBERS = [
    "final",
    "apart",
    "compute_s",
    "communicating",
    "sent_nbytes",
    "interface_nbytes",
    "merge_nbytes",
    "exchanges",
    "meeting_p50_s",
    "meeting_p90_s",
]


def _curve(points: Any) -> tuple[Point, ...]:
    found = [_point(point) for point in points if isinstance(point, dict)] if isinstance(points, list) else []
    return tuple(point for point in found if point is not None)


def _point(point: Record) -> Point | None:
    step, seconds = number(point, "step"), _numbers(point.get("seconds"))
    nbytes = _numbers(point.get("interface_nbytes")) or _numbers(point.get("sent_nbytes"))
    if step is None or not seconds or not nbytes:
        return None
    drift = _numbers(point.get("drift"))
    return Point(
        round(step),
        max(seconds),
        fmean(nbytes),
        number(point, "metric"),
        number(point, "apart"),
        fmean(_numbers(point.get("exchanges")) or [0.0]),
        fmean(drift) if drift else None,
    )


def _numbers(values: Any) -> list[float]:
    found = (number({"x": value}, "x") for value in values) if isinstance(values, list) else ()
    return [value for value in found if value is not None]


def _counts(counts: Any) -> tuple[tuple[str, int], ...]:
    """What was counted, most first."""
    items = counts.items() if isinstance(counts, dict) else ()
    known = [(str(name), round(n)) for name, n in items if number({"n": n}, "n")]
    return tuple(sorted(known, key=lambda item: -item[1]))


def _whole(record: Record, key: str) -> int | None:
    value = number(record, key)
    return None if value is None else round(value)


def _ratio(own: float | None, base: float | None) -> float | None:
    return own / base if own is not None and base else None
