"""The demo's part of a page: a section a task, its figures and its table."""

from __future__ import annotations

from html import escape

from tacit.report.figures import demo as figures
from tacit.report.model import summary
from tacit.report.model.runs import Run
from tacit.report.model.summary import (
    ACCURACY_TOLERANCE,
    LINKS,
    LOSS_TOLERANCE,
    TrainingRow,
    final_text,
    ratio_text,
)
from tacit.report.pages import html
from tacit.report.pages.figure_set import FigureSet
from tacit.report.pages.html import Section, TableCell
from tacit.units import size_text, time_text

LOOPBACK = (
    "All ranks ran on this machine and talked over loopback, which is not a slow network: "
    "time a step shows what tacit costs (its threads and the codec), bytes show what a slow link would save."
)
RULES = (
    f"“As well” means a loss at most {100 * LOSS_TOLERANCE:g} % above plain DDP's, or an accuracy at most "
    f"{100 * ACCURACY_TOLERANCE:g} point below it. Every configuration starts from the same seed and sees the "
    "same batches, a step each in turn, so that other programs slow all alike; the ratio of times is the median over "
    "these pairs. It is one seed on one machine: small differences are chance."
)


def sections(run: Run, figure_set: FigureSet) -> list[Section]:
    """A section for each task that the demo trained."""
    about = run.start.tasks or {}
    return [_section(task, rows, about, figure_set) for task, rows in summary.summarise(run.records).items()]


def _section(task: str, rows: list[TrainingRow], about: dict[str, str], figure_set: FigureSet) -> Section:
    drawn = (
        figure_set.show(
            (task, "bytes"),
            lambda name: figures.bytes_bars(rows, name),
            "Bytes a worker sends each step; × is how many times fewer.",
        ),
        figure_set.show(
            (task, "time"),
            lambda name: figures.time_bars(rows, name),
            "Time a step on loopback, median; the whisker ends at the 95th percentile; × is against plain DDP.",
        ),
        figure_set.show(
            (task, "loss"),
            lambda name: figures.loss_curves(rows, name),
            "Training loss, averaged over the ranks; below, how far each lies from plain DDP's.",
        ),
    )
    counts = f"{rows[0].ranks} ranks, {rows[0].steps} steps; times over {rows[0].step_n} steps."
    what = escape(str(about.get(task, task)))
    return Section(
        task, f'<p>{what}: {counts}</p><div class="figures">{"".join(drawn)}</div>{_table(task, rows)}'
    )


def _table(task: str, rows: list[TrainingRow]) -> str:
    heads = [
        "strategy",
        "time a step",
        "against DDP",
        "bytes a step a worker",
        "against fp32",
        rows[0].metric,
    ]
    heads += [f"one step's bytes on {link} (computed)" for link in LINKS]
    return html.table(heads, map(_cells, rows), f"{task}, every configuration")


def _cells(row: TrainingRow) -> list[TableCell]:
    mark = "" if row.keeps_quality else ' <span class="worse" title="worse than plain DDP">↓</span>'
    return [
        html.code(row.configuration),
        TableCell(time_text(row.step_p50_s), row.step_p50_s),
        TableCell(f"{row.step_ratio:.2f}×", row.step_ratio),
        html.figure_cell(row.sent_nbytes_a_step, size_text, row.sent_is),
        TableCell(ratio_text(row), row.ratio),
        TableCell(final_text(row) + mark, row.final),
        *(TableCell(time_text(seconds), seconds) for seconds in row.wire_s.values()),
    ]
