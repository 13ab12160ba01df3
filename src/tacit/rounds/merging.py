"""What all rules have in common that let ranks train alone and merge their models now and then.

Ranks hold one anchor, the same bits on all of them, and each its own model w. When it is time:

    send     x = w - anchor                      any codec; differences are small, and so are its errors
    receive  m = mean of the ranks' x
    merge    anchor <- anchor + m,  w <- anchor  what a rule makes of it is its own

With `after=n` the ranks add gradients, in every step of the first n, and part only then: a young model learns most from what all
ranks saw, and Adam's second moments should be those of the mean gradient, not of one rank's.

A rule holds options only. What it keeps lies in the memory: float32 vectors by parameter, in every checkpoint.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from tacit.errors import ConfigError
from tacit.requests import Memory
from tacit.rounds.rules import MergeRule, Moment

ANCHOR = "anchor"  # the slot of what all ranks hold alike


@dataclass(frozen=True, slots=True)
class Periodic(MergeRule):
    """Merges every `every` steps; by default the mean becomes the model: what most rules are built on."""

    every: int = 16
    after: int = field(default=0, kw_only=True)
    first: str = field(default="", kw_only=True)

    name: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        whole("every", self.every, 1)
        whole("after", self.after, 0)
        if not isinstance(self.first, str):
            raise ConfigError(
                f"first={self.first!r}: the codec of the first gradients, for example first=hush"
            )
        if self.first and not self.after:
            raise ConfigError(
                f"first={self.first}: no gradients are exchanged; give after=, the steps until models part"
            )

    def __str__(self) -> str:
        return self.text()

    def text(self, *options: str) -> str:
        """The rule as a strategy names it, with options of its own before those that all rules have."""
        common = [f"after={self.after}"] * bool(self.after) + [f"first={self.first}"] * bool(self.first)
        return f"{self.name}({', '.join([str(self.every), *options, *common])})"

    @property
    def delay(self) -> int:
        return 0

    def period(self, step: int, loss: float | None) -> int:
        return self.every

    def due(self, since: int, period: int, bucket: int) -> bool:
        return since == period

    def difference(self, w: Tensor, memory: Memory) -> Tensor:
        return w.float() - memory.vector(ANCHOR)

    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        return memory.vector(ANCHOR).add_(mean)


def whole(name: str, value: object, least: int) -> None:
    """Refuses what is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: a whole number of at least {least}")


def share(name: str, value: object, *, below: float = 1.0) -> None:
    """Refuses what is not from 0 to `below`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= below:
        raise ConfigError(f"{name}={value!r}: a number from 0 to {below:g}")
