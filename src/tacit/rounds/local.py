"""Local SGD (Stich 2019): H steps alone, then the mean of the models.

w_i <- mean_j w_j          every H steps
"""

from dataclasses import dataclass

from tacit.rounds.merging import Periodic
from tacit.rounds.rules import Movement, TriggerRule, Wish


@dataclass(frozen=True, slots=True)
class Local(Periodic, TriggerRule):
    """`local(16)`: a sixteenth of the rounds of `every`, of models instead of gradients."""

    def wish(self, movement: Movement) -> Wish | None:
        """As a trigger of gossip: so many steps after the last exchange."""
        return Wish(f"every {self.every} steps") if movement.since >= self.every else None
