"""Ranks are real processes here: started, heard, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tacit import launch
from tacit.errors import TacitError


class Module:
    """A module written for one test, launched as ranks; `heard` is what they said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: list[tuple[int, dict[str, Any]]] = []

    def write(self, code: str) -> None:
        head = "import json, os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        (self.folder / "launched.py").write_text(head + code)

    def run(self, code: str, *, ranks: int = 2, args: tuple[str, ...] = (), timeout_s: float = 60) -> None:
        self.write(code)
        launch.run(
            "launched",
            args,
            ranks=ranks,
            on_message=lambda rank, message: self.heard.append((rank, message)),
            log_dir=self.folder / "logs",
            timeout_s=timeout_s,
        )

    def pids(self) -> list[int]:
        return [message["pid"] for _, message in self.heard if "pid" in message]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return Module(tmp_path)


SAY_PID = "print(json.dumps({'pid': os.getpid()}), flush=True)\n"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_ranks_find_torchruns_variables_and_their_arguments(module: Module) -> None:
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME', 'OMP_NUM_THREADS'"
    module.run(
        f"print(json.dumps({{k: os.environ[k] for k in ({names})}} | {{'argv': sys.argv[1:]}}))",
        args=("--x", "1"),
    )
    for rank, message in module.heard:
        assert message == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "argv": ["--x", "1"],
        }
    assert sorted(rank for rank, _ in module.heard) == [0, 1]


def test_ranks_meet_at_the_reserved_port_and_sum_a_tensor(module: Module) -> None:
    module.run(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([rank + 1.0]); dist.all_reduce(x)\n"
        "print(json.dumps({'sum': x.item()})); dist.destroy_process_group()",
    )
    assert [message["sum"] for _, message in module.heard] == [3.0, 3.0]


def test_a_message_split_over_writes_arrives_whole_and_other_output_goes_to_the_log(module: Module) -> None:
    module.run(
        "sys.stdout.write('hello\\n{\"a\":'); sys.stdout.flush(); sys.stdout.write('1}'); print('!', file=sys.stderr)"
    )
    assert sorted(module.heard, key=str) == [(0, {"a": 1}), (1, {"a": 1})]
    assert set((module.folder / "logs" / "rank-0.log").read_text().split()) == {"hello", "!"}


def test_a_failing_rank_is_named_with_its_last_words_and_the_others_are_ended(module: Module) -> None:
    with pytest.raises(
        launch.LaunchError, match=r"(?s)rank 1 failed with exit code 3.*out of luck"
    ) as caught:
        module.run(
            SAY_PID
            + "if rank == 1:\n    print('out of luck', file=sys.stderr); sys.exit(3)\nwhile True: time.sleep(60)"
        )
    assert isinstance(caught.value, TacitError)
    assert all(gone(pid) for pid in module.pids())


def test_a_rank_ended_by_a_signal_is_named_with_it(module: Module) -> None:
    with pytest.raises(launch.LaunchError, match="rank 0 was ended by SIGKILL"):
        module.run("os.kill(os.getpid(), signal.SIGKILL)", ranks=1)


def test_silence_beyond_the_timeout_ends_ranks_that_ignore_sigterm_too(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    with pytest.raises(launch.LaunchError, match=r"no rank printed anything for 3 s.*\(0, 1\)"):
        module.run(
            f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SAY_PID}while True: time.sleep(60)", timeout_s=3
        )
    assert len(module.pids()) == 2 and all(gone(pid) for pid in module.pids())


def test_an_error_in_the_listener_ends_the_ranks(module: Module) -> None:
    module.write(SAY_PID + "while True: time.sleep(60)")
    pids = []

    def stop(rank: int, message: dict[str, Any]) -> None:
        pids.append(message["pid"])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch.run("launched", [], ranks=2, on_message=stop, log_dir=module.folder)
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_the_launcher_ends_the_ranks(module: Module, number: signal.Signals) -> None:
    module.write(SAY_PID + "while True: time.sleep(60)")
    code = (
        "import signal; from pathlib import Path; from tacit import launch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "say = lambda rank, message: print(message['pid'], flush=True)\n"
        f"launch.run('launched', [], ranks=2, on_message=say, log_dir=Path({str(module.folder)!r}))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        assert launcher.stdout
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) != 0
    assert all(gone(pid) for pid in pids)


def test_a_reserved_port_is_not_given_to_others() -> None:
    import socket

    with launch.reserved_port() as port:
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(200)]
        taken = [other.getsockname()[1] for other in others]
        for other in others:
            other.close()
    assert port not in taken


def test_zero_ranks_are_refused(module: Module) -> None:
    with pytest.raises(launch.LaunchError, match="ranks=0"):
        module.run("", ranks=0)


def test_a_rank_that_dies_at_once_is_reported_quickly(module: Module) -> None:
    start = time.monotonic()
    with pytest.raises(launch.LaunchError, match="(?s)rank 1.*SyntaxError"):
        module.run("if rank == 1: exec('(')\nwhile True: time.sleep(60)")
    assert time.monotonic() - start < 20
