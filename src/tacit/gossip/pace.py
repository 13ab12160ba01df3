"""How long a meeting may take, from how long meetings took: smoothed mean and deviation, as TCP does for its round trips."""

from dataclasses import dataclass

FIRST_S = 30.0  # before anything was seen
LEAST_S = 0.5
RETRY_S = 8.0  # at most, between calls of one that does not answer


@dataclass(slots=True)
class Pace:
    """The pace of one peer."""

    mean_s: float | None = None
    deviation_s: float = 0.0
    failures: int = 0
    retry_at: float = 0.0

    @property
    def patience_s(self) -> float:
        if self.mean_s is None:
            return FIRST_S * (1 << min(self.failures, 4))  # a large model on a slow link
        return max(LEAST_S, 2 * (self.mean_s + 4 * self.deviation_s))

    def took(self, seconds: float) -> None:
        if self.mean_s is None:
            self.mean_s, self.deviation_s = seconds, seconds / 2
        else:
            self.deviation_s += (abs(seconds - self.mean_s) - self.deviation_s) / 4
            self.mean_s += (seconds - self.mean_s) / 8
        self.answered()

    def answered(self) -> None:
        """It called, or its life began anew: it may be called again at once."""
        self.failures, self.retry_at = 0, 0.0

    def failed(self, now: float) -> None:
        """It is not called again for a while, twice as long each time; and is given more time then."""
        self.failures += 1
        self.retry_at = now + min(RETRY_S, 0.5 * 2 ** min(self.failures, 8))
        if self.mean_s is not None:
            self.deviation_s = min(FIRST_S, 2 * max(self.deviation_s, 0.05))
