"""AdaComm (Wang & Joshi 2019): few merges while the loss is high and any progress helps, more as it falls.

    H <- ceil(sqrt(F / F_0) H_0)          F: the loss, F_0: at the first merge

Ranks must report their loss, `handle.report_loss(loss)` in every step (or when they like: the last one counts); its mean is agreed with each merge.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from tacit.rounds.merging import Periodic


@dataclass(frozen=True, slots=True)
class AdaComm(Periodic):
    """`adacomm(64)`: 64 steps between merges at first. The period never grows beyond that."""

    every: int = 64
    name: ClassVar[str] = "adacomm"
    wants_loss: ClassVar[bool] = True

    def period(self, step: int, loss: float | None) -> int:
        """`loss` is relative to the first one that was agreed."""
        if loss is None or not math.isfinite(loss):
            return self.every
        return min(self.every, max(1, math.ceil(math.sqrt(max(0.0, loss)) * self.every)))
