"""The pieces of a page: one look for every report, tables that sort, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from tacit.extras import extra
from tacit.report.text import NOTHING

with extra("report"):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).with_name("templates")


@cache
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)


def render(template: str, **values: Any) -> str:
    """The file `template` of templates/, filled in. Values are escaped, except where the template marks them as HTML."""
    return _environment().get_template(template).render(values)


@dataclass(frozen=True, slots=True)
class Lane:
    """A bar of a card: its name and text, and its length as a share of the longest."""

    name: str
    text: str
    share: float
    colour: str


@dataclass(frozen=True, slots=True)
class BigFigure:
    """A large figure of a card, what it is, and between what it lies."""

    text: str
    what: str
    between: str = ""


@dataclass(frozen=True, slots=True)
class TableCell:
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
        return render("section.html", place=place, title=self.title, head=self.head, body=self.body)


def text(value: object) -> TableCell:
    return TableCell(escape(str(value)))


def code(value: object, mark: str = "") -> TableCell:
    """A name from a record, in the fixed-width face; `mark` is the colour it has in the figures."""
    swatch = f'<i class="swatch" style="background:{mark}"></i>' if mark else ""
    return TableCell(f"{swatch}<code>{escape(str(value))}</code>")


def figure_cell(value: float | None, show: Callable[[float], str], small: str = "") -> TableCell:
    """A number as `show` formats it, with its spread in small; a dash where there is none."""
    if value is None:
        return TableCell(NOTHING)
    return TableCell(escape(show(value)) + (f" <small>{escape(small)}</small>" if small else ""), value)


def table(heads: Sequence[str], rows: Iterable[Sequence[TableCell]], caption: str) -> str:
    """A table that sorts by any column; it scrolls by itself where the screen is narrow."""
    return render("table.html", heads=heads, rows=list(rows), caption=caption)


def figure(svg: str, caption: str) -> str:
    """A drawing with its caption, which is also its name to those who cannot see it."""
    named = svg.replace('<svg role="img"', f'<svg role="img" aria-label="{escape(caption)}"', 1)
    return render("figure.html", svg=named, caption=caption)


def card(
    title: str,
    badges: str,
    winner: str,
    *,
    figures: Sequence[BigFigure] = (),
    lanes: Sequence[Lane] = (),
    under: str = "",
) -> str:
    """A card: a title with its badges (HTML), who won, large figures, bars, and a line below them."""
    return render(
        "card.html", title=title, badges=badges, winner=winner, figures=figures, lanes=lanes, under=under
    )


def badge(word: str, why: str) -> str:
    return render("badge.html", word=word, why=why)


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    return render("facts.html", pairs=list(pairs))


def document(title: str, body: str) -> str:
    """The whole page: style and script are inside it, so that one file is enough."""
    css, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "sort.js"))
    return render("document.html", title=title, body=body, css=css, script=script)
