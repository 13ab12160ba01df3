"""Sentences on their way to a log that may fail: a full disk, a closed pipe, a terminal that nobody reads any more."""

import contextlib
import queue
import threading
from collections.abc import Callable

from tacit.errors import one_line

MOST_WAITING = 256  # sentences, while the log does not take them
_CLOSE_S = 1.0  # for the log to take the last ones


class Notices:
    """Hands each sentence to `write`, from a thread of its own; `add` never raises and never waits.

    What `write` raises, and what comes while too many wait for it, is counted in `lost` and nothing else. Control characters are
    escaped here, since sentences quote what peers have sent.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self.lost = 0
        self._write = write
        self._queue: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="tacit notices", daemon=True)
        self._thread.start()

    def add(self, sentence: str) -> None:
        try:
            self._queue.put_nowait(one_line(sentence))
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Returns when all are written, or after a second. Again does nothing."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (sentence := self._queue.get()) is not None:
            try:
                self._write(sentence)
            except Exception:
                self.lost += 1
