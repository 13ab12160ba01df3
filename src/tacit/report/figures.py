"""Figures as SVG text that takes its ink from the page, so one drawing reads well in light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tacit.report.summary import Row, ratio_text
from tacit.units import size_text, time_text

INK = "#010203"  # stands for the page's own text colour; no colour below comes near it
# Mid-tones, told apart by lightness as well as hue (after Paul Tol's "bright" and "muted" sets).
COLOURS = ("#8c8c8c", "#4477cc", "#2fa8c9", "#2f9e62", "#c9a227", "#e07b39", "#c4517f", "#8f6bc0")
SMOOTHING = 0.85
WIDTH_IN = 4.4  # narrow enough for a phone to show the text at its own size

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "grid.color": INK,
    "legend.frameon": False,
}


def loss_curves(rows: Sequence[Row], name: str) -> str:
    """Training loss over steps, a line a configuration, smoothed; below, its distance to the first one's."""
    curves = [_smooth(row.loss) for row in rows]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 4.8), layout="constrained")
        loss, distance = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        for row, curve, colour in zip(rows, curves, _colours(rows), strict=True):
            steps = range(1, len(curve) + 1)
            loss.plot(steps, curve, color=colour, lw=1.4, label=row.configuration)
            distance.plot(steps, [a - b for a, b in zip(curve, curves[0], strict=True)], color=colour, lw=1.2)
        loss.set(ylabel="loss, smoothed")
        distance.set(ylabel="– plain DDP", xlabel="step")
        figure.legend(loc="outside lower left", fontsize=8.5, labelspacing=0.25)
        return _svg(figure, name)


def bytes_bars(rows: Sequence[Row], name: str) -> str:
    """Bytes each worker sends a step, a bar a configuration."""
    labels = [f"{size_text(row.sent_nbytes_a_step)} · {ratio_text(row)}" for row in rows]
    return _bars(rows, [row.sent_nbytes_a_step / 1e6 for row in rows], labels, "MB a step a worker", name)


def time_bars(rows: Sequence[Row], name: str) -> str:
    """Median time a step, a bar a configuration; the whisker ends at the 95th percentile."""
    labels = [f"{time_text(row.step_p50_s)} · {row.step_ratio:.2f}×" for row in rows]
    whiskers = [1e3 * (row.step_p95_s - row.step_p50_s) for row in rows]
    return _bars(rows, [1e3 * row.step_p50_s for row in rows], labels, "ms a step, median", name, whiskers)


def _bars(
    rows: Sequence[Row],
    values: list[float],
    labels: list[str],
    unit: str,
    name: str,
    whiskers: list[float] | None = None,
) -> str:
    places = range(len(rows))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.52 * len(rows) + 0.7), layout="constrained")
        axes = figure.subplots()
        axes.barh(places, values, height=0.38, color=_colours(rows))
        if whiskers:
            reach = [[0.0] * len(rows), whiskers]
            axes.errorbar(values, places, xerr=reach, fmt="none", ecolor=INK, lw=1, capsize=3)
        _name_bars(axes, [row.configuration for row in rows], labels)
        axes.set_xlabel(unit)
        return _svg(figure, name)


def _name_bars(axes: Axes, names: list[str], labels: list[str]) -> None:
    """Names and figures stand above the bars, not beside them: a phone has no room for both."""
    across = axes.get_yaxis_transform()
    for place, (name, label) in enumerate(zip(names, labels, strict=True)):
        axes.text(0, place - 0.27, name, fontsize=9, transform=across)
        axes.text(1, place - 0.27, label, fontsize=9, transform=across, ha="right")
    axes.set_ylim(len(names) - 0.5, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _colours(rows: Sequence[Row]) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(len(rows))]


def _smooth(values: Sequence[float | None]) -> list[float]:
    """An exponential average without the start's bias; a value that was not finite stays a gap."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        if value is None:
            smoothed.append(float("nan"))
            continue
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1
        smoothed.append(total / weight)
    return smoothed


def _svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element: no prologue, no metadata, ids made unique by `name`."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg role="img" viewBox="\1">', text, count=1)
    return text.replace("xlink:href", "href")  # HTML knows no xlink prefix
