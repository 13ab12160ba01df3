"""Adaptive gossip (our reading of Ho, Wu & Liu 2018): talk when the local model has changed enough.

    after a step:  talk if  |w - ref| > theta (lr / its largest)^follow |ref|  for a layer      ref: as it was after the last exchange

No network is asked for it. Left alone, models part like random walks: by lr sqrt(T) in T steps. The sum of their squared distances
over the training, for a given number of meetings, is least with meetings in proportion to lr, which is at a distance of sqrt(lr):
hence `follow` is 1/2. With 0 theta is constant, and they stay apart; with 1 they meet as often to the end, when it matters least.
With `by=model` w is the whole model, as the paper may have had it. Who leaves theta out gets one that suits the codec.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from tacit.errors import ConfigError
from tacit.rounds.merging import share

ROOT = 0.5


def default_theta(bits: float) -> float:
    """How far layers may part. For a codec of `bits` an element: 0.07 from four bits on. Traffic is about bits / theta^1.2, so who says less
    than that at a time can afford to meet more often, and has to. docs/rounds.md shows the decade around it.
    """
    return float(f"{0.07 * min(1, bits / 4) ** 1.2:.2g}")


@dataclass(frozen=True, slots=True)
class Movement:
    """How far a model has come since the last exchange: squared lengths by layer."""

    since: int  # steps
    moved: Sequence[float]  # |w - ref|^2
    length: Sequence[float]  # |ref|^2
    lr: float
    top_lr: float  # the largest so far


class Trigger(Protocol):
    """WHEN a rank that gossips talks: after any of its own steps, and to whom it likes."""

    measures: ClassVar[bool]  # whether it looks at lengths at all

    def why(self, movement: Movement) -> str | None:
        """The reason to talk now, for the record; None: not yet."""
        ...


@dataclass(frozen=True, slots=True)
class Adaptive:
    """`adaptive`, or `adaptive(0.05)`; `adaptive(0.05, follow=0, by=model)` as the paper may have had it."""

    theta: float | None = None  # None: default_theta() of the codec, once that is known
    follow: float = ROOT  # the learning rate's power that theta goes with
    by: str = "layer"

    speaks: ClassVar[str] = "models"
    says: ClassVar[str] = "hush"
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number = isinstance(self.theta, int | float) and not isinstance(self.theta, bool)
        if self.theta is not None and not (number and 0 < self.theta < math.inf):
            raise ConfigError(
                f"theta={self.theta!r}: the relative change after which to talk, above 0; leave it out for one that suits the codec"
            )
        share("follow", self.follow, below=2)
        if self.by not in ("model", "layer"):
            raise ConfigError(f"by={self.by!r}: layer or model")

    def __str__(self) -> str:
        options = [
            *([f"{self.theta}"] if self.theta is not None else []),
            *([f"follow={self.follow}"] if self.follow != ROOT else []),
            *(["by=model"] if self.by == "model" else []),
        ]
        return f"adaptive({', '.join(options)})" if options else "adaptive"

    def for_codec(self, bits: float) -> "Adaptive":
        """The same, with a theta."""
        return self if self.theta is not None else replace(self, theta=default_theta(bits))

    def why(self, movement: Movement) -> str | None:
        assert self.theta is not None, "a Strategy has chosen one"
        slowed = movement.lr / movement.top_lr if movement.top_lr else 1.0
        theta = self.theta * slowed**self.follow
        pairs = list(zip(movement.moved, movement.length, strict=True))
        if self.by == "model":
            pairs = [(math.fsum(movement.moved), math.fsum(movement.length))]
        change = (
            max((moved / length if length else math.inf) if moved else 0.0 for moved, length in pairs) ** 0.5
        )
        return f"moved {100 * change:.3g} %" if change > theta else None
