"""The page of a plan: the verdict, the line to paste, every choice with its interval, and what was probed."""

from __future__ import annotations

from html import escape

from tacit.record_types import AdviceRecord, PredictedFacts, ProbeRecord, fit
from tacit.records import Record
from tacit.report.figures import plan as figures
from tacit.report.pages import html
from tacit.report.pages.figure_set import FigureSet
from tacit.report.pages.html import Section, TableCell
from tacit.units import size_text, time_text

TITLE = "tacit plan"


def build(records: list[Record]) -> str:
    """The page of the last advice in `records`, as HTML text that refers to nothing outside itself."""
    found = [fit(record, AdviceRecord)[0] for record in records if record["kind"] == AdviceRecord.kind()]
    probes = [fit(record, ProbeRecord)[0] for record in records if record["kind"] == ProbeRecord.kind()]
    advice = found[-1] if found else AdviceRecord()
    figure_set = FigureSet()
    sections = [_choices(advice, figure_set), *([_probe(probes[-1])] if probes else [])]
    body = f"<h1>{TITLE}</h1>{_head(advice)}"
    return html.document(TITLE, body + "".join(section.html(place) for place, section in enumerate(sections)))


def _head(advice: AdviceRecord) -> str:
    said = f'<div class="verdict"><p>{escape(advice.verdict)}</p></div>'
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in advice.notes)
    risk = f"<p>Accuracy: {escape(advice.risk)}.</p>"
    return f"{said}{risk}<h3>To paste</h3><pre><code>{escape(advice.line)}</code></pre>{notes}"


def _choices(advice: AdviceRecord, figure_set: FigureSet) -> Section:
    rows = advice.predictions
    drawn = ""
    if rows:
        caption = "Predicted step of every choice; the whisker is its interval."
        drawn = figure_set.show(("plan", "steps"), lambda name: figures.predicted_steps(rows, name), caption)
    heads = ["choice", "step", "from", "to", "wire", "codec", "sent a step", "limited by", "error", "caution"]
    table = html.table(heads, [_cells(row) for row in rows], "Every choice, fastest first")
    return Section("Predicted steps", f'<div class="figures">{drawn}</div>{table}')


def _cells(row: PredictedFacts) -> list[TableCell]:
    return [
        html.code(row.choice),
        html.figure_cell(row.step_s, time_text),
        *(
            html.figure_cell(seconds, time_text)
            for seconds in (row.low_s, row.high_s, row.wire_s, row.codec_s)
        ),
        html.figure_cell(row.sent_nbytes, size_text),
        html.text(row.limited_by),
        html.figure_cell(row.nmse or None, lambda value: f"{value:.2g}"),
        html.text(row.caution),
    ]


def _probe(probe: ProbeRecord) -> Section:
    facts = {
        "ranks": probe.world,
        "backend": probe.backend,
        "device": probe.device,
        "CPU": f"{probe.machine.cpu}, {probe.machine.cores} cores, {probe.cores:.2g} for each rank",
        "latency": time_text(probe.latency_s),
        "all at once": f"{size_text(probe.at_once_bps / 8)}/s",
        "one alone": f"{size_text(probe.alone_bps / 8)}/s",
        "took": f"{probe.took_s:.0f} s",
    }
    if probe.pairs is not None:
        pairs = probe.pairs
        facts["between two"] = (
            f"{size_text(pairs.typical_bps / 8)}/s; at the least {size_text(pairs.slowest_bps / 8)}/s, "
            f"rank {pairs.sender} to {pairs.receiver}"
        )
    heads = ["operation", "bytes", "seconds", "CPU"]
    rows = [
        [
            html.code(each.operation),
            html.figure_cell(size, size_text),
            html.figure_cell(seconds, time_text),
            html.figure_cell(cpu, time_text),
        ]
        for each in probe.operations
        for size, seconds, cpu in zip(each.curve.sizes, each.curve.p50_s, each.curve.cpu_s, strict=False)
    ]
    body = html.facts(facts.items()) + html.table(heads, rows, "The process group's operations")
    return Section("Probed", body)
