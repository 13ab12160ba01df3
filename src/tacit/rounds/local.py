"""Local SGD (Stich 2019): H steps alone, then the mean of the models.

w_i <- mean_j w_j          every H steps
"""

from dataclasses import dataclass

from tacit.rounds.merging import Periodic


@dataclass(frozen=True, slots=True)
class Local(Periodic):
    """`local(16)`: a sixteenth of the rounds of `every`, of models instead of gradients."""
