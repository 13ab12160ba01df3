"""Accuracy against bytes with the frontier drawn, and time to the target: many configurations, numbered by what they send."""

from __future__ import annotations

from collections.abc import Mapping

from tacit.extras import extra
from tacit.report.figures import drawing
from tacit.report.figures.drawing import INK
from tacit.report.model.comparisons import Comparison, Standing
from tacit.report.model.frontier import end, frontier, placed, sent_nbytes, shown_from
from tacit.report.text import duration_text, metric_text, short
from tacit.units import size_text

with extra("report"):
    from matplotlib.axes import Axes
    from matplotlib.ticker import FuncFormatter

ON, OFF = "#2f9e62", "#8c8c8c"  # on the frontier, and behind it


def accuracy_against_bytes(comparison: Comparison, name: str) -> str:
    """A number a configuration, from the fewest bytes; green on the frontier, an arrow where it ended below the figure."""
    trained, shown, best = comparison.trained, placed(comparison), frontier(comparison)
    assert trained is not None
    up = trained.higher_is_better
    edge = shown_from([end(s) for s in shown], up)
    with drawing.canvas(3.3 + 0.17 * len(shown)) as figure:
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.step(
            [*(sent_nbytes(s) for s in best), sent_nbytes(shown[-1])],
            [*(end(s) for s in best), end(best[-1])],
            where="post",
            color=ON,
            lw=1.2,
        )
        lines = []
        for number, standing in enumerate(shown, 1):
            colour = ON if standing in best else OFF
            _numbered(axes, number, standing, colour, edge, up)
            told = f"{number}  {short(_codec(standing.name), 34)}: {size_text(sent_nbytes(standing))}, {metric_text(end(standing), up)}"
            lines.append((colour, told))
        worst, most = edge, max if up else min
        limits = worst, most(end(s) for s in shown)
        margin = 0.07 * abs(limits[1] - limits[0])
        axes.set_ylim(min(limits) - margin, max(limits) + margin)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: size_text(v)))
        if up and all(0 <= end(s) <= 1 for s in shown):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))
        axes.set(xlabel="sent by a rank in a step", ylabel=trained.metric)
        handles = [axes.plot([], [], "o", ms=4, color=colour, label=told)[0] for colour, told in lines]
        drawing.legend(figure, handles=handles, handletextpad=0.2)
        return drawing.svg(figure, name)


def _codec(name: str) -> str:
    """`every / int8(block=256) / sharded` as int8(block=256): when and who are the same for all."""
    parts = name.split(" / ")
    return parts[1] if len(parts) == 3 and parts[0] == "every" else name


def _numbered(axes: Axes, number: int, standing: Standing, colour: str, edge: float, up: bool) -> None:
    value = end(standing)
    below = value < edge if up else value > edge
    axes.plot(
        sent_nbytes(standing),
        edge if below else value,
        "v" if below and up else "^" if below else "o",
        ms=3.5,
        color=colour,
    )
    axes.annotate(
        str(number),
        (sent_nbytes(standing), edge if below else value),
        xytext=(0, 4 if number % 2 else -10),
        textcoords="offset points",
        ha="center",
        fontsize=7.5,
        color=INK,
    )
    if len(standing.seeds) > 1 and standing.final and not below:
        axes.plot(
            [sent_nbytes(standing)] * 2, [standing.final.least, standing.final.most], color=colour, lw=1
        )


def time_to_target(comparison: Comparison, colours: Mapping[str, str], name: str) -> str:
    """A bar a configuration, the fastest first; whiskers over the seeds. Those that did not get there stand below, with where they ended."""
    trained = comparison.trained
    assert trained is not None
    arrived = [s for s in comparison.ranked() if s.seeds]
    missed = [s for s in comparison.standings if s.seeds and s.to_target is None]
    everyone = [*arrived, *missed]
    with drawing.canvas(0.36 * len(everyone) + 0.9) as figure:
        axes = figure.subplots()
        labels = []
        for place, standing in enumerate(everyone):
            spread = standing.to_target
            if spread is None:
                labels.append(f"not reached, {metric_text(end(standing), trained.higher_is_better)}")
                continue
            axes.barh(place, spread.p50, 0.2, color=colours[standing.name])
            if spread.n > 1:
                axes.plot([spread.least, spread.most], [place, place], color=INK, lw=1, marker="|", ms=5)
            labels.append(duration_text(spread.p50))
        drawing.name_bars(axes, [_codec(s.name) for s in everyone], labels)
        axes.set_xlabel("seconds to the target")
        return drawing.svg(figure, name)
