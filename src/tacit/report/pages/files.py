"""Writes all files or none: a reader never meets half a page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tacit.errors import ConfigError


def write_all(texts: Mapping[Path, str]) -> None:
    """Each text under its path, folders made as needed. All are written beside their places before the first is
    moved there; on failure what was there before is still there, and a `ConfigError` names the path."""
    ready: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            with _named(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    raise IsADirectoryError(0, "it is a folder")
                ready[path] = path.with_name(f".{path.name}.{os.getpid()}.part")
                ready[path].write_text(text, encoding="utf-8", newline="")
        for path in list(ready):
            with _named(path):
                ready[path].replace(path)
            del ready[path]
    finally:
        for made in ready.values():
            with suppress(OSError):
                made.unlink()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Renames a failure of the file system, once, with the path it came from."""
    try:
        yield
    except OSError as cause:
        raise ConfigError(f"{path}: cannot write there ({cause.strerror}); name another place") from cause
