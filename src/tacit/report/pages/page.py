"""One self-contained HTML page from records: verdict, cards, figures, tables, facts, the command to run it again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tacit.record_types import NetworkFacts
from tacit.records import Record
from tacit.report.model import tables
from tacit.report.model.comparisons import Comparison, comparisons
from tacit.report.model.rounds import Trial, trials
from tacit.report.model.runs import FIGURES, SIMULATED, Run, label, of_records
from tacit.report.model.verdicts import finding, verdicts
from tacit.report.pages import cards, html, side_sections
from tacit.report.pages import demo as demo_page
from tacit.report.pages import lab as lab_page
from tacit.report.pages import rounds as rounds_page
from tacit.report.pages.demo import LOOPBACK
from tacit.report.pages.figure_set import FigureSet
from tacit.report.pages.files import write_all
from tacit.report.pages.html import Section
from tacit.units import size_text

__all__ = ["LOOPBACK", "Report", "build", "compose", "write"]


@dataclass(frozen=True, slots=True)
class Report:
    """A page and what it was made of: HTML text, a sentence a run, figures as SVG files by name, tables as rows."""

    html: str
    verdicts: dict[str, list[str]]
    figures: dict[str, str]
    tables: dict[str, list[tables.TableRow]]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the drawings, ready for JSON."""
        said = " ".join(sentence for sentences in self.verdicts.values() for sentence in sentences)
        return {"verdict": said, "verdicts": self.verdicts, **self.tables}


def write(records: Sequence[Record], path: Path) -> Path:
    """`path`, holding the page of the last run in `records`; it is there whole or not at all."""
    write_all({path: build(records)})
    return path


def build(records: Sequence[Record]) -> str:
    """The page of the last run in `records`, as HTML text that refers to nothing outside itself."""
    return compose([of_records(records)]).html


def compose(runs: Sequence[Run]) -> Report:
    """The page of these runs, side by side where their workloads match."""
    runs = label(runs)
    found, figure_set, several = comparisons(runs), FigureSet(), len(runs) > 1
    tried = trials(runs)
    told = {
        run.label: verdicts(run, found, tried) for run in runs if not (several and _only_lends(run, found))
    }
    for run in runs:
        if run.unfinished:
            told.setdefault(run.label, []).append(run.unfinished)
    compared = tables.compared_rows(found)
    sections: list[Section | None] = [
        side_sections.compared(compared, [run.label for run in runs], figure_set),
        *lab_page.families(runs, found, figure_set),
        *rounds_page.sections(tried, figure_set, several),
        *(part for run in runs for part in _parts(run, found, figure_set, several)),
        *(_facts(run, several) for run in runs),
    ]
    shown = [section for section in sections if section]
    body = _head(runs, told, compared) + cards.cards(found, several) + rounds_page.cards(tried, several)
    body += _contents(shown)
    body += "".join(section.html(place) for place, section in enumerate(shown))
    written = _tables(runs, found, tried, compared)
    return Report(html.document(_title(runs), body), told, figure_set.files(), written)


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1 and not _lab(runs[0]):
        return "tacit demo"
    return f"tacit report · {', '.join(run.label for run in runs)}"


def _lab(run: Run) -> bool:
    return bool(run.of(*(FIGURES - {"training"})))


def _only_lends(run: Run, found: Sequence[Comparison]) -> bool:
    """Whether the run gives the others its trainings and has no comparison of its own to judge."""
    return bool(found and run.of("accuracy")) and not any(comparison.run == run.label for comparison in found)


def _head(runs: Sequence[Run], told: dict[str, list[str]], compared: Sequence[tables.TableRow]) -> str:
    """The verdicts before all else: each run's first sentence large; a run without its end has a badge."""
    marks = {
        run.unfinished: html.badge(str(run.outcome), "not all that was ordered was measured")
        for run in runs
        if run.unfinished
    }
    said = ""
    for name, sentences in told.items():
        of = f"<b>{escape(name)}</b>" if len(told) > 1 else ""
        lines = (f"<p>{marks.get(sentence, '')}{escape(sentence)}</p>" for sentence in sentences)
        said += f'<div class="verdict">{of}{"".join(lines)}</div>'
    matched = f"<p>{escape(tables.compared_text(compared))}</p>" if compared else ""
    demo = f"<p>{LOOPBACK} {demo_page.RULES}</p>" if any(run.of("training") for run in runs) else ""
    notes = "".join(f"<p><small>{escape(note)}</small></p>" for run in runs for note in run.notes)
    return f"<h1>{escape(_title(runs))}</h1>{said}{matched}{notes}{demo}"


def _contents(sections: Sequence[Section]) -> str:
    if len(sections) < 4:
        return ""
    links = (f'<a href="#s{place}">{escape(section.title)}</a>' for place, section in enumerate(sections))
    return f'<nav aria-label="Contents">{"".join(links)}</nav>'


def _parts(
    run: Run, found: Sequence[Comparison], figure_set: FigureSet, several: bool
) -> list[Section | None]:
    of = f", {run.label}" if several else ""
    return [
        *demo_page.sections(run, figure_set),
        side_sections.trained_only(run, found),
        side_sections.limits(run, of, figure_set),
        *side_sections.costs(run, of, figure_set),
        side_sections.calibration(run, of),
    ]


def _facts(run: Run, several: bool) -> Section | None:
    if not run.records:
        return None
    start, times = run.start, [record["time"] for record in run.records]
    facts = dict(start.host or {})
    if isinstance(facts.get("memory_nbytes"), int | float):
        facts["memory"] = size_text(facts.pop("memory_nbytes"))
    network = start.network
    if isinstance(network, NetworkFacts):
        shaped = "shaped" if network.shaped else "unshaped"
        facts["network"] = f"{network.text or network.label or '?'} ({shaped})"
        facts |= {key: value for key, value in (("how", network.how), ("hosts", network.hosts)) if value}
    facts |= {
        "run": run.id,
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(times[0])),
        "took": f"{times[-1] - times[0]:.0f} s",
        **({"ended": run.outcome} if run.outcome else {}),
        **({"records": run.path} if run.path else {}),
    }
    again = (
        f"<h3>Run it again</h3><pre><code>{escape(start.command)}</code></pre>"
        if start.command is not None
        else ""
    )
    verb = "Measured on" if run.of(*(FIGURES - SIMULATED)) else "Simulated on"
    title = f"{verb}, {run.label}" if several else verb
    return Section(title, html.facts(facts.items()) + again)


def _tables(
    runs: Sequence[Run], found: Sequence[Comparison], tried: Sequence[Trial], compared: list[tables.TableRow]
) -> dict[str, list[tables.TableRow]]:
    """What JSON and CSV hold; a table that has no rows is left out."""
    told = {
        "runs": [_told(run) for run in runs],
        "findings": [finding(comparison).as_dict() for comparison in found],
        "standings": tables.standing_rows(found),
        "predictions": tables.prediction_rows(found),
        "compared": compared,
        "strategies": rounds_page.strategy_rows(tried),
        "rounds": rounds_page.training_rows(tried),
        "accuracy": [row for run in runs for row in tables.accuracy_rows(run)],
        "limits": [row for run in runs for row in tables.limit_rows(run)],
        "calibration": [row for run in runs for row in tables.calibration_rows(run)],
        "drops": [row for run in runs for row in tables.drop_rows(run)],
        "costs": [row for run in runs for row in tables.cost_rows(run)],
        "trainings": [row for run in runs for row in tables.training_rows(run)],
    }
    return {name: rows for name, rows in told.items() if rows}


def _told(run: Run) -> tables.TableRow:
    recorded = next(iter(run.of("start")), {})
    start = {key: recorded.get(key) for key in ("experiment", "command", "network", "host")}
    ended = {"outcome": run.outcome, "unfinished": run.unfinished}
    return {"label": run.label, "run": run.id, "path": run.path, **ended, **start}
