"""A plan's figures: predicted steps with their intervals, and predictions against what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from tacit.record_types import PredictedFacts
from tacit.report.figures import drawing
from tacit.report.figures.drawing import INK
from tacit.units import time_text

Point = tuple[float, float, str, str]
"""Measured seconds, predicted seconds, the choice, the network."""


def predicted_steps(rows: Sequence[PredictedFacts], name: str) -> str:
    """The predicted step of each choice, the whisker from the low to the high end; the line is the step without an exchange."""
    values = [1e3 * row.step_s for row in rows]
    reach = [
        [1e3 * (row.step_s - row.low_s) for row in rows],
        [1e3 * (row.high_s - row.step_s) for row in rows],
    ]
    colours = {"compute": drawing.COLOURS[3], "wire": drawing.COLOURS[1], "codec": drawing.COLOURS[5]}
    with drawing.canvas(0.52 * len(rows) + 1.1) as figure:
        axes = figure.subplots()
        axes.barh(range(len(rows)), values, height=0.38, color=[colours.get(r.limited_by, INK) for r in rows])
        axes.errorbar(values, range(len(rows)), xerr=reach, fmt="none", ecolor=INK, lw=1, capsize=3)
        axes.axvline(1e3 * rows[0].compute_s, color=INK, lw=1, ls=":")
        drawing.name_bars(axes, [row.choice for row in rows], [time_text(row.step_s) for row in rows])
        axes.set_xlabel("predicted ms a step; dotted: without an exchange")
        for limit, colour in colours.items():
            axes.barh(
                0, 0, color=colour, label=f"limited by the {limit}" if limit != "compute" else "by compute"
            )
        drawing.legend(figure, ncols=3)
        return drawing.svg(figure, name)


def predicted_against_measured(points: Sequence[Point], share: float, name: str) -> str:
    """A point for each set-up and choice, and the band in which a prediction is at most `share` off."""
    colours = drawing.colours([choice for _, _, choice, _ in points])
    with drawing.canvas(4.6) as figure:
        axes = figure.subplots()
        seconds = [s for measured, predicted, *_ in points for s in (measured, predicted)]
        ends = [0.8e3 * min(seconds), 1.25e3 * max(seconds)]
        axes.fill_between(
            ends,
            [e * (1 - share) for e in ends],
            [e * (1 + share) for e in ends],
            color=INK,
            alpha=0.08,
            lw=0,
        )
        axes.plot(ends, ends, color=INK, lw=0.8)
        for choice, colour in colours.items():
            own = [(1e3 * m, 1e3 * p) for m, p, c, _ in points if c == choice]
            across, up = [m for m, _ in own], [p for _, p in own]
            axes.scatter(across, up, s=16, color=colour, label=choice, lw=0)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "25" else "")
        axes.set_xlabel("measured ms a step")
        axes.set_ylabel(f"predicted; the band is {100 * share:.0f} %")
        drawing.legend(figure, ncols=2)
        return drawing.svg(figure, name)
