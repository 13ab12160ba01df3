"""The page stands alone: figures inside it, nothing fetched, every number in its tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from report.parsed import Page
from report.sample import DDP, INT4, INT8, write_run

from tacit.report.pages import page


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("report")
    path = page.write(write_run(folder / "records.jsonl"), folder / "report.html")
    return Page(path.read_text(encoding="utf-8"))


def test_each_task_has_its_three_figures_inside_the_page(built: Page) -> None:
    assert built.tags.count("figure") == built.tags.count("svg") == 6
    assert built.open == []


def test_nothing_outside_the_page_is_referred_to(built: Page) -> None:
    assert built.references and all(reference.startswith("#") for reference in built.references)
    assert not {"link", "iframe", "img", "object", "embed"} & set(built.tags)
    assert built.tags.count("script") == 1 and "<script>" in built.html  # it sorts the tables; it has no src
    assert "http" not in built.html and "@import" not in built.html
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", built.html))


def test_ids_are_unique_and_every_reference_has_its_target(built: Page) -> None:
    assert len(built.ids) == len(set(built.ids))
    targets = {*(r.lstrip("#") for r in built.references), *re.findall(r"url\(#([^)]*)\)", built.html)}
    assert targets <= set(built.ids)


def test_figures_take_their_ink_from_the_page_in_light_and_dark(built: Page) -> None:
    assert "prefers-color-scheme: dark" in built.html and "currentColor" in built.html
    assert "#010203" not in built.html and "#ffffff" not in built.html and "#000000" not in built.html


def test_tables_hold_every_configuration_with_its_figures(built: Page) -> None:
    row = built.cells.index(INT8)
    expected = [INT8, "12 ms", "1.20×", "1.25 MB counted", "4.00×", "2.410", "100 ms", "10 ms"]
    assert built.cells[row : row + 8] == expected
    assert built.cells.count(DDP) == built.cells.count(INT4) == 2
    assert any(cell.startswith("2.600") and "↓" in cell for cell in built.cells)


def test_the_verdict_comes_first_and_the_command_and_the_machine_are_named(built: Page) -> None:
    assert built.html.index("sends least") < built.html.index("<svg")
    assert "tacit demo --tasks bytes,digits --ranks 4" in built.html
    assert all(
        f"<dt>{fact}</dt>" in built.html for fact in ("cpu", "cores", "memory", "kernel", "torch", "tacit")
    )


def test_text_from_records_is_escaped(built: Page) -> None:
    assert "a &lt;text&gt; task" in built.html


def test_a_run_that_trained_nothing_still_makes_a_page(tmp_path: Path) -> None:
    records = write_run(tmp_path / "r.jsonl", {})
    assert "Nothing was trained" in page.build(records)


def test_report_does_not_import_torch() -> None:
    code = "import sys, tacit.report.pages.page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
