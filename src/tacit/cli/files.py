"""What several verbs do with files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tacit.errors import ConfigError

if TYPE_CHECKING:
    from tacit.records import Recorder


@contextmanager
def recording(path: Path) -> Iterator[Recorder]:
    """A recorder that writes to `path`, in the folder that --out names."""
    from tacit.records import Recorder

    try:
        recorder = Recorder(path)
    except OSError as cause:
        raise ConfigError(f"--out {path.parent}: cannot write there ({cause.strerror})") from cause
    with recorder:
        yield recorder
