"""What the comparisons come to, in one sentence a run: who is fastest to equal accuracy, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tacit.record_types import AccuracyRecord, CalibrationRecord
from tacit.report.model import summary
from tacit.report.model.comparisons import (
    Comparison,
    Standing,
    families,
    refusals,
    scale_text,
)
from tacit.report.model.rounds import LOSS, POINTS, Trial
from tacit.report.model.runs import Run
from tacit.report.model.tables import cost_rows, limit_rows
from tacit.report.text import (
    apart_text,
    counted,
    less_text,
    listed,
    metric_text,
    percent_text,
    rate_text,
    times_text,
)


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """Who won a comparison: the fastest to the target, or by step time where nothing was trained. None where nobody did."""

    comparison: Comparison
    winner: Standing | None
    best_tacit: Standing | None

    @property
    def fp32(self) -> Standing | None:
        return self.comparison.fp32

    @property
    def bf16(self) -> Standing | None:
        return self.comparison.bf16

    def as_dict(self) -> dict[str, Any]:
        comparison, winner = self.comparison, self.winner
        return {
            "run": comparison.run,
            "workload": comparison.workload,
            "link": comparison.link,
            "rate_bps": comparison.first.rate_bps,
            "replayed": comparison.first.replayed,
            "shaped": comparison.first.shaped,
            "trusted": comparison.trusted,
            "ranked_by": "step time" if comparison.target is None else "time to accuracy",
            "target": comparison.target,
            "fastest": winner.name if winner else None,
            "time_s": comparison.time_s(winner) if winner else None,
            "against_fp32": comparison.ratio(winner, comparison.fp32) if winner else None,
            "against_bf16": comparison.ratio(winner, comparison.bf16) if winner else None,
            "best_tacit": self.best_tacit.name if self.best_tacit else None,
        }


def finding(comparison: Comparison) -> ComparisonResult:
    """The comparison's winner, and the best of tacit's own strategies; neither where calibration refused the network."""
    if not comparison.trusted:
        return ComparisonResult(comparison, None, None)
    ranked = comparison.ranked()
    own = comparison.ranked(lambda standing: standing.timing.tacit)
    return ComparisonResult(comparison, next(iter(ranked), None), next(iter(own), None))


def verdicts(run: Run, comparisons: Sequence[Comparison], tried: Sequence[Trial] = ()) -> list[str]:
    """What this run shows, a sentence a workload, those that were trained to a target first, then a sentence a trial; else
    what its other records show, in one sentence."""
    own = families([comparison for comparison in comparisons if comparison.run == run.label])
    told = [f"{_family(family)}." for family in sorted(own, key=lambda family: family[0].target is None)]
    told += [_trial(trial) for trial in tried if trial.run == run.label]
    if told:
        return [*told, *_refusal(run, comparisons)]
    if refused := _refusal(run, comparisons):
        return refused
    others = (_demo(run), _limits(run), _costs(run), _accuracy(run), _calibration(run))
    return [
        next((sentence for sentence in others if sentence), "This run measured nothing that can be compared.")
    ]


def _family(family: Sequence[Comparison]) -> str:
    """Comparisons that differ in their link: winners grouped, so that a rate is named once."""
    first, trained = family[0].first, family[0].trained
    replayed = ", replayed" if first.replayed else ""
    scaled = f", {scale_text(first.scale)}" if first.scale != 1 else ""
    workload = f"{first.workload}{replayed}{scaled}"
    if trained and trained.target is not None:
        head = f"To {metric_text(trained.target, trained.higher_is_better)} {trained.metric} on {workload}, "
    else:
        why = "no target was set for accuracy" if trained else "accuracy was not measured"
        head = f"By step time on {workload} ({why}), "
    if not any(comparison.trusted for comparison in family):
        refused = listed([comparison.link for comparison in family])
        return f"Calibration refused the network at {refused}: it was not what it claims, so nothing is claimed on {workload}"
    groups: dict[tuple[Any, ...], list[ComparisonResult]] = {}
    for found in map(finding, family):
        groups.setdefault(_shape(found), []).append(found)
    return head + "; ".join(_group(found, family) for found in groups.values()) + _fell_short(family)


def _fell_short(family: Sequence[Comparison]) -> str:
    """Who took shorter steps than a winner and yet has no time to the target: named, so that nobody looks for it."""
    short = []
    for found in map(finding, family):
        if found.winner and found.comparison.target is not None:
            step_s = found.winner.timing.step_p50_s
            rest = [s for s in found.comparison.standings if s.timing.step_p50_s < step_s and not s.to_target]
            short += [f"“{s.name}”" for s in rest if s.seeds]
    names = list(dict.fromkeys(short))
    verb = "steps" if len(names) == 1 else "step"
    return f"; {listed(names)} {verb} faster but missed that target" if names else ""


def _shape(found: ComparisonResult) -> tuple[Any, ...]:
    best = found.best_tacit.name if found.best_tacit else None
    name = found.winner.name if found.winner else None
    return name, best, found.comparison.trusted, found.fp32 is None, found.bf16 is None


def _group(found: Sequence[ComparisonResult], family: Sequence[Comparison]) -> str:
    where = _where(found, family)
    one, winner = found[0], found[0].winner
    if not one.comparison.trusted:
        return f"{where} calibration refused the network, so nothing is claimed there"
    if winner is None:
        return f"{where} no configuration got there with every seed"
    if winner.timing.fp32:
        head = f"{where} uncompressed DDP wins (“{winner.name}”)"
    elif winner.timing.bf16:
        head = f"{where} bf16 wins (“{winner.name}”)"
    else:
        head = f"{where} “{winner.name}” is fastest" + ("" if winner.timing.tacit else ", a baseline")
    return head + ": " + ", ".join(_against(found))


def _against(found: Sequence[ComparisonResult]) -> list[str]:
    """The winner against its rivals, over the rates of one group: they share winner and rivals."""
    one, winner = found[0], found[0].winner
    assert winner is not None
    fp32, bf16, best = one.fp32, one.bf16, one.best_tacit
    parts = []
    if fp32 is None:
        parts.append("without fp32 DDP beside it")
    elif fp32.name != winner.name:
        tuned = "tuned " if fp32.timing.bucket_tuned else ""
        parts.append(_ratios(found, [f.fp32 for f in found], f"{tuned}fp32 DDP"))
    if bf16 is None:
        parts.append("without bf16 beside it")
    elif bf16.name != winner.name:
        parts.append(_ratios(found, [f.bf16 for f in found], "bf16"))
    named = {standing.name for standing in (winner, fp32, bf16) if standing}
    if not winner.timing.tacit and best and best.name not in named:
        parts.append(_ratios(found, [f.best_tacit for f in found], f"tacit's best, “{best.name}”"))
    return parts or ["nothing was faster"]


def _ratios(found: Sequence[ComparisonResult], rivals: Sequence[Standing | None], name: str) -> str:
    """'2.90× and 2.10× as fast as bf16'; three and more as a range; level and overlapping spreads are marked."""
    pairs = [
        (f.comparison, f.winner, rival) for f, rival in zip(found, rivals, strict=True) if f.winner and rival
    ]
    ratios = [(c, w, r, ratio) for c, w, r in pairs if (ratio := c.ratio(w, r)) is not None]
    if not ratios:
        return f"{name} did not get there with every seed"
    if all(comparison.level(winner, rival) for comparison, winner, rival, _ in ratios):
        return f"level with {name}"
    values = [ratio for *_, ratio in ratios]
    told = listed([times_text(v) for v in values])
    if len(values) > 2:
        told = f"{times_text(min(values))} to {times_text(max(values))}"
    unsure = [
        comparison.link for comparison, winner, rival, _ in ratios if not comparison.apart(winner, rival)
    ]
    at = f" at {listed(unsure)}" if 0 < len(unsure) < len(ratios) else ""
    return f"{told} as fast as {name}" + (f" (spreads overlap{at})" if unsure else "")


def _where(found: Sequence[ComparisonResult], family: Sequence[Comparison]) -> str:
    links = [f.comparison.link for f in found]
    if not found[0].comparison.first.shaped:
        return f"over {listed(links)},"
    places = [place for place, comparison in enumerate(family) if comparison.link in links]
    if len(links) > 2 and places[-1] - places[0] == len(places) - 1:
        return f"from {links[0]} to {links[-1]}"
    units = {link.rpartition(" ")[2] for link in links}
    if len(units) == 1 and len(links) > 1:  # '100 and 200 Mbit', the unit once
        return f"at {listed([link.rpartition(' ')[0] for link in links])} {units.pop()}"
    return f"at {listed(links)}"


def _trial(trial: Trial) -> str:
    """The strategy that sends least and learns as well as the baseline, what that saves, and how much the baseline communicates."""
    base, best, first = trial.baseline, trial.best, trial.first
    where = f"at {trial.link}" if first.shaped else f"over {trial.link}"
    head = f"On {first.workload} {where} ({counted(len(trial.strategies[0].pairs), 'seed')}), "
    if base is None or not trial.others:
        return f"{head}“{first.configuration}” was trained, and nothing beside it to compare with."
    share = base.over(lambda own: own.communicating)
    talks = f", which communicates {percent_text(share.mean)} of a step" if share and first.shaped else ""
    sent, took, apart = (best.bytes_share, best.time_ratio, best.difference) if best else (None, None, None)
    if best is None or sent is None or apart is None:
        bound = f"{100 * POINTS:g} points" if first.higher_is_better else f"{100 * LOSS:g} %"
        return (
            f"{head}no strategy came within {bound} {first.metric} of “{base.name}”{talks}{_nearest(trial)}."
        )
    time = f" and takes {less_text(took.mean)} time" if took and first.shaped else ""
    told = apart_text(apart.mean, first.higher_is_better)
    return f"{head}“{best.name}” sends {less_text(sent.mean)}{time} than “{base.name}”{talks}, at {told} {first.metric}."


def _nearest(trial: Trial) -> str:
    near = trial.nearest
    if near is None or near.difference is None:
        return ""
    told = apart_text(near.difference.mean, trial.first.higher_is_better)
    return f"; the nearest is “{near.name}”, at {told}" + (
        f", which sends {less_text(near.bytes_share.mean)}" if near.bytes_share else ""
    )


def _refusal(run: Run, comparisons: Sequence[Comparison]) -> list[str]:
    """A sentence about jobs that calibration kept from running; those that ran all the same are covered by their comparison."""
    ran = {(c.first.job, c.first.rate_bps) for c in comparisons if c.run == run.label}
    kept = [
        (job, rate) for job, rate in refusals(run) if not any(job in (None, j) and rate == r for j, r in ran)
    ]
    if not kept:
        return []
    jobs = dict.fromkeys(job for job, _ in kept)
    where = [
        " at ".join(filter(None, (job, listed([rate_text(rate) for j, rate in kept if j == job and rate]))))
        for job in jobs
    ]
    at = f" ({listed(list(filter(None, where)))})" if any(where) else ""
    return [f"Calibration refused the network{at}: it was not what it claims, so nothing is claimed there."]


def _demo(run: Run) -> str:
    rows = summary.summarise(run.records)
    return summary.verdict(rows) if rows or run.start.tasks is not None else ""


def _limits(run: Run) -> str:
    ratios = [row["ratio"] for row in limit_rows(run) if row["ratio"]]
    if not ratios:
        return ""
    extra = [abs(row["unexplained"]) for row in limit_rows(run) if row["unexplained"] is not None]
    bytes_ = (
        f"; interface bytes within {100 * max(extra):.2g} % of counted bytes and headers" if extra else ""
    )
    return (
        f"All-reduce took {times_text(min(ratios))} to {times_text(max(ratios))} of the time that the link's rate allows "
        f"(median {times_text(median(ratios))}, {counted(len(ratios), 'case')}){bytes_}."
    )


def _costs(run: Run) -> str:
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in cost_rows(run):
        case = row["network"], row["world"], row["nbytes"]
        cases.setdefault(case, {})[row["schedule"]] = row["time_s"]
    cases = {case: times for case, times in cases.items() if len(times) > 1}
    if not cases:
        return ""
    wins: dict[str, list[float]] = {}
    for times in cases.values():
        best, second = sorted(times, key=lambda name: times[name])[:2]
        wins.setdefault(best, []).append(times[second] / times[best] if times[best] else 1.0)
    told = [
        f"“{name}” is the fastest schedule in {len(leads)} of {counted(len(cases), 'case')} "
        f"(median {times_text(median(leads))} against the next)"
        for name, leads in sorted(wins.items(), key=lambda item: -len(item[1]))
    ]
    return f"Simulated, not measured: {listed(told)}."


def _accuracy(run: Run) -> str:
    trained = run.typed(AccuracyRecord)
    if not trained:
        return ""
    names = {record.configuration for record in trained}
    return (
        f"{counted(len(trained), 'training')} of {counted(len(names), 'configuration')} were recorded, but no step "
        "times, so time to accuracy is unknown."
    )


def _calibration(run: Run) -> str:
    passed = any(record.passed for record in run.typed(CalibrationRecord))
    return "Calibration passed; nothing else was measured." if passed else ""
