"""Synchronous SGD: gradients are exchanged in every step, while the backward pass runs."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class EveryStep:
    """Talks in every step. Accumulation (`no_sync`) makes a step longer, not rarer."""

    speaks: ClassVar[str] = "gradients"

    def __str__(self) -> str:
        return "every"
