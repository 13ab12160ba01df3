"""The page in a real browser: no console errors, every figure drawn, tables sort, nothing wider than a phone."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from report.lab_sample import BF16, CNN, FP32, HUSH, MBIT, POWER, VGG, write_run

from tacit.report.model.runs import load
from tacit.report.pages.page import Report, compose

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--dump-dom",
]
PHONE = 360  # px

# Looks at the page inside a frame of a phone's width, sorts its first table twice by keyboard's own event, and writes
# what it found where --dump-dom shows it.
PROBE = """
<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const table = page.querySelector("table.sortable"), head = table.tHead.rows[0].cells[2];
  const column = () => [...table.tBodies[0].rows].map(row => Number(row.cells[2].dataset.v));
  const sorted = [];
  for (let time = 0; time < 2; time++) {
    head.querySelector("button").focus();
    page.activeElement.click();
    sorted.push([head.getAttribute("aria-sort"), column()]);
  }
  const drawn = [...page.querySelectorAll("figure svg")].filter(svg => svg.getBoundingClientRect().height > 50).length;
  const right = element => element.getBoundingClientRect().right;
  const beside = [...page.querySelectorAll(".card *")].filter(e => right(e) > right(e.closest(".card")) - 8);
  const found = {width: root.scrollWidth, beside: beside.map(e => e.textContent), drawn, sorted, buttons: table.tHead.querySelectorAll("button").length,
    heads: table.tHead.rows[0].cells.length, scripts: page.scripts.length};
  document.querySelector("#found").textContent = JSON.stringify(found);
});
</script>
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("browser") / "records.jsonl"
    trained = (FP32, BF16, POWER, HUSH)  # PowerSGD wins on VGG: a card with three ratios
    write_run(path, rates=(100 * MBIT, 200 * MBIT), workloads=(CNN, VGG), configurations=trained)
    return compose(load([path]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_the_page_opens_without_errors_draws_sorts_and_fits_a_phone(report: Report, tmp_path: Path) -> None:
    framed = (
        f'<iframe style="border:0" width="{PHONE}" height="900" srcdoc="{html.escape(report.html)}"></iframe>'
    )
    (tmp_path / "probe.html").write_text(
        f'<!doctype html><meta charset="utf-8">{framed}<pre id="found"></pre>{PROBE}'
    )
    found, log = _open(tmp_path / "probe.html", tmp_path / "profile")
    assert "CONSOLE" not in log, log
    assert found["drawn"] == len(report.figures) == 13
    assert found["width"] <= PHONE and found["beside"] == []
    assert found["buttons"] == found["heads"] and found["scripts"] == 1
    (up, rising), (down, falling) = found["sorted"]
    assert (up, down) == ("ascending", "descending")
    assert rising == sorted(rising) and falling == sorted(rising, reverse=True) and len(set(rising)) > 2


def _open(page: Path, profile: Path) -> tuple[dict[str, Any], str]:
    """What the probe found, and what the browser logged."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [str(BROWSER), *FLAGS, *sandbox, f"--user-data-dir={profile}", page.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    match = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert match and match[1], ran.stderr
    return json.loads(html.unescape(match[1])), ran.stderr
