"""A card a comparison, first thing on the page: who won, by how much, and what a reader has to know of the measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tacit.report.figures import drawing
from tacit.report.model import comparisons as ct
from tacit.report.model.comparisons import Comparison, Standing
from tacit.report.model.verdicts import ComparisonResult, finding
from tacit.report.pages import html
from tacit.report.pages.html import BigFigure, Lane
from tacit.report.text import counted, duration_text, metric_text, times_text

WHY = {
    "replayed": "compute was played as sleeps of recorded length; communication and codecs are real",
    "unshaped": "the link was not limited to a rate, so times say nothing about a slow network",
    "calibration refused": "the network was not what it claims: these figures decide nothing",
    "scaled": "compute is kept, and so is payload over rate, since both were scaled down together; the codec's own CPU time "
    "shrinks with the parameters, so ratios flatter codecs whose encode and decode matter",
}


STEP = "median step; small: p10 to p90"


def cards(found: Sequence[Comparison], several: bool) -> str:
    """A card a comparison, a row a workload: who won, by how much, and the times as bars."""
    ink = ink_of(found)
    rows = (
        "".join(_card(finding(comparison), ink, several) for comparison in family)
        for family in ct.families(found)
    )
    return "".join(f'<div class="cards">{row}</div>' for row in rows)


def _card(found: ComparisonResult, ink: dict[str, str], several: bool) -> str:
    comparison, winner = found.comparison, found.winner
    of = f"{comparison.run} · " if several else ""
    title, marks = f"{of}{comparison.workload} · {comparison.link}", badges(comparison)
    if winner is None:
        missed = "no configuration reached the target with every seed"
        return html.card(title, marks, missed if comparison.trusted else "nothing is claimed here")
    big = [
        BigFigure(times_text(ratio), f"against {whom}", _between(comparison, winner, rival))
        for whom, rival in _rivals(found)
        if rival.name != winner.name and (ratio := comparison.ratio(winner, rival))
    ]
    shown = [*(rival for _, rival in _rivals(found)), winner]
    unique = list({standing.name: standing for standing in shown}.values())
    longest = max(comparison.time_s(s) or 0 for s in unique)
    lanes = [_lane(comparison, standing, longest, ink[standing.name]) for standing in unique]
    return html.card(title, marks, winner.name, figures=big, lanes=lanes, under=_ranked_by(comparison))


def _between(comparison: Comparison, winner: Standing, rival: Standing) -> str:
    """How sure a ratio is: its least and its most, or that the two do not differ beyond noise."""
    spread = comparison.ratio_range(winner, rival)
    if spread is None or spread[0] == spread[1]:
        return ""
    told = f"{times_text(spread[0])[:-1]} to {times_text(spread[1])}"
    return told if comparison.apart(winner, rival) else f"{told}: the spreads overlap"


def _rivals(found: ComparisonResult) -> Iterator[tuple[str, Standing]]:
    if found.fp32:
        yield ("tuned fp32 DDP" if found.fp32.timing.bucket_tuned else "fp32 DDP"), found.fp32
    if found.bf16:
        yield "bf16", found.bf16
    named = {standing.name for standing in (found.fp32, found.bf16, found.winner) if standing}
    if found.best_tacit and found.best_tacit.name not in named:
        yield "tacit's best", found.best_tacit


def _lane(comparison: Comparison, standing: Standing, longest: float, colour: str) -> Lane:
    time_s = comparison.time_s(standing)
    text = duration_text(time_s) if time_s else "not reached"
    return Lane(standing.name, text, time_s / longest if time_s and longest else 0.0, colour)


def _ranked_by(comparison: Comparison) -> str:
    trained = comparison.trained
    if trained is None:
        return f"{STEP}; accuracy was not measured"
    if trained.target is None:
        return f"{STEP}; no target was set for accuracy"
    seeds = sorted({len(s.seeds) for s in comparison.standings if s.seeds})
    count = counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    small = "; small: their range" if seeds[-1] > 1 else ""
    target = metric_text(trained.target, trained.higher_is_better)
    return f"time to {target} {trained.metric}, median of {count}{small}"


def badges(comparison: Comparison) -> str:
    refused = "" if comparison.trusted else html.badge("calibration refused", WHY["calibration refused"])
    return kind_badges(comparison) + refused


def kind_badges(comparison: Comparison) -> str:
    """What a reader has to know of the measurement: replayed, unshaped, scaled."""
    first = comparison.first
    words = [("replayed", first.replayed), ("unshaped", not first.shaped)]
    shown = [html.badge(word, WHY[word]) for word, holds in words if holds]
    if first.scale != 1:
        shown.append(html.badge(ct.scale_text(first.scale), WHY["scaled"]))
    return "".join(shown)


def ink_of(found: Sequence[Comparison]) -> dict[str, str]:
    """One colour a configuration all over the page; fp32 DDP is grey."""
    plain = [comparison.fp32.name for comparison in found if comparison.fp32]
    return drawing.colours([*plain[:1], *(s.name for comparison in found for s in comparison.standings)])
