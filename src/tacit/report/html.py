"""The pieces of a page: one look for every report, tables that sort, nothing fetched from anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tacit.report.text import NOTHING


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell: HTML to show, and the number it is sorted by, if it is one."""

    html: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page under its own heading, which the contents link to. `head` goes beside the title, as HTML."""

    title: str
    body: str
    head: str = ""

    def html(self, place: int) -> str:
        return f'<section id="s{place}"><h2>{escape(self.title)} {self.head}</h2>{self.body}</section>'


def text(value: object) -> Cell:
    return Cell(escape(str(value)))


def code(value: object, mark: str = "") -> Cell:
    """A name from a record, in the fixed-width face; `mark` is the colour it has in the figures."""
    swatch = f'<i class="swatch" style="background:{mark}"></i>' if mark else ""
    return Cell(f"{swatch}<code>{escape(str(value))}</code>")


def figure_cell(value: float | None, show: Callable[[float], str], small: str = "") -> Cell:
    """A number as `show` tells it, with its spread in small; a dash where there is none."""
    if value is None:
        return Cell(NOTHING)
    return Cell(escape(show(value)) + (f" <small>{escape(small)}</small>" if small else ""), value)


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str) -> str:
    """A table that sorts by any column; it scrolls by itself where the screen is narrow."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    named = f'aria-label="{escape(caption)}"'
    return (
        f'<p class="caption">{escape(caption)}</p><div class="wide" tabindex="0" role="region" {named}>'
        f'<table class="sortable" {named}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(cell: Cell) -> str:
    value = f' data-v="{cell.value!r}"' if cell.value is not None else ""
    return f"<td{value}>{cell.html}</td>"


def figure(svg: str, caption: str) -> str:
    """A drawing with its caption, which is also its name to those who cannot see it."""
    named = svg.replace('<svg role="img"', f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return f"<figure>{named}<figcaption>{escape(caption)}</figcaption></figure>"


def badge(word: str, why: str) -> str:
    return f'<span class="badge" title="{escape(why)}">{escape(word)}</span>'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in pairs)
    return f"<dl>{listed}</dl>"


def slug(*words: str) -> str:
    """`words` as an id: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-") or "x"


def document(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>"
        f"<body><main>{body}</main><script>{SORT}</script></body></html>\n"
    )


CSS = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fdfdfc; --card: #f5f6f7; --soft: #62676e; --line: #dcdfe3;
  --accent: #2f6fd0; --warn: #a8480f; --warn-paper: #fdf0e6 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e5e8; --paper: #16181b; --card: #1e2125; --soft: #9ea4ac; --line: #33373d; --accent: #7fb0ff;
    --warn: #ffb27d; --warn-paper: #38261a }
}
* { box-sizing: border-box }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100% }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif }
main { max-width: 74rem; margin: 0 auto; padding: 1.5rem 1rem 4rem }
p, dd, li, h1, h2, h3 { overflow-wrap: anywhere }
h1 { font-size: 1rem; color: var(--soft); font-weight: 600; margin: 0 }
h2 { margin: 3rem 0 .3rem; font-size: 1.35rem } h3 { margin: 1.6rem 0 .2rem; font-size: 1.05rem }
.verdict { margin: .4rem 0 1.2rem; padding-left: .9rem; border-left: 4px solid var(--accent); overflow-wrap: anywhere }
.verdict p { margin: 0; font-size: 1.3rem; line-height: 1.4 } .verdict p + p { font-size: 1.02rem; margin-top: .5rem; color: var(--soft) }
.verdict b { display: block; font-size: .85rem; font-weight: 600; color: var(--soft) }
.badge { display: inline-block; font-size: .78rem; font-weight: 600; line-height: 1.5; padding: 0 .55rem; margin: 0 .35rem .3rem 0;
  border-radius: 1rem; color: var(--warn); background: var(--warn-paper); vertical-align: .12em }
nav { font-size: .92rem; margin: 1.2rem 0 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem }
a { color: var(--accent) }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1rem; margin-top: 1rem }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem }
.card h3 { margin: 0; font-size: .92rem; color: var(--soft); font-weight: 600 }
.card .under { margin: .7rem 0 0; line-height: 1.3 }
.card .win { font-size: 1.02rem; font-weight: 600; margin: .15rem 0 .6rem; overflow-wrap: anywhere }
.card .big { display: flex; gap: 1.6rem; margin: 0 0 .7rem }
.card .big span { display: block; font-size: .8rem; color: var(--soft); line-height: 1.3 }
.card .big strong { font-size: 1.75rem; line-height: 1.15; font-weight: 650; font-variant-numeric: tabular-nums; color: var(--ink) }
.lane { display: grid; grid-template-columns: 1fr auto; font-size: .82rem; line-height: 1.35; gap: 0 .6rem; margin-top: .35rem }
.lane span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap } .lane b { font-weight: 500; font-variant-numeric: tabular-nums }
.lane i { grid-column: 1 / -1; height: 8px; border-radius: 2px; width: var(--w); min-width: 2px; background: var(--c) }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1rem 2rem; align-items: start }
figure { margin: .8rem 0; max-width: 34rem } figure svg { width: 100%; height: auto; display: block; color: var(--ink) }
figure svg text { font-family: system-ui, sans-serif !important }
figcaption, small, .caption { color: var(--soft); font-size: .85rem }
.wide { overflow-x: auto; margin: 0 0 1.2rem } .wide:focus-visible { outline: 2px solid var(--accent) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem }
.caption { margin: 1.4rem 0 0 }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: bottom }
td { white-space: nowrap; vertical-align: top } td small { display: block; line-height: 1.25 }
th { color: var(--soft); font-weight: 600; min-width: 4.6rem }
tbody tr:hover { background: var(--card) }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
th button { all: unset; cursor: pointer } th button:hover { color: var(--ink) }
th button:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
th[aria-sort=ascending] button::after { content: " ↑" } th[aria-sort=descending] button::after { content: " ↓" }
.swatch { display: inline-block; width: .6rem; height: .6rem; border-radius: 2px; margin-right: .45rem }
.worse { color: var(--warn) }
code { font: .9em ui-monospace, monospace }
pre { overflow-x: auto; padding: .7rem 1rem; border: 1px solid var(--line); border-radius: 6px; background: var(--card) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem } dt { color: var(--soft) } dd { margin: 0 }
@media (max-width: 40rem) { td:first-child { white-space: normal; overflow-wrap: anywhere }
  th:first-child, td:first-child { min-width: 9rem; max-width: 9rem; position: sticky; left: 0; background: var(--paper) } }
@media print { nav { display: none } .card, figure, table { break-inside: avoid } }
"""

# Buttons are made here and not in the HTML, so that a page without scripts has no dead ones. Cells without a number stay last.
SORT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = (row, column) => row.cells[column].dataset.v;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1, rows = [...body.rows];
      const numbers = rows.some(row => key(row, column) !== undefined);
      rows.sort((a, b) => {
        if (!numbers) return way * a.cells[column].textContent.localeCompare(b.cells[column].textContent, undefined, {numeric: true});
        const x = key(a, column), y = key(b, column);
        return x === undefined || y === undefined ? (x === undefined) - (y === undefined) : way * (x - y);
      });
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      body.append(...rows);
    });
  });
}
"""
