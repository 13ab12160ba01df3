"""Adaptive gossip (our reading of Ho, Wu & Liu 2018): talk when the local model has changed enough. Each layer for itself, and by its size.

    after a step:  talk of layer k if  |w_k - ref_k| > theta (lr / its largest)^follow (n_k / the largest n)^(1/4) |ref_k|

ref_k is the layer as it was after its last exchange, n_k the number of its elements, but at least what a meeting costs by itself. No
network is asked for it. Other layers go along where sending them too early wastes less than a meeting of their own would cost.

Why so: left alone, layers part like random walks, in T steps by squares of r T relative to their length, with r in proportion to lr^2 and
about the same for all. To meet costs n / T a step. The sum of squared relative distances for a given cost is least with T in proportion to
sqrt(n / r); what parts them then is the root of r T, which goes with sqrt(lr) and n^(1/4). So small layers meet often, for next to nothing, and
all of them most where steps are long. With `follow=0` theta is constant and models stay apart; with 1 they meet as often to the end, when it
matters least. With `by=model` w is the whole model, as the paper may have had it, and all of it is sent. Who leaves theta out gets one that
suits the codec. What all ranks learn alike moves them too, and does not part them: at first they meet more often than they would have to.

Where data differ, a rank's moves are not noise: each goes back to where its own data are better, and models that meet as rarely forget. Two that
meet measure it, for nothing: |w_i - w_j|^2 / (|w_i - r|^2 + |w_j - r|^2), where r is what they agreed on when they last met, is below 1 if they
have something in common, 1 if their moves are unrelated, and above 1 only if they pull against each other. Theta falls with the sixth power of the running mean of it above 1,
to a third: on equal data nothing changes.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from tacit.errors import ConfigError
from tacit.rounds.merging import share
from tacit.rounds.rules import Movement, TriggerRule, Wish

ROOT = 0.5
MEETING = 1 / 16  # what a meeting costs by itself, in sayings of the largest layer,
MOST_ELEMENTS = 1 << 14  # but never more than sending so many

LEARNS = 1 / 16  # a meeting's weight in the running mean
POWER = 6  # sorted shards show 1.0 to 1.7, equal ones 0.3 to 0.8: benchmarks/gossip_unequal.py
LEAST = 1 / 3  # of theta: 4 % of the bytes of every step there


def learned(differs: float, shown: float) -> float:
    """The running mean of meeting.difference(), after one more meeting."""
    return differs + LEARNS * (shown - differs)


def default_theta(bits: float) -> float:
    """How far layers may part. For a codec of `bits` an element: 0.06 from four bits on. Traffic is about bits / theta^1.2, so a codec of fewer bits
    than that at a time can afford to meet more often, and has to. docs/rounds.md shows the decade around it.
    """
    return float(f"{0.06 * min(1, bits / 4) ** 1.2:.2g}")


@dataclass(frozen=True, slots=True)
class Adaptive(TriggerRule):
    """`adaptive`, or `adaptive(0.05)`; `adaptive(0.05, follow=0, by=model)` as the paper may have had it."""

    theta: float | None = None  # None: default_theta() of the codec, once that is known
    follow: float = ROOT  # the learning rate's power that theta goes with
    by: str = "layer"

    default_codec: ClassVar[str] = "hush"
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number = isinstance(self.theta, int | float) and not isinstance(self.theta, bool)
        if self.theta is not None and not (number and 0 < self.theta < math.inf):
            raise ConfigError(
                f"theta={self.theta!r}: the relative change after which to exchange, above 0; leave it out for one that suits the codec"
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

    @property
    def allowed_distance(self) -> float:
        assert self.theta is not None, "a Strategy has chosen one"
        return float(self.theta)

    def wish(self, movement: Movement) -> Wish | None:
        assert self.theta is not None, "a Strategy has chosen one"
        slowed = movement.lr / movement.top_lr if movement.top_lr else 1.0
        theta = self.theta * slowed**self.follow * nearer(movement.differs)
        if not theta:
            return None  # at a rate of 0 nobody learns anything worth sending
        if self.by == "model":
            change = _change(math.fsum(movement.moved), math.fsum(movement.length))
            return Wish(_moved(change)) if change > theta else None
        largest = max(movement.sizes)
        meeting = min(MEETING, MOST_ELEMENTS / largest)
        sizes = [size / largest for size in movement.sizes]
        changes = [_change(m, length) for m, length in zip(movement.moved, movement.length, strict=True)]
        limits = [theta * max(size, meeting) ** 0.25 for size in sizes]
        over = [change for change, limit in zip(changes, limits, strict=True) if change > limit]
        if not over:
            return None
        steps_lost = [1 - (change / limit) ** 2 for change, limit in zip(changes, limits, strict=True)]
        said = tuple(k for k, lost in enumerate(steps_lost) if sizes[k] * lost < meeting)
        return Wish(_moved(max(over)), said if len(said) < len(sizes) else None)


def nearer(differs: float) -> float:
    """Theta's factor: 1, and less where data differ."""
    return max(LEAST, max(differs, 1.0) ** -POWER)


def _change(moved: float, length: float) -> float:
    return math.sqrt((moved / length if length else math.inf) if moved else 0.0)


def _moved(change: float) -> str:
    return f"moved {100 * change:.3g} %"
