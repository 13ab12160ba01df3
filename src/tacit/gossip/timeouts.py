"""How long a meeting may take, from how long meetings took: smoothed mean and deviation, as TCP does for its round trips.

A layer is sent sooner than a model, so meetings are distinguished by their size. One that is larger than any before may take as much longer.
"""

from dataclasses import dataclass, field

FIRST_S = 30.0  # before anything was seen
LEAST_S = 0.5
RETRY_S = 8.0  # at most, between calls of one that does not answer


@dataclass(slots=True)
class Timeouts:
    """The timeouts of one peer. `seen`: mean and deviation, by the binary logarithm of the bytes that were sent."""

    seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    failures: int = 0
    retry_at: float = 0.0

    def timeout_s(self, nbytes: int) -> float:
        first_s = FIRST_S * (1 << min(self.failures, 4))  # a large model on a slow link
        if (near := self._near(nbytes)) is None:
            return first_s
        mean_s, deviation_s = self.seen[near]
        own_s, larger = 2 * (mean_s + 4 * deviation_s), max(0, nbytes.bit_length() - near)
        return max(LEAST_S, own_s, min(first_s, own_s * (1 << larger)))

    def mean_s(self, nbytes: int) -> float:
        near = self._near(nbytes)
        return FIRST_S if near is None else self.seen[near][0]

    def took(self, seconds: float, nbytes: int) -> None:
        size = nbytes.bit_length()
        if size in self.seen:
            mean_s, deviation_s = self.seen[size]
            deviation_s += (abs(seconds - mean_s) - deviation_s) / 4
            self.seen[size] = mean_s + (seconds - mean_s) / 8, deviation_s
        else:
            self.seen[size] = seconds, seconds / 2
        self.answered()

    def answered(self) -> None:
        """It called, or its life began anew: it may be called again at once."""
        self.failures, self.retry_at = 0, 0.0

    def failed(self, now: float, nbytes: int) -> None:
        """It is not called again for a while, twice as long each time; and is given more time then."""
        self.failures += 1
        self.retry_at = now + min(RETRY_S, 0.5 * 2 ** min(self.failures, 8))
        if (near := self._near(nbytes)) is not None:
            mean_s, deviation_s = self.seen[near]
            self.seen[near] = mean_s, min(FIRST_S, 2 * max(deviation_s, 0.05))

    def _near(self, nbytes: int) -> int | None:
        """The size most like this one that was seen."""
        sizes = list(self.seen)  # at once: another thread may be adding one
        return min(sizes, key=lambda size: abs(size - nbytes.bit_length()), default=None)
