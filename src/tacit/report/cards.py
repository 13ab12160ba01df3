"""A card a contest, first thing on the page: who won, by how much, and what a reader has to know of the measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from tacit.report import contests as ct
from tacit.report import drawing, html
from tacit.report.contests import Contest, Standing
from tacit.report.text import counted, duration_text, metric_text, times_text
from tacit.report.verdicts import Finding, finding

WHY = {
    "replayed": "compute was played as sleeps of recorded length; communication and codecs are real",
    "unshaped": "the link was not limited to a rate, so times say nothing about a slow network",
    "calibration refused": "the network was not what it claims: these figures decide nothing",
    "scaled": "compute is kept, and so is payload over rate, since both were scaled down together; the codec's own CPU time "
    "shrinks with the parameters, so ratios flatter codecs whose encode and decode matter",
}


def cards(found: Sequence[Contest], several: bool) -> str:
    """A card a contest, a row a workload: who won, by how much, and the times as bars."""
    ink = ink_of(found)
    rows = (
        "".join(_card(finding(contest), ink, several) for contest in family) for family in ct.families(found)
    )
    return "".join(f'<div class="cards">{row}</div>' for row in rows)


def _card(found: Finding, ink: dict[str, str], several: bool) -> str:
    contest, winner = found.contest, found.winner
    of = f"{contest.run} · " if several else ""
    head = f"<h3>{escape(f'{of}{contest.workload} · {contest.link}')}</h3>{badges(contest)}"
    if winner is None:
        why = (
            "no configuration reached the target with every seed"
            if contest.trusted
            else "nothing is claimed here"
        )
        return f'<article class="card">{head}<p class="win">{why}</p></article>'
    big = "".join(
        f"<div><strong>{times_text(ratio)}</strong><span>against {escape(whom)}</span></div>"
        for whom, rival in _rivals(found)
        if rival.name != winner.name and (ratio := contest.ratio(winner, rival))
    )
    lanes = [*(rival for _, rival in _rivals(found)), winner]
    unique = list({standing.name: standing for standing in lanes}.values())
    longest = max(contest.time_s(s) or 0 for s in unique)
    bars = "".join(_lane(contest, standing, longest, ink[standing.name]) for standing in unique)
    return (
        f'<article class="card">{head}<p class="win">{escape(winner.name)}</p><div class="big">{big}</div>'
        f'{bars}<p class="under"><small>{escape(_ranked_by(contest))}</small></p></article>'
    )


def _rivals(found: Finding) -> Iterator[tuple[str, Standing]]:
    if found.fp32:
        yield ("tuned fp32 DDP" if ct.is_tuned(found.fp32.timing) else "fp32 DDP"), found.fp32
    if found.bf16:
        yield "bf16", found.bf16
    named = {standing.name for standing in (found.fp32, found.bf16, found.winner) if standing}
    if found.best_tacit and found.best_tacit.name not in named:
        yield "tacit's best", found.best_tacit


def _lane(contest: Contest, standing: Standing, longest: float, colour: str) -> str:
    time_s = contest.time_s(standing)
    width = 100 * time_s / longest if time_s and longest else 0
    told = duration_text(time_s) if time_s else "not reached"
    return (
        f'<div class="lane" style="--w:{width:.1f}%;--c:{colour}"><span>{escape(standing.name)}</span>'
        f"<b>{told}</b><i></i></div>"
    )


def _ranked_by(contest: Contest) -> str:
    trained = contest.trained
    if trained is None:
        return "median step; accuracy was not measured"
    if trained.target is None:
        return "median step; no target was set for accuracy"
    seeds = sorted({len(s.seeds) for s in contest.standings if s.seeds})
    count = counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    return (
        f"time to {metric_text(trained.target, trained.higher_is_better)} {trained.metric}, median of {count}"
    )


def badges(contest: Contest) -> str:
    refused = "" if contest.trusted else html.badge("calibration refused", WHY["calibration refused"])
    return kind_badges(contest) + refused


def kind_badges(contest: Contest) -> str:
    """What a reader has to know of the measurement: replayed, unshaped, scaled."""
    first = contest.first
    words = [("replayed", first.replayed), ("unshaped", not first.shaped)]
    shown = [html.badge(word, WHY[word]) for word, holds in words if holds]
    if first.scale != 1:
        shown.append(html.badge(ct.scale_text(first.scale), WHY["scaled"]))
    return "".join(shown)


def ink_of(found: Sequence[Contest]) -> dict[str, str]:
    """One colour a configuration all over the page; fp32 DDP is grey."""
    plain = [contest.fp32.name for contest in found if contest.fp32]
    return drawing.colours([*plain[:1], *(s.name for contest in found for s in contest.standings)])
