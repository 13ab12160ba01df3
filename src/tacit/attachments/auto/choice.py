"""What was chosen, and from what: a value that rank 0 broadcasts, that a cache keeps, and that records and `handle.stats` show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tacit.errors import CheckpointError, TacitError
from tacit.rounds import GradientRule
from tacit.schemes import AllReduce, Sharded
from tacit.strategy import Strategy
from tacit.units import size_text, time_text


@dataclass(frozen=True, slots=True)
class Expected:
    """A step as it was predicted, or measured while the choice was confirmed."""

    step_s: float
    low_s: float
    high_s: float
    compute_s: float
    wire_s: float
    codec_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy and its buckets. `how` is probed, measured (no probe was of use), cached or checkpoint; `why` a sentence; `start_up_s` what it took beside training."""

    strategy: str
    bucket_nbytes: int
    how: str
    why: str
    expected: Expected | None = None
    start_up_s: float = 0.0

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, found: Any) -> Choice | None:
        """A choice from JSON; None where it is none, or names what this tacit cannot run."""
        try:
            expected = found["expected"]
            made = cls(**{**found, "expected": Expected(**expected) if expected is not None else None})
            numbers = [made.start_up_s, *(asdict(made.expected).values() if made.expected else ())]
            texts = (made.strategy, made.how, made.why)
            good = isinstance(made.bucket_nbytes, int) and made.bucket_nbytes > 0
            good = good and all(isinstance(text, str) for text in texts)
            if not good or not all(isinstance(number, int | float) for number in numbers):
                return None
            switchable(made.strategy)
        except (KeyError, TypeError, TacitError):
            return None
        return made

    def __str__(self) -> str:
        expected = f", {time_text(self.expected.step_s)} a step expected" if self.expected else ""
        start = f", start-up {time_text(self.start_up_s)}" if self.start_up_s else ""
        chosen = f"{self.strategy!r} in buckets of {size_text(self.bucket_nbytes)}"
        return f"auto chose {chosen} ({self.how}{start}{expected}): {self.why}"


def switchable(text: str) -> Strategy:
    """The strategy of a checkpoint or a plan, which a training can change to between two steps; raises CheckpointError."""
    try:
        strategy = Strategy.parse(text)
    except TacitError as cause:
        raise CheckpointError(f"the checkpoint's strategy cannot be read: {cause}") from cause
    if not isinstance(strategy.when, GradientRule) or not isinstance(strategy.who, AllReduce | Sharded):
        raise CheckpointError(
            f"the checkpoint was written under {text!r}, which auto cannot take up in a training; attach {text!r}"
        )
    return strategy
