"""The demo's figures: bytes, times and losses of the trainings of one task."""

from __future__ import annotations

from collections.abc import Sequence

from tacit.report.figures import drawing
from tacit.report.figures.drawing import INK
from tacit.report.model.summary import TrainingRow, ratio_text
from tacit.units import size_text, time_text

SMOOTHING = 0.85


def loss_curves(rows: Sequence[TrainingRow], name: str) -> str:
    """Training loss over steps, a line a configuration, smoothed; below, its distance to the first one's."""
    curves = [_smooth(row.loss) for row in rows]
    with drawing.canvas(4.8) as figure:
        loss, distance = figure.subplots(2, sharex=True, height_ratios=(3, 2))
        for row, curve, colour in zip(rows, curves, _colours(rows), strict=True):
            steps = range(1, len(curve) + 1)
            loss.plot(steps, curve, color=colour, lw=1.4, label=row.configuration)
            apart = [a - b for a, b in zip(curve, curves[0], strict=False)]
            distance.plot(steps[: len(apart)], apart, color=colour, lw=1.2)
        loss.set(ylabel="loss, smoothed")
        distance.set(ylabel="– plain DDP", xlabel="step")
        drawing.legend(figure)
        return drawing.svg(figure, name)


def bytes_bars(rows: Sequence[TrainingRow], name: str) -> str:
    """Bytes each worker sends a step, a bar a configuration."""
    labels = [f"{size_text(row.sent_nbytes_a_step)} · {ratio_text(row)}" for row in rows]
    return _bars(rows, [row.sent_nbytes_a_step / 1e6 for row in rows], labels, "MB a step a worker", name)


def time_bars(rows: Sequence[TrainingRow], name: str) -> str:
    """Median time a step, a bar a configuration; the whisker ends at the 95th percentile."""
    labels = [f"{time_text(row.step_p50_s)} · {row.step_ratio:.2f}×" for row in rows]
    whiskers = [1e3 * (row.step_p95_s - row.step_p50_s) for row in rows]
    return _bars(rows, [1e3 * row.step_p50_s for row in rows], labels, "ms a step, median", name, whiskers)


def _bars(
    rows: Sequence[TrainingRow],
    values: list[float],
    labels: list[str],
    unit: str,
    name: str,
    whiskers: list[float] | None = None,
) -> str:
    places = range(len(rows))
    with drawing.canvas(0.52 * len(rows) + 0.7) as figure:
        axes = figure.subplots()
        axes.barh(places, values, height=0.38, color=_colours(rows))
        if whiskers:
            reach = [[0.0] * len(rows), whiskers]
            axes.errorbar(values, places, xerr=reach, fmt="none", ecolor=INK, lw=1, capsize=3)
        drawing.name_bars(axes, [row.configuration for row in rows], labels)
        axes.set_xlabel(unit)
        return drawing.svg(figure, name)


def _colours(rows: Sequence[TrainingRow]) -> list[str]:
    return list(drawing.colours([f"{place}" for place in range(len(rows))]).values())


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
