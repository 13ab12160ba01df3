"""A click log without a download: made from a law, the same on every machine, as large as one likes.

A sample has a key for each of eight features and four numbers. Keys of a feature are drawn by Zipf's law (exponent 1.05), as in real logs: a few
are everywhere, most are rare. Every key has a hidden effect and a hidden vector; a sample is clicked with the probability

    sigmoid(-1 + sum of effects + sum over pairs of features of (vector . vector) + 0.5 x the first number)

so there is a best possible AUC, `ClickLog.best`, that no model can pass.
"""

import torch
from torch import Tensor

KEYS = (30, 300, 1_000, 5_000, 20_000, 50_000, 100_000, 200_000)
NUMBERS, ZIPF = 4, 1.05


class ClickLog:
    """`draw(samples, rng)` returns keys (samples x 8), numbers (samples x 4) and whether each was clicked."""

    def __init__(self, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self._below = [(torch.arange(1.0, n + 1, dtype=torch.float64) ** -ZIPF).cumsum(0) for n in KEYS]
        self._effects = [0.4 * torch.randn(n, generator=rng) for n in KEYS]
        self._vectors = [0.2 * torch.randn(n, 4, generator=rng) for n in KEYS]

    def draw(self, samples: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.stack(
            [
                torch.searchsorted(below, torch.rand(samples, dtype=torch.float64, generator=rng) * below[-1])
                for below in self._below
            ],
            1,
        )
        numbers = torch.randn(samples, NUMBERS, generator=rng)
        clicked = torch.rand(samples, generator=rng) < self._score(keys, numbers).sigmoid()
        return keys, numbers, clicked.float()

    def best(self, keys: Tensor, numbers: Tensor, clicked: Tensor) -> float:
        """The AUC of the law itself."""
        return auc(self._score(keys, numbers), clicked)

    def _score(self, keys: Tensor, numbers: Tensor) -> Tensor:
        columns = keys.unbind(1)
        effects = sum(effect[own] for effect, own in zip(self._effects, columns, strict=True))
        vectors = torch.stack([each[own] for each, own in zip(self._vectors, columns, strict=True)], 1)
        pairs = (vectors.sum(1).square().sum(1) - vectors.square().sum((1, 2))) / 2
        return -1.0 + effects + pairs + 0.5 * numbers[:, 0]


def auc(scores: Tensor, clicked: Tensor) -> float:
    """How often a clicked sample is scored above one that was not; equal scores count half."""
    _, places, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0) - (counts - 1) / 2  # the mean rank of equal scores
    clicks = clicked.sum()
    above = ranks[places][clicked.bool()].sum() - clicks * (clicks + 1) / 2
    return float(above / (clicks * (len(clicked) - clicks)))
