"""Records: every number this project measures, one JSON object a line.

    with Recorder("runs/demo/records.jsonl") as recorder:
        recorder.record("exchange", schedule="ring", nbytes=1 << 22, p50_s=0.0118, n=200)

A line is written with one unbuffered write, so what was recorded survives a crash of the process. On a full disk `record` raises, and
may leave half a line behind: the next one that can be written starts on a line of its own.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tacit import record_types

Record = dict[str, Any]


class TornRecordWarning(UserWarning):
    """A line of a record file could not be read: the writer was cut off in the middle of it."""


class Recorder:
    """A record file open for appending, and the id of this run; the file and its folder are made if missing."""

    def __init__(
        self, path: str | Path, *, run: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = Path(path)
        self.run = run or new_run_id(clock())
        self._clock = clock
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._torn = _ends_torn(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._lock = threading.Lock()
        weakref.finalize(self, self._file.close).atexit = False

    def record(self, kind: str, **fields: Any) -> Record:
        """The record as written: `time`, `kind`, `run`, then the fields. A number that is not finite is null.

        A kind that has a type (`record_types.TYPES`) is checked against it and gets its version.

        Raises:
            TypeError: a field does not fit the kind's type.
            OSError: it was not written.
        """
        version = {"version": record_types.VERSION} if kind in record_types.TYPES else {}
        header = {"time": self._clock(), "kind": kind, "run": self.run, **version}
        entry = record_types.plain(header | fields)
        record_types.check(entry)
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._write(
                b"\n" + line if self._torn else line
            )  # glued to another's torn half it would be lost with it
        return dict(entry)

    def _write(self, line: bytes) -> None:
        """All of `line`. A disk that becomes full takes a part of it first, and fails only when asked for the rest."""
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
            self._torn = len(rest) > 0

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: str | Path) -> list[Record]:
    """All records of a file, oldest first; a torn line is skipped and named in a `TornRecordWarning`, an empty one is skipped."""
    return [entry for _, entry in read_lines(path)]


def read_lines(path: str | Path) -> list[tuple[int, Record]]:
    """The same, each with the number of its line."""
    records: list[tuple[int, Record]] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            records.append((number, json.loads(line)))
        except ValueError:
            warnings.warn(f"{path}: line {number} is torn and was skipped", TornRecordWarning, stacklevel=2)
    return records


def new_run_id(time_s: float) -> str:
    """A name for one run that sorts by its start: 20260131T120000-3f9a1c (UTC)."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(time_s))}-{secrets.token_hex(3)}"


def host_facts() -> dict[str, Any]:
    """The machine and the software a number was measured on. Torch's version is read without importing it."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "tacit": _version("tacit"),
        "torch": _version("torch"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
