"""Touches and rows in 32-bit lanes: exact for any number of ranks, and whatever the size of the numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from tacit.rows.adding import Adder
from tacit.rows.hot_lanes import CHUNK, Add, FixedRows, pack_touches, sum_rows, unpack_touches
from tacit.transports.process_group import Wire

MOST = 2**50


class Node:
    """Adds the lanes of `world` threads, wrapping around."""

    def __init__(self, world: int) -> None:
        self._barrier, self._sent, self.sums = Barrier(world), [torch.empty(0)] * world, 0

    def adder(self, rank: int) -> Add:
        def add(lanes: Tensor) -> Tensor:
            assert lanes.dtype == torch.int32
            self._sent[rank] = lanes
            self._barrier.wait(60)
            total = torch.stack(self._sent).sum(0, dtype=torch.int64)
            self._barrier.wait(60)
            self.sums += rank == 0
            return (total & 0xFFFFFFFF).to(torch.int32)

        return add


def summed(ranks: list[list[FixedRows]]) -> tuple[list[FixedRows], int, int]:
    """What all ranks get alike, rows that were sent again, and sums that it took."""
    world = len(ranks)
    node = Node(world)
    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(lambda r: sum_rows(ranks[r], world, node.adder(r)), range(world)))
    for sums, repaired in found[1:]:
        assert repaired == found[0][1]
        for one, other in zip(sums, found[0][0], strict=True):
            assert torch.equal(one.values, other.values) and torch.equal(one.broken, other.broken)
    return *found[0], node.sums


@pytest.mark.parametrize("world", [1, 2, 15, 16, 255])
def test_the_sum_of_touches_is_how_many_ranks_touched_each_row(world: int) -> None:
    touched = torch.rand(world, 101, generator=torch.Generator().manual_seed(world)) < 0.7
    touched[:, 7] = True
    total = torch.stack([pack_touches(own, world) for own in touched]).sum(0, dtype=torch.int32)
    assert torch.equal(unpack_touches(total, 101, world), touched.sum(0))
    assert len(total) == (13 if world < 16 else 26)


@pytest.mark.parametrize("world", [1, 2, 3, 32, 33, 64, 100])
def test_sums_of_the_largest_numbers_are_exact_in_any_world(world: int) -> None:
    g = torch.Generator().manual_seed(world)
    every = torch.randint(-MOST, MOST + 1, (world, 2 * CHUNK + 5, 3), generator=g)
    every[:, 0], every[:, 1] = MOST, -MOST
    every[:, CHUNK : 2 * CHUNK] %= 2**20  # fit as they are
    parts = [[FixedRows(own, torch.zeros(len(own), dtype=torch.bool))] for own in every]
    (found,), repaired, sums = summed(parts)
    assert torch.equal(found.values, every.sum(0)) and not found.broken.any()
    assert (repaired, sums) == (CHUNK + 5, 2)


def test_numbers_that_fit_take_one_sum_and_nothing_takes_none() -> None:
    limit = (2**31 - 1) // 3
    rows = FixedRows(torch.tensor([[limit, -limit]]), torch.zeros(1, dtype=torch.bool))
    empty = FixedRows(torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
    sums, repaired, rounds = summed([[empty, rows]] * 3)
    assert sums[1].values.tolist() == [[3 * limit, -3 * limit]] and sums[0].values.shape == (0, 5)
    assert (repaired, rounds) == (0, 1)
    assert summed([[empty, empty]] * 3)[1:] == (0, 0)


def test_one_rank_s_broken_row_is_broken_for_all_and_its_neighbours_are_exact() -> None:
    values = torch.arange(2 * CHUNK).view(-1, 1)
    whole, broken = torch.zeros(2 * CHUNK, dtype=torch.bool), torch.zeros(2 * CHUNK, dtype=torch.bool)
    broken[3] = True
    (found,), repaired, _ = summed([[FixedRows(values, whole)], [FixedRows(values, broken)]])
    assert torch.equal(found.broken, broken) and repaired == CHUNK
    assert torch.equal(found.values, 2 * values)


def test_rows_that_are_added_elsewhere_have_the_bits_of_an_owner_s_sum() -> None:
    world, count, width = 3, 200, 5
    g = torch.Generator().manual_seed(4)
    gradients = torch.randn(world, count, width, generator=g) * 10.0 ** torch.randint(
        -12, 12, (world, count, 1), generator=g
    )
    gradients[0, 0, 0], gradients[1, 1, 1], gradients[2, 2, 2] = torch.nan, torch.inf, -torch.inf
    gradients[:, 3] = torch.tensor([0.5, -1.5, 2.5])[:, None] * 2.0**-30
    for exponents in ([], [-5], [60], [-200]):
        owner, elsewhere = Adder(exact=True), Adder(exact=True)
        for adder in (owner, elsewhere):
            adder.history = list(exponents)
        targets = torch.arange(count).repeat(world)
        wanted = owner.means(gradients.view(-1, width), targets, count, world)
        parts = [[FixedRows(elsewhere.fixed(own), ~own.isfinite().all(1))] for own in gradients]
        (sums,), _, _ = summed(parts)
        found = elsewhere.means_of(sums.values, sums.broken, world)
        assert torch.equal(found.nan_to_num(7.0).view(torch.int32), wanted.nan_to_num(7.0).view(torch.int32))
        assert torch.equal(found.isnan(), wanted.isnan()) and owner.own == elsewhere.own


def test_the_process_group_adds_lanes_that_wrap_around(ranks: object) -> None:
    for found in ranks.run(3, add_over_the_group):  # type: ignore[attr-defined]
        assert found == [-3, 3 * 7, -2, 0]


def add_over_the_group(rank: int, world: int) -> list[int]:
    import torch.distributed as dist

    from tacit.transports.lanes import sum_lanes

    wire = Wire(dist.group.WORLD)  # type: ignore[arg-type]
    own = torch.tensor(
        [-1, 7, [2**31 - 1, 2**31 - 1, 0][rank], [-(2**31), 0, -(2**31)][rank]], dtype=torch.int32
    )
    return [int(each) for each in sum_lanes(wire, None, own)]
