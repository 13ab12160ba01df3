"""Rows and the verdict say what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.sample import DDP, FINAL, INT4, INT8, write_run

from tacit.report import last_run, summarise, verdict, wire_time_s
from tacit.report.model.summary import final_text


def test_rows_are_told_against_the_first_configuration_of_their_task(tmp_path: Path) -> None:
    rows = summarise(write_run(tmp_path / "r.jsonl"))
    assert [row.configuration for row in rows["bytes"]] == [DDP, INT8, INT4]
    assert [row.ratio for row in rows["bytes"]] == pytest.approx([1, 4, 5 / 0.7])
    assert [row.keeps_quality for row in rows["bytes"]] == [True, True, False]
    assert [row.keeps_quality for row in rows["digits"]] == [True, True, True]


def test_wire_time_is_bits_over_rate(tmp_path: Path) -> None:
    assert wire_time_s(1_250_000, 1e8) == pytest.approx(0.1)
    row = summarise(write_run(tmp_path / "r.jsonl"))["bytes"][1]
    assert row.wire_s == pytest.approx({"100 Mbit": 0.1, "1 Gbit": 0.01})


def test_the_verdict_names_the_least_bytes_that_train_as_well_on_every_task(tmp_path: Path) -> None:
    said = verdict(summarise(write_run(tmp_path / "r.jsonl")))
    assert INT8 in said and INT4 not in said and "4.0×" in said and "2.410 against 2.400" in said


def test_the_verdict_admits_that_nothing_trained_as_well(tmp_path: Path) -> None:
    worse = {"bytes": FINAL["bytes"] | {INT8: 3.0, INT4: float("nan")}}
    rows = summarise(write_run(tmp_path / "r.jsonl", worse))
    assert verdict(rows).startswith("No strategy sent fewer bytes than plain DDP and trained as well")
    assert [final_text(row) for row in rows["bytes"]] == ["2.400", "3.000", "diverged"]
    assert "Nothing" in verdict({})


def test_only_the_last_run_is_told(tmp_path: Path) -> None:
    write_run(tmp_path / "r.jsonl")
    records = write_run(tmp_path / "r.jsonl")
    assert len(records) == 16 and last_run(records) == records[8:]
