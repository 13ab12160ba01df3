"""The lab's figures: accuracy over time, what a step consists of, bytes, rates, limits; and the simulator's sweeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from tacit.extras import extra
from tacit.report.figures import drawing
from tacit.report.figures.drawing import INK
from tacit.report.model.comparisons import Comparison, Standing
from tacit.report.model.tables import TableRow
from tacit.report.text import metric_text, rate_text, short, times_text
from tacit.units import size_text, time_text

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Colours = Mapping[str, str]
TRAINING = {"compute": "#8c8c8c", "waiting": "#e07b39", "rest": "#c9a227"}  # what the training thread does
BESIDE = {"encode": "#4477cc", "wire": "#2fa8c9", "decode": "#2f9e62"}  # what tacit's threads do meanwhile
LANE = 0.2


def accuracy_over_time(comparison: Comparison, colours: Colours, name: str) -> str:
    """Every configuration's accuracy against time at this rate: the median of its seeds thick, each seed thin."""
    trained = comparison.trained
    assert trained is not None
    shown = [s for s in comparison.standings if any(seed.points for seed in s.seeds)]
    longest = max(s.timing.step_p50_s * seed.points[-1][0] for s in shown for seed in s.seeds if seed.points)
    reached = [s.to_target.most for s in shown if s.to_target]
    longest = min(longest, 1.3 * max(reached, default=longest))  # beyond, nothing is decided
    unit, factor = ("minutes", 60) if longest >= 600 else ("seconds", 1)
    with drawing.canvas(3.1 + 0.19 * len(shown)) as figure:
        axes = figure.subplots()
        for standing in shown:
            _curves(axes, standing, colours[standing.name], factor)
        if trained.target is not None:
            axes.axhline(trained.target, color=INK, lw=0.8, ls=(0, (4, 3)))
            told = f"target {metric_text(trained.target, trained.higher_is_better)}"
            axes.annotate(told, (1, trained.target), xycoords=("axes fraction", "data"), xytext=(0, -11),
                          textcoords="offset points", ha="right", fontsize=8.5)  # fmt: skip
        values = [v for s in shown for seed in s.seeds for _, v in seed.points]
        focus(axes, values, trained.higher_is_better, trained.target)
        if trained.higher_is_better and all(0 <= v <= 1 for v in values):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))
        axes.set(xlabel=f"{unit} of training", ylabel=trained.metric, xlim=(0, longest / factor))
        drawing.legend(figure)
        return drawing.svg(figure, name)


def _curves(axes: Axes, standing: Standing, colour: str, factor: float) -> None:
    step_s = standing.timing.step_p50_s / factor
    for seed in standing.seeds:
        axes.plot(
            [step_s * x for x, _ in seed.points],
            [y for _, y in seed.points],
            color=colour,
            lw=0.6,
            alpha=0.45,
        )
    curves = [dict(seed.points) for seed in standing.seeds if seed.points]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    middle = [median(curve[step] for curve in curves) for step in steps]
    axes.plot([step_s * step for step in steps], middle, color=colour, lw=1.7, label=short(standing.name))
    spread, target = standing.to_target, standing.seeds[0].target
    if spread and target is not None:
        axes.plot([spread.p50 / factor], [target], "o", ms=5, color=colour, mec=INK, mew=0.7, zorder=5)


def focus(axes: Axes, values: Sequence[float], higher_is_better: bool, target: float | None) -> None:
    """Leaves out the first climb, which would press the rest into a line; the target is always seen."""
    if len(values) < 10:
        return
    low, high = min(values), max(values)
    third, two_thirds = quantiles(values, n=3)
    low, high = (third, high) if higher_is_better else (low, two_thirds)
    if target is not None:
        low, high = min(low, target), max(high, target)
    margin = 0.06 * (high - low)
    axes.set_ylim(low - margin, high + margin)


def step_bars(comparison: Comparison, name: str) -> str:
    """What a step consists of: above, the training thread (they add up to the step); below, tacit's threads beside it."""
    standings = comparison.standings
    scale, unit = _time_scale(max(s.timing.step_p50_s for s in standings))
    with drawing.canvas(0.6 * len(standings) + 1.25) as figure:
        axes = figure.subplots()
        for place, standing in enumerate(standings):
            _lane(axes, place - 0.02, LANE, training_parts(standing), TRAINING, scale)
            _whisker(axes, standing, place - 0.02, scale)
            beside = {part: getattr(standing.timing.split, f"{part}_s") or 0.0 for part in BESIDE}
            _lane(axes, place + 0.17, 0.55 * LANE, beside, BESIDE, scale)
        labels = [_labelled(s) for s in standings]
        drawing.name_bars(axes, [s.name for s in standings], labels)
        axes.set_xlabel(f"{unit} a step, median; whisker p10 to p90")
        handles = [Patch(color=colour, label=part) for part, colour in (TRAINING | BESIDE).items()]
        drawing.legend(
            figure, handles=handles, ncols=6, handlelength=0.8, handletextpad=0.4, columnspacing=0.9
        )
        return drawing.svg(figure, name)


def _lane(
    axes: Axes, place: float, height: float, parts: Mapping[str, float], ink: Colours, scale: float
) -> None:
    left = 0.0
    for part, seconds in parts.items():
        if seconds > 0:
            axes.barh(place, seconds * scale, height, left=left, color=ink[part])
            left += seconds * scale


def training_parts(standing: Standing) -> dict[str, float]:
    """The step as the training thread spends it. Medians of parts need not add up: what is over is cut from waiting."""
    timing = standing.timing
    compute = min(timing.compute_s or 0.0, timing.step_p50_s)
    waiting = min(timing.split.wait_s or 0.0, timing.step_p50_s - compute)
    return {"compute": compute, "waiting": waiting, "rest": timing.step_p50_s - compute - waiting}


def _whisker(axes: Axes, standing: Standing, place: float, scale: float) -> None:
    timing = standing.timing
    if timing.step_p10_s and timing.step_p90_s:
        ends = [scale * timing.step_p10_s, scale * timing.step_p90_s]
        axes.plot(ends, [place, place], color=INK, lw=1, marker="|", ms=5)


def _labelled(standing: Standing) -> str:
    ratio = f" · {times_text(standing.speedup)}" if standing.speedup else ""
    return time_text(standing.timing.step_p50_s) + ratio


def byte_bars(comparison: Comparison, colours: Colours, name: str) -> str:
    """Bytes a rank sends in a step: as counted where they leave (solid), and as the interface saw them (outline)."""
    standings = [s for s in comparison.standings if s.timing.sent_nbytes_a_step is not None]
    plain = comparison.fp32
    with drawing.canvas(0.52 * len(standings) + 0.9) as figure:
        axes = figure.subplots()
        labels = []
        for place, standing in enumerate(standings):
            sent, seen = standing.timing.sent_nbytes_a_step or 0.0, standing.timing.interface_nbytes_a_step
            axes.barh(place, sent / 1e6, 0.3, color=colours[standing.name])
            if seen is not None:
                axes.barh(place, seen / 1e6, 0.3, fill=False, edgecolor=INK, lw=0.9)
            fewer = (
                plain and plain.timing.sent_nbytes_a_step and sent and plain.timing.sent_nbytes_a_step / sent
            )
            labels.append(
                size_text(sent) + (f" · {times_text(fewer)} fewer" if fewer and fewer > 1.005 else "")
            )
        drawing.name_bars(axes, [s.name for s in standings], labels)
        axes.set_xlabel("MB a step a rank; outline: at the interface")
        return drawing.svg(figure, name)


def speedup_by_rate(family: Sequence[Comparison], colours: Colours, name: str) -> str:
    """Step-time speed-up against fp32 DDP over the link's rate, a line a configuration; whiskers p10 to p90."""
    names = list(dict.fromkeys(s.name for comparison in family for s in comparison.standings))
    with drawing.canvas(3.0 + 0.19 * len(names)) as figure:
        axes = figure.subplots()
        for place, configuration in enumerate(names):
            points = [(c, s) for c in family for s in c.standings if s.name == configuration and s.speedup]
            nudge = 1 + 0.012 * (place - len(names) / 2)  # so that whiskers of equals stand side by side
            x = [nudge * (comparison.first.rate_bps or 0) for comparison, _ in points]
            y = [s.speedup or 0.0 for _, s in points]
            low = [max(0.0, v - (s.timing.speedup_p10 or v)) for v, (_, s) in zip(y, points, strict=True)]
            high = [max(0.0, (s.timing.speedup_p90 or v) - v) for v, (_, s) in zip(y, points, strict=True)]
            axes.errorbar(x, y, yerr=[low, high], color=colours[configuration], lw=1.4, marker="o", ms=4,
                          elinewidth=1, label=short(configuration))  # fmt: skip
        axes.axhline(1, color=INK, lw=0.8, ls=(0, (4, 3)))
        rates = [comparison.first.rate_bps for comparison in family if comparison.first.rate_bps]
        _log_ticks(axes, {rate: rate_text(rate) for rate in rates})
        if max(s.speedup or 0 for comparison in family for s in comparison.standings) > 8:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        axes.set(xlabel="link rate", ylabel="times as fast as fp32 DDP")
        drawing.legend(figure)
        return drawing.svg(figure, name)


def predicted_against_measured(rows: Sequence[TableRow], colours: Colours, name: str) -> str:
    """A dot a configuration and rate; on the line the prediction was right, in the band within 10 %."""
    names = list(dict.fromkeys(row["configuration"] for row in rows))
    with drawing.canvas(3.4 + 0.19 * len(names)) as figure:
        axes = figure.subplots()
        for configuration in names:
            own = [row for row in rows if row["configuration"] == configuration]
            measured, predicted = [row["measured_s"] for row in own], [row["predicted_s"] for row in own]
            axes.plot(
                measured,
                predicted,
                "o",
                ms=5,
                color=colours[configuration],
                label=short(configuration),
                alpha=0.9,
            )
        both = [row[key] for row in rows for key in ("measured_s", "predicted_s")]
        ends = [0.8 * min(both), 1.25 * max(both)]
        axes.plot(ends, ends, color=INK, lw=0.8)
        axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color=INK, alpha=0.08, lw=0)
        _log_times(axes, "x", ends)
        _log_times(axes, "y", ends)
        axes.set(xlabel="measured step", ylabel="predicted step", xlim=ends, ylim=ends)
        drawing.legend(figure)
        return drawing.svg(figure, name)


def limits_dots(rows: Sequence[TableRow], name: str) -> str:
    """How near an all-reduce comes to the link's own limit: measured over theory, against its size."""
    rates = sorted({row["rate_bps"] for row in rows if row["rate_bps"]})
    with drawing.canvas(2.6 + 0.19 * len(rates)) as figure:
        axes = figure.subplots()
        ink = drawing.colours(["", *map(str, rates)])
        for rate in rates:
            own = sorted(
                (r["nbytes"], r["ratio"])
                for r in rows
                if r["rate_bps"] == rate and r["ratio"] and r["nbytes"]
            )
            label = rate_text(rate)
            axes.plot(
                [n for n, _ in own],
                [r for _, r in own],
                "o-",
                ms=4,
                lw=1.2,
                color=ink[str(rate)],
                label=label,
            )
        axes.axhline(1, color=INK, lw=0.8)
        axes.axhspan(0.9, 1.1, color=INK, alpha=0.08, lw=0)
        ratios = [row["ratio"] for row in rows if row["ratio"]]
        axes.set(
            ylim=(min(0.85, *ratios) - 0.02, max(1.15, *ratios) + 0.02),
            xlabel="payload",
            ylabel="measured over theory",
        )
        _log_sizes(axes, [row["nbytes"] for row in rows if row["nbytes"]])
        drawing.legend(figure, ncols=min(4, len(rates)))
        return drawing.svg(figure, name)


def cost_curves(rows: Sequence[TableRow], name: str) -> str:
    """Simulated time of each schedule over what the sweep varies: the world, else the payload."""
    over = "world" if len({row["world"] for row in rows}) > 1 else "nbytes"
    usable = [row for row in rows if row[over] and row["time_s"] > 0]
    names = list(dict.fromkeys(row["schedule"] for row in usable))
    ink = drawing.colours(names)
    with drawing.canvas(3.0 + 0.19 * len(names)) as figure:
        axes = figure.subplots()
        for schedule in names:
            own = [row for row in usable if row["schedule"] == schedule]
            axes.plot(
                *_xy(own, over, "time_s"), "o-", ms=4, lw=1.3, color=ink[schedule], label=short(schedule)
            )
        bound = [row for row in usable if row["bound_s"]]
        if bound:
            axes.plot(*_xy(bound, over, "bound_s"), color=INK, lw=1, ls=(0, (4, 3)), label="bound")
        _log_times(axes, "y", [row["time_s"] for row in usable])
        if over == "nbytes":
            _log_sizes(axes, [row["nbytes"] for row in usable])
        else:
            _log_ticks(axes, {row["world"]: f"{row['world']:g}" for row in usable})
        axes.set(xlabel="payload" if over == "nbytes" else "ranks", ylabel="simulated time")
        drawing.legend(figure)
        return drawing.svg(figure, name)


def _xy(rows: Sequence[TableRow], x: str, y: str) -> tuple[list[float], list[float]]:
    """A line's points: of the rows that share an x the least y."""
    least: dict[float, float] = {}
    for row in rows:
        least[row[x]] = min(row[y], least.get(row[x], row[y]))
    pairs = sorted(least.items())
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def runs_compared(rows: Sequence[TableRow], runs: Sequence[str], name: str) -> str:
    """Median steps of the same configuration in several runs, a dot a run."""
    scale, unit = _time_scale(max(max(row["step_s"].values()) for row in rows))
    ink = drawing.colours(["", *runs])
    with drawing.canvas(0.42 * len(rows) + 1.0 + 0.19 * len(runs)) as figure:
        axes = figure.subplots()
        for place, row in enumerate(rows):
            values = [scale * value for value in row["step_s"].values()]
            axes.plot([min(values), max(values)], [place, place], color=INK, lw=1, alpha=0.4)
            for run, value in row["step_s"].items():
                axes.plot([scale * value], [place], "o", ms=5.5, color=ink[run])
        names = [f"{short(row['configuration'], 30)} · {row['link']}" for row in rows]
        drawing.name_bars(axes, names, [f"{row['change']:.2f}×" for row in rows])
        axes.set(xlabel=f"{unit} a step, median", xlim=(0, None))
        drawing.legend(
            figure, handles=[Patch(color=ink[run], label=short(run)) for run in runs], handlelength=0.8
        )
        return drawing.svg(figure, name)


def _time_scale(longest_s: float) -> tuple[float, str]:
    return (1.0, "s") if longest_s >= 2 else (1e3, "ms")


def _log_times(axes: Axes, which: str, values: Sequence[float]) -> None:
    axis: Any = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    span = max(values) / min(values)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 30 else (1, 3) if span < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda v, _: time_text(v)))
    axis.set_minor_formatter(NullFormatter())


def _log_sizes(axes: Axes, sizes: Sequence[float]) -> None:
    _log_ticks(axes, {nbytes: size_text(nbytes) for nbytes in sizes})


def _log_ticks(axes: Axes, ticks: Mapping[float, str]) -> None:
    """A logarithmic x axis with these ticks, thinned to what a phone can hold."""
    places = sorted(ticks)
    kept = places[:: math.ceil(len(places) / 6)]
    axes.set_xscale("log")
    axes.set_xticks(kept, [ticks[place] for place in kept])
    axes.xaxis.set_minor_formatter(NullFormatter())
