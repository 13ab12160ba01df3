"""Integer tables: which of the values 0..g stand for the levels of a rounded Gaussian. Solved exactly, in milliseconds.

Level v of granularity g stands for z = (v - g/2) * 2R/g, a point of [-R, R].
"""

from functools import lru_cache
from math import erf, exp, inf, pi, sqrt
from statistics import NormalDist

Table = tuple[int, ...]


def clamp_at(fraction: float) -> float:
    """t with P(|N(0,1)| > t) = fraction: 1/32 gives 2.15387469."""
    return NormalDist().inv_cdf(1 - fraction / 2)


@lru_cache(maxsize=64)
def stochastic_table(levels: int, granularity: int, reach: float) -> Table:
    """The `levels` values of 0..granularity that minimise the variance of unbiased rounding to a neighbour (THC).

    Among tables that are symmetric about the middle, as the published ones are: what is chosen is the lower half, by a
    dynamic program over its last value, O(levels * granularity^2). `levels` is even.
    """
    z, below = _points(granularity, reach), range((granularity + 1) // 2)
    cost = [[_rounding_variance(a, b) if a < b else inf for b in z] for a in z]
    best = [0.0 if v == 0 else inf for v in below]
    came: list[list[int]] = []
    for _ in range(levels // 2 - 1):
        choice = [min(range(v), key=lambda u, v=v: best[u] + cost[u][v], default=0) for v in below]  # type: ignore[misc]
        best = [best[u] + cost[u][v] for v, u in enumerate(choice)]
        came.append(choice)
    last = min(below, key=lambda v: 2 * best[v] + cost[v][granularity - v])
    half = _walk_back(came, last)
    return half + tuple(granularity - v for v in reversed(half))


@lru_cache(maxsize=64)
def nearest_table(levels: int, granularity: int, reach: float) -> Table:
    """The `levels` values of 0..granularity that minimise the error of rounding to the nearest (Lloyd-Max on a grid).

    A dynamic program over the last two values chosen: O(levels * granularity^3).
    """
    z, grid = _points(granularity, reach), range(granularity + 1)
    best = {(0, b): _cell_error(-inf, z[0], (z[0] + z[b]) / 2) for b in grid if b > 0}
    came: list[dict[tuple[int, int], int]] = []
    for _ in range(levels - 2):
        step: dict[tuple[int, int], tuple[float, int]] = {}
        for (a, b), so_far in best.items():
            for c in range(b + 1, granularity + 1):
                error = so_far + _cell_error((z[a] + z[b]) / 2, z[b], (z[b] + z[c]) / 2)
                if error < step.get((b, c), (inf, 0))[0]:
                    step[b, c] = (error, a)
        best = {pair: error for pair, (error, _) in step.items()}
        came.append({pair: a for pair, (_, a) in step.items()})
    ends = [(a, b) for a, b in best if b == granularity]
    last = min(ends, key=lambda p: best[p] + _cell_error((z[p[0]] + z[p[1]]) / 2, z[p[1]], inf))
    table = [last[1], last[0]]
    for choice in reversed(came):
        table.append(choice[table[-1], table[-2]])
    return tuple(reversed(table))


def _points(granularity: int, reach: float) -> list[float]:
    return [(v - granularity / 2) * 2 * reach / granularity for v in range(granularity + 1)]


def _walk_back(came: list[list[int]], last: int) -> Table:
    table = [last]
    for choice in reversed(came):
        table.append(choice[table[-1]])
    return tuple(reversed(table))


def _moments(a: float, b: float) -> tuple[float, float, float]:
    """E[1], E[z], E[z^2] of N(0,1) over [a, b]."""
    m0 = (erf(b / sqrt(2)) - erf(a / sqrt(2))) / 2
    m1 = _phi(a) - _phi(b)
    m2 = m0 + (0.0 if a == -inf else a * _phi(a)) - (0.0 if b == inf else b * _phi(b))
    return m0, m1, m2


def _rounding_variance(a: float, b: float) -> float:
    """E[(z - a)(b - z)] over [a, b]: the variance of unbiased rounding between neighbours."""
    m0, m1, m2 = _moments(a, b)
    return -a * b * m0 + (a + b) * m1 - m2


def _cell_error(low: float, point: float, high: float) -> float:
    m0, m1, m2 = _moments(low, high)
    return m2 - 2 * point * m1 + point * point * m0


def _phi(z: float) -> float:
    return 0.0 if z in (-inf, inf) else exp(-z * z / 2) / sqrt(2 * pi)
