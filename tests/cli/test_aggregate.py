"""`tacit aggregate` as its user meets it: started, asked, stopped, and refused in one sentence."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest
from aggregator.kernel import in_new_network
from aggregator.members import joined, some_terms, sum_exactly, until
from aggregator.serving import TACIT, UNWRITABLE, serving, unwritable
from pyroute2 import IPRoute

from tacit.aggregator import Header, PacketKind
from tacit.aggregator.control.status import StatusClient
from tacit.aggregator.planes.kernel_plane import KernelPlane
from tacit.cli import main
from tacit.lab.network.namespaces import NEWNET, unshare

LONG = "0123456789abcdef-long-enough"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TACIT_AGGREGATOR_SECRET", raising=False)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("tacit: ") and error.count("\n") == 1
    return error


def test_it_serves_tells_its_status_and_stops_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--slots", "64", "--jobs", "2", "--lease", "20s", "--metrics", "127.0.0.1:0")
    with serving(*options, secret=LONG) as served:
        assert (served.told["plane"], served.told["slots"], served.told["share"]) == ("user", 64, 32)
        assert b"tacit_aggregator_slots" in urlopen(served.told["metrics"], timeout=30).read()
        monkeypatch.setenv("TACIT_AGGREGATOR_SECRET", LONG)
        at = ["--at", served.told["listen"], "--over", "50ms"]
        with joined(served.address, some_terms("run [7]", slots=1024), LONG) as ranks:
            assert len(ranks[0].job.slots) == 32 and ranks[0].membership.lease_s == 20
            for chunk in range(5):
                ranks[0].send(chunk)
                ranks[1].send(chunk)
            until(lambda: ranks[0].membership.missing() == {2: 5})
            assert main(["aggregate", "status", *at]) == 0
            shown = capsys.readouterr().out
            assert shown.startswith(
                "job 'run [7]' waits for rank 2: 5 chunks lack only it, no packet of it has ever come"
            )
            assert "32 of 64 slots in use, up to 32 a job" in shown and "never" in shown
            assert main(["aggregate", "status", *at, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
            assert not told["well"] and told["diagnosis"][0].startswith("job 'run [7]' waits for rank 2")
            rates = ("received_bps", "answered_bps", "chunks_per_s", "rows_per_s")
            assert told["jobs"][0]["rates"] == dict.fromkeys(rates, 0)
            assert [rank["missing"] for rank in told["jobs"][0]["stats"]["ranks"]] == [0, 0, 5]
            assert main(["aggregate", "--json", "status", *at]) == 0  # options may stand before the action
            assert json.loads(capsys.readouterr().out)["jobs"][0]["name"] == "run [7]"
            code, error = served.end(signal.SIGTERM)
            until(lambda: not any(rank.membership.alive for rank in ranks))
            assert ranks[0].membership.why == "the aggregator was stopped"
    assert code == 0
    assert error.splitlines()[-1] == "tacit: stopped; jobs served: 1, chunks summed: 0, ranks lost: 0"
    assert "job 'run [7]' runs: 3 ranks, 32 slots" in error and LONG not in error


@pytest.mark.parametrize("how", UNWRITABLE)
def test_a_standard_error_that_takes_nothing_ends_no_job(how: str) -> None:
    with unwritable(how) as stderr, serving(stderr=stderr) as served:
        for name in ("a", "b"):
            with joined(served.address, some_terms(name), "") as ranks:
                sum_exactly(ranks, chunks=10, seed=4)
        with StatusClient(served.address, "") as status:
            assert (status.read().admitted, status.read().lost_ranks) == (2, 0)
            if how != "a pipe that nobody reads":  # there they wait
                until(lambda: status.read().lost_notices >= 3)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0


def test_ctrl_c_ends_it_like_any_command() -> None:
    with serving() as served:
        code, error = served.end(signal.SIGINT)
    assert code == 130
    assert error == "tacit: interrupted; jobs served: 0, chunks summed: 0, ranks lost: 0\n"


def test_status_can_be_watched_until_ctrl_c() -> None:
    with serving() as served, joined(served.address, some_terms(world=1), "") as (rank,):
        command = [
            *TACIT,
            "aggregate",
            "status",
            "--at",
            served.told["listen"],
            "--watch",
            "--json",
            "--over",
            "20ms",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stdout and watching.stderr
            assert json.loads(watching.stdout.readline())["counts"]["completed"] == 0
            rank.send(0)
            until(lambda: json.loads(watching.stdout.readline())["counts"]["completed"] == 1)
            watching.send_signal(signal.SIGINT)
            assert watching.wait(60) == 130 and watching.stderr.read() == "tacit: interrupted\n"


def test_killed_it_is_missed_at_once_and_its_port_is_free_again() -> None:
    with serving() as served, joined(served.address, some_terms(), "") as ranks:
        served.process.kill()
        until(lambda: not any(rank.membership.alive for rank in ranks))
        assert "is gone from job 'run'" in ranks[0].membership.why and ranks[0].membership.lost == ()
        with (
            serving("--listen", served.told["listen"]) as again,
            joined(again.address, some_terms(), "") as anew,
        ):
            assert anew[0].job.cookie != ranks[0].job.cookie


def test_status_where_nobody_is_and_with_the_wrong_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    assert main(["aggregate", "status", "--at", nobody]) == 2
    assert f"no aggregator listens at {nobody}; start one there with `tacit aggregate`" in said(capsys)
    with serving(secret=LONG) as served:
        monkeypatch.setenv("TACIT_AGGREGATOR_SECRET", "another-long-secret-1")
        assert main(["aggregate", "status", "--at", served.told["listen"]]) == 2
        assert "the secret is not one that this aggregator was started with" in said(capsys)


def test_a_key_file_holds_several_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of two groups\n\n{LONG}\n  {LONG[::-1]}\n")
    file.chmod(0o600)
    with serving("--key-file", str(file)) as served:
        for secret in (LONG, LONG[::-1]):
            with joined(served.address, some_terms(world=1), secret):
                pass
        assert (
            main(
                [
                    "aggregate",
                    "status",
                    "--at",
                    served.told["listen"],
                    "--key-file",
                    str(file),
                    "--over",
                    "1ms",
                ]
            )
            == 0
        )
        assert "no job is here; the last one, 'run', ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mode", "text", "expected"),
    [
        (0o644, LONG, "can be read by everybody on this machine; run: chmod 600"),
        (0o600, "# nothing\n", "holds no secret"),
        (0o600, "short", "a secret of 5 characters can be guessed; take at least 16"),
        (0o600, b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_bad_key_file_is_refused(
    mode: int, text: str | bytes, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    assert main(["aggregate", "--listen", "127.0.0.1:0", "--key-file", str(file)]) == 2
    assert expected in said(capsys)
    assert main(["aggregate", "status", "--key-file", str(file)]) == 2
    assert expected in said(capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "0.0.0.0 can be reached by others, and there is no secret; set TACIT_AGGREGATOR_SECRET"),
        (["--listen", ":0"], "can be reached by others"),
        (["--listen", "127.0.0.1:0", "--control", "0.0.0.0:0"], "can be reached by others"),
        (["--listen", "127.0.0.1"], "'127.0.0.1' is no address"),
        (["--listen", "127.0.0.1:0", "--metrics", "9100"], "'9100' is no address"),
        (["--listen", "127.0.0.1:0", "--lease", "10"], "time '10' has no unit"),
        (["--listen", "127.0.0.1:0", "--lease", "1ms"], "a silent rank is given up after 0.1 to 3600 s"),
        (["--listen", "127.0.0.1:0", "--jobs", "0"], "--jobs 0: at least one"),
        (["--listen", "127.0.0.1:0", "--slots", "4", "--jobs", "4"], "4 slots for 4 jobs: each job needs at least 2"),
        (["--listen", "127.0.0.1:0", "--slots", "999999"], "999999"),
        (["--listen", "127.0.0.1:0", "--interfaces", "eth0"], "--interfaces is for --plane kernel"),
        (["--listen", "127.0.0.1:0", "--plane", "kernel"], "--plane kernel needs --interfaces"),
        (["--listen", "127.0.0.1:0", "--plane", "kernel", "--interfaces", "nosuch0"], "nosuch0"),
        (["--listen", "127.0.0.1:0", "--key-file", "/nowhere/keys"], "--key-file /nowhere/keys cannot be read"),
        (["status", "--over", "0s"], "--over 0s: a time up to 60s"),
        (["status", "--at", ":::"], "is no address"),
    ],
)  # fmt: skip
def test_bad_words_are_one_sentence(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["aggregate", *words]) == 2
    assert expected in said(capsys)


def test_a_taken_port_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as served:
        assert main(["aggregate", "--listen", served.told["listen"]]) == 2
        assert "cannot be listened on" in said(capsys)


def test_the_secret_is_no_option_and_help_names_its_places(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["aggregate", "--help"])
    shown = capsys.readouterr().out
    assert "--secret" not in shown and "TACIT_AGGREGATOR_SECRET" in shown and "--key-file" in shown
    assert "example" in shown
    for words in (["--secret", LONG], [f"--secret={LONG}"], ["status", "--secret", LONG]):
        assert main(["aggregate", *words]) == 2
        error = said(capsys)
        assert "`ps` shows the command line" in error and LONG not in error


# ---- the kernel plane, in networks of the test's own ----


def _add_up(ip: IPRoute, name: str, address: str) -> None:
    index = ip.link_lookup(ifname=name)[0]
    ip.addr("add", index=index, address=address, prefixlen=24)
    ip.link("set", index=index, state="up")


def _ranks_beside(made: threading.Event, linked: threading.Event) -> list[object]:
    """In a network namespace of this thread: a job whose ranks complete one chunk, and what is read of it then."""
    unshare(NEWNET)
    made.set()
    assert linked.wait(60)
    with IPRoute() as ip:
        _add_up(ip, "rank0", "10.9.0.1")
    at = ("10.9.0.254", 4800)
    with joined(at, some_terms(), LONG, host="10.9.0.1") as ranks, StatusClient(at, LONG) as status:
        for rank in ranks:
            rank.send(0)
        kinds = [Header.of(rank.socket.recv(65536)).kind for rank in ranks]
        for chunk in (1, 2):
            ranks[0].send(chunk)
        until(lambda: ranks[2].membership.missing() == {1: 2, 2: 2})
        now = status.read()
    return [kinds, now.plane, now.counts["completed"], now.jobs[0].members == ranks[0].job.members]


def _switch() -> tuple[list[object], int, str]:
    """In another one: the link between both, and the command."""
    made, linked = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool, ExitStack() as opened:
        opened.callback(linked.set)
        beside = pool.submit(threading.get_native_id).result()
        outcome = pool.submit(_ranks_beside, made, linked)
        assert made.wait(60)
        with IPRoute() as ip, Path(f"/proc/self/task/{beside}/ns/net").open() as namespace:
            ip.link("add", ifname="switch0", kind="veth", peer="rank0")
            ip.link("set", index=ip.link_lookup(ifname="rank0")[0], net_ns_fd=namespace.fileno())
            _add_up(ip, "switch0", "10.9.0.254")
        options = ("--plane", "kernel", "--listen", "10.9.0.254:4800", "--interfaces", "switch0")
        with serving(*options, secret=LONG) as served:
            linked.set()
            told = outcome.result(60)
            return told, *served.end(signal.SIGTERM)


def test_the_kernel_plane_serves_and_stops_like_the_other() -> None:
    if reason := KernelPlane.missing():
        pytest.skip(reason)
    told, code, error = in_new_network(_switch)
    assert told == [[PacketKind.RESULT] * 3, "kernel", 1, True]
    last = error.splitlines()[-1]
    assert (code, last) == (0, "tacit: stopped; jobs served: 1, chunks summed: 1, ranks lost: 0")
