"""Records survive what cuts their writer off, and say where they were measured."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from toys import deep, flat, train

import tacit
from tacit.errors import ConfigError
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


def test_half_a_line_on_a_full_disk_harms_no_later_record(tmp_path: Path) -> None:
    with Recorder(tmp_path / "records.jsonl") as recorder:
        recorder.record("before")
        with limited_to(recorder.path.stat().st_size + 20):  # as a disk that has room for 20 bytes more
            for _ in range(3):
                with pytest.raises(OSError):
                    recorder.record("lost", padding="x" * 100)
        recorder.record("after")
        recorder.record("later")
    with pytest.warns(TornRecordWarning, match="line 2"):
        assert [record["kind"] for record in read(recorder.path)] == ["before", "after", "later"]


@contextmanager
def limited_to(nbytes: int) -> Iterator[None]:
    """No file of this process can grow beyond `nbytes`: a write gets short, then fails, as on a full disk."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_is_reported_once_and_training_goes_on(ranks) -> None:
    for said, step, bits, unrecorded in ranks.run(2, _on_a_full_disk):
        assert len(said) == 1 and "records=/dev/full: No space left on device" in said[0]
        assert "training goes on" in said[0]
        assert step == 4 and torch.equal(bits, unrecorded)


def _on_a_full_disk(rank, world):
    models = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for where in ("/dev/full", None):
            model = deep()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            handle = tacit.attach(model, optimizer, "every / ef(int4) / sharded", records=where)
            train(model, optimizer, rank, range(4))
            step = handle.step
            handle.close()
            models.append(flat(model))
    said = [str(w.message) for w in warned if "records" in str(w.message)]
    return said, step, *models


def test_records_go_on_when_the_disk_has_room_again(tmp_path: Path) -> None:
    handle = tacit.attach(deep(), None, "none", records=tmp_path / "records.jsonl")
    handle.record("step", n=0)
    with limited_to(150):
        with pytest.warns(UserWarning, match="records are lost"):
            handle.record("step", n=1, padding="x" * 200)
        with warnings.catch_warnings(action="error"):
            handle.record("step", n=2)
    handle.record("step", n=3)
    handle.close()
    with pytest.warns(TornRecordWarning):
        assert [record["n"] for record in read(tmp_path / "records.jsonl")] == [0, 3]


def test_a_place_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="records=.*; name a file that can be written"):
        tacit.attach(deep(), None, "none", records=tmp_path / "file" / "records.jsonl")
