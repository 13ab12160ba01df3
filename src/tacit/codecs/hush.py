"""hush: tacit's own 4-bit homomorphic codec. THC's wire contract, half its error.

    y   = H diag(s) x                           s shared signs; H Walsh-Hadamard over blocks of 1024
    i   = nearest level to  y g / (2 R M) + g/2 + d         M^4 = mean over ranks of |block|^4;  T = table, 0..g
    sum = (sum T[i] - sum d - n g/2) 2 R M / g;       x^ = diag(s) H sum / 1024

What differs from THC (2302.08545), each measured in docs/decisions/0006-hush.md:
- a block of 1024 samples all of the vector: some of its elements are from each 32nd of it, so that ranks with their
  energy in different places (experts, embeddings) have similar norms in every block, if those places are no narrower
  than about a 32nd; it has a norm of its own, so that no block is clamped because another one is large, and 10
  butterfly stages do instead of 20;
- M is a mean of the ranks' norms (of fourth powers), not their maximum: one large rank does not coarsen all grids (it is
  clamped a little instead, so hush is not unbiased: it shrinks by 1 %, more where one rank dwarfs the others);
- a Lloyd-Max table on the integer grid, rounded to the nearest: half the variance of unbiased rounding;
- one shared random stream u shifts each rank's grid by d = frac(u + rank/n) - 1/2 steps. The shifts are stratified over
  ranks, so errors cancel even when all ranks send the same, where nearest rounding alone would not average at all.
  Every receiver knows u, and the sum of the d follows from it;
- the finest table whose sum fits into 8 bits for this world, else 16-bit lanes: nothing wraps.

Its limit: all ranks share one scale a block, because only then can anybody add their indices. Where one rank is 10 times as
large as all others in everything, the others are rounded coarsely: from 7 ranks on int4, which has a scale a rank, has
less error, with nearest rounding from 3 on (n x NMSE .047 in any world; hush .030, .053, .074, .14 with 4, 8, 13, 64 ranks; thc .059, .108, .163, .53).
Where each rank is 30 times as large or more in a place of its own that is narrower than about a 32nd of the vector, thc, whose
rotation spans 2^20 elements, has less error (n x NMSE .020; hush .026 to .035).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.in_torch import COLUMNS, hush_pieces, kernels
from tacit.codecs.tables import nearest_table
from tacit.errors import ConfigError
from tacit.requests import (
    Context,
    Conversation,
    Lanes,
    Payload,
    Reduced,
    Sum,
    TableSum,
    Total,
    Traits,
    seed_of,
    threads_for,
)

_STRATA = 16  # the shared stream has 4 bits an element


class Grid(NamedTuple):
    """A table of 16 of the values 0..granularity, which stand for [-reach, reach]."""

    granularity: int
    reach: float

    @property
    def table(self) -> tuple[int, ...]:
        return nearest_table(16, self.granularity, self.reach)


GRIDS = (Grid(19, 2.68), Grid(17, 2.64), Grid(15, 2.52))


def grid_for(world: int) -> tuple[Grid, Lanes]:
    """The finest grid whose sum fits into 8-bit lanes (13, 15 or 17 ranks), else the finest with 16-bit lanes."""
    for grid in GRIDS:
        lanes = Lanes(8, grid.granularity)
        if world <= lanes.most_ranks:
            return grid, lanes
    return GRIDS[0], Lanes(16, GRIDS[0].granularity)


@dataclass(frozen=True, slots=True)
class Hush:
    """4 bits up, integers added, 8 bits down (16 beyond 17 ranks), and 1/16 bit of norms. `dither=0`: no shared shifts."""

    dither: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.dither, int | float) or not 0 <= self.dither <= 2:
            raise ConfigError(
                f"dither={self.dither}: the grid is shifted by 0 to 2 of its steps; the default is 1"
            )

    def __str__(self) -> str:
        return "hush" if self.dither == 1 else f"hush(dither={self.dither})"

    @property
    def traits(self) -> Traits:
        return Traits(rounds=2, summable=True, contracting=True, lanes=Lanes(16, GRIDS[0].granularity))

    def nbytes(self, numel: int) -> int:
        rows = hush_pieces(numel)
        return 8 * COLUMNS * len(rows) + COLUMNS * sum(rows) // 2

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x = x.float()
        grid, lanes = grid_for(context.world)
        frame = Frame(x.numel(), grid, self.dither, context.shared_seed)
        # doubles: they hold the fourth power of any float
        fourth: Total = yield Sum(Payload.dense(frame.norms(x) ** 4), to_all=True, small=True)
        norms = _sqrt(_sqrt(fourth.value / fourth.count))
        index = frame.encode(x, norms, _place(context.rank, context.world))
        total: Total = yield TableSum(index, grid.table, frame.padded, lanes)
        present = range(context.world) if total.count == context.world else [context.rank]
        own = TableSum(index, grid.table, frame.padded, Lanes(8, grid.granularity))
        return Reduced(
            frame.decode(total.value, norms, [_place(rank, context.world) for rank in present]),
            contribution=lambda: frame.decode(own.look_up(), norms, [_place(context.rank, context.world)]),
        )


def _place(rank: int, world: int) -> int:
    """This rank's stratum of the shared stream."""
    return _STRATA * rank // world


@dataclass(frozen=True, slots=True)
class Frame:
    """What all ranks share about one vector: its length, the grid, the signs and the shifts."""

    numel: int
    grid: Grid
    dither: float
    seed: int

    @property
    def padded(self) -> int:
        return COLUMNS * sum(hush_pieces(self.numel))

    def norms(self, x: Tensor) -> Tensor:
        """|block| of every block."""
        out = x.new_empty(COLUMNS * len(hush_pieces(self.numel)), dtype=torch.float64)
        kernels(x).hush_norms(x, out, threads_for(self.numel))
        return out

    def encode(self, x: Tensor, norms: Tensor, place: int) -> Tensor:
        """The 4-bit levels of the rotated, scaled and shifted x."""
        out = recycled.empty(self.padded // 2, torch.uint8, x.device)
        signs, shifts = _seeds(self.seed)
        g, reach = self.grid
        kernels(x).hush_encode(
            x,
            norms,
            signs,
            shifts,
            place,
            self.dither,
            reach,
            g,
            _cells(self.grid),
            out,
            threads_for(self.numel),
        )
        return out

    def decode(self, lanes: Tensor, norms: Tensor, places: Sequence[int]) -> Tensor:
        """The sum over the ranks at `places`, whose levels were added in `lanes`."""
        out = recycled.empty(self.numel, torch.float32, norms.device)
        signs, shifts = _seeds(self.seed)
        g, reach = self.grid
        lanes = (
            lanes.view(torch.uint16) if lanes.dtype == torch.int16 and lanes.device.type == "cpu" else lanes
        )
        offsets = _offsets(self.grid, self.dither, tuple(places))
        kernels(norms).hush_decode(
            lanes, norms, signs, shifts, offsets, reach, g, out, 1.0, threads_for(self.numel)
        )
        return out


def _sqrt(x: Tensor) -> Tensor:
    """The correctly rounded root, the same on every machine: ranks must agree on it to the bit, and torch's is not."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _seeds(shared: int) -> tuple[int, int]:
    return seed_of(shared, "signs"), seed_of(shared, "shifts")


@lru_cache(maxsize=16)
def _cells(grid: Grid) -> Tensor:
    """The level nearest to v, for every half unit of v: cells[floor(2 v)]."""
    middles = [(w + 0.5) / 2 for w in range(64)]
    return torch.tensor([_nearest(grid.table, v) for v in middles], dtype=torch.uint8)


def _nearest(table: Sequence[int], value: float) -> int:
    return min(range(len(table)), key=lambda i: abs(table[i] - value))


@lru_cache(maxsize=256)
def _offsets(grid: Grid, dither: float, places: tuple[int, ...]) -> Tensor:
    """For each value of the shared stream, what contexts a sum of levels into a sum: minus the middles, minus the shifts."""
    shifts = [sum((u + place) % _STRATA - 7.5 for place in places) for u in range(_STRATA)]
    middle, width = len(places) * grid.granularity / 2, dither / _STRATA
    return torch.tensor([-middle - width * shift for shift in shifts], dtype=torch.float32)
