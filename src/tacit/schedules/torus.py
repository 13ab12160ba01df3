"""2D torus all-reduce: rings along the rows, then along the columns, and back (Mikami et al. 2018; Ying et al. 2018).

Rank r = i b + j stands in row i of a, column j of b, and owns chunk j a + i:

    reduce-scatter, 2 lines:   the all-gather below, turned round and added: first the rows, then the columns
    all-gather, a-1 stages:    (i, j) sends chunk j a + (i - k) mod a to (i+1, j)
    all-gather, b-1 stages:    (i, j) sends the a chunks from ((j - k) mod b) a on to (i, j+1)

The rows are the largest divisor of n up to its root, or `rows`; a prime n is 1 x n: a plain ring.

Stages: 2 (a - 1) + 2 (b - 1). Chunks: n = a b. Bytes that leave a rank: 2 (n - 1) / n of the vector, the least possible.
"""

import math

import numpy as np

from tacit.errors import ConfigError
from tacit.schedules.schedule import Phase, Schedule, Stage, backwards, check_option, check_world


def torus(world: int, *, rows: int | None = None) -> Schedule:
    world = check_world(world, "torus")
    a = next(d for d in range(math.isqrt(world), 0, -1) if world % d == 0) if rows is None else rows
    a = check_option("torus", "rows", a, least=1, most=world)
    if world % a:
        raise ConfigError(
            f"torus: rows={a} does not divide {world} ranks; leave rows out for the squarest torus"
        )
    b = world // a
    rank = np.arange(world)
    i, j = rank // b, rank % b
    down, right = (i + 1) % a * b + j, i * b + (j + 1) % b
    columns = Phase(Stage.of(rank, down, chunk=j * a + i), a - 1, -1, a, first=j * a)
    along = Phase(Stage.of(rank, right, chunk=j * a, count=a), b - 1, -a, world)
    spread = tuple(phase for phase in (columns, along) if phase.times)
    return Schedule("torus", world, world, backwards(spread) + spread, notes={"rows": a, "columns": b})
