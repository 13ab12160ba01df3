"""An aggregator in the lab: `tacit aggregate` in a switch, or on a host, for as long as an experiment runs."""

from __future__ import annotations

import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tacit.environment import inherited
from tacit.lab.errors import LabError
from tacit.lab.network.lab import Lab

PORT = 4800
START_S = 60.0  # the kernel plane compiles first
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Aggregator:
    """Where it is, which plane adds, and how many slots it has."""

    at: str
    plane: str = "user"
    slots: int = 1024


@contextmanager
def aggregating(
    wanted: Aggregator | None, lab: Lab, log: Path, *, realtime: bool
) -> Iterator[dict[str, str]]:
    """What ranks need in their environment to find it; nothing where none is wanted."""
    if wanted is None:
        yield {}
        return
    address = lab[wanted.at].address if lab.shaped else "127.0.0.1"
    secret = secrets.token_hex(16)
    words = [sys.executable, "-P", "-m", "tacit", "aggregate", "--json", "--listen", f"{address}:{PORT}"]
    words += ["--plane", wanted.plane, "--slots", str(wanted.slots)]
    if wanted.plane == "kernel":
        words += ["--interfaces", ",".join(_ports(lab, wanted.at))]
    prefix = lab.prefix(wanted.at, realtime=realtime) if lab.shaped else ()
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = inherited() | {"TACIT_AGGREGATOR_SECRET": secret}
    with log.open("w") as errors:
        process = subprocess.Popen([*prefix, *words], stdout=subprocess.PIPE, stderr=errors, env=environment)
    try:
        _await_start(process, wanted, log)
        yield {"TACIT_AGGREGATOR": f"{address}:{PORT}", "TACIT_AGGREGATOR_SECRET": secret}
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_start(process: subprocess.Popen[bytes], wanted: Aggregator, log: Path) -> None:
    """Returns when it has reported where it listens."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    if (
        select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
        and process.stdout.readline()
    ):
        return
    process.kill()
    process.wait()
    said = log.read_text().strip().splitlines()[-1:] or ["it printed nothing"]
    raise LabError(f"the aggregator at {wanted.at} did not start: {said[0].removeprefix('tacit: ')}")


def _ports(lab: Lab, node: str) -> list[str]:
    return [port.device for cable in lab.plan.cables for port in (cable.a, cable.b) if port.node == node]
