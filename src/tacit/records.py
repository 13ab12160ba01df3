"""Records: every number this project measures, one JSON object a line.

    with Recorder("runs/demo/records.jsonl") as recorder:
        recorder.record("exchange", schedule="ring", nbytes=1 << 22, p50_s=0.0118, n=200)

A line is written with one unbuffered write, so what was recorded survives a crash of the process. On a full disk `record` raises, and
may leave half a line behind: the next one that can be written starts on a line of its own.
"""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
        """The record as written: `time`, `kind`, `run`, then the fields. A number that is not finite is null. OSError: it was not written."""
        entry = _plain({"time": self._clock(), "kind": kind, "run": self.run, **fields})
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
    records: list[Record] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            warnings.warn(f"{path}: line {number} is torn and was skipped", TornRecordWarning, stacklevel=2)
            continue
        records.append(entry)
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


def _plain(value: Any) -> Any:
    """`value` as strict JSON can say it: NaN and infinity, which a diverged run produces, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
