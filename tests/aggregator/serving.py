"""`tacit aggregate` as a process of its own on loopback, also with a standard error that takes nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tacit.aggregator.addresses import parse_address
from tacit.aggregator.spec import Address

TACIT = [sys.executable, "-c", "import sys; from tacit.cli import main; sys.exit(main())"]
UNWRITABLE = ("a full disk", "a closed pipe", "a pipe that nobody reads", "closed")


@dataclass
class Served:
    process: subprocess.Popen[str]
    told: dict[str, Any]

    @property
    def address(self) -> Address:
        return parse_address(self.told["listen"])

    def end(self, how: signal.Signals) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        self.process.send_signal(how)
        error = self.process.communicate(timeout=60)[1]
        return self.process.returncode, error


@contextmanager
def serving(*options: str, secret: str = "", stderr: int | None = subprocess.PIPE) -> Iterator[Served]:
    """`stderr=None`: it has none."""
    command = [*TACIT, "aggregate", "--listen", "127.0.0.1:0", "--json", *options]
    if stderr is None:
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    environment = os.environ | {"TACIT_AGGREGATOR_SECRET": secret}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    ) as process:
        try:
            assert process.stdout
            yield Served(process, json.loads(process.stdout.readline()))
        finally:
            process.kill()


@contextmanager
def unwritable(how: str) -> Iterator[int | None]:
    """A standard error for `serving` that takes nothing: one of UNWRITABLE."""
    if how == "closed":
        yield None
        return
    reading, writing = os.pipe()
    if how == "a full disk":
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    if how == "a pipe that nobody reads":
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while os.write(writing, bytes(4096)):
                pass
        os.set_blocking(writing, True)
    else:
        os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)
        if how == "a pipe that nobody reads":
            os.close(reading)
