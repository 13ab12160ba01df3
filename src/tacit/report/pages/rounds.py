"""The part of a page about rules of rounds/ and gossip: a card and a section a trial, with its figures and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape

from msgspec.structs import asdict as fields

from tacit.record_types import RoundsRecord
from tacit.report.figures import drawing
from tacit.report.figures import rounds as draw
from tacit.report.model.rounds import (
    LOSS,
    POINTS,
    Over,
    StrategyTrainings,
    Trial,
    curve_points,
    exchange_times_s,
    most_first,
)
from tacit.report.model.tables import TableRow
from tacit.report.pages import html
from tacit.report.pages.cards import WHY
from tacit.report.pages.figure_set import FigureSet
from tacit.report.pages.html import BigFigure, Lane, Section, TableCell, figure_cell
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
    """A card a trial: the strategy that sends least and learns as well as the baseline, and what that saves."""
    ink = ink_of(found)
    told = "".join(_card(trial, ink, several) for trial in found)
    return f'<div class="cards">{told}</div>' if told else ""


def _card(trial: Trial, ink: dict[str, str], several: bool) -> str:
    title = f"{trial.run} · {trial.title}" if several else trial.title
    base, best = trial.baseline, trial.best
    lanes = [_lane(strategy, ink[strategy.name]) for strategy in trial.strategies]
    if base is None or best is None:
        why = "no strategy learned as well as the baseline" if base else "no baseline was trained"
        return html.card(title, _badges(trial), why, lanes=lanes, under="bars: bytes")
    shares = [("bytes", best.bytes_share), ("time", best.time_ratio if trial.first.shaped else None)]
    figures = [
        BigFigure(more_text(s.mean - 1), f"{what} against the baseline", _between(s))
        for what, s in shares
        if s
    ]
    difference = best.difference
    metric = apart_text(difference.mean, trial.first.higher_is_better) if difference else NOTHING
    under = f"bars: bytes; {trial.first.metric} {metric}, mean of {counted(len(best.pairs), 'seed')}"
    return html.card(title, _badges(trial), best.name, figures=figures, lanes=lanes, under=under)


def _between(share: Over) -> str:
    """What the seeds lie between."""
    return f"{more_text(share.least - 1)[:-2]} to {more_text(share.most - 1)}" if share.n > 1 else ""


def _lane(strategy: StrategyTrainings, colour: str) -> Lane:
    share = strategy.bytes_share
    if share is None:
        return Lane(strategy.name, NOTHING, 0.0, colour)
    return Lane(strategy.name, share_text(share.mean), min(1.0, share.mean), colour)


def sections(found: Sequence[Trial], figure_set: FigureSet, several: bool) -> list[Section]:
    """A section for each trial."""
    ink = ink_of(found)
    return [_section(trial, ink, figure_set, several) for trial in found]


def _section(trial: Trial, ink: dict[str, str], figure_set: FigureSet, several: bool) -> Section:
    title = f"{trial.title}, {trial.run}" if several else trial.title
    shown = "".join(_figures(trial, ink, figure_set))
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
        counted(len(trial.strategies[0].pairs), "seed"),
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


def _figures(trial: Trial, ink: dict[str, str], figure_set: FigureSet) -> Iterator[str]:
    what, trainings = (
        trial.first.metric.capitalize(),
        [own for strategy in trial.strategies for own in strategy.trainings],
    )
    points = [point for own in trainings for point in curve_points(own)]
    words = (trial.first.workload, *((trial.first.job,) if trial.job_named else ()), trial.link)
    where = "at the interface" if trial.interface else "as counted where they leave"
    thick = "each seed thin, their mean thick"

    def show(name: str, draw_it: Callable[[str], str], caption: str) -> str:
        return figure_set.show((*words, name), draw_it, caption)

    if any(strategy.bytes_share or strategy.time_ratio for strategy in trial.others):
        caption = f"Bytes ({where}) and time as shares of the baseline's; whiskers over the seeds."
        yield show("saved", lambda name: draw.saved_bars(trial, name), caption)
    if any(point.metric is not None and point.exchanges and point.nbytes > 0 for point in points):
        caption = f"{what} of the mean model against bytes a rank had sent ({where}): {thick}."
        yield show("by-bytes", lambda name: draw.learned_by_bytes(trial, ink, name), caption)
        caption = f"{what} of the mean model against time, the slowest rank's: {thick}."
        yield show("by-time", lambda name: draw.learned_by_time(trial, ink, name), caption)
    if any(rank for own in trainings for rank in exchange_times_s(own)):
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
    rows = [_cells(strategy, ink[strategy.name]) for strategy in trial.strategies]
    kept = [place for place in range(len(heads)) if any(row[place].html != NOTHING for row in rows)]
    caption = f"{trial.title}: means over the seeds, with extremes and count"
    return html.table([heads[place] for place in kept], [[row[p] for p in kept] for row in rows], caption)


def _cells(strategy: StrategyTrainings, colour: str) -> list[TableCell]:
    higher = strategy.first.higher_is_better

    def metric(value: float) -> str:
        return f"{100 * value:.2f} %" if higher and 0 <= value <= 1 else metric_text(value, higher)

    other = not strategy.first.baseline
    apart = _over(strategy.difference if other else None, lambda value: apart_text(value, higher))
    if other and not strategy.keeps_quality:
        worse = '<span class="worse" title="worse than the baseline">↓</span> '
        apart = TableCell(worse + apart.html, apart.value)
    return [
        html.code(strategy.name, colour),
        _over(strategy.over(lambda own: own.final), metric, count=True),
        apart,
        _over(strategy.over(lambda own: own.nbytes), size_text),
        _over(strategy.bytes_share if other else None, share_text),
        _over(strategy.over(lambda own: own.seconds), duration_text),
        _over(strategy.time_ratio if other else None, share_text),
        _over(strategy.over(lambda own: own.communicating), percent_text),
        _over(strategy.over(lambda own: own.exchanges), lambda value: f"{value:,.0f}"),
        _over(strategy.over(lambda own: own.meeting_p50_s), time_text),
        _over(strategy.over(lambda own: own.apart), lambda value: f"{100 * value:.2g} %"),
        _over(strategy.over(lambda own: own.merge_nbytes), size_text),
    ]


def _over(over: Over | None, show: Callable[[float], str], *, count: bool = False) -> TableCell:
    """A mean with its extremes in small where there were several seeds."""
    if over is None:
        return TableCell(NOTHING)
    low, high = show(over.least), show(over.most)
    span = f"{low} – {high}" if low != high else ""
    return figure_cell(over.mean, show, " ".join(filter(None, (span, f"n={over.n}" if count else ""))))


def _notes(trial: Trial) -> str:
    """Why exchanges fired and how they ended, where that is not one thing only."""
    items = []
    for strategy in trial.strategies:
        why, ends = (
            _counted(counts)
            for counts in zip(*((own.why, own.outcomes) for own in strategy.trainings), strict=True)
        )
        if len(ends) > 1:
            told = [", ".join(f"{n:,} {name}" for name, n in list(c.items())[:6]) for c in (why, ends)]
            items.append(f"<code>{escape(strategy.name)}</code>: {escape(told[0])}; ended {escape(told[1])}")
    listed = "".join(f"<li>{item}</li>" for item in items)
    return (
        f"<p>Exchanges of all ranks and seeds, by reason, and how they ended:</p><ul>{listed}</ul>"
        if items
        else ""
    )


def _counted(trainings: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """What all trainings of a strategy counted, most first."""
    total: Counter[str] = Counter()
    for counts in trainings:
        total.update(most_first(counts))
    return most_first(total)


def training_rows(found: Sequence[Trial]) -> list[TableRow]:
    """A row a training, beside its baseline, for JSON and CSV; curves and times of exchanges stay in the JSON."""
    rows = []
    for trial in found:
        for strategy in trial.strategies:
            for own, base in strategy.pairs:
                alone = StrategyTrainings(((own, base),))
                shares = {key: over.mean if (over := getattr(alone, key)) else None for key in _AGAINST}
                rows.append({**_training_row(own), "run": trial.run, **shares})
    return rows


def _training_row(own: RoundsRecord) -> TableRow:
    row = {
        key: value for key, value in fields(own).items() if key not in ("time", "version", "exchange_times_s")
    }
    return row | {
        "seed": "" if own.seed is None else str(own.seed),
        "outcomes": most_first(own.outcomes),
        "why": most_first(own.why),
        "curve": [asdict(point) for point in curve_points(own)],
        "times_s": exchange_times_s(own),
    }


def strategy_rows(found: Sequence[Trial]) -> list[TableRow]:
    """A row a strategy: mean, extremes and count over the seeds."""
    rows = []
    for trial in found:
        for strategy in trial.strategies:
            first = strategy.first
            row: TableRow = {key: getattr(first, key) for key in _NAMES}
            figures = {key: getattr(strategy, key) for key in _AGAINST}
            figures |= {key: Over.of(getattr(own, key) for own in strategy.trainings) for key in _FIGURES}
            flat = {key: asdict(over) if over else None for key, over in figures.items()}
            rows.append(
                {
                    "run": trial.run,
                    **row,
                    "seeds": len(strategy.pairs),
                    "as_good": strategy.keeps_quality,
                    **flat,
                }
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
    rest = [strategy.name for trial in found for strategy in trial.strategies if strategy.name not in grey]
    ink = drawing.colours(["", *rest])
    return ink | dict.fromkeys(grey, ink[""])
