"""The labs of this user that run now, as one small file each; a file whose process has gone is removed when seen.

A file is only a note: a lab ends with its processes, whatever happens to the note.
"""

from __future__ import annotations

import json
import os
import select
import signal
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tacit import environment
from tacit.lab.errors import LabError

END_S = 10.0


@dataclass(frozen=True, slots=True)
class LabEntry:
    """A lab: its watcher `pid`, process 1 inside (`init`), who started it (`parent`); ids as seen from outside."""

    pid: int
    init: int
    parent: int
    how: str
    network: str
    hosts: tuple[str, ...]
    started: int = 0  # the watcher's start, in clock ticks after boot: distinguishes it from a later process of the same id


def default_folder() -> Path:
    """Where this user's labs are listed: the run-time folder of the session, else /tmp."""
    uid = os.geteuid()
    session = Path(environment.runtime_folder() or f"/run/user/{uid}")
    return (session / "tacit-lab") if os.access(session, os.W_OK) else Path(f"/tmp/tacit-lab-{uid}")


def add(entry: LabEntry, folder: Path) -> Path:
    """Lists a lab; whoever adds it removes it."""
    made = asdict(entry) | {"started": _started(entry.pid)}
    path = prepare(folder) / f"{entry.pid}.json"
    half = path.with_suffix(".half")
    half.write_text(json.dumps(made))
    half.rename(path)  # at once, so that nobody reads half a note
    return path


def prepare(folder: Path) -> Path:
    """The folder, made if missing; refused if others could have written in it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as cause:
        raise LabError(
            f"labs cannot be listed in {folder}: {cause.strerror}; remove what is there"
        ) from cause
    _check_own(folder)
    return folder


def _check_own(folder: Path) -> None:
    found = folder.lstat()
    own = found.st_uid in (os.geteuid(), os.getuid())
    if not stat.S_ISDIR(found.st_mode) or not own or found.st_mode & 0o022:
        raise LabError(f"{folder}, where labs are listed, is not this user's alone; remove it")


def all_running(folder: Path) -> list[LabEntry]:
    """Every lab of this user that is alive, oldest first; notes of dead ones are removed."""
    if not folder.exists():
        return []
    _check_own(folder)  # a note names a process to end
    return [entry for path in sorted(folder.glob("*.json")) if (entry := _alive(path)) is not None]


def end(entry: LabEntry) -> None:
    """Ends a lab by its watcher's id, and returns when all of it has ended."""
    try:
        watcher = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return
    try:
        if _started(entry.pid) != entry.started:
            return  # another process has this id by now
        signal.pidfd_send_signal(watcher, signal.SIGTERM)
        if not select.select([watcher], [], [], END_S)[0]:
            raise LabError(f"the lab of process {entry.pid} did not end within {END_S:g} s")
    except ProcessLookupError:
        pass
    finally:
        os.close(watcher)


def _alive(path: Path) -> LabEntry | None:
    try:
        read = json.loads(path.read_text())
        entry = LabEntry(**(read | {"hosts": tuple(read["hosts"])}))
        if _started(entry.pid) == entry.started:
            return entry
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        pass  # no note of ours, or of another version
    with suppress(OSError):
        path.unlink()
    return None


def _started(pid: int) -> int:
    """When process `pid` started, in clock ticks after boot; -1 if there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return -1 if words[0] in "ZX" else int(words[19])
