"""Synchronous SGD: gradients are exchanged in every step, while the backward pass runs."""

from dataclasses import dataclass

from tacit.rounds.rules import GradientRule, Movement, TriggerRule, Wish


@dataclass(frozen=True, slots=True)
class EveryStep(GradientRule, TriggerRule):
    """Exchanges in every step. Accumulation (`no_sync`) makes a step longer, not rarer."""

    def __str__(self) -> str:
        return "every"

    def wish(self, movement: Movement) -> Wish | None:
        """As a trigger of gossip: after every step."""
        return Wish("every step")
