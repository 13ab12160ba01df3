"""Only records become runs: the last of each file, under a label of its own; all else is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report import lab_sample
from report.sample import write_run

from tacit.errors import ConfigError
from tacit.record_types import VERSION, TimingRecord
from tacit.report.model.runs import load
from tacit.report.pages.files import write_all


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello\nworld\n", "no line of this file is a record"),
        (b"\x00\xff\x89PNG\r\n", "no line of this file is a record"),
        (b'[1, 2]\n3\n{"kind": "timing"}\n', "no line of this file is a record"),
        (b'{"kind": "note", "run": "a", "time": 1}\n', "its records (note) hold nothing to report"),
    ],
)
def test_what_is_no_run_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="r.jsonl") as refusal:
        load([tmp_path / "r.jsonl"])
    assert said in str(refusal.value)


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        load([tmp_path / "none"])
    with pytest.raises(ConfigError, match="it holds none"):
        load([tmp_path])
    for name in ("a", "b"):
        write_run(tmp_path / f"{name}.jsonl")
    with pytest.raises(ConfigError, match="it holds 2 of them"):
        load([tmp_path])


def test_a_folder_and_its_file_are_one_run_and_torn_lines_are_told(tmp_path: Path) -> None:
    lab_sample.write_run(tmp_path / "thc" / "records.jsonl")
    with (tmp_path / "thc" / "records.jsonl").open("a") as file:
        file.write('{"kind": "tim')
    (run,) = load([tmp_path / "thc", tmp_path / "thc" / "records.jsonl"])
    assert run.label == "thc" and " of 87 lines" in run.notes[0] and "skipped" in run.notes[0]


def test_the_last_run_that_measured_is_told_and_the_rest_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lab_sample.write_run(path, run="first")
    lab_sample.write_run(path, run="second")
    with path.open("a") as file:
        file.write('{"kind": "start", "run": "third", "time": 1}\n')
    (run,) = load([path])
    assert run.id == "second" and {r["run"] for r in run.records} == {"second"}
    assert run.notes == (f"{path} holds 1 earlier run, left out here",)


@pytest.mark.parametrize(
    ("outcome", "told", "said"),
    [
        ("done", "done", ""),
        ("interrupted", "interrupted", "This run was interrupted; what it had recorded stands here."),
        ("failed", "failed", "This run failed before its end; what it had recorded stands here."),
        (None, "no end", "This run did not record its end: it was killed, or it still runs; what"),
        ("odd", "odd", "This run ended otherwise than done (odd); what"),
    ],
)
def test_how_a_run_ended_is_told(outcome: str | None, told: str, said: str, tmp_path: Path) -> None:
    lab_sample.write_run(tmp_path / "r.jsonl", outcome=outcome, rates=(1e8,), workloads=())
    (run,) = load([tmp_path / "r.jsonl"])
    assert run.outcome == told and run.unfinished.startswith(said) and bool(run.unfinished) is bool(said)


def test_a_sweep_has_no_end_to_miss(tmp_path: Path) -> None:
    lab_sample.write_costs(tmp_path / "c.jsonl")
    (run,) = load([tmp_path / "c.jsonl"])
    assert run.outcome is None and run.unfinished == ""


def test_a_sweep_that_was_resumed_is_told_whole(tmp_path: Path) -> None:
    lab_sample.write_costs(tmp_path / "c.jsonl")
    lab_sample.write_costs(tmp_path / "c.jsonl")
    (run,) = load([tmp_path / "c.jsonl"])
    assert len(run.of("cost")) == 24 and run.notes == ()


def test_files_are_written_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("before")
    (tmp_path / "wall").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match="cannot write there"):
        write_all({tmp_path / "a.html": "after", tmp_path / "wall" / "b.svg": "never"})
    assert (tmp_path / "a.html").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "wall"]
    write_all({tmp_path / "a.html": "after", tmp_path / "new" / "b.svg": "there"})
    assert (tmp_path / "a.html").read_text() == "after" and (
        tmp_path / "new" / "b.svg"
    ).read_text() == "there"


def _timing(path: Path, **more: object) -> Path:
    record = {"kind": "timing", "run": "a", "time": 1, "configuration": "DDP bf16 hook", "step_p50_s": 0.1}
    path.write_text(json.dumps(record | more) + "\n")
    return path


def test_records_of_version_1_are_upgraded_and_one_sentence_names_it(tmp_path: Path) -> None:
    path = _timing(tmp_path / "r.jsonl")
    (run,) = load([path])
    (timing,) = run.typed(TimingRecord)
    assert (timing.family, timing.lossy, timing.precision) == ("ddp", True, "bf16")
    assert run.notes == (
        f"{path}: 1 record of version 1: family, precision and loss are taken from the configurations' names",
    )


def test_records_of_a_later_version_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = _timing(tmp_path / "r.jsonl", version=VERSION + 1)
    with pytest.raises(
        ConfigError, match=rf"line 1 is a record of version {VERSION + 1}, and this tacit reads"
    ):
        load([path])


def test_a_record_that_is_malformed_is_one_sentence(tmp_path: Path) -> None:
    path = _timing(tmp_path / "r.jsonl", version=VERSION, family="ddp", split=[1], curve=3)
    (run,) = load([path])
    assert len(run.notes) == 1 and run.notes[0].startswith(f"{path}: line 1: timing.split is left out (")
