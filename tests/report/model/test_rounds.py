"""Trainings under rules and gossip: each beside the baseline's of its seed, one sentence, figures, a table, JSON and CSV.

PYTHONPATH=tests python tests/report/model/test_rounds.py runs/sample      # to look at: then `tacit report runs/sample`
"""

from __future__ import annotations

import csv
import html
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from report.model.test_comparisons import run_of, timed
from report.pages.test_browser import BROWSER, PHONE, PROBE, _open
from report.parsed import Page

from tacit.cli.lab import show
from tacit.lab.experiments.session import SessionOutcome
from tacit.records import Record, Recorder, host_facts, read
from tacit.report.model.rounds import trials
from tacit.report.model.runs import load
from tacit.report.pages.page import Report, compose

EVERY, LOCAL = "every / none / gossip", "local(13) / none / gossip"
PLAIN, HUSH = "adaptive(0.1) / none / gossip", "adaptive(0.1) / hush / gossip"
SHARE = {EVERY: 1.0, LOCAL: 0.077, PLAIN: 0.076, HUSH: 0.0146}
TIME = {EVERY: 1.0, LOCAL: 0.45, PLAIN: 0.44, HUSH: 0.40}
FINAL = {EVERY: 0.884, LOCAL: 0.8792, PLAIN: 0.8842, HUSH: 0.8837}
APART = {EVERY: 0.004, LOCAL: 0.05, PLAIN: 0.03, HUSH: 0.031}
SEEDS, STEPS, RANKS, NBYTES, SECONDS = (0, 1, 2), 4000, 4, 1.75e9, 310.0


def training(name: str, seed: int, **more: Any) -> Record:
    """A made-up training, close to what the simulation gave; nothing in it is random."""
    nbytes, seconds = NBYTES * SHARE[name] * (1 + 0.02 * (seed - 1) * (name != EVERY)), SECONDS * TIME[name]
    adaptive = name.startswith("adaptive")
    met = round(STEPS * (SHARE[PLAIN] if adaptive else SHARE[name]))
    curve = []
    for k in range(1, 21):
        part, wave = k / 20, math.sin(k + 2 * seed + len(name))
        gone = part**0.7 if adaptive else part
        point = {
            "step": round(STEPS * part),
            "metric": FINAL[name] + 0.0005 * (seed - 1) - 0.09 * math.exp(-6 * part) * (1 + 0.1 * wave),
            "apart": APART[name] * (0.5 + 0.5 * math.cos(math.pi * part) + 0.02) * (1 + 0.1 * wave),
            "seconds": [seconds * part * (1 - 0.002 * rank) for rank in range(RANKS)],
            "sent_nbytes": [0.98 * nbytes * gone] * RANKS,
            "interface_nbytes": [nbytes * gone] * RANKS,
            "exchanges": [round(met * gone)] * RANKS,
            "drift": [0.1 * (0.5 + 0.5 * math.cos(math.pi * part) + 0.01) if adaptive else None] * RANKS,
        }
        curve.append(point)
    times = [[seconds * ((k + 0.3 * rank) / min(met, 400)) ** (1.4 if adaptive else 1) for k in range(min(met, 400))]
             for rank in range(RANKS)]  # fmt: skip
    return {
        "job": "mlp", "workload": "fashion_mlp", "configuration": name, "baseline": name == EVERY, "seed": seed,
        "ranks": RANKS, "steps": STEPS, "network": "star(nodes=4, rate=50Mbit)", "shaped": True, "rate_bps": 5e7,
        "metric": "test accuracy", "higher_is_better": True, "final": FINAL[name] + 0.0005 * (seed - 1),
        "apart": curve[-1]["apart"], "seconds": seconds, "compute_s": 0.03, "sent_nbytes": 0.98 * nbytes,
        "interface_nbytes": nbytes, "merge_nbytes": 1.3e6, "communicating": 1 - 0.03 * STEPS / seconds,
        "exchanges": met, "outcomes": {"met": RANKS * met, "busy": 31}, "meeting_p50_s": 0.071, "meeting_p90_s": 0.15,
        "why": {"moved" if adaptive else "every step": RANKS * met + 31}, "exchange_times_s": times, "curve": curve,
    } | more  # fmt: skip


def write_run(path: Path) -> None:
    ticks = iter(range(1_794_800_000, 1_794_900_000, 7))
    with Recorder(path, clock=lambda: float(next(ticks))) as recorder:
        recorder.record("start", experiment="gossip", command="tacit lab run experiments/gossip.toml", host=host_facts(),
                        network={"text": "star of 4 hosts", "shaped": True})  # fmt: skip
        for seed in SEEDS:
            for name in SHARE:
                recorder.record("rounds", **training(name, seed))
        recorder.record("end", outcome="done")


def bare(name: str, seed: int = 0, **more: Any) -> Record:
    """A record with little in it."""
    return {"kind": "rounds", "workload": "w", "configuration": name, "seed": seed, "seconds": 2.0, "shaped": True,
            "rate_bps": 1e8} | more  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds")
    write_run(path / "records.jsonl")
    return path


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return compose(load([folder]))


def test_the_verdict_names_who_says_least_of_those_that_learn_as_well(report: Report) -> None:
    assert report.verdicts["gossip"] == [
        "On fashion_mlp at 50 Mbit (3 seeds), “adaptive(0.1) / hush / gossip” sends 98.5 % less and takes 60.0 % less time "
        "than “every / none / gossip”, which communicates 61 % of a step, at -0.03 points test accuracy."
    ]


def test_each_training_stands_beside_the_baseline_of_its_seed() -> None:
    finals = {("a", 0): 0.80, ("a", 1): 0.90, ("b", 0): 0.81, ("b", 1): 0.90}
    sent = {("a", 0): 100, ("a", 1): 200, ("b", 0): 10, ("b", 1): 10}
    records = [
        bare(name, seed, baseline=name == "a", final=final, sent_nbytes=sent[name, seed])
        for (name, seed), final in finals.items()
    ]
    (trial,) = trials([run_of(*records)])
    rule = next(rule for rule in trial.strategies if rule.name == "b")
    assert rule.bytes_share and (rule.bytes_share.mean, rule.bytes_share.n) == (
        pytest.approx((0.1 + 0.05) / 2),
        2,
    )
    assert rule.difference and rule.difference.mean == pytest.approx(0.005)
    assert rule.difference.least == pytest.approx(0) and rule.difference.most == pytest.approx(0.01)
    assert rule.time_ratio and rule.time_ratio.mean == 1 and rule.keeps_quality and not trial.interface


@pytest.mark.parametrize(
    ("higher", "base", "own", "good"),
    [(True, 0.9, 0.8971, True), (True, 0.9, 0.8969, False), (False, 2.0, 2.019, True), (False, 2.0, 2.021, False),
     (False, 2.0, 1.0, True), (True, 0.9, None, False)],
)  # fmt: skip
def test_as_good_is_within_0_3_points_or_1_percent(
    higher: bool, base: float, own: float | None, good: bool
) -> None:
    facts: dict[str, Any] = {"higher_is_better": higher, "metric": "m", "sent_nbytes": 1.0}
    records = [bare("a", baseline=True, final=base, **facts), bare("b", final=own, **facts)]
    report = compose([run_of(*records)])
    assert [row["as_good"] for row in report.tables["strategies"]] == [True, good]
    bound = "0.3 points m" if higher else "1 % m"
    sentence = report.verdicts["made"][0]
    assert (f"no strategy came within {bound} of “a”" in sentence) is not good
    near = (
        "; the nearest is “b”, at -0.31 points, which sends 0.0 % less."
        if higher
        else "“b”, at +1.05 %, which"
    )
    assert (near in sentence) is (not good and own is not None)


def test_every_figure_is_there_with_its_own_ids_and_as_a_file(report: Report) -> None:
    kinds = ("saved", "by-bytes", "by-time", "exchanges", "apart", "drift")
    assert set(report.figures) == {f"fashion-mlp-50-mbit-{kind}" for kind in kinds}
    page = Page(report.html)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) and page.tags.count("svg") == len(kinds)
    for text in report.figures.values():
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg" and "currentColor" in text


def test_the_table_holds_means_extremes_and_counts(report: Report) -> None:
    cells = Page(report.html).cells
    row = cells[cells.index(HUSH) :][:12]
    assert row[1] == "88.37 % 88.32 % – 88.42 % n=3" and row[2].startswith("-0.03 points")
    assert row[4] == "1.5 % 1.4 % – 1.5 %" and row[5] == "124 s" and row[6] == "40.0 %"
    worse = cells[cells.index(LOCAL) :][:12]
    assert worse[2].startswith("↓ -0.48 points")
    assert "912 every step" not in report.html and "3,741 moved; ended 3,648 met, 93 busy" in report.html


def test_json_and_csv_hold_every_training_and_every_strategy(
    folder: Path, report: Report, tmp_path: Path
) -> None:
    rows = report.tables["rounds"]
    assert len(rows) == len(SHARE) * len(SEEDS) and len(rows[0]["curve"]) == 20
    own = next(row for row in rows if row["configuration"] == HUSH and row["seed"] == "2")
    assert own["bytes_share"] == pytest.approx(SHARE[HUSH] * 1.02) and own["time_ratio"] == pytest.approx(0.4)
    strategy = next(row for row in report.tables["strategies"] if row["configuration"] == PLAIN)
    assert strategy["final"] == pytest.approx({"mean": 0.8842, "least": 0.8837, "most": 0.8847, "n": 3})
    out = tmp_path / "page.html"
    command = [sys.executable, "-m", "tacit", "report", str(folder), "--out", str(out), "--csv", "--json"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert told["strategies"] == json.loads(json.dumps(report.tables["strategies"]))
    with (tmp_path / "page-strategies.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 4 and float(table[3]["bytes_share mean"]) == pytest.approx(SHARE[HUSH])


def test_what_is_missing_or_hostile_is_borne() -> None:
    hostile = '<script>alert(1)</script> & "q" $ </svg>'
    sparse = [
        [bare("a")],
        [bare("a", baseline=True), bare("b", sent_nbytes=0)],
        [bare("b", final=0.5), {"kind": "rounds"}],
        [training(hostile_name, 0, kind="rounds", **facts) for hostile_name, facts in (
            (EVERY, {"workload": hostile, "metric": hostile, "network": hostile, "configuration": hostile}),
            (HUSH, {"workload": hostile, "metric": hostile, "network": hostile, "why": {hostile: 3}}))],
        [training(EVERY, 0, kind="rounds", curve=[{"step": 1}, "x", {"step": 2, "seconds": [1], "sent_nbytes": [0]}])],
        [timed("x", 1.0), bare("a", baseline=True, final=0.5, sent_nbytes=3), bare("b", final=0.5, sent_nbytes=1)],
    ]  # fmt: skip
    for records in sparse:
        page = Page(compose([run_of(*records)]).html)
        assert page.open == [] and page.tags.count("script") == 1
    both = compose([run_of(*records, label=str(place)) for place, records in enumerate(sparse)])
    assert Page(both.html).open == [] and len(both.verdicts) == len(sparse)


def test_an_unshaped_run_claims_no_time() -> None:
    records = [training(name, 0, kind="rounds", shaped=False, network="loopback, unshaped", interface_nbytes=None)
               for name in (EVERY, HUSH)]  # fmt: skip
    report = compose([run_of(*records)])
    (sentence,) = report.verdicts["made"]
    assert sentence.startswith(
        "On fashion_mlp over loopback, unshaped (1 seed), “adaptive(0.1) / hush / gossip” sends 98.6 %"
    )
    assert " time" not in sentence and "unshaped</span>" in report.html


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
def test_the_page_opens_draws_sorts_and_fits_a_phone(report: Report, tmp_path: Path) -> None:
    framed = (
        f'<iframe style="border:0" width="{PHONE}" height="900" srcdoc="{html.escape(report.html)}"></iframe>'
    )
    page = f'<!doctype html><meta charset="utf-8">{framed}<pre id="found"></pre>'
    (tmp_path / "probe.html").write_text(page + PROBE.replace("cells[2]", "cells[3]"))
    found, log = _open(tmp_path / "probe.html", tmp_path / "profile")
    assert "CONSOLE" not in log, log
    assert found["drawn"] == len(report.figures) and found["width"] <= PHONE and found["beside"] == []
    (up, rising), (down, falling) = found["sorted"]
    assert (up, down) == ("ascending", "descending") and rising == sorted(rising) == falling[::-1]
    assert rising[-1] == pytest.approx(NBYTES) and rising[0] == pytest.approx(fmean([NBYTES * SHARE[HUSH]]))


def test_the_command_shows_means_over_seeds_with_their_spread(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = SessionOutcome(tuple(read(folder / "records.jsonl")), (), shaped=True)
    show(outcome)
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if HUSH in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[1:5] == ["3", "0.8837 ±0.0005", "-0.03 ±0.00", "25.6 MB"]
    assert cells[5:] == ["1.5 ±0.0", "124 s", "40.0 ±0.0", "3 ±0", "304"]
    assert "mlp: fashion_mlp · 50 Mbit" in shown and "at the interfaces" in shown


def test_no_word_of_the_page_is_a_raw_number_of_python(report: Report) -> None:
    shown = re.sub(r"<(style|script|svg).*?</\1>|<[^>]*>", " ", report.html, flags=re.DOTALL)
    assert not re.search(r"\d\.\d{5,}|\bnan\b|None", shown)


if __name__ == "__main__":
    (Path(sys.argv[1]) / "records.jsonl").unlink(missing_ok=True)
    write_run(Path(sys.argv[1]) / "records.jsonl")
