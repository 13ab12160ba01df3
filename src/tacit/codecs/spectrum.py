"""Ranks for the matrices of a bucket, from what their factors have shown of the spectrum: how `lowrank(rank=auto)` spends its bytes.

Column j of R = M^T P is a direction of the mean gradient and its residual, and |R_j|^2 the energy that it carries. All ranks hold the same
R, so all come to the same answer with nothing sent: energies are sums of whole numbers, which no order of adding changes, and the rest
is single multiplications and divisions, which IEEE 754 rounds alike everywhere.

Ranks are given out one by one to the matrix whose next column is largest for its bytes, against that matrix's own largest column: an
optimizer such as Adam divides a parameter's scale out again. A rank moves by a quarter at a time: error feedback makes the columns that
were left out grow, and what follows them in one go never settles.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

_FALL = 0.9  # from a column to the next one, where none has been sent
_BITS = 15  # of the whole numbers that energies are sums of


def energies_of(r: Tensor) -> Tensor:
    """The squared length of every row of `r`, in a unit of its own: whole numbers below 2^53 up to 2^22 columns."""
    exponent = torch.frexp(r.abs().amax().double()).exponent
    return torch.ldexp(r.double(), _BITS - exponent).round().long().square().sum(1)


def allocate(
    energies: Sequence[Sequence[float]], costs: Sequence[float], most: Sequence[int], budget: float
) -> list[int]:
    """The rank of each matrix, a quarter more or less than now; the sum of rank x cost stays within the budget, where it was.

    Args:
        energies: Of every matrix, those of its columns now.
        costs: What one rank of it costs.
        most: Its largest rank.
        budget: What all may cost.
    """
    falls, ranks = [], []
    for own, top in zip(energies, most, strict=True):
        now, step = len(own), max(1, len(own) // 4)
        ranks.append(max(1, now - step))
        falls.append(_falling(own, min(now + step, top)))
    left = budget - sum(cost * rank for cost, rank in zip(costs, ranks, strict=True))
    queue = [
        (-fall[rank] / cost, rank, i)
        for i, (fall, cost, rank) in enumerate(zip(falls, costs, ranks, strict=True))
        if rank < len(fall)
    ]
    heapify(queue)
    while queue:
        _, rank, i = heappop(queue)
        if costs[i] > left:
            continue
        left -= costs[i]
        ranks[i] = rank = rank + 1
        if rank < len(falls[i]):
            heappush(queue, (-falls[i][rank] / costs[i], rank, i))
    return ranks


def _falling(energies: Sequence[float], count: int) -> list[float]:
    """The columns' energies, largest first, against the largest; `count` of them."""
    seen = sorted(energies, reverse=True)
    while len(seen) < count:
        seen.append(_FALL * seen[-1])
    return [energy / seen[0] if seen[0] else 1.0 for energy in seen[:count]]


def uniform(costs: Sequence[float], most: Sequence[int], budget: float) -> list[int]:
    """One rank for all matrices, cut to the largest of each: as large as the budget allows, and 1 at least."""
    found = [1] * len(most)
    for rank in range(2, max(most, default=0) + 1):
        ranks = [min(rank, top) for top in most]
        if sum(cost * each for cost, each in zip(costs, ranks, strict=True)) > budget:
            break
        found = ranks
    return found
