"""`tacit report` as a user meets it: the page, what lies beside it, and mistakes in one sentence."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from report import lab_sample, sample
from report.lab_sample import BF16, CNN, FP32, HUSH, MBIT

from tacit.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    few = {"rates": (100 * MBIT,), "workloads": (CNN,), "configurations": (FP32, BF16, HUSH), "limits": False}
    lab_sample.write_run(tmp_path / "run" / "records.jsonl", **few)
    return tmp_path / "run"


def test_a_run_folder_becomes_a_page_beside_its_records(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        "To 88.5 % test accuracy on fashion-mnist cnn, at 100 Mbit “every / hush / sharded” is fastest"
    )
    assert str(run / "report.html") in told
    assert sorted(path.name for path in run.iterdir()) == ["records.jsonl", "report.html"]


def test_json_csv_and_figures_lie_beside_the_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, figures = run.parent / "docs" / "thc.html", run.parent / "docs" / "images"
    assert (
        main(
            [
                "report",
                str(run / "records.jsonl"),
                "--out",
                str(out),
                "--json",
                "--csv",
                "--figures",
                str(figures),
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((out.parent / "thc.json").read_text()) and told["report"] == str(out)
    (finding,) = told["findings"]
    assert finding["fastest"] == HUSH and finding["against_fp32"] == pytest.approx(3.26, abs=0.005)
    with (out.parent / "thc-standings.csv").open(newline="") as file:
        rows = {row["configuration"]: row for row in csv.DictReader(file)}
    assert float(rows[HUSH]["to_target_s"]) == pytest.approx(finding["time_s"])
    names = {"findings", "standings", "accuracy", "calibration", "predictions", "runs"}
    assert {path.name for path in out.parent.glob("*.csv")} == {f"thc-{name}.csv" for name in names}
    assert {path.suffix for path in figures.iterdir()} == {".svg"} and len(list(figures.iterdir())) == 4


def test_a_demo_run_and_a_lab_run_share_a_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.write_run(tmp_path / "demo" / "records.jsonl")
    out = tmp_path / "both.html"
    assert main(["report", str(run), str(tmp_path / "demo"), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "thc: To 88.5 %" in told and "demo: “every / int8(block=256) / sharded” sends least" in told
    assert out.read_text(encoding="utf-8").count("<svg") == 4 + 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.jsonl"], "none.jsonl: there is no such file or folder"),
        (["empty.jsonl"], "this file is empty"),
        (["text.jsonl"], "no line of this file is a record"),
        (["notes.jsonl"], "hold nothing to report"),
        (["run", "none.jsonl"], "there is no such file"),
        (["run", "--out", "run"], "this is a folder; name the page"),
        (["run", "--out", "page.pdf"], "the page is HTML; name it page.html"),
        (["run", "--out", "text.jsonl/page.html"], "cannot write there"),
        (["run", "--figures", "text.jsonl"], "this is a file; name a folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    words: list[str],
    said: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.parent)
    Path("empty.jsonl").write_text("")
    Path("text.jsonl").write_text("dear diary\n")
    Path("notes.jsonl").write_text('{"kind": "note", "run": "a", "time": 1}\n')
    before = sorted(run.parent.rglob("*"))
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tacit: ") and said in error and error.count("\n") == 1
    assert sorted(run.parent.rglob("*")) == before


def test_a_torn_line_is_told_and_the_rest_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "records.jsonl").open("a") as file:
        file.write('{"kind": "timing", "wor')
    assert main(["report", str(run)]) == 0
    assert "lines are no records and were skipped" in capsys.readouterr().err
    assert "were skipped" in (run / "report.html").read_text(encoding="utf-8")
