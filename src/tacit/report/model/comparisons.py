"""What the lab measured, side by side: step times and trainings joined to standings, the standings of a comparison ranked.

A comparison is one job of one run at one link rate: its configurations were measured in turn, in one process group, so their
ratios mean something. Accuracy does not depend on the link: it comes from trainings of the same workload and world, of the
same run or, where that has none, of the other runs on the page.

    time to accuracy = steps to the target x median step time
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from msgspec.structs import replace

from tacit.record_types import (
    AccuracyRecord,
    CalibrationRecord,
    NetworkFacts,
    RefusedRecord,
    TimingRecord,
    TuningRecord,
)
from tacit.report.model.runs import Run
from tacit.report.text import LEVEL, rate_text


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its extremes and count."""

    p50: float
    least: float
    most: float
    n: int


@dataclass(frozen=True, slots=True)
class Standing:
    """One configuration in a comparison: its times, and the seeds it was trained with."""

    timing: TimingRecord
    seeds: tuple[AccuracyRecord, ...]
    speedup: float | None  # step time against the comparison's fp32 DDP

    @property
    def name(self) -> str:
        return self.timing.configuration

    @property
    def reached(self) -> int:
        return sum(seed.steps_to_target is not None for seed in self.seeds)

    @property
    def to_target(self) -> Spread | None:
        """Time to the target over the seeds; None unless every seed reached it."""
        steps = [seed.steps_to_target for seed in self.seeds if seed.steps_to_target is not None]
        if not steps or len(steps) < len(self.seeds):
            return None
        times = [count * self.timing.step_p50_s for count in steps]
        return Spread(median(times), min(times), max(times), len(times))

    @property
    def final(self) -> Spread | None:
        finals = [seed.final for seed in self.seeds if seed.final is not None]
        return Spread(median(finals), min(finals), max(finals), len(finals)) if finals else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Configurations measured side by side at one rate; `trusted` is False where calibration refused that rate."""

    run: str
    standings: tuple[Standing, ...]
    trusted: bool
    job_named: bool = False  # another comparison of the run has the same workload and rate

    @property
    def first(self) -> TimingRecord:
        return self.standings[0].timing

    @property
    def workload(self) -> str:
        return self.first.workload

    @property
    def trained(self) -> AccuracyRecord | None:
        """A training that all the comparison's trainings share metric and target with; None where nothing was trained."""
        return next((standing.seeds[0] for standing in self.standings if standing.seeds), None)

    @property
    def target(self) -> float | None:
        return self.trained.target if self.trained else None

    @property
    def link(self) -> str:
        """The link as text: '100 Mbit', or what stands in for one."""
        if not self.first.shaped:
            return f"{self.first.network_text or 'loopback'}, unshaped".replace(
                "unshaped, unshaped", "unshaped"
            )
        rate = (
            rate_text(self.first.rate_bps)
            if self.first.rate_bps
            else self.first.network_text or "an unnamed link"
        )
        return f"{rate} ({self.first.job})" if self.job_named else rate

    @property
    def fp32(self) -> Standing | None:
        """The fastest uncompressed DDP: of several bucket sizes the best is the tuned one."""
        plain = [s for s in self.standings if s.timing.fp32]
        flagged = [s for s in plain if s.timing.baseline]
        return min(flagged or plain, key=lambda s: s.timing.step_p50_s, default=None)

    @property
    def bf16(self) -> Standing | None:
        halves = [s for s in self.standings if s.timing.bf16]
        return min(halves, key=lambda s: s.timing.step_p50_s, default=None)

    def time_s(self, standing: Standing) -> float | None:
        """What ranks a standing: time to the target where the comparison has one, else the median step."""
        if self.target is None:
            return standing.timing.step_p50_s
        spread = standing.to_target
        return spread.p50 if spread else None

    def range_s(self, standing: Standing) -> tuple[float, float]:
        """From the least to the most of `time_s`: over seeds, or p10 to p90 of the step."""
        timing, spread = standing.timing, standing.to_target
        if self.target is not None and spread:
            return spread.least, spread.most
        return timing.step_p10_s or timing.step_p50_s, timing.step_p90_s or timing.step_p50_s

    def ranked(self, eligible: Callable[[Standing], bool] = lambda standing: True) -> list[Standing]:
        """The standings that reached the target, fastest first."""
        timed = [
            (time_s, s) for s in self.standings if eligible(s) and (time_s := self.time_s(s)) is not None
        ]
        return [s for _, s in sorted(timed, key=lambda pair: pair[0])]

    def ratio(self, standing: Standing, rival: Standing | None) -> float | None:
        """How many times as fast as `rival`; None where one of them has no time."""
        own, other = self.time_s(standing), rival and self.time_s(rival)
        return other / own if own and other else None

    def ratio_range(self, standing: Standing, rival: Standing | None) -> tuple[float, float] | None:
        """The least and the most that `ratio` can be where both lie in their ranges; None where one of them has no time."""
        if rival is None or self.ratio(standing, rival) is None:
            return None
        (fastest, slowest), (least, most) = self.range_s(standing), self.range_s(rival)
        return least / slowest, most / fastest

    def step_ratio(self, standing: Standing, rival: Standing | None) -> float | None:
        return rival.timing.step_p50_s / standing.timing.step_p50_s if rival else None

    def apart(self, standing: Standing, rival: Standing) -> bool:
        """Whether the slowest of one is still faster than the fastest of the other."""
        return self.range_s(standing)[1] < self.range_s(rival)[0]

    def level(self, standing: Standing, rival: Standing) -> bool:
        ratio = self.ratio(standing, rival)
        return ratio is not None and 1 / LEVEL < ratio < LEVEL


def comparisons(runs: Sequence[Run]) -> list[Comparison]:
    """Every comparison of the runs: as recorded, rates of one job upwards."""
    trained = {run.label: _one_target(_trainings(run)) for run in runs}
    found: list[Comparison] = []
    for run in runs:
        refused = refusals(run)
        elsewhere = _one_target([t for r in runs if r is not run for t in trained[r.label]])
        groups: dict[tuple[Any, ...], dict[str, TimingRecord]] = {}
        for timing in _timings(run):
            key = (
                timing.job,
                timing.workload,
                timing.rate_bps,
                timing.network_text,
                timing.ranks,
                timing.scale,
            )
            groups.setdefault(key, {})[timing.configuration] = timing  # measured again: the last one counts
        names = Counter((key[1], key[2]) for key in groups)
        for key, timings in groups.items():
            own = trained[run.label]
            pool = own if any(t.workload == key[1] for t in own) else elsewhere
            trusted = not any(job in (None, key[0]) and rate in (None, key[2]) for job, rate in refused)
            found.append(_comparison(run, list(timings.values()), pool, trusted, names[key[1], key[2]] > 1))
    return [comparison for family in families(found) for comparison in family]


def families(found: Sequence[Comparison]) -> list[list[Comparison]]:
    """Comparisons that differ in their link alone, lowest rate first: what one curve over rates can show."""
    grouped: dict[tuple[Any, ...], list[Comparison]] = {}
    for comparison in found:
        first = comparison.first
        job = first.job if comparison.job_named else None
        key = (comparison.run, first.workload, first.replayed, first.ranks, first.scale, first.shaped, job)
        grouped.setdefault(key, []).append(comparison)
    return [
        sorted(family, key=lambda comparison: comparison.first.rate_bps or math.inf)
        for family in grouped.values()
    ]


def refusals(run: Run) -> list[tuple[str | None, float | None]]:
    """The jobs and rates at which calibration refused the network; None stands for all of them."""
    failed = [record for record in run.typed(CalibrationRecord) if record.passed is False]
    found = [(record.job or None, record.rate_bps) for record in failed]
    found += [(record.job or None, record.rate_bps) for record in run.typed(RefusedRecord)]
    return list(dict.fromkeys(found))


def scale_text(scale: float) -> str:
    """What a workload's scale is called: 'scaled to 1/10'."""
    return f"scaled to 1/{1 / scale:.4g}" if scale < 1 else f"scaled down {scale:.4g}×"


def _timings(run: Run) -> Iterable[TimingRecord]:
    """The step times of a run; what a record lacks of its network is taken from the run's start."""
    given = run.start.network
    network = given if isinstance(given, NetworkFacts) else NetworkFacts(label=given or "")
    tuned = {record.job for record in run.typed(TuningRecord)}
    for record in run.typed(TimingRecord):
        if record.step_p50_s <= 0:
            continue  # nothing was measured
        yield replace(
            record,
            workload=record.workload or record.job or "?",
            shaped=network.shaped if record.shaped is None else record.shaped,
            network=record.network_text or network.short,
            scale=record.scale or 1,
            rate_bps=record.rate_bps or network.rate_bps,
            tuned=record.tuned or record.job in tuned,
        )


def _trainings(run: Run) -> list[AccuracyRecord]:
    return [replace(r, workload=r.workload or r.job or "?") for r in run.typed(AccuracyRecord)]


def _one_target(trainings: Sequence[AccuracyRecord]) -> list[AccuracyRecord]:
    """The trainings of each workload that share its commonest target: times to different targets compare nothing.

    Of one configuration trained twice with one seed the last counts.
    """
    kept: dict[tuple[Any, ...], AccuracyRecord] = {}
    for workload in dict.fromkeys(t.workload for t in trainings):
        own = [t for t in trainings if t.workload == workload]
        common = Counter((t.metric, t.target) for t in own).most_common(1)[0][0]
        for t in own:
            if (t.metric, t.target) == common:
                kept[workload, t.configuration, t.seed, t.ranks] = t
    return list(kept.values())


def _comparison(
    run: Run, timings: Sequence[TimingRecord], pool: Sequence[AccuracyRecord], trusted: bool, job_named: bool
) -> Comparison:
    bare = Comparison(run.label, tuple(Standing(t, (), None) for t in timings), trusted, job_named)
    standings = []
    for standing in bare.standings:
        timing = standing.timing
        seeds = tuple(
            t
            for t in pool
            if (t.workload, t.configuration) == (timing.workload, timing.configuration)
            and (t.ranks is None or timing.ranks is None or t.ranks == timing.ranks)
        )
        speedup = timing.speedup if timing.speedup else bare.step_ratio(standing, bare.fp32)
        standings.append(Standing(timing, seeds, speedup))
    return Comparison(run.label, tuple(standings), trusted, job_named)
