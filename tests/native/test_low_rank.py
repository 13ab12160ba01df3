"""The C++ kernels of low rank against float64, on every instruction set this CPU can run, and their torch twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tacit import _core
from tacit.codecs import in_torch

SHAPES = [(1, 1), (1, 37), (37, 1), (3, 5), (17, 33), (64, 64), (257, 511), (1000, 3), (5, 2100), (1037, 530)]
RANKS = [1, 2, 3, 8, 17, 32]
BOTH: list[Any] = [_core, in_torch]


def case(rows: int, columns: int, rank: int) -> tuple[Tensor, ...]:
    """x, e, p, q and another q."""
    g = torch.Generator().manual_seed(rows * 31 + columns * 7 + rank)
    shapes = [(rows * columns,)] * 2 + [(rank, rows), (rank, columns), (rank, columns)]
    return tuple(torch.randn(shape, generator=g) for shape in shapes)


def run(kernels: Any, given: tuple[Tensor, ...], threads: int = 1) -> list[Tensor]:
    """left, right, the new e, and out."""
    x, e, p, q, total = (t.clone() for t in given)
    left, right, out = torch.full_like(p, 9e9), torch.full_like(q, 9e9), torch.full_like(x, 9e9)
    kernels.low_rank_left(x, e, q, left, threads)
    kernels.low_rank_right(x, e, p, right, threads)
    kernels.low_rank_finish(x, e, p, q, total, out, threads)
    for read, before in zip((x, p, q, total), (given[0], *given[2:]), strict=True):
        assert torch.equal(read, before)
    return [left, right, e, out]


def expected(given: tuple[Tensor, ...]) -> tuple[list[Tensor], list[float]]:
    """What `run` finds, in float64, and how far rounding may take float32 from each."""
    x, e, p, q, total = (t.double() for t in given)
    m = (x + e).view(p.shape[1], q.shape[1])
    exact = [q @ m.T, p @ m, (m - p.T @ q).view(-1), (p.T @ total).view(-1)]
    terms = [q.abs() @ m.abs().T, p.abs() @ m.abs(), m.abs() + p.abs().T @ q.abs(), p.abs().T @ total.abs()]
    return exact, [float(t.max()) * 2.0**-24 * 8 for t in terms]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_those_of_float64(rows: int, columns: int, rank: int) -> None:
    given = case(rows, columns, rank)
    exact, rounding = expected(given)
    for kernels in BOTH:
        for found, wanted, bound in zip(run(kernels, given), exact, rounding, strict=True):
            assert (found - wanted).abs().max() <= bound


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_have_the_same_bits_on_all_instruction_sets_and_threads(
    rows: int, columns: int, rank: int, simd: str
) -> None:
    given = case(rows, columns, rank)
    _core.use_simd("baseline")
    wanted = run(_core, given)
    _core.use_simd(simd)
    for threads in (1, 2, 3):
        for found, exact in zip(run(_core, given, threads), wanted, strict=True):
            assert same_bits(found, exact)


def test_a_result_that_passes_the_caches_has_the_same_bits(simd: str) -> None:
    given = case(
        1030, 2048, 3
    )  # past_caches in low_rank.cpp, and rows that are aligned; then rows that are not
    x, e, p, q, total = given
    out, aside = torch.empty(x.numel()), torch.empty(x.numel() + 1)[1:]
    _core.use_simd(simd)
    errors = []
    for to, threads in ((out, 1), (aside, 1), (out.clone(), 2)):
        errors.append(e.clone())
        _core.low_rank_finish(x, errors[-1], p, q, total, to, threads)
        assert same_bits(to.clone(), out)
        assert same_bits(errors[-1], errors[0])
    assert (out - (p.T @ total).view(-1)).abs().max() < 1e-4


def test_views_anywhere_in_memory_and_the_highest_rank_have_the_same_bits(simd: str) -> None:
    given = case(37, 70, 256)
    shifted = []
    for t in given:
        flat = torch.empty(t.numel() + 1)[1:]
        flat.copy_(t.reshape(-1))
        shifted.append(flat.view(t.shape))
    _core.use_simd("baseline")
    wanted = run(_core, given)
    _core.use_simd(simd)
    x, e, p, q, total = shifted
    left, right, out = torch.empty_like(p), torch.empty_like(q), torch.empty(x.numel() + 1)[1:]
    _core.low_rank_left(x, e, q, left, 1)
    _core.low_rank_right(x, e, p, right, 1)
    _core.low_rank_finish(x, e, p, q, total, out, 1)
    for found, exact in zip((left, right, e, out), wanted, strict=True):
        assert same_bits(found, exact)


@pytest.mark.parametrize("kernels", BOTH, ids=["core", "torch"])
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (0, 0)])
def test_a_matrix_without_elements_is_left_alone(kernels: Any, rows: int, columns: int) -> None:
    x, e, p, q, total = case(rows, columns, 3)
    before = p.clone(), q.clone()
    kernels.low_rank_left(x, e, q, p, 1)
    kernels.low_rank_right(x, e, p, q, 1)
    kernels.low_rank_finish(x, e, p, q, total, x.clone(), 1)
    assert torch.equal(p, before[0])
    assert torch.equal(q, before[1])
    assert kernels.low_rank_orthonormalize(torch.empty(3, 0), 1) == 0


def test_wrong_sizes_are_refused() -> None:
    x, e, p, q, total = case(4, 6, 2)
    out = torch.empty(24)
    with pytest.raises(ValueError, match="x has 23 elements: a matrix of 4 x 6 has 24"):
        _core.low_rank_left(x[1:], e, q, p, 1)
    with pytest.raises(ValueError, match="e has 23 elements"):
        _core.low_rank_right(x, e[1:], p, q, 1)
    with pytest.raises(ValueError, match="p has rank 2 and q has rank 1: both have the same"):
        _core.low_rank_left(x, e, q[:1], p, 1)
    with pytest.raises(ValueError, match="own is 2 x 6 and total is 1 x 6: both have the same shape"):
        _core.low_rank_finish(x, e, p, q, total[:1], out, 1)
    with pytest.raises(ValueError, match="out has 23 elements"):
        _core.low_rank_finish(x, e, p, q, total, out[1:], 1)
    with pytest.raises(ValueError, match="threads=0: from 1 to 1024"):
        _core.low_rank_left(x, e, q, p, 0)
    for rank in (0, 257):
        with pytest.raises(ValueError, match=f"rank={rank}: from 1 to 256"):
            _core.low_rank_orthonormalize(torch.zeros(rank, 300), 1)
        with pytest.raises(ValueError, match=f"rank={rank}: from 1 to 256"):
            _core.low_rank_left(x, e, torch.zeros(rank, 6), torch.zeros(rank, 4), 1)
    with pytest.raises(TypeError):  # not a silent copy, whose changes would be lost
        _core.low_rank_orthonormalize(torch.zeros(4, 2).T, 1)


# ---- orthonormalize


def factors() -> dict[str, tuple[Tensor, int]]:
    """Factors, and how many of their rows depend on those before."""
    g = torch.Generator().manual_seed(5)

    def normal(rank: int, length: int) -> Tensor:
        return torch.randn(rank, length, generator=g)

    twins, gap, mixed = normal(8, 100), normal(6, 33), normal(4, 50)
    twins[3], twins[6], twins[7] = twins[1], -1e-6 * twins[0] + 3 * twins[5], 1e9 * twins[2]
    gap[0] = gap[4] = 0
    mixed *= torch.tensor([1e37, 1e-35, 1.0, 1e-44])[:, None]  # the last is subnormal
    near = normal(3, 1000)
    near[2] = near[0] + 1e-4 * near[2]
    return {
        "one": (torch.tensor([[-3.0]]), 0),
        "random": (normal(8, 4096), 0),
        "odd": (normal(17, 33), 0),
        "square": (normal(32, 32), 0),
        "huge": (normal(8, 257) * 1e37, 0),
        "tiny": (normal(8, 257) * 1e-35, 0),
        "mixed": (mixed[:3], 0),
        "subnormal": (mixed[3:], 0),
        "zero": (torch.zeros(5, 64), 5),
        "gap": (gap, 2),
        "twins": (twins, 3),
        "near": (near, 0),
        "wide": (normal(9, 4), 5),
        "zero and wide": (torch.zeros(3, 1), 3),
        "most": (normal(256, 300), 0),
    }


@pytest.mark.parametrize("kernels", BOTH, ids=["core", "torch"])
@pytest.mark.parametrize("name", factors())
def test_rows_become_orthonormal(name: str, kernels: Any) -> None:
    given, dependent = factors()[name]
    p, (rank, length) = given.clone(), given.shape
    assert kernels.low_rank_orthonormalize(p, 7) == dependent
    wanted = torch.diag((torch.arange(rank) < length).double())
    assert (p.double() @ p.double().T - wanted).abs().max() < 1e-5
    if not dependent:  # they span what they did: a row is in the span of those up to its own
        scaled = given.double() / given.double().norm(dim=1, keepdim=True)
        assert (scaled - scaled @ p.double().T @ p.double()).abs().max() < 1e-5


@pytest.mark.parametrize("name", factors())
def test_orthonormal_rows_have_the_same_bits_on_all_instruction_sets_and_the_twins_agree(
    name: str, simd: str
) -> None:
    found = []
    for variant in ("baseline", simd):
        _core.use_simd(variant)
        found.append(factors()[name][0])
        _core.low_rank_orthonormalize(found[-1], 2**64 - 3)
    assert same_bits(*found)
    twin = factors()[name][0]
    in_torch.low_rank_orthonormalize(twin, 2**64 - 3)
    assert (found[0] - twin).abs().max() < 1e-6


@pytest.mark.parametrize("kernels", BOTH, ids=["core", "torch"])
def test_another_seed_draws_other_rows(kernels: Any) -> None:
    found = []
    for seed in (1, 2, 1):
        found.append(torch.zeros(2, 20))
        kernels.low_rank_orthonormalize(found[-1], seed)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("kernels", BOTH, ids=["core", "torch"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_factor_that_is_not_finite_becomes_nan(kernels: Any, value: float) -> None:
    p = torch.zeros(5, 3)
    p[3, 2] = value
    assert kernels.low_rank_orthonormalize(p, 1) == 0
    assert p.isnan().all()


def test_the_twins_run_on_shapes_alone() -> None:
    x, e, p, q, total = (t.to("meta") for t in case(7, 5, 3))
    out = torch.empty_like(x)
    in_torch.low_rank_left(x, e, q, p, 1)
    in_torch.low_rank_right(x, e, p, q, 1)
    in_torch.low_rank_finish(x, e, p, q, total, out, 1)
    assert in_torch.low_rank_orthonormalize(p, 1) == 0
    assert in_torch.low_rank_orthonormalize(torch.empty(9, 4, device="meta"), 1) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_error_that_is_no_number_stays_what_it_was(bad):
    x, e, p, own, total, out = (
        torch.ones(35),
        torch.full((35,), 2.0),
        *(torch.ones(1, n) for n in (5, 7, 7)),
        torch.empty(35),
    )
    x[17] = bad
    twin, twin_out = e.clone(), out.clone()
    _core.low_rank_finish(x, e, p, own, total, out, 1)
    in_torch.low_rank_finish(x, twin, p, own, total, twin_out, 1)
    assert torch.equal(e, twin) and torch.equal(out, twin_out)
    assert e.tolist() == [2.0] * 35


@pytest.mark.parametrize("kernels", BOTH, ids=["core", "torch"])
def test_many_matrices_in_one_call_are_as_one_by_one(kernels: Any) -> None:
    shapes = [(5, 9, 9, 2), (60, 40, 31, 3), (1300, 1, 7, 1), (1310, 0, 4, 2)]  # with gaps between them
    g = torch.Generator().manual_seed(1)
    x, e, p, q, own = (torch.randn(n, generator=g) for n in (1400, 1400, 139, 126, 126))
    one, many = (
        [p.clone(), q.clone(), e.clone(), torch.zeros(1400)],
        [p.clone(), q.clone(), e.clone(), torch.zeros(1400)],
    )
    matrices = torch.tensor(shapes)
    kernels.low_rank_lefts(x, e, matrices, q, many[0], 2)
    kernels.low_rank_rights(x, e, matrices, p, many[1], 2)
    kernels.low_rank_finishes(x, many[2], matrices, p, own, q, many[3], 2)
    kernels.low_rank_orthonormalize_all(many[0], matrices[:, [3, 1]].contiguous(), 5)
    at_p = at_q = 0
    for index, (start, rows, columns, rank) in enumerate(shapes):
        m, left, right = (
            slice(start, start + rows * columns),
            slice(at_p, at_p + rank * rows),
            slice(at_q, at_q + rank * columns),
        )
        at_p, at_q = left.stop, right.stop
        lefts = [t[left].view(rank, rows) for t in (p, one[0])]
        rights = [t[right].view(rank, columns) for t in (q, one[1], own)]
        kernels.low_rank_left(x[m], e[m], rights[0], lefts[1], 1)
        kernels.low_rank_right(x[m], e[m], lefts[0], rights[1], 1)
        kernels.low_rank_finish(x[m], one[2][m], lefts[0], rights[2], rights[0], one[3][m], 1)
        kernels.low_rank_orthonormalize(lefts[1], (5 + index * 0xD1B54A32D192ED03) % 2**64)
    assert (at_p, at_q) == (p.numel(), q.numel())
    assert all(same_bits(a, b) for a, b in zip(one, many, strict=True))


def test_matrices_that_do_not_lie_in_the_vector_are_refused() -> None:
    x, p, q = torch.zeros(100), torch.zeros(10), torch.zeros(10)

    def lefts(*row: int, p: Tensor = p, q: Tensor = q) -> None:
        _core.low_rank_lefts(x, x, torch.tensor([row]), q, p, 1)

    lefts(0, 10, 10, 1)
    for row in [
        (1, 10, 10, 1),
        (-1, 10, 10, 1),
        (0, -10, 10, 1),
        (0, 2**40, 2**40, 1),
        (0, 10, 10, 0),
        (200, 0, 10, 1),
    ]:
        with pytest.raises(ValueError, match="does not lie in a vector of 100"):
            lefts(*row)
    with pytest.raises(ValueError, match="q has 10 elements: too few"):
        lefts(0, 10, 10, 2, p=torch.zeros(20))
    with pytest.raises(ValueError, match="p has 20 elements: its factors have 10"):
        lefts(0, 10, 10, 1, p=torch.zeros(20))
    with pytest.raises(ValueError, match="a row has 3 numbers; 4 are needed"):
        lefts(0, 10, 10)
    with pytest.raises(ValueError, match="a factor of rank 0"):
        _core.low_rank_orthonormalize_all(p, torch.tensor([[0, 10]]), 1)
