"""What stands beside the comparisons: runs compared, trainings not timed, limits, calibration, simulated schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tacit.record_types import LimitsRecord, RefusedRecord
from tacit.report.figures import lab as draw
from tacit.report.model import comparisons as ct
from tacit.report.model import tables
from tacit.report.model.comparisons import Comparison
from tacit.report.model.runs import Run
from tacit.report.model.tables import TableRow
from tacit.report.pages import html
from tacit.report.pages.cards import WHY
from tacit.report.pages.figure_set import FigureSet
from tacit.report.pages.html import Section, TableCell, figure_cell
from tacit.report.text import duration_text, more_text, plain_text, rate_text, times_text
from tacit.units import size_text, time_text


def compared(rows: Sequence[TableRow], runs: Sequence[str], figure_set: FigureSet) -> Section | None:
    """Where the runs measured the same thing: the same configuration, workload and link."""
    if not rows:
        return None
    names = [run for run in runs if any(run in row["step_s"] for row in rows)]
    workloads = dict.fromkeys(row["workload"] for row in rows)
    shown = "".join(
        _dots([row for row in rows if row["workload"] == w], names, figure_set) for w in workloads
    )
    reached = names if any(value for row in rows for value in row["to_target_s"].values()) else []
    heads = ["configuration", "workload", "link", *(f"step, {run}" for run in names), "change"]
    heads += [f"time to target, {run}" for run in reached]
    body = [
        [
            html.code(row["configuration"]),
            html.text(row["workload"]),
            html.text(row["link"]),
            *(figure_cell(row["step_s"].get(run), time_text) for run in names),
            figure_cell(row["change"], times_text),
            *(figure_cell(row["to_target_s"].get(run), duration_text) for run in reached),
        ]
        for row in rows
    ]
    table = html.table(
        heads, body, "The runs, where they match; change is the last run's step over the first's"
    )
    return Section("Runs side by side", f'<div class="figures">{shown}</div>{table}')


def _dots(rows: Sequence[TableRow], names: Sequence[str], figure_set: FigureSet) -> str:
    workload = rows[0]["workload"]
    caption = (
        f"{workload}: median steps where the runs match, a dot a run; × is the last run's over the first's."
    )
    return figure_set.show(
        ("compared", workload), lambda name: draw.runs_compared(rows, names, name), caption
    )


def trained_only(run: Run, found: Sequence[Comparison]) -> Section | None:
    """Trainings whose workload nobody timed: their accuracy, without a time."""
    timed = {comparison.workload for comparison in found}
    rows = [row for row in tables.accuracy_rows(run) if row["workload"] not in timed]
    if not rows:
        return None
    heads = ["configuration", "workload", "seed", "steps to target", "target", "final", "metric"]
    body = [
        [
            html.code(row["configuration"]),
            html.text(row["workload"]),
            html.text(row["seed"]),
            *(figure_cell(row[key], plain_text) for key in ("steps_to_target", "target", "final")),
            html.text(row["metric"] or ""),
        ]
        for row in rows
    ]
    return Section(
        "Trained, not timed", html.table(heads, body, f"Trainings of {run.label} without step times")
    )


def limits(run: Run, of: str, figure_set: FigureSet) -> Section | None:
    """Collectives against what the link allows."""
    rows = tables.limit_rows(run)
    if not rows:
        return None
    drawn = ""
    if any(row["ratio"] and row["rate_bps"] and row["nbytes"] for row in rows):
        caption = "An all-reduce against the link's own limit, 2(n−1)/n of the payload over the rate; the band is 10 %."
        drawn = figure_set.show(("limits", of), lambda name: draw.limits_dots(rows, name), caption)
    heads = [
        "payload",
        "link",
        "ranks",
        "measured",
        "theory",
        "ratio",
        "counted",
        "headers",
        "interface",
        "unexplained",
    ]
    body = [
        [
            figure_cell(row["nbytes"], size_text),
            figure_cell(row["rate_bps"], rate_text),
            figure_cell(row["ranks"], plain_text),
            figure_cell(row["measured_s"], time_text),
            figure_cell(row["theory_s"], time_text),
            figure_cell(row["ratio"], times_text),
            *(figure_cell(row[f"{what}_nbytes"], size_text) for what in ("counted", "headers", "interface")),
            figure_cell(row["unexplained"], more_text),
        ]
        for row in rows
    ]
    caption = "All-reduce against theory; interface bytes against counted bytes and headers, a rank"
    table = html.table(heads, body, caption)
    lost = dropped(run, {(record.job, record.rate_bps) for record in run.typed(LimitsRecord)})
    notes = "".join(f"<p>{escape(sentence)}.</p>" for sentence in lost)
    return Section(f"Limits{of}", f'<div class="figures">{drawn}</div>{table}{notes}')


def dropped(run: Run, cases: Iterable[tuple[Any, float | None]]) -> list[str]:
    """A sentence for each of these jobs and rates at which packets were dropped."""
    rows = tables.drop_rows(run)
    told = (tables.drops_text([r for r in rows if (r["job"], r["rate_bps"]) == case]) for case in cases)
    return [sentence for sentence in told if sentence]


def calibration(run: Run, of: str) -> Section | None:
    """What the network was before it was used."""
    rows, refused = tables.calibration_rows(run), ct.refusals(run)
    if not rows and not refused:
        return None
    heads = ["link", "message", "measured", "theory", "ratio", "at least", "at most", "attempts", "verdict"]
    body = [
        [
            figure_cell(row["rate_bps"], rate_text),
            figure_cell(row["nbytes"], size_text, row["what"]),
            figure_cell(row["measured_s"], time_text),
            figure_cell(row["theory_s"], time_text),
            figure_cell(row["ratio"], times_text),
            figure_cell(row["least_s"], time_text),
            figure_cell(row["most_s"], time_text),
            figure_cell(row["attempts"], plain_text),
            TableCell("passed" if row["passed"] else '<span class="worse">refused</span>'),
        ]
        for row in rows
    ]
    why = "".join(f"<p>{escape(record.why)}</p>" for record in run.typed(RefusedRecord))
    told = "Before each rate the network is measured: it must take the time that its rate says, or nothing is claimed."
    marks = html.badge("calibration refused", WHY["calibration refused"]) if refused else ""
    caption = (
        "One message at a time, against its rate; a network is used if every row of its last attempt passed"
    )
    table = html.table(heads, body, caption) if rows else ""
    return Section(f"Calibration{of}", f"<p>{told}</p>{why}{table}", marks)


def costs(run: Run, of: str, figure_set: FigureSet) -> list[Section]:
    """Simulated schedules, a section a network."""
    rows = tables.cost_rows(run)
    networks = dict.fromkeys(row["network"] for row in rows)
    return [_costs([row for row in rows if row["network"] == on], on, of, figure_set) for on in networks]


def _costs(rows: Sequence[TableRow], on: str, of: str, figure_set: FigureSet) -> Section:
    network = on or "an unnamed network"
    sweeps = [rows]
    if len({row["world"] for row in rows}) > 1:  # then time is drawn over the world, a figure a payload
        sizes = dict.fromkeys(row["nbytes"] for row in rows)
        sweeps = [[row for row in rows if row["nbytes"] == nbytes] for nbytes in sizes]
    drawn = "".join(_swept(sweep, network, figure_set) for sweep in sweeps)
    heads = ["schedule", "world", "payload", "time", "bound", "against bound"]
    body = [
        [
            html.code(row["schedule"]),
            figure_cell(row["world"], plain_text),
            figure_cell(row["nbytes"], size_text, row["model"]),
            figure_cell(row["time_s"], time_text),
            figure_cell(row["bound_s"], time_text),
            figure_cell(row["time_s"] / row["bound_s"] if row["bound_s"] else None, times_text),
        ]
        for row in rows
    ]
    mark = html.badge("simulated", "computed by the simulator, not measured")
    table = html.table(heads, body, f"Schedules on {network}")
    return Section(f"Schedules on {network}{of}", f'<div class="figures">{drawn}</div>{table}', mark)


def _swept(rows: Sequence[TableRow], network: str, figure_set: FigureSet) -> str:
    if not any(row["time_s"] > 0 and row["nbytes"] and row["world"] for row in rows):
        return ""
    worlds, sizes = {row["world"] for row in rows}, {row["nbytes"] for row in rows}
    what = (
        f"{rows[0]['model'] or 'a payload'}, {size_text(rows[0]['nbytes'] or 0)}" if len(sizes) == 1 else ""
    )
    among = f"{rows[0]['world'] or 0:g} ranks" if len(worlds) == 1 else ""
    case = "; ".join(filter(None, (what, among)))
    caption = f"Simulated time of one all-reduce on {network} ({case}); dashed: what no schedule can beat, where known."
    return figure_set.show(("simulated", network), lambda name: draw.cost_curves(rows, name), caption)
