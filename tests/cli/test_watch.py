"""`tacit watch` as a user meets it: a training that runs, one that has stopped, and files as crashes leave them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import deep, train

import tacit
from tacit.cli import main
from tacit.records import Recorder
from tacit.report.following import HEAD_NBYTES, TAIL_NBYTES, RecordFollower
from tacit.report.model.live import WINDOW

INT8 = "every / int8(block=256) / sharded"


def write(
    path: Path,
    rank: int,
    *,
    steps: int = 20,
    own_s: float = 0.08,
    world: int = 4,
    run: str = "20260101T000000-abc",
) -> Recorder:
    """One rank's records: steps of 0.1 s that end now, of which `own_s` is not waiting."""
    at = time.time() - 0.1 * steps
    recorder = Recorder(path, run=run, clock=lambda: at)
    recorder.record("attached", rank=rank, world=world, strategy=INT8, host="here", elements=1000)
    for number in range(1, steps + 1):
        at += 0.1
        sums = {"encode_s": 0.01, "wire_s": 0.03, "decode_s": 0.02, "wait_s": 0.1 - own_s, "sent_nbytes": 500}
        fields = {name: value * number for name, value in sums.items()}
        recorder.record("step", rank=rank, step=number, strategy=INT8, steps=number, **fields)
    return recorder


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["watch", *map(str, words)]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(capsys, path, "--once", "--json"))
    return found


def test_speed_bytes_and_parts_come_from_the_last_steps(tmp_path, capsys):
    for rank in range(4):
        write(tmp_path / f"rank{rank}.jsonl", rank, steps=2 * WINDOW)
    found = as_json(capsys, tmp_path)
    assert (found["world"], found["step"], found["strategy"]) == (4, 2 * WINDOW, INT8)
    assert found["step_s"] == pytest.approx(0.1) and found["steps_a_s"] == pytest.approx(10)
    assert found["sent_nbytes"] == 100 * WINDOW * 10 and found["sent_nbytes_a_step"] == pytest.approx(500)
    parts = {"own_s": 0.08, "wait_s": 0.02, "encode_s": 0.01, "wire_s": 0.03, "decode_s": 0.02}
    assert found["parts"] == pytest.approx(parts, rel=1e-3)
    assert found["lagging"] == [] and found["silent"] == []
    text = shown(capsys, tmp_path, "--once")
    assert "10 steps/s, 100 ms a step" in text and "computes 80 ms (80 %), waits 20 ms (20 %)" in text


def test_what_a_lossy_scheme_leaves_out_is_shown(tmp_path, capsys):
    recorder = write(tmp_path / "rank0.jsonl", 0, world=1)
    fields = {"strategy": INT8, "steps": 21, "chunks": 2000, "partial_chunks": 30}
    recorder.record("step", rank=0, step=21, **fields)
    recorder.close()
    assert "left out: 30 of 2,000 chunks (1.5 %) went without some rank" in shown(capsys, tmp_path, "--once")
    assert as_json(capsys, tmp_path)["partial_chunks"] == 30


def test_the_rank_that_others_wait_for_is_named(tmp_path, capsys):
    for rank in range(4):
        write(tmp_path / f"rank{rank}.jsonl", rank, own_s=0.098 if rank == 2 else 0.08)
    found = as_json(capsys, tmp_path)
    assert found["lagging"] == [2] and found["ranks"][2]["lag_s"] == pytest.approx(0.018, rel=1e-3)
    assert "rank 2 by 18 ms a step" in shown(capsys, tmp_path, "--once")


def test_the_records_of_one_rank_name_the_slow_one_where_ranks_exchange_their_times(tmp_path, capsys):
    recorder = Recorder(tmp_path / "rank0.jsonl")
    recorder.record("attached", rank=0, world=3, strategy=INT8)
    for number in range(1, 6):
        recorder.record("step", rank=0, step=number, strategy=INT8)
    recorder.record("ranks", rank=0, step=5, own_s=(0.08, 0.095, 0.08))
    found = as_json(capsys, tmp_path)
    assert [rank["own_s"] for rank in found["ranks"]] == [0.08, 0.095, 0.08] and found["lagging"] == [1]


def test_a_rank_without_new_records_is_silent(tmp_path, capsys):
    at = time.time() - 600
    recorder = Recorder(tmp_path / "rank0.jsonl", clock=lambda: at)
    for number in range(1, 4):
        recorder.record("step", rank=0, step=number, strategy=INT8)
    found = as_json(capsys, tmp_path)
    assert found["silent"] == [0] and found["ranks"][0]["silent_s"] > 590
    assert "no record of rank 0 for 10" in shown(capsys, tmp_path, "--once")


def test_prediction_stands_beside_what_is_measured_and_a_broken_plan_in_its_sentence(tmp_path, capsys):
    recorder = write(tmp_path / "rank0.jsonl", 0, world=1)
    predicted = {"step_s": 0.08, "low_s": 0.07, "high_s": 0.09, "wire_s": 0.02}
    recorder.record("chosen", rank=0, strategy=INT8, why="the link is slow", predicted=predicted)
    recorder.record("drift", rank=0, part="wire", sentence="the link is slower")
    found = as_json(capsys, tmp_path)
    assert found["predicted"]["step_s"] == 0.08 and found["off"] == pytest.approx(0.25, rel=1e-3)
    assert found["drifts"] == ["the link is slower"]
    text = shown(capsys, tmp_path, "--once")
    assert "predicted: 80 ms (70 ms to 90 ms), measured 100 ms: +25 %" in text
    assert "The plan no longer holds: the link is slower" in text and "chosen: the link is slow" in text


def test_of_a_training_that_was_started_again_the_last_counts_with_its_ranks(tmp_path, capsys):
    for rank in range(4):
        write(tmp_path / f"rank{rank}.jsonl", rank, steps=90)
    for rank in range(2):
        write(tmp_path / f"rank{rank}.jsonl", rank, steps=7, world=2, run="20260102T000000-abc")
    found = as_json(capsys, tmp_path)
    assert (found["world"], found["step"], len(found["ranks"])) == (2, 7, 2)


# ---- following files


def test_a_half_line_is_read_when_it_is_complete_and_other_lines_are_skipped(tmp_path):
    path = tmp_path / "rank0.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n{"kind": 3}\n{"kind": "step", "run": "a", "time": 1, "st')
    follower = RecordFollower(tmp_path)
    assert list(follower.new()) == []
    with path.open("ab") as file:
        file.write(b'ep": 5}\n')
    assert [record["step"] for record in follower.new()] == [5]
    assert list(follower.new()) == []


def test_a_replaced_file_and_a_new_one_are_read_from_their_beginning(tmp_path):
    write(tmp_path / "rank0.jsonl", 0, steps=3)
    follower = RecordFollower(tmp_path)
    assert len(list(follower.new())) == 4
    (tmp_path / "rank0.jsonl").unlink()
    assert list(follower.new()) == []
    write(tmp_path / "rank0.jsonl", 0, steps=1)
    write(tmp_path / "rank1.jsonl", 1, steps=1)
    assert [record["rank"] for record in follower.new()] == [0, 0, 1, 1]


def test_of_a_very_long_file_the_head_and_the_tail_are_read(tmp_path):
    path = tmp_path / "rank0.jsonl"
    line = json.dumps({"kind": "step", "run": "a", "time": 1, "filler": "x" * 900_000}).encode() + b"\n"
    count = (HEAD_NBYTES + TAIL_NBYTES) // len(line) + 20
    path.write_bytes(line * count)
    found = list(RecordFollower(path).new())
    assert 1 + TAIL_NBYTES // len(line) <= len(found) < count


# ---- mistakes


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "there is no such file or folder"),
        (lambda path: path.mkdir(), "holds no record of a training; attach(records="),
        (lambda path: path.write_text("{}\n"), "holds no record of a training; attach(records="),
    ],
)
def test_a_folder_without_records_gets_one_sentence(tmp_path, capsys, make, sentence):
    make(tmp_path / "run")
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


@pytest.mark.parametrize("every", ["0", "nan", "1e9"])
def test_an_interval_out_of_range_is_refused(tmp_path, capsys, every):
    assert main(["watch", str(tmp_path), "--every", every]) == 2
    assert "give 0.1 to 3600 seconds" in capsys.readouterr().err


# ---- the real thing


def _trains(rank, world, folder):
    model = deep(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tacit.attach(model, optimizer, "int8", records=f"{folder}/rank{rank}.jsonl"):
        train(model, optimizer, rank, range(30))


def test_a_real_training_can_be_watched(ranks, tmp_path, capsys):
    ranks.run(2, _trains, str(tmp_path))
    found = as_json(capsys, tmp_path)
    assert (found["world"], found["step"], found["strategy"]) == (2, 30, INT8)
    assert found["step_s"] > 0 and found["sent_nbytes_a_step"] > 0
    assert 0 < found["parts"]["own_s"] < found["step_s"] and found["parts"]["encode_s"] > 0


def test_it_follows_until_ctrl_c_and_ends_cleanly(tmp_path):
    recorder = write(tmp_path / "rank0.jsonl", 0, steps=3, world=1)
    command = [sys.executable, "-m", "tacit", "watch", str(tmp_path), "--json", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None and watch.stderr is not None
        assert json.loads(watch.stdout.readline())["step"] == 3
        recorder.record("step", rank=0, step=4, strategy=INT8)
        deadline = time.monotonic() + 30
        while json.loads(watch.stdout.readline())["step"] != 4:
            assert time.monotonic() < deadline
        os.kill(watch.pid, signal.SIGINT)
        assert watch.wait(30) == 0
        assert watch.stderr.read() == ""


def test_escapes_in_records_do_not_reach_the_terminal(tmp_path, capsys):
    escape = "\x1b]0;mine\x07\x1b[2J\x9b1m"
    recorder = write(tmp_path / "rank0.jsonl", 0, world=1)
    fields = {"encode_s": 0.1, "wire_s": 0.1, "decode_s": 0.1, "wait_s": 0.1, "sent_nbytes": 1}
    recorder.record("step", rank=0, step=21, strategy=f"every{escape}", steps=21, **fields)
    recorder.record(
        "drift", rank=0, step=21, part="wire", sentence=f"a{escape}b\nc", expected_s=1.0, measured_s=2.0
    )
    text = shown(capsys, tmp_path, "--once")
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "every\\x1b]0;mine\\x07" in text and "a\\x1b]0;mine" in text and "b c" in text
