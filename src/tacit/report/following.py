"""Record files that grow while they are read: each call returns what is new since the last.

A half line at the end is the writer's and is read once it is complete; a file that was replaced or cut short is read anew. Files are
only read, never locked, moved or rotated.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tacit.errors import ConfigError
from tacit.records import Record

HEAD_NBYTES = 1 << 20  # of a file that is longer than both: how it began
TAIL_NBYTES = 32 << 20  # and what it holds of the last steps
LONGEST_LINE = 1 << 20
MOST_FILES = 4096
_CHUNK = 1 << 20


class RecordFollower:
    """The records of a file, or of all `*.jsonl` files of a folder, also of those that come later."""

    def __init__(self, path: Path):
        if not path.exists():
            raise ConfigError(
                f"{path}: there is no such file or folder; name what attach(records=...) writes, or its folder"
            )
        self.path = path
        self._tails: dict[Path, _Tail] = {}

    def new(self) -> Iterator[Record]:
        """Records that were written since the last call, in the order of each file."""
        for file in self._files():
            if file not in self._tails:
                self._tails[file] = _Tail(file)
            yield from self._tails[file].new()

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        found = sorted(self.path.glob("*.jsonl"))
        if len(found) > MOST_FILES:
            raise ConfigError(
                f"{self.path}: this folder holds {len(found):,} record files, and the limit is {MOST_FILES:,}; name one file"
            )
        return found


class _Tail:
    """Where the reading of one file stands."""

    def __init__(self, file: Path):
        self._file = file
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self._inode, self._offset, self._rest, self._skips = inode, 0, b"", False

    def new(self) -> Iterator[Record]:
        try:
            facts = self._file.stat()
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._begin(facts.st_ino)
            if facts.st_size == self._offset:
                return
            with self._file.open("rb") as opened:
                if self._offset == 0 and facts.st_size > HEAD_NBYTES + TAIL_NBYTES:
                    yield from self._lines(opened.read(HEAD_NBYTES))
                    self._offset = opened.seek(facts.st_size - TAIL_NBYTES)
                    self._rest, self._skips = b"", True  # it begins somewhere inside a line
                opened.seek(self._offset)
                while self._offset < facts.st_size and (read := opened.read(_CHUNK)):
                    self._offset += len(read)
                    yield from self._lines(read)
        except FileNotFoundError:
            self._begin(0)
        except OSError as cause:
            raise ConfigError(
                f"{self._file}: cannot be read ({cause.strerror}); name a file that can"
            ) from cause

    def _lines(self, read: bytes) -> Iterator[Record]:
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            if not self._skips and (record := _record(line)) is not None:
                yield record
            self._skips = False
        if len(self._rest) > LONGEST_LINE:
            self._rest, self._skips = b"", True


def _record(line: bytes) -> Record | None:
    """The record that a line holds; None for half a line, or for something else."""
    try:
        found: Any = msgspec.json.decode(line) if line else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    fields = {"kind": str, "run": str, "time": int | float}
    good = isinstance(found, dict) and all(isinstance(found.get(key), of) for key, of in fields.items())
    return found if good else None
