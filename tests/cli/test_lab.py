"""`tacit lab` as a user meets it. Labs are listed in a folder of the test's own: nobody else's are seen or ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tacit import records
from tacit.cli import main
from tacit.lab import NoNamespacesError, kernel_features, up
from tacit.lab.experiments import session
from tacit.lab.network import calibration
from tacit.topology import star

ROOT = Path(__file__).parents[2]
SMALL = """
network = "star(nodes=2, rate=1Gbit, latency=0us)"
[[job]]
kind = "limits"
rates = ["500Mbit"]
sizes = ["1MB"]
repeats = 2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "tacit-lab"


@pytest.fixture(scope="module")
def able() -> None:
    try:
        kernel_features()
    except NoNamespacesError as cause:
        pytest.skip(str(cause))


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("tacit: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("network = [", "is not TOML"),
        ('network = "star(nodes=2, rate=100)"\n[job]\nkind = "limits"', "rate '100' has no unit"),
        ('network = "star(nodes=2, rate=1Gbit)"\n[job]\nkind = "limits"\nrates = ["1"]', "rate '1' has no unit"),
        ('[[network.host]]\nname = "a"\n[[network.link]]\na = "a"\nb = "c"\nrate = "1Gbit"\n[job]\nkind = "limits"', "names 'c', which is no host"),
    ],
)  # fmt: skip
def test_a_bad_experiment_is_one_sentence_and_nothing_is_written(
    text: str, expected: str, tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    assert main(["lab", "run", str(file), "--out", str(tmp_path / "out")]) == 2
    assert expected in said(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "none.toml"], "none.toml cannot be opened"),
        (["shell", "h9", "--network", "star(nodes=2, rate=1Gbit)"], "no host 'h9'; its hosts are h0, h1"),
        (["shell", "h0", "--network", "star(nodes=2, rate=1)"], "rate '1' has no unit"),
        (["shell", "h0"], "no lab of this user runs now; make one with --network"),
        (["shell", "h0", "--lab", "1"], "no lab of this user runs now"),
        (["clean", "1"], "no lab 1 of this user runs; those that do: none"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_two(
    words: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *words]) == 2
    assert expected in said(capsys)


def test_a_delay_that_the_kernel_cannot_add_is_one_sentence(
    able: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not kernel_features()["netem"]:
        pytest.skip("this kernel has netem")
    assert main(["lab", "shell", "anna", "--network", str(ROOT / "experiments/topologies/office.toml")]) == 2
    assert "asks for a delay of 2 ms, and this kernel has no netem" in said(capsys)


def test_check_tells_what_is_here_and_what_it_takes(able: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "check", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["able"]
        and told["how"] in ("root", "user")
        and told["verdict"].startswith("This machine can run")
    )
    found = {finding["name"]: finding for finding in told["findings"]}
    assert {"root", "user namespaces", "htb", "netem", "nft", "BPF", "cores"} <= set(found)
    assert all(
        bool(f["way_out"]) is not f["there"] and bool(f["why"]) is not f["there"] for f in found.values()
    )
    assert main(["lab", "check"]) == 0
    assert told["verdict"] in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_labs_are_listed_entered_and_ended(
    able: None, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "list"]) == 0 and "no lab of this user runs now" in capfd.readouterr().out
    with up(star(2, 1e8), folder=folder) as first, up(star(3, 1e8), folder=folder) as second:
        assert main(["lab", "list", "--json"]) == 0
        listed = json.loads(capfd.readouterr().out)
        assert {lab["init"] for lab in listed} == {first.init, second.init}
        assert main(["lab", "list"]) == 0 and "star(nodes=3" in capfd.readouterr().out
        assert (
            main(["lab", "shell", "h0"]) == 2
            and "2 labs run; choose one with --lab" in capfd.readouterr().err
        )
        number = str(next(lab["id"] for lab in listed if lab["init"] == second.init))
        line = "grep -c eth0 /proc/self/net/dev; exit 3"
        assert main(["lab", "shell", "h2", "--lab", number, "-c", line]) == 3
        assert capfd.readouterr().out == "1\n"
        assert main(["lab", "clean"]) == 0 and "0 ended, 2 left running" in capfd.readouterr().out
        assert main(["lab", "clean", number]) == 0 and "1 ended, 1 left running" in capfd.readouterr().out
        assert not Path(f"/proc/{second.init}").exists() and Path(f"/proc/{first.init}").exists()
        assert main(["lab", "clean", "--all"]) == 0 and "1 ended, 0 left running" in capfd.readouterr().out
    assert list(folder.iterdir()) == []


def test_a_shell_may_have_a_lab_made_for_it(
    able: None, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    network = ["--network", "ring(nodes=3, rate=1Gbit)"]
    assert main(["lab", "shell", "h1", *network, "-c", "cat /proc/self/net/dev; exit 4"]) == 4
    devices = [line.split(":")[0].strip() for line in capfd.readouterr().out.splitlines() if ":" in line]
    assert set(devices) == {"lo", "eth0", "eth1", "net0"}
    assert list(folder.iterdir()) == []


def passing(lab: Any, log_dir: Path, realtime: bool) -> calibration.Calibration:
    """What a calibration on a quiet machine finds; how quiet this one is now is not tested."""
    return calibration.Calibration(lab.rate_bps, (), 1)


def test_an_experiment_is_run_and_its_bytes_are_those_that_were_counted(
    able: None,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(session, "calibrate", passing)
    (tmp_path / "small.toml").write_text(SMALL)
    code = main(["lab", "run", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == (0 if told["passed"] else 1)  # its time depends on what else this machine does
    (result,) = told["results"]
    assert result["rate_bps"] == 500e6 and result["ranks"] == 2 and result["nbytes"] == 1_000_000
    assert result["counted_nbytes"] == 1_000_000 and result["n"] == 40
    assert abs(result["bytes_ratio"] - 1) < 0.02
    assert result["theory_s"] == pytest.approx(0.016) and result["measured_s"] > 0
    found = records.read(told["records"])
    assert [r["kind"] for r in found] == ["start", "calibration", "limits", "counters", "end"]
    start, counters = found[0], found[3]
    assert start["experiment"] == "small" and start["network"]["shaped"] and start["network"]["hosts"] == 2
    assert start["command"].startswith("tacit lab run ")
    seen = counters["nodes"]["h0"]["eth0"]
    assert seen["qdisc_nbytes"] > seen["tx_nbytes"] > 3 * 1_000_000 and seen["qdisc_drops"] == 0
    assert found[-1]["outcome"] == "done"
    assert sorted(path.name for path in (tmp_path / "out/logs/01-limits").iterdir()) == [
        "rank-0.log",
        "rank-1.log",
    ]


def test_a_network_that_is_not_what_it_claims_is_not_reported_on(
    able: None,
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = calibration.CalibrationCheck("from h0 to h1", "h0", "h1", 100_000, 7, 0.0004, 0.0084, 0.008, 0.009)
    monkeypatch.setattr(
        session, "calibrate", lambda lab, logs, realtime: calibration.Calibration(lab.rate_bps, (row,), 3)
    )
    (tmp_path / "small.toml").write_text(SMALL)
    assert main(["lab", "run", str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["results"] == [] and told["passed"] is False
    assert told["refused"][0].startswith("limits at 500Mbit: this network is not what it claims")
    kinds = [r["kind"] for r in records.read(told["records"])]
    assert kinds == ["start", "calibration", "refused", "end"]


# ---- as another user ----


@pytest.fixture(scope="module")
def nobody() -> Iterator[list[str]]:
    """The words that run Python with tacit as a user who is not root; skipped where that cannot be."""
    if os.geteuid() != 0:
        yield [sys.executable]
        return
    if shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv (util-linux) to become another user")
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    path = os.pathsep.join([str(ROOT / "src"), *(p for p in sys.path if p.endswith("site-packages"))])
    environment = [
        "env",
        "-i",
        "HOME=/tmp",
        "PATH=/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE=1",
        f"PYTHONPATH={path}",
    ]
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        words = [*user, *environment, python]
        tried = subprocess.run(
            [*words, "-c", "import tacit.lab, numpy, pyroute2"], capture_output=True, cwd="/"
        )
        if tried.returncode == 0:
            yield words
            return
    pytest.skip("this Python, or tacit's folder, cannot be read by other users")


TACIT = ["-c", "import sys; from tacit.cli import main; sys.exit(main(sys.argv[1:]))"]


def test_an_unprivileged_user_is_told_the_truth_and_has_a_lab_if_the_kernel_lets_him(
    nobody: list[str],
) -> None:
    ran = subprocess.run([*nobody, *TACIT, "lab", "check", "--json"], capture_output=True, text=True, cwd="/")
    told = json.loads(ran.stdout)
    there = {finding["name"]: finding["there"] for finding in told["findings"]}
    assert there["root"] is False and there["BPF"] is False and there["real-time priority"] is False
    try_it = [*nobody[:-1], "unshare", "-Urnm", "true"] if len(nobody) > 1 else ["unshare", "-Urnm", "true"]
    allowed = subprocess.run(try_it, capture_output=True).returncode == 0
    assert there["user namespaces"] is allowed
    assert told["how"] == ("user" if allowed else "unshaped") and ran.returncode == (0 if allowed else 1)
    if not allowed:
        pytest.skip("user namespaces are forbidden here")
    words = [
        "lab",
        "shell",
        "h1",
        "--network",
        "star(nodes=2, rate=100Mbit)",
        "-c",
        "id -u; cat /proc/self/net/dev; exit 6",
    ]
    ran = subprocess.run([*nobody, *TACIT, *words], capture_output=True, text=True, cwd="/")
    assert ran.returncode == 6, ran.stderr
    assert ran.stdout.startswith("0\n") and "eth0:" in ran.stdout  # root, but inside only


FORBID = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set -all --inh-caps -all "$@"'


@pytest.fixture(scope="module")
def forbidden() -> list[str]:
    """The words that run a command as a user who may not make any namespace."""
    words = ["unshare", "-Ur", "sh", "-c", FORBID, "sh"]
    if subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("no user namespace can be made here in which to forbid more")
    return words


def test_where_nothing_is_allowed_it_is_said_and_loopback_is_labelled_unshaped(
    forbidden: list[str], tmp_path: Path
) -> None:
    python = [*forbidden, sys.executable, *TACIT]
    ran = subprocess.run([*python, "lab", "check", "--json"], capture_output=True, text=True)
    told = json.loads(ran.stdout)
    assert ran.returncode == 1 and told["how"] == "unshaped" and not told["able"]
    found = {finding["name"]: finding for finding in told["findings"]}
    assert "max_user_namespaces" in found["user namespaces"]["way_out"]
    ran = subprocess.run(
        [*python, "lab", "shell", "h0", "--network", "star(nodes=2, rate=1Gbit)"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("tacit: no network can be built here: this user may not make namespaces")
    (tmp_path / "small.toml").write_text(SMALL)
    out = ["--out", str(tmp_path / "out"), "--json"]
    ran = subprocess.run(
        [*python, "lab", "run", str(tmp_path / "small.toml"), *out], capture_output=True, text=True
    )
    told = json.loads(ran.stdout)
    assert ran.returncode == 0 and told["shaped"] is False and "loopback, unshaped" in ran.stderr
    (result,) = told["results"]
    assert result["shaped"] is False and result["theory_s"] is None and result["passed"] is None
    assert records.read(told["records"])[0]["network"]["how"] == "unshaped"
