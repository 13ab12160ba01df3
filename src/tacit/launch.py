"""Ranks as child processes: started, read and ended together.

    launch.run("tacit.demo.worker", ["--steps", "5"], ranks=4, on_message=print, log_dir=Path("runs/logs"))

The children find torchrun's environment variables, so the module they run needs no knowledge of this file.
What a rank prints as a JSON object reaches `on_message`; all else it prints goes to its log.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tacit.authentication import SECRET
from tacit.environment import inherited
from tacit.errors import TacitError

Message = dict[str, Any]

GRACE_S = 3.0  # between asking a child to end (SIGTERM) and making it (SIGKILL)
TAIL_LINES = 12


class LaunchError(TacitError):
    """A rank failed, or no rank printed anything for too long; by the time this is raised, no rank is left running."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Where a rank runs: the arguments before its command, and what its environment has besides torchrun's variables."""

    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Child:
    """One rank's process, its log, and the start of a line it has not finished."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    unfinished: bytes = field(default=b"")


def run(
    module: str,
    args: Sequence[str],
    *,
    ranks: int,
    on_message: Callable[[int, Message], None],
    log_dir: Path,
    timeout_s: float = 300.0,
    limit_s: float = math.inf,
    rank_specs: Sequence[RankSpec] = (),
) -> None:
    """Runs `python -m module args` as `ranks` processes until all end well; `on_message` runs in this thread.

    Raises `LaunchError` when a rank fails, when no rank prints anything for `timeout_s`, or when they have run for
    `limit_s`. However this returns (error, Ctrl-C, SIGTERM), every child has ended. Each rank's stderr is in
    `log_dir`/rank-N.log. Without `rank_specs`, one a rank, all run here.
    """
    if ranks < 1:
        raise LaunchError(f"ranks={ranks}: at least one rank is needed")
    log_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", module, *args]
    rank_specs = rank_specs or [RankSpec()] * ranks
    with (
        _sigterm_as_exit(),
        reserved_port() as port,
        _started(command, rank_specs, port, log_dir) as children,
    ):
        _listen(children, on_message, timeout_s, limit_s)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port on 127.0.0.1 that no other program is given while the block runs.

    The socket is bound and never listens. Both ends set SO_REUSEADDR, so Linux lets rank 0 listen on
    the same port meanwhile, but never picks it when another program asks for any free port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _started(
    command: list[str], rank_specs: Sequence[RankSpec], port: int, log_dir: Path
) -> Iterator[list[Child]]:
    children: list[Child] = []
    secret = secrets.token_hex(32)  # of this run: ranks that gossip prove it to each other
    try:
        for rank, spec in enumerate(rank_specs):
            env = _environment(rank, len(rank_specs), port) | {SECRET: secret} | dict(spec.env)
            children.append(_start([*spec.prefix, *command], rank, env, log_dir / f"rank-{rank}.log"))
        yield children
    finally:
        _end(children)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return inherited() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _start(command: list[str], rank: int, env: Mapping[str, str], log: Path) -> Child:
    log.write_bytes(b"")
    with log.open("ab") as stderr:
        # A session of its own keeps the terminal's Ctrl-C away: the child is ended by _end, without a traceback.
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    return Child(rank, process, log)


def _end(children: list[Child]) -> None:
    alive = [child.process for child in children if child.process.poll() is None]
    try:
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in alive:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:  # reached on a second Ctrl-C too
        for process in alive:
            if process.poll() is None:
                process.kill()
                process.wait()
        for child in children:
            if child.process.stdout:
                child.process.stdout.close()


def _listen(
    children: list[Child], on_message: Callable[[int, Message], None], timeout_s: float, limit_s: float
) -> None:
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.process.stdout
            selector.register(child.process.stdout, selectors.EVENT_READ, child)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            events = selector.select(max(0.0, min(timeout_s, left_s)))
            if not events:
                why = _unfinished(children, limit_s) if left_s < timeout_s else _silence(children, timeout_s)
                raise LaunchError(why)
            for key, _ in events:
                child, chunk = key.data, os.read(key.fd, 1 << 16)
                _deliver(child, chunk, on_message)
                if not chunk:
                    selector.unregister(key.fileobj)
                    _check_exit(child, timeout_s)


def _deliver(child: Child, chunk: bytes, on_message: Callable[[int, Message], None]) -> None:
    *lines, child.unfinished = (child.unfinished + chunk).split(b"\n")
    if not chunk and child.unfinished:  # the end of the pipe ends the last line
        lines, child.unfinished = [child.unfinished], b""
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            on_message(child.rank, message)
        else:
            with child.log.open("ab") as log:
                log.write(line + b"\n")


def _check_exit(child: Child, timeout_s: float) -> None:
    try:
        code = child.process.wait(timeout_s)
    except subprocess.TimeoutExpired as cause:
        message = f"rank {child.rank} closed its output but did not end within {timeout_s:g} s"
        raise LaunchError(message) from cause
    if code != 0:
        raise LaunchError(
            f"rank {child.rank} {_exit_text(code)}; the other ranks were ended.{_tail(child.log)}"
        )


def _exit_text(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name} (exit code {code})"
    return f"failed with exit code {code}"


def _unfinished(children: list[Child], limit_s: float) -> str:
    return f"the ranks did not finish within {limit_s:g} s, and were ended.{_tail(children[0].log)}"


def _silence(children: list[Child], timeout_s: float) -> str:
    running = [child for child in children if child.process.poll() is None]
    names = ", ".join(str(child.rank) for child in running)
    tail = _tail(running[0].log) if running else ""
    return (
        f"no rank printed anything for {timeout_s:g} s; the ranks still running ({names}) were ended.{tail}"
    )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return (
        "".join(f"\n  {line}" for line in [f"last lines of {log}:", *lines]) if lines else f" {log} is empty."
    )


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """SIGTERM unwinds this block like an exception does, so that the children are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
