"""Post-local SGD (Lin et al. 2020): merges after every step at first, when the model moves most; every H steps later.

H(t) = 1 if t < after else every
"""

from dataclasses import dataclass
from typing import ClassVar

from tacit.rounds.merging import Periodic, whole


@dataclass(frozen=True, slots=True)
class PostLocal(Periodic):
    """`post_local(16, after=1000)`."""

    after: int = 1000
    name: ClassVar[str] = "post_local"

    def __post_init__(self) -> None:
        whole("every", self.every, 1)
        whole("after", self.after, 0)

    def __str__(self) -> str:
        return f"post_local({self.every}, after={self.after})"

    def period(self, step: int, loss: float | None) -> int:
        return 1 if step < self.after else self.every
