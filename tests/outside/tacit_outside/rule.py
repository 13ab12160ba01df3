"""Local SGD whose period doubles with every merge, up to a limit: 1, 2, 4, ... steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tacit.rounds.merging import Periodic


@dataclass(frozen=True, slots=True)
class Doubling(Periodic):
    """`doubling(8)`: merges after 1, 3, 7, 15, 23, ... steps."""

    every: int = 8
    name: ClassVar[str] = "doubling"

    def period(self, step: int, loss: float | None) -> int:
        return min(self.every, step + 1)
