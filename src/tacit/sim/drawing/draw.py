"""Schedules as pictures: who sends to whom, stage by stage.

On an optical ring a transfer is drawn as its light travels: clockwise outside the ring, counter-clockwise inside, every
wavelength on its own track and in its own colour. Two lights on one track never touch: that is what the checker proves.
Elsewhere arrows distinguish add from copy. Stages that differ only in their chunks are drawn once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, pi
from typing import Any

import numpy as np

from tacit.errors import ConfigError
from tacit.extras import extra
from tacit.schedules.schedule import Schedule, Stage
from tacit.sim.drawing.pictures import GREY, INK, STYLE, heading, places
from tacit.sim.fabric import Fabric
from tacit.sim.wavelengths import Assignment, Colours, assign, optical_notes
from tacit.topology import Floats, Ints, Network, OpticalRing

with extra("report"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, Rectangle
    from matplotlib.path import Path as Curve

MOST_ARROWS = 600  # in one panel; more is a blot
MOST_PANELS = 60
ADD, COPY = "#4477cc", "#e07b39"
IDLE: dict[str, Any] = {"color": INK, "alpha": 0.14}
LIGHT = LinearSegmentedColormap.from_list(
    "light", ["#d1495b", "#e07b39", "#c9a227", "#2f9e62", "#2fa8c9", "#4477cc", "#8f6bc0"]
)


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One picture of a stage, or of one part of it: the transfers in it, and their light."""

    title: str
    stage: Stage
    which: Ints
    light: Assignment | None


def panels(schedule: Schedule, fabric: Fabric | None = None) -> list[Panel]:
    """What there is to draw; refused with one sentence if it would be a blot."""
    ring = None if fabric is None else fabric.ring
    found, number, known = [], 0, Colours()
    for i, phase in enumerate(schedule.phases):
        if not phase.times or not len(phase.stage):
            continue
        light = None
        if ring is not None and fabric is not None:
            clockwise, wavelength = optical_notes(schedule, i)
            light = assign(
                phase.stage,
                ring,
                clockwise=clockwise,
                wavelength=wavelength,
                stripe=fabric.stripe,
                known=known,
            )
        parts = 1 if light is None else light.parts
        name = f"stage {number}" if phase.times == 1 else f"stages {number} to {number + phase.times - 1}"
        for part in range(parts):
            which = np.arange(len(phase.stage)) if light is None else np.flatnonzero(light.part == part)
            title = name if parts == 1 else f"{name}, part {part + 1} of {parts}"
            _check_arrows(schedule, title, len(which) if light is None else int(light.stripes[which].sum()))
            found.append(Panel(title, phase.stage, which, light))
            _check_panels(schedule, len(found))
        number += phase.times
    return found


def _check_arrows(schedule: Schedule, title: str, arrows: int) -> None:
    if arrows > MOST_ARROWS:
        raise ConfigError(
            f"{schedule.name}: {title} has {arrows:,} arrows to draw, the limit is {MOST_ARROWS}; take fewer ranks, or no striping"
        )


def _check_panels(schedule: Schedule, count: int) -> None:
    if count > MOST_PANELS:
        raise ConfigError(
            f"{schedule.name} has more than {MOST_PANELS} different stages and parts to draw; take fewer ranks"
        )


def draw_stages(schedule: Schedule, fabric: Fabric | None = None, title: str | None = None) -> Figure:
    """Small multiples: a panel a stage, sub-stages separately."""
    if fabric is not None:
        fabric.cost(schedule, 1.0)  # refuses what has no room there
    shown = panels(schedule, fabric)
    if not shown:
        raise ConfigError(
            f"{schedule.name} among {schedule.world} ranks sends nothing; there is nothing to draw"
        )
    ring = None if fabric is None else fabric.ring
    crowd = schedule.world if ring is None else ring.nodes + 1.5 * _tracks(shown)
    panel_in = float(np.clip(1.5 + 0.075 * crowd, 2.2, 3.6))
    columns = _columns(len(shown), int(11 / panel_in))
    rows = ceil(len(shown) / columns)
    width_in, height_in = max(6.4, columns * panel_in + 0.4), rows * (panel_in + 0.42) + 1.1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width_in, height_in))
        draw = (
            _light_drawer(ring, shown, panel_in)
            if ring is not None
            else _arrow_drawer(schedule, fabric, panel_in)
        )
        left_in = (width_in - columns * panel_in) / 2
        for index, panel in enumerate(shown):
            row, column = divmod(index, columns)
            corner_in = (left_in + column * panel_in, height_in - 0.62 - (row + 1) * (panel_in + 0.42))
            axes = figure.add_axes(
                (corner_in[0] / width_in, corner_in[1] / height_in, panel_in / width_in, panel_in / height_in)
            )
            _frame(axes, panel)
            draw(axes, panel)
        heading(figure, title or schedule.name, schedule, fabric)
        _legend(figure, shown, ring)
    return figure


def _columns(count: int, most: int) -> int:
    """As many as fit, but rows of nearly the same length."""
    rows = ceil(count / most)
    return ceil(count / rows)


def _frame(axes: Axes, panel: Panel) -> None:
    axes.set_aspect("equal")
    axes.set_axis_off()
    many = len(panel.which)
    adds = panel.stage.add[panel.which]
    verb = "added" if adds.all() else "copied" if not adds.any() else "added or copied"
    text = f"{many:,} transfer{'s' if many > 1 else ''}, {verb}"
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(
        panel.title, (0.5, 1), (0, 11), xycoords="axes fraction", fontsize=9, weight="bold", **place
    )
    axes.annotate(text, (0.5, 1), (0, 1), xycoords="axes fraction", fontsize=7.5, alpha=0.75, **place)


def _legend(figure: Figure, shown: list[Panel], ring: OpticalRing | None) -> None:
    width_in, height_in = figure.get_size_inches()
    if ring is None:
        kinds = {bool(add) for panel in shown for add in panel.stage.add}
        swatches = [
            pair
            for pair, add in (((ADD, "added at the destination"), True), ((COPY, "copied"), False))
            if add in kinds
        ]
    else:
        used = _tracks(shown)
        swatches = [
            (_colour(wave, used), str(wave) if used <= 16 or wave in (0, used - 1) else "")
            for wave in range(used)
        ]
    step_in = 1.9 if ring is None else min(0.42, 3.2 / len(swatches))
    for i, (colour, name) in enumerate(swatches):
        x_in = 0.2 + i * step_in
        size_in = min(0.14, 0.9 * step_in)
        box = Rectangle(
            (x_in / width_in, 0.18 / height_in),
            size_in / width_in,
            0.14 / height_in,
            transform=figure.transFigure,
        )
        box.set(facecolor=colour, linewidth=0)
        figure.add_artist(box)
        if ring is None or step_in > 0.19:
            figure.text(
                (x_in + size_in + 0.04) / width_in, 0.25 / height_in, name, fontsize=7.5, va="center_baseline"
            )
    if ring is not None:
        x_in = 0.3 + len(swatches) * step_in
        which = "wavelength" if step_in > 0.19 else f"wavelengths 0 to {len(swatches) - 1}"
        text = f"{which}; outside the ring clockwise, inside counter-clockwise"
        figure.text(x_in / width_in, 0.25 / height_in, text, fontsize=7.5, va="center_baseline")


def _tracks(shown: list[Panel]) -> int:
    """Wavelengths that some panel uses, counted from 0."""
    lights = [panel.light for panel in shown if panel.light is not None]
    return max((int((light.first + light.width).max(initial=1)) for light in lights), default=1)


def _colour(wave: int, used: int) -> Any:
    return LIGHT(wave / max(1, used - 1)) if used > 2 else (ADD, COPY)[wave]


# ---- light on a ring ----


def _light_drawer(ring: OpticalRing, shown: list[Panel], panel_in: float) -> Callable[[Axes, Panel], None]:
    nodes, used = ring.nodes, _tracks(shown)
    gap = 2 * pi / nodes
    half = min(0.41 * gap, 0.15)  # of a node, as an angle
    track = min(0.1, 0.52 / used)
    reach = 1.12 + used * track
    points_a_unit = 72 * panel_in / (2 * reach + 0.2)
    line = max(0.4, min(1.4, 0.3 * track * points_a_unit))
    head = max(1.6, min(3.4, 1.5 * half * points_a_unit / used))

    def drawer(axes: Axes, panel: Panel) -> None:
        light = panel.light
        assert light is not None
        axes.set(xlim=(-reach - 0.1, reach + 0.1), ylim=(-reach - 0.1, reach + 0.1))
        _ring_nodes(
            axes,
            nodes,
            half,
            reach,
            points_a_unit,
            np.unique(np.r_[panel.stage.src[panel.which], panel.stage.dst[panel.which]]),
        )
        mine = np.isin(light.transfer, panel.which)
        for transfer, first, width in zip(
            light.transfer[mine], light.first[mine], light.width[mine], strict=True
        ):
            clockwise = bool(light.paths.clockwise[transfer])
            for wave in range(first, first + width):
                side = half * (0.12 + 0.8 * (used - wave - 0.5) / used)
                at, hops = int(panel.stage.src[transfer]), int(light.paths.hops[transfer])
                lift = 0.11 + wave * track
                points = _lifted(
                    at * gap, hops * gap, side, clockwise, 0.07, lift, max(0.45 * gap, 1.1 * lift)
                )
                axes.add_patch(
                    _arrow(_with_neck(points, head / points_a_unit), _colour(wave, used), line, head)
                )

    return drawer


def _ring_nodes(axes: Axes, nodes: int, half: float, reach: float, points_a_unit: float, busy: Ints) -> None:
    """The fibre, and every node as a piece of it: dark if it sends or receives in this stage."""
    thick = min(0.11 * points_a_unit, 9.5)
    named = {round(i * nodes / 8) for i in range(8)}
    font = min(7.0, 0.85 * thick, 2 * half * points_a_unit * 0.62)
    for node in range(nodes):
        angle = 2 * pi * node / nodes
        arc = np.linspace(angle - half, angle + half, 7)
        fibre = np.linspace(angle + half, angle + 2 * pi / nodes - half, 3 + 60 // nodes)
        active = node in busy
        look = {"color": GREY} if active else IDLE
        axes.plot(np.sin(arc), np.cos(arc), lw=thick, solid_capstyle="butt", zorder=3, **look)
        axes.plot(np.sin(fibre), np.cos(fibre), color=INK, lw=0.8, alpha=0.3, zorder=1)
        where: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 5}
        if font >= 4.2:
            axes.text(np.sin(angle), np.cos(angle), str(node), fontsize=font, **_number(active), **where)
        elif node in named:
            axes.text(
                (reach + 0.06) * np.sin(angle),
                (reach + 0.06) * np.cos(angle),
                str(node),
                fontsize=6,
                alpha=0.75,
                **where,
            )


def _number(active: bool) -> dict[str, Any]:
    return {"color": "white"} if active else {"color": INK, "alpha": 0.55}


def _lifted(
    start: float, sweep: float, side: float, clockwise: bool, foot: float, lift: float, corner: float
) -> Floats:
    """From a node to its track, along it, and down to another node: round corners, no two paths of a node on one line."""
    way = 1 if clockwise else -1
    length = sweep - 2 * side
    bend = min(corner, length / 2)
    up = bend * (1 - np.cos(np.linspace(0, pi / 2, 12)))  # close together where the curve is steep
    level = np.linspace(bend, length - bend, max(3, int(24 * length)))
    at = np.unique(np.r_[up, level, length - up])
    near = np.clip(np.minimum(at, length - at) / bend, 0, 1)
    radius = 1 + way * (foot + (lift - foot) * np.sqrt(1 - (1 - near) ** 2))
    angle = start + way * (side + at)
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1)


def _with_neck(points: Floats, length: float) -> Floats:
    """The path with its last `length` straight: an arrow's head points where the path goes, not where its last bit bends."""
    far = np.hypot(*(points - points[-1]).T) > length
    far[[0, -1]] = True
    return np.asarray(points[far], float)


def _arrow(points: Floats, colour: Any, line: float, head: float) -> FancyArrowPatch:
    style = f"-|>,head_length={head},head_width={0.42 * head}"
    return FancyArrowPatch(
        path=Curve(points),
        arrowstyle=style,
        mutation_scale=1,
        color=colour,
        lw=line,
        zorder=2,
        capstyle="butt",
        joinstyle="round",
        clip_on=False,
    )


# ---- arrows between nodes ----


def _arrow_drawer(
    schedule: Schedule, fabric: Fabric | None, panel_in: float
) -> Callable[[Axes, Panel], None]:
    network = None if fabric is None or isinstance(fabric.network, OpticalRing) else fabric.network
    at = _positions(schedule, network)
    where = places(schedule, network, "switches" if fabric is None else fabric.aggregators_on)
    size = min(0.1, 1.4 / max(1, schedule.world))  # radius of a node
    squarish = network is not None and network.kind == "torus" and len(network.sizes) == 2

    def drawer(axes: Axes, panel: Panel) -> None:
        axes.set(xlim=(-1.22, 1.22), ylim=(-1.22, 1.22))
        if network is not None:
            _links(axes, network, at, size)
        stage = panel.stage
        diameter_pt = 2 * size * 72 * panel_in / 2.44
        _nodes(axes, schedule, network, at, where, diameter_pt, np.unique(np.r_[stage.src, stage.dst]))
        most = int(stage.count.max())
        for i in panel.which:
            points = _bent(at[where[stage.src[i]]], at[where[stage.dst[i]]], size, flat=squarish)
            line = max(0.6, min(1.3, 60 / len(panel.which))) * (0.5 + 0.5 * float(stage.count[i]) / most)
            axes.add_patch(_arrow(points, ADD if stage.add[i] else COPY, line, max(2.0, 2.8 * line)))

    return drawer


def _positions(schedule: Schedule, network: Network | None) -> Floats:
    """Hosts round a circle, rank 0 on top; a 2-D torus as a grid; switches among those they serve, aggregators in the middle."""
    if network is not None and network.kind == "torus" and len(network.sizes) == 2:
        rows, columns = network.sizes
        row, column = np.divmod(np.arange(rows * columns), columns)
        return np.stack([_spaced(column, columns), -_spaced(row, rows)], axis=1)
    hosts, others = (
        (schedule.world, schedule.aggregators)
        if network is None
        else (len(network.hosts), len(network.switches))
    )
    angle = 2 * pi * np.arange(hosts) / hosts
    circle = np.stack([np.sin(angle), np.cos(angle)], axis=1)
    turn = 2 * pi * np.arange(others) / max(1, others)
    middle = (0.3 if others > 1 else 0.0) * np.stack([np.sin(turn), np.cos(turn)], axis=1)
    return (
        np.concatenate([circle, middle])
        if network is None or not others
        else _layered(network, np.concatenate([circle, middle]))
    )


def _spaced(place: Ints, count: int) -> Floats:
    return np.asarray(2 * place / max(1, count - 1) - 1 if count > 1 else np.zeros(len(place)), float) * 0.88


def _layered(network: Network, at: Floats) -> Floats:
    """Switches on circles inside the hosts', one a hop away from them, in the order of those they serve."""
    hosts, ends = len(network.hosts), np.concatenate([network.ends, network.ends[:, ::-1]])
    depth = np.where(np.arange(network.nodes) < hosts, 0, -1)
    while (depth < 0).any():
        reached = ends[(depth[ends[:, 0]] >= 0) & (depth[ends[:, 1]] < 0)][:, 1]
        depth[np.unique(reached)] = depth.max() + 1
    for layer in range(1, int(depth.max(initial=0)) + 1):
        mine = np.flatnonzero(depth == layer)
        known = ends[(depth[ends[:, 0]] == layer) & (depth[ends[:, 1]] == layer - 1)]
        total = np.stack(
            [np.bincount(known[:, 0], at[known[:, 1], axis], network.nodes)[mine] for axis in (0, 1)]
        )
        wanted = np.where(
            np.hypot(*total) > 1e-6, np.arctan2(*total) % (2 * pi), 2 * pi * np.arange(len(mine)) / len(mine)
        )
        order = np.argsort(wanted.round(6), kind="stable")
        even = 2 * pi * np.arange(len(mine)) / len(mine)
        shift = np.angle(np.exp(1j * (wanted[order] - even)).sum())
        radius = (1 - layer / (depth.max() + 1)) * 0.95 if len(mine) > 1 else 0.0
        at[mine[order]] = radius * np.stack([np.sin(even + shift), np.cos(even + shift)], axis=1)
    return at


def _links(axes: Axes, network: Network, at: Floats, size: float) -> None:
    for a, b in network.ends.tolist():
        along = at[b] - at[a]
        short = along / max(float(np.hypot(*along)), 1e-9) * size
        begin, stop = (
            at[i] + sign * short * (1.0 if i < len(network.hosts) else 0.95) for i, sign in ((a, 1), (b, -1))
        )
        axes.plot([begin[0], stop[0]], [begin[1], stop[1]], color=INK, lw=0.7, alpha=0.2, zorder=1)


def _nodes(
    axes: Axes,
    schedule: Schedule,
    network: Network | None,
    at: Floats,
    where: Ints,
    diameter_pt: float,
    busy: Ints,
) -> None:
    active = np.isin(np.arange(len(at)), where[busy])
    hosts = schedule.world if network is None else len(network.hosts)
    for node, (x, y) in enumerate(at):
        marker, scale = ("o", 1.0) if node < hosts else ("s", 0.7)
        look = {"color": GREY} if active[node] else IDLE
        axes.plot([x], [y], marker, ms=diameter_pt * scale, mew=0, zorder=3, **look)
        if diameter_pt > 5.5 and node < hosts:
            font = min(8, diameter_pt * (0.62 if hosts <= 100 else 0.45))
            axes.text(
                x,
                y,
                str(node),
                fontsize=font,
                ha="center",
                va="center_baseline",
                zorder=5,
                **_number(active[node]),
            )


def _bent(start: Floats, stop: Floats, size: float, *, flat: bool) -> Floats:
    """A curve between two nodes, bent to its right, so that there and back are two lines; it ends at their rims."""
    along = stop - start
    length = max(float(np.hypot(*along)), 1e-9)
    right = np.array([along[1], -along[0]]) / length
    middle = (start + stop) / 2
    if flat:
        control = middle + right * (0.09 if length < 0.8 else 0.28) * length
    else:
        control = middle * (1 - 0.5 * min(1, length / 2)) + right * 0.09 * length
    t = np.linspace(0, 1, 40)[:, None]
    points = (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * stop
    clear = (np.hypot(*(points - start).T) > size) & (np.hypot(*(points - stop).T) > size * 1.25)
    return np.asarray(points[clear] if clear.sum() > 1 else points, float)
