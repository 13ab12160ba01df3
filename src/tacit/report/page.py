"""One self-contained HTML page from the records of one run: verdict, figures, tables, facts, command."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tacit.records import Record
from tacit.report import figures
from tacit.report.summary import (
    ACCURACY_TOLERANCE,
    LINKS,
    LOSS_TOLERANCE,
    Row,
    final_text,
    last_run,
    ratio_text,
    summarise,
    verdict,
)
from tacit.units import size_text, time_text

LOOPBACK = (
    "All ranks ran on this machine and talked over loopback, which is not a slow network: "
    "time a step shows what tacit costs (its threads and the codec), bytes show what a slow link would save."
)


def write(records: Sequence[Record], path: Path) -> Path:
    """`path`, holding the page of the last run in `records`."""
    path.write_text(build(records), encoding="utf-8")
    return path


def build(records: Sequence[Record]) -> str:
    """The page of the last run in `records`, as HTML text that refers to nothing outside itself."""
    run = last_run(records)
    start = next((record for record in run if record["kind"] == "start"), {})
    rows = summarise(run)
    sections = "".join(_section(task, of_task, start.get("tasks", {})) for task, of_task in rows.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tacit demo</title><style>{_CSS}</style></head><body><main>"
        f'<h1>tacit demo</h1><p class="verdict">{escape(verdict(rows))}</p>'
        f"<p>{LOOPBACK} {_limits(rows)}</p>{sections}{_facts(start, run)}</main></body></html>\n"
    )


def _limits(rows: dict[str, list[Row]]) -> str:
    return (
        f"“As well” means a loss at most {100 * LOSS_TOLERANCE:g} % above plain DDP's, or an accuracy at most "
        f"{100 * ACCURACY_TOLERANCE:g} point below it. Every configuration starts from the same seed and sees the "
        "same batches, a step each in turn, so that other programs slow all alike; the ratio of times is the median over "
        "these pairs. It is one seed on one machine: small differences are chance."
    )


def _section(task: str, rows: list[Row], about: dict[str, str]) -> str:
    what = escape(about.get(task, task))
    drawn = (
        (
            figures.bytes_bars(rows, f"{task}-bytes"),
            "Bytes a worker sends each step; × is how many times fewer.",
        ),
        (
            figures.time_bars(rows, f"{task}-time"),
            "Time a step on loopback, median; the whisker ends at the 95th percentile; × is against plain DDP.",
        ),
        (
            figures.loss_curves(rows, f"{task}-loss"),
            "Training loss, averaged over the ranks; below, how far each lies from plain DDP's.",
        ),
    )
    shown = "".join(f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>" for svg, text in drawn)
    counts = f"{rows[0].ranks} ranks, {rows[0].steps} steps; times over {rows[0].step_n} steps."
    return (
        f"<section><h2>{escape(task)}</h2><p>{what}: {counts}</p>"
        f'<div class="figures">{shown}</div><div class="wide">{_table(rows)}</div></section>'
    )


def _table(rows: list[Row]) -> str:
    heads = [
        "strategy",
        "time a step",
        "against DDP",
        "bytes a step a worker",
        "against fp32",
        rows[0].metric,
    ]
    heads += [f"one step's bytes on {link} (computed)" for link in LINKS]
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in _cells(row)) + "</tr>" for row in rows)
    return (
        f"<table><thead><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _cells(row: Row) -> list[str]:
    mark = "" if row.keeps_quality else ' <span class="worse" title="worse than plain DDP">↓</span>'
    return [
        f"<code>{escape(row.configuration)}</code>",
        time_text(row.step_p50_s),
        f"{row.step_ratio:.2f}×",
        f"{size_text(row.sent_nbytes_a_step)} <small>{escape(row.sent_is)}</small>",
        ratio_text(row),
        final_text(row) + mark,
        *(time_text(seconds) for seconds in row.wire_s.values()),
    ]


def _facts(start: Record, run: Sequence[Record]) -> str:
    facts = dict(start.get("host", {}))
    if "memory_nbytes" in facts:
        facts["memory"] = size_text(facts.pop("memory_nbytes"))
    facts |= {
        "run": run[0]["run"],
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run[0]["time"])),
        "took": f"{run[-1]['time'] - run[0]['time']:.0f} s",
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    again = (
        f"<h2>Run it again</h2><pre><code>{escape(start['command'])}</code></pre>"
        if "command" in start
        else ""
    )
    return f"<section><h2>Measured on</h2><dl>{listed}</dl>{again}</section>"


_CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fdfdfc; --soft: #6a6f76; --line: #dcdfe3; --accent: #2f6fd0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e5e8; --paper: #16181b; --soft: #9aa0a8; --line: #33373d; --accent: #7fb0ff }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif }
main { max-width: 74rem; margin: 0 auto; padding: 1.5rem 1rem 4rem }
h1 { font-size: 1rem; color: var(--soft); font-weight: 600; margin: 0 }
h2 { margin: 2.5rem 0 .3rem; font-size: 1.3rem }
.verdict { font-size: 1.3rem; line-height: 1.4; margin: .4rem 0 1.2rem; padding-left: .9rem;
  border-left: 4px solid var(--accent); overflow-wrap: anywhere }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1rem 2rem; align-items: start }
figure { margin: .8rem 0 } figure svg { width: 100%; height: auto; display: block; color: var(--ink) }
figure svg text { font-family: system-ui, sans-serif !important }
figcaption, small { color: var(--soft); font-size: .85rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: bottom }
td { white-space: nowrap } th { color: var(--soft); font-weight: 600 }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.worse { color: #d0603a }
code { font: .9em ui-monospace, monospace }
pre { overflow-x: auto; padding: .7rem 1rem; border: 1px solid var(--line); border-radius: 6px }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem } dt { color: var(--soft) } dd { margin: 0 }
"""
