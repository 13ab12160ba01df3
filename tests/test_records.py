"""Records survive what cuts their writer off, and say where they were measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tacit.records import Recorder, TornRecordWarning, host_facts, read


def test_every_record_carries_time_kind_and_run(tmp_path: Path) -> None:
    with Recorder(tmp_path / "deep" / "records.jsonl", clock=lambda: 0.0) as recorder:
        recorder.record("exchange", nbytes=4, p50_s=0.5)
    assert read(recorder.path) == [
        {"time": 0.0, "kind": "exchange", "run": recorder.run, "nbytes": 4, "p50_s": 0.5}
    ]
    assert recorder.run.startswith("19700101T000000-")


def test_a_second_run_is_appended_under_its_own_id(tmp_path: Path) -> None:
    for _ in range(2):
        with Recorder(tmp_path / "records.jsonl") as recorder:
            recorder.record("start")
    assert len({record["run"] for record in read(recorder.path)}) == 2


def test_a_killed_writer_loses_nothing_it_recorded(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    code = (
        "import os, signal, sys; from tacit.records import Recorder; r = Recorder(sys.argv[1]);"
        "[r.record('step', n=n) for n in range(100)]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == -9
    assert [record["n"] for record in read(path)] == list(range(100))


def test_a_torn_last_line_is_skipped_and_reported_and_harms_no_later_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with Recorder(path) as recorder:
        recorder.record("whole")
    with path.open("ab") as file:
        file.write(b'{"time": 1.0, "ki')
    with pytest.warns(TornRecordWarning, match="line 2"):
        assert [record["kind"] for record in read(path)] == ["whole"]
    with Recorder(path) as recorder:
        recorder.record("later")
    with pytest.warns(TornRecordWarning, match="line 2"):
        assert [record["kind"] for record in read(path)] == ["whole", "later"]


def test_a_number_that_is_not_finite_is_null_in_strict_json(tmp_path: Path) -> None:
    with Recorder(tmp_path / "records.jsonl") as recorder:
        recorder.record("training", loss=[1.0, float("nan")], final=float("inf"))
    entry = json.loads(recorder.path.read_text(), parse_constant=pytest.fail)
    assert (entry["loss"], entry["final"]) == ([1.0, None], None)


def test_host_facts_name_the_machine_without_importing_torch() -> None:
    code = "import sys; from tacit.records import host_facts; host_facts(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    facts = host_facts()
    assert facts["cores"] >= 1 and facts["memory_nbytes"] > 1e8
    assert facts["torch"][0].isdigit() and all(facts[key] for key in ("cpu", "kernel", "python", "tacit"))
