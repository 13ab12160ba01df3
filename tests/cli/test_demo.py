"""The command as a user meets it: its help, its mistakes, one short demo, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tacit import records
from tacit.cli import VERBS, main
from tacit.demo.facts import CONFIGURATIONS

TACIT = [sys.executable, "-c", "import sys; from tacit.cli import main; sys.exit(main())"]


@pytest.mark.parametrize("words", [[], *([verb] for verb in VERBS)], ids=" ".join)
def test_help_ends_with_an_example_and_does_not_import_torch(words: list[str]) -> None:
    code = (
        "import sys; from tacit.cli import main\n"
        "try: main(sys.argv[1:])\nfinally: assert not {'torch', 'rich', 'matplotlib'} & set(sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert "example" in ran.stdout.split("\n\n")[-1]


def test_version_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("tacit ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "--ranks 0"),
        (["--ranks", "1000"], "choose 1 to 64"),
        (["--steps", "0"], "--steps 0"),
        (["--tasks", "digits,imagenet"], "no task 'imagenet'; choose from digits, bytes"),
        (["--tasks", ""], "no task ''"),
        (["--rate", "100"], "rate '100' has no unit"),
    ],
)
def test_a_bad_value_is_one_sentence_and_nothing_is_written(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tacit: ") and said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_out_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    assert "this is a file" in capsys.readouterr().err and (tmp_path / "out").read_text() == "mine"


def test_a_missing_scikit_learn_is_said_and_the_other_task_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tacit.cli import build_parser
    from tacit.cli.demo import check

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check(build_parser().parse_args(["demo", "--loopback"])).tasks == ("bytes",)
    assert "needs the package sklearn" in capsys.readouterr().err
    assert main(["demo", "--loopback", "--tasks", "digits"]) == 2
    assert "no other task" in capsys.readouterr().err


def test_a_short_demo_prints_json_and_leaves_records_and_a_report(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = [
        "demo",
        "--loopback",
        "--ranks",
        "2",
        "--steps",
        "4",
        "--tasks",
        "digits",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    ran = subprocess.run([*TACIT, *words], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [row["configuration"] for row in told["rows"]] == list(CONFIGURATIONS)
    assert [row["ratio"] for row in told["rows"]][:3] == pytest.approx([1, 1, 2], rel=0.05)
    kinds = [record["kind"] for record in records.read(told["records"])]
    assert [kind for kind in kinds if kind != "progress"] == [
        "start",
        *["training"] * len(CONFIGURATIONS),
        "end",
    ]
    assert Path(told["report"]).read_text(encoding="utf-8").count("<svg") == 3
    assert ran.stderr.count("ms a step") == len(CONFIGURATIONS)


def test_a_short_demo_on_a_network_compares_with_plain_ddp_and_leaves_a_page(tmp_path: Path) -> None:
    from tacit.lab.network.machine import check

    pytest.importorskip("sklearn")
    if not (machine := check()).able:
        pytest.skip(machine.verdict)
    words = ["demo", "--rate", "50Mbit", "--ranks", "2", "--steps", "4", "--tasks", "digits", "--json"]
    ran = subprocess.run(
        [*TACIT, *words, "--out", str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    told = json.loads(ran.stdout)
    kept = records.read(told["records"])
    assert kept[0]["network"]["shaped"] and kept[-1]["outcome"] == "done"
    if (
        ran.returncode
    ):  # a busy machine could not keep the network to its rate, and says so instead of figures
        assert "not what it claims" in ran.stdout
        return
    timed = [record for record in kept if record["kind"] == "timing"]
    assert [record["configuration"] for record in timed][:2] == ["plain DDP", "DDP bf16 hook"]
    sent = {record["configuration"]: record["sent_nbytes_a_step"] for record in timed}
    assert sent["plain DDP"] > 3.5 * sent["every / int8(block=256) / sharded"]
    assert [r["configuration"] for r in kept if r["kind"] == "accuracy"] == [
        r["configuration"] for r in timed
    ]
    assert "<svg" in Path(told["report"]).read_text(encoding="utf-8")


def test_ctrl_c_ends_the_ranks_and_keeps_the_records_so_far(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = [
        "demo",
        "--loopback",
        "--ranks",
        "2",
        "--steps",
        "30",
        "--tasks",
        "digits,bytes",
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(
        [*TACIT, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stderr
        first = command.stderr.readline()  # a step is done, so it is recorded
        ranks = _children(command.pid)
        command.send_signal(signal.SIGINT)
        rest = command.stderr.read()
        assert command.wait(timeout=60) == 130
    assert "side by side" in first and rest.splitlines()[-1].startswith(
        "tacit: interrupted; the records so far"
    )
    assert "Traceback" not in rest
    kept = records.read(tmp_path / "records.jsonl")
    assert kept[1]["kind"] == "progress" and kept[-1]["outcome"] == "interrupted"
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def _children(pid: int) -> list[int]:
    stats = {
        int(p.name): p / "stat"
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and int(p.name) != os.getpid()
    }
    found = []
    for child, stat in stats.items():
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if parent == pid:
            found.append(child)
    return found
