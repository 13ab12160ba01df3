"""What the lab measured, side by side: step times and trainings joined to standings, the standings of a contest ranked.

A contest is one job of one run at one link rate: its configurations were measured in turn, in one process group, so their
ratios mean something. Accuracy does not depend on the link: it comes from trainings of the same workload and world, of the
same run or, where that has none, of the other runs on the page.

    time to accuracy = steps to the target x median step time
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tacit.records import Record
from tacit.report.runs import Run
from tacit.report.text import LEVEL, rate_text

_LOSSY = frozenset({"bf16", "fp16", "half", "powersgd", "topk", "int8", "int4", "thc", "hush", "ef"})
_WHOLE = frozenset({"fp32", "plain", "none"})


@dataclass(frozen=True, slots=True)
class Timing:
    """Step times of one configuration at one rate, as recorded; None is what the record does not tell."""

    job: str
    workload: str
    configuration: str
    baseline: bool
    replayed: bool
    shaped: bool
    network: str
    scale: float
    rate_bps: float | None
    ranks: int | None
    step_n: int | None
    step_p50_s: float
    step_p10_s: float | None = None
    step_p90_s: float | None = None
    speedup: float | None = None
    speedup_p10: float | None = None
    speedup_p90: float | None = None
    compute_s: float | None = None
    encode_s: float | None = None
    wait_s: float | None = None
    decode_s: float | None = None
    wire_s: float | None = None
    sent_nbytes_a_step: float | None = None
    interface_nbytes_a_step: float | None = None
    goodput_bps: float | None = None
    link_share: float | None = None
    cpu_s_a_step: float | None = None
    bucket_nbytes: float | None = None
    predicted_step_s: float | None = None
    note: str = ""
    sent_is: str = ""  # "counted" as the bytes left, or "computed"
    tuned: bool = False  # the bucket size is the best of those tried

    @property
    def codec_s(self) -> float | None:
        """Encode and decode of a step; None where nobody tells them, as torch's hooks do not."""
        told = [part for part in (self.encode_s, self.decode_s) if part is not None]
        return sum(told) if told else None

    @property
    def codec_full_s(self) -> float | None:
        """The same on all of the parameters, of which a scaled replay has a part: it grows with them."""
        return None if self.codec_s is None else self.codec_s / self.scale


@dataclass(frozen=True, slots=True)
class Training:
    """One seed of one configuration, trained for its accuracy; `steps_to_target` is None where it was not reached."""

    workload: str
    configuration: str
    seed: str
    ranks: int | None
    metric: str
    higher_is_better: bool
    curve: tuple[tuple[float, float], ...]
    target: float | None
    steps_to_target: float | None
    final: float | None


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its extremes and count."""

    p50: float
    least: float
    most: float
    n: int


@dataclass(frozen=True, slots=True)
class Standing:
    """One configuration in a contest: its times, and the seeds it was trained with."""

    timing: Timing
    seeds: tuple[Training, ...]
    speedup: float | None  # step time against the contest's fp32 DDP

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
class Contest:
    """Configurations measured side by side at one rate; `trusted` is False where calibration refused that rate."""

    run: str
    standings: tuple[Standing, ...]
    trusted: bool
    job_named: bool = False  # another contest of the run has the same workload and rate

    @property
    def first(self) -> Timing:
        return self.standings[0].timing

    @property
    def workload(self) -> str:
        return self.first.workload

    @property
    def trained(self) -> Training | None:
        """A training that all the contest's trainings share metric and target with; None where nothing was trained."""
        return next((standing.seeds[0] for standing in self.standings if standing.seeds), None)

    @property
    def target(self) -> float | None:
        return self.trained.target if self.trained else None

    @property
    def link(self) -> str:
        """The link in words: '100 Mbit', or what stands in for one."""
        if not self.first.shaped:
            return f"{self.first.network or 'loopback'}, unshaped".replace("unshaped, unshaped", "unshaped")
        rate = (
            rate_text(self.first.rate_bps) if self.first.rate_bps else self.first.network or "an unnamed link"
        )
        return f"{rate} ({self.first.job})" if self.job_named else rate

    @property
    def fp32(self) -> Standing | None:
        """The fastest uncompressed DDP: of several bucket sizes the best is the tuned one."""
        plain = [s for s in self.standings if is_fp32(s.timing)]
        flagged = [s for s in plain if s.timing.baseline]
        return min(flagged or plain, key=lambda s: s.timing.step_p50_s, default=None)

    @property
    def bf16(self) -> Standing | None:
        halves = [s for s in self.standings if is_bf16(s.timing)]
        return min(halves, key=lambda s: s.timing.step_p50_s, default=None)

    def time_s(self, standing: Standing) -> float | None:
        """What ranks a standing: time to the target where the contest has one, else the median step."""
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

    def step_ratio(self, standing: Standing, rival: Standing | None) -> float | None:
        return rival.timing.step_p50_s / standing.timing.step_p50_s if rival else None

    def apart(self, standing: Standing, rival: Standing) -> bool:
        """Whether the slowest of one is still faster than the fastest of the other."""
        return self.range_s(standing)[1] < self.range_s(rival)[0]

    def level(self, standing: Standing, rival: Standing) -> bool:
        ratio = self.ratio(standing, rival)
        return ratio is not None and 1 / LEVEL < ratio < LEVEL


def contests(runs: Sequence[Run]) -> list[Contest]:
    """Every contest of the runs: as recorded, rates of one job upwards."""
    trained = {run.label: _one_target(_trainings(run)) for run in runs}
    found: list[Contest] = []
    for run in runs:
        refused = refusals(run)
        elsewhere = _one_target([t for r in runs if r is not run for t in trained[r.label]])
        groups: dict[tuple[Any, ...], dict[str, Timing]] = {}
        for timing in _timings(run):
            key = (timing.job, timing.workload, timing.rate_bps, timing.network, timing.ranks, timing.scale)
            groups.setdefault(key, {})[timing.configuration] = timing  # measured again: the last one counts
        names = Counter((key[1], key[2]) for key in groups)
        for key, timings in groups.items():
            own = trained[run.label]
            pool = own if any(t.workload == key[1] for t in own) else elsewhere
            trusted = not any(job in (None, key[0]) and rate in (None, key[2]) for job, rate in refused)
            found.append(_contest(run, list(timings.values()), pool, trusted, names[key[1], key[2]] > 1))
    return [contest for family in families(found) for contest in family]


def families(found: Sequence[Contest]) -> list[list[Contest]]:
    """Contests that differ in their link alone, lowest rate first: what one curve over rates can show."""
    grouped: dict[tuple[Any, ...], list[Contest]] = {}
    for contest in found:
        first = contest.first
        job = first.job if contest.job_named else None
        key = (contest.run, first.workload, first.replayed, first.ranks, first.scale, first.shaped, job)
        grouped.setdefault(key, []).append(contest)
    return [
        sorted(family, key=lambda contest: contest.first.rate_bps or math.inf) for family in grouped.values()
    ]


def refusals(run: Run) -> list[tuple[str | None, float | None]]:
    """The jobs and rates at which calibration refused the network; None stands for all of them."""
    refused = [
        r for r in run.of("calibration", "refused") if r["kind"] == "refused" or r.get("passed") is False
    ]
    found = [(str(r["job"]) if r.get("job") else None, number(r, "rate_bps")) for r in refused]
    return list(dict.fromkeys(found))


def is_fp32(timing: Timing) -> bool:
    """Whether this is DDP that compresses nothing, by its name and flag."""
    words = _words(timing.configuration)
    return not words & _LOSSY and (timing.baseline or bool(words & _WHOLE))


def is_bf16(timing: Timing) -> bool:
    words = _words(timing.configuration)
    return "bf16" in words and not words & (_LOSSY - {"bf16"})


def is_tacit(timing: Timing) -> bool:
    """Whether tacit spoke, not DDP or one of torch's hooks."""
    return not timing.baseline and "ddp" not in _words(timing.configuration)


def is_tuned(timing: Timing) -> bool:
    """Whether its bucket size was searched for: DDP's own default loses up to 1.4x."""
    return timing.tuned or "tuned" in f"{timing.configuration} {timing.note}".lower()


def scale_text(scale: float) -> str:
    """What a workload's scale is called: 'scaled to 1/10'."""
    return f"scaled to 1/{1 / scale:.4g}" if scale < 1 else f"scaled down {scale:.4g}×"


def number(record: Record, key: str) -> float | None:
    """The finite number under `key`, or None: a record may lack it, and a diverged run writes null."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _timings(run: Run) -> Iterable[Timing]:
    network = run.start.get("network")
    network = network if isinstance(network, dict) else {"label": network or ""}
    tuned = {record.get("job") for record in run.of("tuning")}
    for record in run.of("timing"):
        p50 = number(record, "step_p50_s")
        if not p50 or p50 < 0:
            continue  # nothing was measured
        split = record.get("split")
        figures = {key: number(record, key) for key in _NUMBERS}
        figures |= {key: number(split, key) for key in _SPLIT} if isinstance(split, dict) else {}
        rate = number(record, "rate_bps") or number(network, "rate_bps")
        yield Timing(
            job=str(record.get("job") or ""),
            workload=str(record.get("workload") or record.get("job") or "?"),
            configuration=str(record.get("configuration") or "?"),
            baseline=record.get("baseline") is True,
            replayed=record.get("replayed") is True,
            shaped=(record.get("shaped", network.get("shaped")) is True),
            network=_network_text(record.get("network")) or _network_text(network),
            scale=number(record, "scale") or 1.0,
            rate_bps=rate,
            ranks=_whole(record, "ranks"),
            step_n=_whole(record, "step_n"),
            step_p50_s=p50,
            note=str(record.get("note") or ""),
            sent_is=str(record.get("sent_is") or ""),
            tuned=record.get("tuned") is True or record.get("job") in tuned,
            **figures,
        )


_NUMBERS = [
    "step_p10_s",
    "step_p90_s",
    "speedup",
    "speedup_p10",
    "speedup_p90",
    "compute_s",
    "sent_nbytes_a_step",
    "interface_nbytes_a_step",
    "goodput_bps",
    "link_share",
    "cpu_s_a_step",
    "bucket_nbytes",
    "predicted_step_s",
]
_SPLIT = ("encode_s", "wait_s", "decode_s", "wire_s")


def _trainings(run: Run) -> list[Training]:
    return [
        Training(
            workload=str(record.get("workload") or record.get("job") or "?"),
            configuration=str(record.get("configuration") or "?"),
            seed=str(record.get("seed", "")),
            ranks=_whole(record, "ranks"),
            metric=str(record.get("metric") or "accuracy"),
            higher_is_better=record.get("higher_is_better") is not False,
            curve=_curve(record.get("curve")),
            target=number(record, "target"),
            steps_to_target=number(record, "steps_to_target"),
            final=number(record, "final"),
        )
        for record in run.of("accuracy")
    ]


def _one_target(trainings: Sequence[Training]) -> list[Training]:
    """The trainings of each workload that share its commonest target: times to different targets compare nothing.

    Of one configuration trained twice with one seed the last counts.
    """
    kept: dict[tuple[Any, ...], Training] = {}
    for workload in dict.fromkeys(t.workload for t in trainings):
        own = [t for t in trainings if t.workload == workload]
        common = Counter((t.metric, t.target) for t in own).most_common(1)[0][0]
        for t in own:
            if (t.metric, t.target) == common:
                kept[workload, t.configuration, t.seed, t.ranks] = t
    return list(kept.values())


def _contest(
    run: Run, timings: Sequence[Timing], pool: Sequence[Training], trusted: bool, job_named: bool
) -> Contest:
    bare = Contest(run.label, tuple(Standing(t, (), None) for t in timings), trusted, job_named)
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
    return Contest(run.label, tuple(standings), trusted, job_named)


def _curve(points: Any) -> tuple[tuple[float, float], ...]:
    pairs = points if isinstance(points, list) else []
    numbers = [
        (number({"x": p[0]}, "x"), number({"y": p[1]}, "y"))
        for p in pairs
        if isinstance(p, list) and len(p) == 2
    ]
    return tuple((step, value) for step, value in numbers if step is not None and value is not None)


def _network_text(network: Any) -> str:
    if isinstance(network, dict):
        return str(network.get("label") or network.get("text") or "")
    return str(network or "")


def _whole(record: Record, key: str) -> int | None:
    value = number(record, key)
    return None if value is None else round(value)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
