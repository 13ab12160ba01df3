"""The part of a page about rules of rounds/ and gossip: a card and a section a trial, with its figures and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from html import escape

from tacit.report import drawing, html
from tacit.report import round_figures as draw
from tacit.report.cards import WHY
from tacit.report.gallery import Gallery
from tacit.report.html import Cell, Section, figure_cell
from tacit.report.rounds import LOSS, POINTS, Over, Rule, Trial
from tacit.report.tables import TableRow
from tacit.report.text import (
    NOTHING,
    apart_text,
    counted,
    duration_text,
    metric_text,
    more_text,
    percent_text,
    share_text,
)
from tacit.units import size_text, time_text


def cards(found: Sequence[Trial], several: bool) -> str:
    """A card a trial: who says least and learns as well as the baseline, and what that saves."""
    ink = ink_of(found)
    told = "".join(_card(trial, ink, several) for trial in found)
    return f'<div class="cards">{told}</div>' if told else ""


def _card(trial: Trial, ink: dict[str, str], several: bool) -> str:
    of = f"{trial.run} · " if several else ""
    head = f"<h3>{escape(of + trial.title)}</h3>{_badges(trial)}"
    base, best = trial.baseline, trial.best
    lanes = "".join(_lane(rule, ink[rule.name]) for rule in trial.rules)
    if base is None or best is None:
        why = "no strategy learned as well as the baseline" if base else "no baseline was trained"
        under = '<p class="under"><small>bars: bytes</small></p>'
        return f'<article class="card">{head}<p class="win">{why}</p>{lanes}{under}</article>'
    figures = [("bytes", best.bytes_share), ("time", best.time_ratio if trial.first.shaped else None)]
    big = "".join(
        f"<div><strong>{more_text(share.mean - 1)}</strong><span>{what} against the baseline</span></div>"
        for what, share in figures
        if share
    )
    apart = best.difference
    told = apart_text(apart.mean, trial.first.higher_is_better) if apart else NOTHING
    under = f"bars: bytes; {trial.first.metric} {told}, mean of {counted(len(best.pairs), 'seed')}"
    return (
        f'<article class="card">{head}<p class="win">{escape(best.name)}</p><div class="big">{big}</div>'
        f'{lanes}<p class="under"><small>{escape(under)}</small></p></article>'
    )


def _lane(rule: Rule, colour: str) -> str:
    share = rule.bytes_share
    mean, told = (share.mean, share_text(share.mean)) if share else (0.0, NOTHING)
    return (
        f'<div class="lane" style="--w:{100 * min(1.0, mean):.1f}%;--c:{colour}"><span>{escape(rule.name)}</span>'
        f"<b>{told}</b><i></i></div>"
    )


def sections(found: Sequence[Trial], gallery: Gallery, several: bool) -> list[Section]:
    """A section for each trial."""
    ink = ink_of(found)
    return [_section(trial, ink, gallery, several) for trial in found]


def _section(trial: Trial, ink: dict[str, str], gallery: Gallery, several: bool) -> Section:
    title = f"{trial.title}, {trial.run}" if several else trial.title
    shown = "".join(_figures(trial, ink, gallery))
    body = f'<p>{escape(_about(trial))}</p><div class="figures">{shown}</div>{_table(trial, ink)}'
    return Section(title, body + _notes(trial), _badges(trial))


def _badges(trial: Trial) -> str:
    return "" if trial.first.shaped else html.badge("unshaped", WHY["unshaped"])


def _about(trial: Trial) -> str:
    first, base = trial.first, trial.baseline
    share = base.over(lambda own: own.communicating) if base else None
    parts = [
        counted(first.ranks, "rank") if first.ranks else "",
        first.network,
        f"{first.steps:,} steps each" if first.steps else "",
        counted(len(trial.rules[0].pairs), "seed"),
    ]
    told = ", ".join(filter(None, parts))
    if base and share:
        told += f". The baseline, “{base.name}”, communicates {percent_text(share.mean)} of a step"
        told += " (what a step takes longer than compute alone, with all ranks at work)"
    good = f"{100 * POINTS:g} points below" if first.higher_is_better else f"{100 * LOSS:g} % above"
    return (
        f"{told}. Each strategy was trained alone, from start to end, and judged by the mean of all ranks' models; as good "
        f"is at most {good} the baseline's, in the mean over the seeds. Ratios are of trainings with the same seed."
    )


def _figures(trial: Trial, ink: dict[str, str], gallery: Gallery) -> Iterator[str]:
    what, trainings = trial.first.metric.capitalize(), [own for rule in trial.rules for own in rule.trainings]
    points = [point for own in trainings for point in own.curve]
    words = (trial.first.workload, *((trial.first.job,) if trial.job_named else ()), trial.link)
    where = "at the interface" if trial.interface else "as counted where they leave"
    thick = "each seed thin, their mean thick"

    def show(name: str, draw_it: Callable[[str], str], caption: str) -> str:
        return gallery.show((*words, name), draw_it, caption)

    if any(rule.bytes_share or rule.time_ratio for rule in trial.others):
        caption = f"Bytes ({where}) and time as shares of the baseline's; whiskers over the seeds."
        yield show("saved", lambda name: draw.saved_bars(trial, name), caption)
    if any(point.metric is not None and point.exchanges and point.nbytes > 0 for point in points):
        caption = f"{what} of the mean model against bytes a rank had sent ({where}): {thick}."
        yield show("by-bytes", lambda name: draw.learned_by_bytes(trial, ink, name), caption)
        caption = f"{what} of the mean model against time, the slowest rank's: {thick}."
        yield show("by-time", lambda name: draw.learned_by_time(trial, ink, name), caption)
    if any(rank for own in trainings for rank in own.times_s):
        caption = "Exchanges that a rank has taken part in, over time: a line a seed."
        yield show("exchanges", lambda name: draw.exchanges_over_time(trial, ink, name), caption)
    if any(point.apart for point in points):
        caption = f"Consensus: root mean square distance of the ranks' models from their mean, over its length: {thick}."
        yield show("apart", lambda name: draw.apart_over_time(trial, ink, name), caption)
    if any(point.drift for point in points):
        caption = f"Drift: how far a rank's model, or the layer of it that had come farthest, had moved when its exchange fired, over its length: {thick}."
        yield show("drift", lambda name: draw.drift_over_time(trial, ink, name), caption)


def _table(trial: Trial, ink: dict[str, str]) -> str:
    first = trial.first
    heads = [
        "strategy",
        first.metric,
        "against baseline",
        "bytes a rank",
        "of baseline's",
        "time",
        "of baseline's",
    ]
    heads += ["communicating", "exchanges a rank", "a meeting", "apart at the end", "final merge"]
    rows = [_cells(rule, ink[rule.name]) for rule in trial.rules]
    kept = [place for place in range(len(heads)) if any(row[place].html != NOTHING for row in rows)]
    caption = f"{trial.title}: means over the seeds, with extremes and count"
    return html.table([heads[place] for place in kept], [[row[p] for p in kept] for row in rows], caption)


def _cells(rule: Rule, colour: str) -> list[Cell]:
    higher = rule.first.higher_is_better

    def metric(value: float) -> str:
        return f"{100 * value:.2f} %" if higher and 0 <= value <= 1 else metric_text(value, higher)

    other = not rule.first.baseline
    apart = _over(rule.difference if other else None, lambda value: apart_text(value, higher))
    if other and not rule.keeps_quality:
        worse = '<span class="worse" title="worse than the baseline">↓</span> '
        apart = Cell(worse + apart.html, apart.value)
    return [
        html.code(rule.name, colour),
        _over(rule.over(lambda own: own.final), metric, count=True),
        apart,
        _over(rule.over(lambda own: own.nbytes), size_text),
        _over(rule.bytes_share if other else None, share_text),
        _over(rule.over(lambda own: own.seconds), duration_text),
        _over(rule.time_ratio if other else None, share_text),
        _over(rule.over(lambda own: own.communicating), percent_text),
        _over(rule.over(lambda own: own.exchanges), lambda value: f"{value:,.0f}"),
        _over(rule.over(lambda own: own.meeting_p50_s), time_text),
        _over(rule.over(lambda own: own.apart), lambda value: f"{100 * value:.2g} %"),
        _over(rule.over(lambda own: own.merge_nbytes), size_text),
    ]


def _over(over: Over | None, show: Callable[[float], str], *, count: bool = False) -> Cell:
    """A mean with its extremes in small where there were several seeds."""
    if over is None:
        return Cell(NOTHING)
    low, high = show(over.least), show(over.most)
    span = f"{low} – {high}" if low != high else ""
    return figure_cell(over.mean, show, " ".join(filter(None, (span, f"n={over.n}" if count else ""))))


def _notes(trial: Trial) -> str:
    """Why exchanges fired and how they ended, where that is not one thing only."""
    items = []
    for rule in trial.rules:
        why, ends = (_counted(rule, which) for which in ("why", "outcomes"))
        if len(ends) > 1:
            told = [", ".join(f"{n:,} {name}" for name, n in list(c.items())[:6]) for c in (why, ends)]
            items.append(f"<code>{escape(rule.name)}</code>: {escape(told[0])}; ended {escape(told[1])}")
    listed = "".join(f"<li>{item}</li>" for item in items)
    return (
        f"<p>Exchanges of all ranks and seeds, by reason, and how they ended:</p><ul>{listed}</ul>"
        if items
        else ""
    )


def _counted(rule: Rule, which: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for own in rule.trainings:
        for name, n in getattr(own, which):
            total[name] = total.get(name, 0) + n
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def training_rows(found: Sequence[Trial]) -> list[TableRow]:
    """A row a training, beside its baseline, for JSON and CSV; curves and times of exchanges stay in the JSON."""
    rows = []
    for trial in found:
        for rule in trial.rules:
            for own, base in rule.pairs:
                one = Rule(((own, base),))
                row = asdict(own) | {"outcomes": dict(own.outcomes), "why": dict(own.why)}
                row |= {
                    "curve": [asdict(p) for p in own.curve],
                    "times_s": [list(rank) for rank in own.times_s],
                }
                shares = {key: over.mean if (over := getattr(one, key)) else None for key in _AGAINST}
                rows.append({"run": trial.run, **row, **shares})
    return rows


def rule_rows(found: Sequence[Trial]) -> list[TableRow]:
    """A row a strategy: mean, extremes and count over the seeds."""
    rows = []
    for trial in found:
        for rule in trial.rules:
            first = rule.first
            row: TableRow = {key: getattr(first, key) for key in _NAMES}
            figures = {key: getattr(rule, key) for key in _AGAINST}
            figures |= {key: Over.of(getattr(own, key) for own in rule.trainings) for key in _FIGURES}
            flat = {key: asdict(over) if over else None for key, over in figures.items()}
            rows.append(
                {"run": trial.run, **row, "seeds": len(rule.pairs), "as_good": rule.keeps_quality, **flat}
            )
    return rows


_NAMES = (
    "job",
    "workload",
    "configuration",
    "baseline",
    "metric",
    "network",
    "shaped",
    "rate_bps",
    "ranks",
    "steps",
)
_AGAINST = ("bytes_share", "time_ratio", "difference")
_FIGURES = (
    "final",
    "nbytes",
    "seconds",
    "communicating",
    "exchanges",
    "meeting_p50_s",
    "apart",
    "merge_nbytes",
)


def ink_of(found: Sequence[Trial]) -> dict[str, str]:
    """One colour a strategy all over the page; baselines are grey."""
    grey = {trial.baseline.name for trial in found if trial.baseline}
    rest = [rule.name for trial in found for rule in trial.rules if rule.name not in grey]
    ink = drawing.colours(["", *rest])
    return ink | dict.fromkeys(grey, ink[""])
