"""Runs a command on a host of a lab: `python -m tacit.lab.network.exec_in_host --init PID --host h0 -- command ...`

The command is a child in the lab's namespaces: it ends with the lab, with this process (SIGKILL included), and on the
SIGTERM that this process passes on. Its exit code, or the signal that ended it, becomes this process's own.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tacit.lab.network import namespaces

REALTIME = 1  # the lowest of the real-time priorities: before every ordinary process, behind the kernel's own threads


def main(argv: Sequence[str] | None = None) -> None:
    """Enters, starts, waits."""
    args = _arguments(argv)
    folder = Path.cwd()
    try:
        _enter(args.init, args.host)
    except OSError as cause:
        sys.exit(f"tacit: host {args.host} of the lab of process {args.init} cannot be entered: {cause}")
    for place in (folder, Path("/")):  # a mount namespace is entered at its root
        with suppress(OSError):
            os.chdir(place)
            break
    if args.cores:
        os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    if args.realtime:
        with suppress(PermissionError):  # root's alone
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REALTIME))
    child = os.fork()
    if child == 0:
        _become(args.command)
    _mirror(child)


def prefix(init: int, host: str, *, cores: Sequence[int] = (), realtime: bool = False) -> tuple[str, ...]:
    """The arguments that, put before a command, run it on `host`; real-time priority only where allowed."""
    pinned = ("--cores", ",".join(map(str, cores))) if cores else ()
    priority = ("--realtime",) if realtime else ()
    where = ("--init", str(init), "--host", host)
    return (sys.executable, "-P", "-m", "tacit.lab.network.exec_in_host", *where, *pinned, *priority, "--")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tacit.lab.network.exec_in_host")
    parser.add_argument("--init", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--cores", default="")
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


def _enter(init: int, host: str) -> None:
    own = Path("/proc/self/ns/user").stat().st_ino
    opened = {
        kind: os.open(f"/proc/{init}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
        for kind in ("user", "pid", "mnt")
    }
    if os.fstat(opened["user"]).st_ino != own:
        namespaces.setns(opened["user"], namespaces.NEWUSER)
    namespaces.setns(opened["pid"], namespaces.NEWPID)
    namespaces.setns(opened["mnt"], namespaces.NEWNS)
    network = os.open(namespaces.NAMES / host, os.O_RDONLY | os.O_CLOEXEC)
    namespaces.setns(network, namespaces.NEWNET)


def _become(command: list[str]) -> NoReturn:
    try:
        namespaces.die_with_parent()
        if (
            os.getppid() == 1
        ):  # the lab's process 1 has adopted us: the parent, outside, ended before PR_SET_PDEATHSIG was set
            os._exit(1)
        os.execvp(command[0], command)
    except OSError as cause:
        print(f"tacit: {command[0]} cannot be started: {cause.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _mirror(child: int) -> NoReturn:
    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child itself
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child's core is enough
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):  # SIGKILL cannot be set, nor need it
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    main()
