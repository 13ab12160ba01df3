"""Ranks for the matrices of a bucket, from what their factors have shown of the spectrum: how `lowrank(rank=auto)` spends its bytes.

Column j of R = M^T P is a direction of the mean gradient and its residual, and |R_j|^2 the energy that this column carries. All ranks hold
the same R, so all come to the same answer with nothing sent. Ranks are given out one by one to the matrix whose next column carries the
largest share of its own energy for its bytes, until the bytes are spent. Shares, not energies: an optimizer such as Adam divides each
parameter's scale out again. Columns that were never sent are taken to go on falling as the last ones did.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

_GROWTH = 2  # of a rank at a time: beyond its columns a spectrum is a guess
_FALL = 0.9  # from a column to the next, where one column has shown nothing of it


def allocate(
    energies: Sequence[Sequence[float]], costs: Sequence[float], most: Sequence[int], budget: float
) -> list[int]:
    """The rank of each matrix: 1 or more, with sum(rank * cost) at most `budget` where that is enough for ones.

    Args:
        energies: Of every matrix, those of its columns so far.
        costs: What one rank of it costs.
        most: Its largest rank.
        budget: What all may cost.
    """
    shares = [_shares(own, min(_GROWTH * len(own), top)) for own, top in zip(energies, most, strict=True)]
    ranks = [1] * len(shares)
    left = budget - sum(costs)
    queue = [
        (-own[1] / cost, 1, i)
        for i, (own, cost) in enumerate(zip(shares, costs, strict=True))
        if len(own) > 1
    ]
    heapify(queue)
    while queue:
        _, _, i = heappop(queue)
        if costs[i] > left:
            continue
        left -= costs[i]
        ranks[i] += 1
        if ranks[i] < len(shares[i]):
            heappush(queue, (-shares[i][ranks[i]] / costs[i], ranks[i], i))
    return ranks


def _shares(energies: Sequence[float], count: int) -> list[float]:
    """What each column carries of all that is seen, falling; `count` of them."""
    seen: list[float] = []
    for energy in energies:
        seen.append(min(energy, seen[-1]) if seen else energy)
    last = len(seen) - 1
    middle = last // 2
    fall = _FALL
    if last > middle and seen[middle] > 0:
        fall = (seen[last] / seen[middle]) ** (1 / (last - middle))
    total = sum(seen) or 1.0
    return [(seen[j] if j <= last else seen[last] * fall ** (j - last)) / total for j in range(count)]


def uniform(costs: Sequence[float], most: Sequence[int], budget: float) -> list[int]:
    """One rank for all matrices, cut to the largest of each: as large as the budget allows; empty if that is not enough for ones."""
    found: list[int] = []
    for rank in range(1, max(most, default=0) + 1):
        ranks = [min(rank, top) for top in most]
        if sum(cost * each for cost, each in zip(costs, ranks, strict=True)) > budget:
            break
        found = ranks
    return found
