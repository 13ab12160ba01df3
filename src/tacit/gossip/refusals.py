"""What this rank refused, counted by reason; the first of each reason and peer is also a warning."""

import threading
import warnings
from collections import Counter

MOST_WARNED = 256  # of different reasons and peers: strangers must not fill a log


class Refusals:
    """Any thread may add. `counts` is what `handle.stats.refused` shows."""

    def __init__(self, rank: int, counts: Counter[str] | None = None) -> None:
        self._rank = rank
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._lock = threading.Lock()
        self._warned: set[tuple[str, object]] = set()

    def add(self, reason: str, sentence: str, who: object = None) -> None:
        """Counts it; warns where nothing was refused to `who` for this reason yet."""
        with self._lock:
            self.counts[reason] += 1
            if (reason, who) in self._warned or len(self._warned) >= MOST_WARNED:
                return
            self._warned.add((reason, who))
        warnings.warn(
            f"rank {self._rank} refused: {sentence}; later cases are only counted, in handle.stats.refused",
            stacklevel=2,
        )
