"""Templates, CSS and JS are package data: they lie next to the module that reads them, and so in the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tacit.report.pages import html

NAMES = {
    "badge.html",
    "card.html",
    "document.html",
    "facts.html",
    "figure.html",
    "page.css",
    "section.html",
    "sort.js",
    "table.html",
}


def test_templates_css_and_js_lie_next_to_the_module() -> None:
    assert Path(html.__file__).with_name("templates") == html.TEMPLATES
    assert {path.name for path in html.TEMPLATES.iterdir()} == NAMES


def test_the_wheel_takes_every_file_of_the_package() -> None:
    top = Path(__file__).parents[3]
    build = tomllib.loads((top / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert build["wheel"]["packages"] == ["src/tacit"] and not build["wheel"].get("exclude")
