"""Post-local SGD (Lin et al. 2020): gradients in every step at first, when the model moves most; the mean of the models every H steps later.

t < after:   w_i <- step with mean_j g_j         from then on `local`
"""

from dataclasses import dataclass, field
from typing import ClassVar

from tacit.rounds.merging import Periodic, whole


@dataclass(frozen=True, slots=True)
class PostLocal(Periodic):
    """`post_local(16, after=1000)`: every rule has an `after`; this one is named for it."""

    after: int = field(default=1000, kw_only=True)
    name: ClassVar[str] = "post_local"

    def __post_init__(self) -> None:
        super(PostLocal, self).__post_init__()
        whole("after", self.after, 1)
