"""Links over time, and a training step over time: where a schedule waits, and what of an exchange nothing hides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tacit.errors import ConfigError
from tacit.extras import extra
from tacit.schedules.schedule import Schedule, Stage
from tacit.sim.costs import Cost
from tacit.sim.drawing.pictures import GREY, INK, STYLE, heading, places
from tacit.sim.fabric import Fabric
from tacit.sim.fairness import finish
from tacit.sim.overlap import StepTime
from tacit.sim.routes import link_text, route
from tacit.sim.wavelengths import Assignment, Colours, assign, loads, optical_notes
from tacit.topology import Ints, Network
from tacit.units import time_text

with extra("report"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

MOST_ROWS = 128  # links of an electrical network in a timeline
MOST_ARCS = 4096
_ALIKE = 48  # stages beyond which those alike are one block of a timeline
LOAD = LinearSegmentedColormap.from_list("load", ["#a9dcd0", "#2fa8c9", "#4477cc", "#6a3fa0"])
STEP = {
    "forward": "#2f9e62",
    "backward": "#4477cc",
    "encode": "#c9a227",
    "transfer": "#e07b39",
    "decode": "#8f6bc0",
}


# ---- links over time ----


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """One stage, or one block of stages alike, in time."""

    name: str
    phase: int
    part: int
    start_s: float
    latency_s: float
    stop_s: float


def _spans(schedule: Schedule, cost: Cost) -> Iterator[_Span]:
    """Stages one after the other; where there are many, those alike are one block."""
    phases = [i for i, phase in enumerate(schedule.phases) if phase.times and len(phase.stage)]
    merged = cost.stage_count > _ALIKE
    start_s, number = 0.0, 0
    for i, stage in zip(phases, cost.stages, strict=True):
        times = 1 if merged else stage.times
        for k in range(times):
            for part in range(stage.parts):
                took_s = (stage.latency_s + stage.transfer_s) * (stage.times if merged else 1)
                name = (
                    f"stages {number} to {number + stage.times - 1}"
                    if merged and stage.times > 1
                    else f"stage {number + k}"
                )
                name += f".{part + 1}" if stage.parts > 1 else ""
                yield _Span(
                    name, i, part, start_s, stage.latency_s * (stage.times if merged else 1), start_s + took_s
                )
                start_s += took_s
        number += stage.times


def draw_timeline(schedule: Schedule, nbytes: float, fabric: Fabric, title: str | None = None) -> Figure:
    """Links over time: on an optical ring every arc of both fibres, and how much of its light is in use; else every link."""
    cost = fabric.cost(schedule, nbytes)
    if not cost.stages:
        raise ConfigError(
            f"{schedule.name} among {schedule.world} ranks sends nothing; there is nothing to draw"
        )
    spans = list(_spans(schedule, cost))
    if len(spans) > 20 * _ALIKE:
        raise ConfigError(
            f"{schedule.name} has {len(spans):,} stages and parts in a row; the limit of a timeline is {20 * _ALIKE}"
        )
    with matplotlib.rc_context(STYLE):
        drawer = _arcs if fabric.ring is not None else _wires
        figure = drawer(schedule, nbytes, fabric, cost, spans)
        heading(figure, title or schedule.name, schedule, fabric, f": {time_text(cost.time_s)}")
    return figure


def _arcs(schedule: Schedule, nbytes: float, fabric: Fabric, cost: Cost, spans: list[_Span]) -> Figure:
    ring = fabric.ring
    assert ring is not None
    if ring.nodes > MOST_ARCS:
        raise ConfigError(
            f"a ring of {ring.nodes:,} nodes has more arcs than a timeline can show; the limit is {MOST_ARCS:,}"
        )
    figure = Figure(figsize=(9.2, 6.4))
    figure.subplots_adjust(left=0.075, right=0.985, top=0.83, bottom=0.155, hspace=0.12)
    both = figure.subplots(2, sharex=True)
    unit_s, unit = _time_unit(cost.time_s)
    lights = _lights(schedule, fabric)
    for span in spans:
        light = lights[span.phase]
        load = loads(light.paths, ring.nodes, np.where(light.part == span.part, light.stripes, 0))
        for axes, row in zip(both, load, strict=True):
            _setup(axes, span, unit_s, ring.nodes)
            for low, high, value in _runs(row):
                x = (span.start_s + span.latency_s) / unit_s
                width = span.stop_s / unit_s - x
                colour = LOAD(value / ring.wavelengths)
                axes.add_patch(
                    Rectangle((x, low), width, high - low, facecolor=colour, edgecolor=colour, lw=0.15)
                )
        _name_span(
            both[0],
            span,
            cost.time_s,
            unit_s,
            ring.nodes,
            f"{100 * load.sum() / (2 * ring.nodes * ring.wavelengths):.0f} %",
        )
    for axes, way in zip(both, ("clockwise", "counter-clockwise"), strict=True):
        axes.set(xlim=(0, cost.time_s / unit_s), ylim=(0, ring.nodes), ylabel=f"arc, {way}")
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
    both[1].set_xlabel(f"time, {unit}")
    _ramp(
        figure,
        f"wavelengths in use on an arc, of {ring.wavelengths}; above: share of all light in use; grey: set-up",
        ring.wavelengths,
    )
    return figure


def _lights(schedule: Schedule, fabric: Fabric) -> dict[int, Assignment]:
    known, found = Colours(), {}
    assert fabric.ring is not None
    for i, phase in enumerate(schedule.phases):
        clockwise, wavelength = optical_notes(schedule, i)
        if phase.times and len(phase.stage):
            found[i] = assign(
                phase.stage,
                fabric.ring,
                clockwise=clockwise,
                wavelength=wavelength,
                stripe=fabric.stripe,
                known=known,
            )
    return found


def _runs(row: Ints) -> Iterator[tuple[int, int, int]]:
    """(first, end, value) of every run of equal values above 0."""
    edges = np.flatnonzero(np.r_[True, np.diff(row) != 0, True]).tolist()
    for low, high in pairwise(edges):
        if row[low] > 0:
            yield low, high, int(row[low])


def _setup(axes: Axes, span: _Span, unit_s: float, rows: int) -> None:
    axes.add_patch(
        Rectangle((span.start_s / unit_s, 0), span.latency_s / unit_s, rows, color=GREY, alpha=0.25, lw=0)
    )
    axes.axvline(span.start_s / unit_s, color=INK, lw=0.5, alpha=0.35)


def _name_span(axes: Axes, span: _Span, total_s: float, unit_s: float, top: float, more: str = "") -> None:
    """The name above the stage, where there is room for it."""
    share = (span.stop_s - span.start_s) / total_s
    x = (span.start_s + span.stop_s) / 2 / unit_s
    name = (
        span.name
        if share > 0.02 * len(span.name)
        else span.name.removeprefix("stage ").removeprefix("stages ")
    )
    if share > 0.016 * len(name):
        axes.annotate(
            name, (x, top), xytext=(0, 3), textcoords="offset points", fontsize=7.5, ha="center", va="bottom"
        )
    if more and share > 0.05:
        axes.annotate(
            more,
            (x, top),
            xytext=(0, 13),
            textcoords="offset points",
            fontsize=7,
            ha="center",
            va="bottom",
            alpha=0.7,
        )


def _ramp(figure: Figure, text: str, most: int | None) -> None:
    height_in = figure.get_figheight()
    axes = figure.add_axes((0.075, 0.12 / height_in, 0.2, 0.11 / height_in))
    axes.set_axis_off()
    steps = 60
    for i in range(steps):
        axes.add_patch(Rectangle((i, 0), 1.05, 1, color=LOAD((i + 1) / steps), lw=0))
    axes.set(xlim=(0, steps), ylim=(0, 1))
    figure.text(0.07, 0.175 / height_in, "1" if most else "0", fontsize=7, ha="right", va="center")
    figure.text(0.28, 0.175 / height_in, str(most) if most else "1", fontsize=7, va="center")
    figure.text(0.32, 0.175 / height_in, text, fontsize=7.5, va="center")


def _wires(schedule: Schedule, nbytes: float, fabric: Fabric, cost: Cost, spans: list[_Span]) -> Figure:
    network = fabric.network
    assert isinstance(network, Network)
    where = places(schedule, network, fabric.aggregators_on)
    busy = {
        i: _busy(phase.stage, nbytes / max(1, schedule.chunks), network, where)
        for i, phase in enumerate(schedule.phases)
        if phase.times and len(phase.stage)
    }
    links = sorted({link for stage in busy.values() for link in stage})
    if len(links) > MOST_ROWS:
        raise ConfigError(
            f"{schedule.name} uses {len(links)} links of {network}, one row each; the limit of a timeline is {MOST_ROWS}: take fewer ranks"
        )
    row_of = {link: row for row, link in enumerate(links)}
    height_in = 1.7 + min(9.0, max(1.2, 0.17 * len(links)))
    figure = Figure(figsize=(9.2, height_in))
    figure.subplots_adjust(left=0.14, right=0.985, top=1 - 0.82 / height_in, bottom=0.85 / height_in)
    axes = figure.subplots()
    unit_s, unit = _time_unit(cost.time_s)
    for span in spans:
        _setup(axes, span, unit_s, len(links))
        for link, (end, load) in busy[span.phase].items():
            x, full = span.start_s + span.latency_s, span.stop_s - span.start_s - span.latency_s
            box = Rectangle(
                (x / unit_s, row_of[link] + 0.1),
                end * full / unit_s,
                0.8,
                facecolor=LOAD(load),
                edgecolor=INK,
                lw=0.2,
            )
            axes.add_patch(box)
        _name_span(axes, span, cost.time_s, unit_s, 0)
    axes.set(xlim=(0, cost.time_s / unit_s), ylim=(len(links), 0), xlabel=f"time, {unit}")
    axes.set_yticks(
        np.arange(len(links)) + 0.5,
        [link_text(network, link) for link in links],
        fontsize=min(7.5, 520 / len(links) * 0.9),
    )
    axes.tick_params(axis="y", length=0)
    _ramp(figure, "share of the link's rate in use, mean over the bar; grey: latency", None)
    return figure


def _busy(stage: Stage, chunk_nbytes: float, network: Network, where: Ints) -> dict[int, tuple[float, float]]:
    """For every directed link in use: until which share of the transfer time, and its mean load until then."""
    routes = route(network, where[stage.src], where[stage.dst])
    bits, rate_bps = 8 * chunk_nbytes * stage.count.astype(float), np.repeat(network.rate_bps, 2)
    ended_s = finish(routes, bits, rate_bps).time_s
    whole_s = float(ended_s.max()) or 1.0
    last_s, moved = np.zeros(len(rate_bps)), np.zeros(len(rate_bps))
    np.maximum.at(last_s, routes.link, ended_s[routes.flow])
    np.add.at(moved, routes.link, bits[routes.flow])
    return {
        link: (float(last_s[link]) / whole_s, min(1.0, float(moved[link] / (rate_bps[link] * last_s[link]))))
        for link in np.flatnonzero(last_s > 0).tolist()
    }


def _time_unit(total_s: float) -> tuple[float, str]:
    return next(
        (unit for unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if total_s >= unit[0]), (1e-9, "ns")
    )


# ---- a training step ----


def draw_step(step: StepTime) -> Figure:
    """Computation, codec and wire over time; what lies right of the line is what the exchange adds to the step."""
    rows = {"forward": 0, "backward": 0, "encode": 1, "decode": 1, "transfer": 2}
    unit_s, unit = _time_unit(step.step_s)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 2.9))
        figure.subplots_adjust(left=0.1, right=0.985, top=0.78, bottom=0.33)
        axes = figure.subplots()
        compute_s = step.forward_s + step.backward_s
        axes.axvspan(compute_s / unit_s, step.step_s / unit_s, color=GREY, alpha=0.13, lw=0)
        axes.axvline(compute_s / unit_s, color=INK, lw=0.8, alpha=0.5)
        for event in step.events:
            x, width = event.start_s / unit_s, (event.stop_s - event.start_s) / unit_s
            box = Rectangle(
                (x, rows[event.kind] + 0.12),
                width,
                0.76,
                facecolor=STEP[event.kind],
                edgecolor="white",
                lw=0.3,
            )
            axes.add_patch(box)
            label = event.name.removeprefix("bucket ")
            if rows[event.kind] and width * unit_s > 0.018 * step.step_s:
                axes.text(
                    x + width / 2,
                    rows[event.kind] + 0.5,
                    label,
                    fontsize=7,
                    color="white",
                    ha="center",
                    va="center",
                )
        axes.set(xlim=(0, step.step_s / unit_s * 1.001), ylim=(3, 0), xlabel=f"time, {unit}")
        axes.set_yticks([0.5, 1.5, 2.5], ["compute", "codec", "wire"])
        axes.tick_params(axis="y", length=0)
        used = [kind for kind in STEP if any(event.kind == kind for event in step.events)]
        handles = [Patch(color=STEP[kind], label=kind) for kind in used]
        handles.append(Patch(color=GREY, alpha=0.25, label=f"exposed: {time_text(step.exposed_s)}"))
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.09, 0),
            ncols=len(handles),
            fontsize=8,
            handlelength=1,
        )
        title = f"{step.workload}: a step of {time_text(step.step_s)}"
        figure.text(0.02, 0.92, title, fontsize=12, weight="bold", va="center")
        figure.text(
            0.02,
            0.84,
            "numbers are buckets, in the order of the backward pass",
            fontsize=7.5,
            alpha=0.7,
            va="center",
        )
    return figure
