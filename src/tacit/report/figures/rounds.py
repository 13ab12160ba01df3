"""The figures of a trial: what was learned against bytes and time, exchanges, consensus and drift over time, and what is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from tacit.extras import extra
from tacit.record_types import RoundsRecord
from tacit.report.figures import drawing
from tacit.report.figures.drawing import INK
from tacit.report.figures.lab import focus
from tacit.report.model.rounds import (
    CurvePoint,
    Over,
    StrategyTrainings,
    Trial,
    curve_points,
    exchange_times_s,
)
from tacit.report.text import share_text, short
from tacit.units import size_text

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Colours = Mapping[str, str]
Read = Callable[[CurvePoint], float | None]
SAVED = {"bytes": "#4477cc", "time": "#e07b39"}
DRAWN = 80  # points of a line of exchanges


def learned_by_bytes(trial: Trial, colours: Colours, name: str) -> str:
    """The mean model's metric against the bytes that a rank had sent by then, on a logarithmic axis."""
    with drawing.canvas(_height(trial)) as figure:
        axes = figure.subplots()
        _learned(axes, trial, colours, lambda point: point.nbytes if point.exchanges else None)
        axes.set_xscale("log")
        sizes = [point.nbytes for point in _points(trial) if point.exchanges and point.nbytes > 0]
        near = max(sizes) < 300 * min(sizes)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if near else (1,)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: size_text(v)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("sent by a rank")
        drawing.legend(figure)
        return drawing.svg(figure, name)


def learned_by_time(trial: Trial, colours: Colours, name: str) -> str:
    """The mean model's metric against the time at which the slowest rank got there."""
    unit, factor = _unit(trial)
    with drawing.canvas(_height(trial)) as figure:
        axes = figure.subplots()
        _learned(axes, trial, colours, lambda point: point.seconds / factor)
        axes.set(xlabel=f"{unit} of training", xlim=(0, None))
        drawing.legend(figure)
        return drawing.svg(figure, name)


def _learned(axes: Axes, trial: Trial, colours: Colours, x: Read) -> None:
    for strategy in trial.strategies:
        _seeds(axes, strategy, colours[strategy.name], x, lambda point: point.metric)
    values = [point.metric for point in _points(trial) if point.metric is not None]
    focus(axes, values, trial.first.higher_is_better, None)
    ends = [
        points[-1].metric
        for strategy in trial.strategies
        for own in strategy.trainings
        if (points := curve_points(own))
    ]
    (low, high), known = axes.get_ylim(), [end for end in ends if end is not None]
    margin = 0.04 * (high - low)
    axes.set_ylim(min(low, *(end - margin for end in known)), max(high, *(end + margin for end in known)))
    if trial.first.higher_is_better and all(0 <= v <= 1 for v in values):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))
    axes.set_ylabel(trial.first.metric)


def exchanges_over_time(trial: Trial, colours: Colours, name: str) -> str:
    """In how many exchanges a rank has taken part by then, a line a seed."""
    unit, factor = _unit(trial)
    with drawing.canvas(_height(trial)) as figure:
        axes = figure.subplots()
        for strategy in trial.strategies:
            for place, own in enumerate(strategy.trainings):
                x, y = _begun(own)
                label = short(strategy.name) if place == 0 else None
                axes.plot(
                    [t / factor for t in x], y, color=colours[strategy.name], lw=1.3, alpha=0.85, label=label
                )
        _log(axes, "exchanges a rank", lambda v: f"{v:,.0f}" if v >= 1 else f"{v:g}")
        axes.set(xlabel=f"{unit} of training", xlim=(0, None))
        drawing.legend(figure)
        return drawing.svg(figure, name)


def _begun(own: RoundsRecord) -> tuple[list[float], list[float]]:
    """A line's points: after so many seconds so many exchanges, a mean over ranks."""
    times = sorted(time for rank in exchange_times_s(own) for time in rank)
    a_rank = (own.exchanges or len(times) / max(1, len(own.exchange_times_s))) / max(1, len(times))
    kept = sorted({*range(0, len(times), max(1, len(times) // DRAWN)), *range(len(times))[-1:]})
    return [times[k] for k in kept], [a_rank * (k + 1) for k in kept]


def apart_over_time(trial: Trial, colours: Colours, name: str) -> str:
    """How far the ranks' models are from their mean."""
    return _over_time(trial, colours, name, lambda point: point.apart or None, "distance from the mean model")


def drift_over_time(trial: Trial, colours: Colours, name: str) -> str:
    """How far a model, or the layer of it that had come farthest, had moved when an exchange fired."""
    return _over_time(trial, colours, name, lambda point: point.drift or None, "moved when it fired")


def _over_time(trial: Trial, colours: Colours, name: str, y: Read, label: str) -> str:
    unit, factor = _unit(trial)
    shown = [
        r for r in trial.strategies if any(y(point) for own in r.trainings for point in curve_points(own))
    ]
    with drawing.canvas(2.7 + 0.19 * len(shown)) as figure:
        axes = figure.subplots()
        for strategy in shown:
            _seeds(axes, strategy, colours[strategy.name], lambda point: point.seconds / factor, y)
        _log(axes, label, lambda v: f"{100 * v:.2g} %")
        axes.set(xlabel=f"{unit} of training", xlim=(0, None))
        drawing.legend(figure)
        return drawing.svg(figure, name)


def saved_bars(trial: Trial, name: str) -> str:
    """Bytes and time as shares of the baseline's: means over the seeds, whiskers from the least to the most."""
    strategies = [strategy for strategy in trial.others if strategy.bytes_share or strategy.time_ratio]
    with drawing.canvas(0.62 * len(strategies) + 1.15) as figure:
        axes = figure.subplots()
        labels = []
        for place, strategy in enumerate(strategies):
            shares = {"bytes": strategy.bytes_share, "time": strategy.time_ratio}
            for lane, (what, share) in enumerate(shares.items()):
                _share_bar(axes, place - 0.04 + 0.22 * lane, share, SAVED[what])
            labels.append(" · ".join(f"{share_text(s.mean)} {what}" for what, s in shares.items() if s))
            axes.plot([100, 100], [place - 0.15, place + 0.29], color=INK, lw=0.9)
        drawing.name_bars(axes, [strategy.name for strategy in strategies], labels)
        axes.set_xlabel("% of the baseline's, which the mark shows")
        handles = [Patch(color=colour, label=what) for what, colour in SAVED.items()]
        drawing.legend(figure, handles=handles, ncols=2, handlelength=0.8)
        return drawing.svg(figure, name)


def _share_bar(axes: Axes, place: float, share: Over | None, colour: str) -> None:
    if share is None:
        return
    axes.barh(place, 100 * share.mean, 0.18, color=colour)
    if share.n > 1:
        axes.plot([100 * share.least, 100 * share.most], [place, place], color=INK, lw=1, marker="|", ms=4)


def _seeds(axes: Axes, strategy: StrategyTrainings, colour: str, x: Read, y: Read) -> None:
    """Each seed thin, their mean thick: at a step that all of them have, of both axes."""
    curves: list[dict[int, tuple[float, float]]] = []
    for own in strategy.trainings:
        pairs = {point.step: (x(point), y(point)) for point in curve_points(own)}
        curves.append({s: (a, b) for s, (a, b) in pairs.items() if a is not None and b is not None})
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    for curve in curves if len(curves) > 1 else []:
        axes.plot(*_xy(list(curve.values())), color=colour, lw=0.6, alpha=0.45)
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = [(fmean(c[s][0] for c in curves), fmean(c[s][1] for c in curves)) for s in steps]
    axes.plot(*_xy(means), color=colour, lw=1.7, label=short(strategy.name))
    axes.plot(*_xy(means[-1:]), "o", color=colour, ms=4.5, mec=INK, mew=0.7)


def _xy(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _log(axes: Axes, label: str, show: Callable[[float], str]) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high < 30 * low else (1, 3) if high < 300 * low else (1,))
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: show(v)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


def _points(trial: Trial) -> list[CurvePoint]:
    return [
        point for strategy in trial.strategies for own in strategy.trainings for point in curve_points(own)
    ]


def _unit(trial: Trial) -> tuple[str, float]:
    longest = max(own.seconds for strategy in trial.strategies for own in strategy.trainings)
    return ("minutes", 60.0) if longest >= 600 else ("seconds", 1.0)


def _height(trial: Trial) -> float:
    return 3.0 + 0.19 * len(trial.strategies)
