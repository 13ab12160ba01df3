"""Synchronous SGD: gradients are exchanged in every step, while the backward pass runs."""

from dataclasses import dataclass
from typing import ClassVar

from tacit.rounds.adaptive import Movement, Wish


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Talks in every step. Accumulation (`no_sync`) makes a step longer, not rarer."""

    speaks: ClassVar[str] = "gradients"
    measures: ClassVar[bool] = False

    def __str__(self) -> str:
        return "every"

    def wish(self, movement: Movement) -> Wish | None:
        """As a trigger of gossip: after every step."""
        return Wish("every step")
