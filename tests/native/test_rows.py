"""The row kernels against float64, on every instruction set this CPU can run; the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tacit import _core

ROWS, WIDTH, TOUCHED = 3000, 17, 2100  # more than two shares of a thread


def case(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "weights": torch.randn(ROWS, WIDTH, generator=g).to(dtype),
        "rows": torch.randperm(ROWS, generator=g)[:TOUCHED].sort().values,
        "gradients": torch.randn(TOUCHED, WIDTH, generator=g),
        "first": torch.randn(ROWS, WIDTH, generator=g),
        "second": torch.rand(ROWS, WIDTH, generator=g),
        "a_row": torch.rand(ROWS, generator=g),
    }


def sgd(w: Any, g: Any, s: dict[str, Any]) -> Any:
    return w - 0.1 * g


def adagrad(w: Any, g: Any, s: dict[str, Any]) -> Any:
    s["second"] = s["second"] + g**2
    return w - 0.1 * g / (np.sqrt(s["second"]) + 1e-3)


def row_adagrad(w: Any, g: Any, s: dict[str, Any]) -> Any:
    s["a_row"] = s["a_row"] + (g**2).mean(1)
    return w - 0.1 * g / (np.sqrt(s["a_row"])[:, None] + 1e-3)


def ftrl(w: Any, g: Any, s: dict[str, Any]) -> Any:
    n, after = s["second"], s["second"] + g**2
    z = s["first"] + g - (np.sqrt(after) - np.sqrt(n)) / 0.1 * w
    s["first"], s["second"] = z, after
    moved = (np.sign(z) * 0.5 - z) / ((1.0 + np.sqrt(after)) / 0.1 + 0.2)
    return np.where(np.abs(z) <= 0.5, 0, moved)


def lazy_adam(w: Any, g: Any, s: dict[str, Any]) -> Any:
    s["first"] = 0.9 * s["first"] + 0.1 * g
    s["second"] = 0.99 * s["second"] + 0.01 * g**2
    return w - 0.1 * s["first"] / (np.sqrt(s["second"]) + 1e-3)


def run(name: str, c: dict[str, Tensor], threads: int) -> dict[str, Tensor]:
    w, f, s, a = (c[key].clone() for key in ("weights", "first", "second", "a_row"))
    r, g = c["rows"], c["gradients"]
    if name == "sgd":
        _core.row_sgd(w, r, g, 0.1, threads)
    elif name == "adagrad":
        _core.row_adagrad(w, s, r, g, 0.1, 1e-3, threads)
    elif name == "row_adagrad":
        _core.row_row_adagrad(w, a, r, g, 0.1, 1e-3, threads)
    elif name == "ftrl":
        _core.row_ftrl(w, f, s, r, g, 0.1, 1.0, 0.5, 0.2, threads)
    else:
        _core.row_lazy_adam(w, f, s, r, g, 0.1, 0.9, 0.99, 1e-3, threads)
    return {"weights": w, "first": f, "second": s, "a_row": a}


FORMULAS: dict[str, Callable[..., Any]] = {
    "sgd": sgd, "adagrad": adagrad, "row_adagrad": row_adagrad, "ftrl": ftrl, "lazy_adam": lazy_adam
}  # fmt: skip


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMULAS)
def test_an_optimizer_computes_its_formula_on_the_rows_named_and_no_other(
    name: str, dtype: torch.dtype, simd: str
) -> None:
    c = case(dtype)
    found = run(name, c, 1)
    rows, wide = c["rows"].numpy(), {k: v.double().numpy() for k, v in c.items()}
    state = {key: wide[key][rows] for key in ("first", "second", "a_row")}
    wanted = FORMULAS[name](wide["weights"][rows], wide["gradients"], state)
    bound = 2e-6 if dtype == torch.float32 else 2.0**-8
    difference = np.abs(found["weights"].double().numpy()[rows] - wanted)
    assert (difference <= bound * np.maximum(1, np.abs(wanted))).all()
    for key in state:
        np.testing.assert_allclose(found[key].double().numpy()[rows], state[key], rtol=2e-5, atol=2e-5)
    others = torch.ones(ROWS, dtype=torch.bool)
    others[c["rows"]] = False
    assert same({k: v[others] for k, v in found.items()}, {k: c[k][others] for k in found})
    _core.use_simd("baseline")
    assert same(found, run(name, c, 1))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(name: str, threads: int) -> None:
    c = case()
    assert same(run(name, c, threads), run(name, c, 1))


def test_bfloat16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    values = torch.randn(1, 4096, generator=torch.Generator().manual_seed(2)).bfloat16()
    step = torch.randn(1, 4096, generator=torch.Generator().manual_seed(3)) * 0.01
    step[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    wanted = (values.float() - step).bfloat16()
    _core.row_sgd(values, torch.zeros(1, dtype=torch.int64), step, 1.0)
    assert torch.equal(values.nan_to_num(9.0), wanted.nan_to_num(9.0))


# ---- sums


def sums_case() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(4)
    return torch.randn(9000, 13, generator=g), torch.randint(2500, (9000,), generator=g)


def sums_of(
    gradients: Tensor, targets: Tensor, count: float, exponent: int | None = None, threads: int = 1
) -> Tensor:
    out = torch.full((2500, gradients.shape[1]), 9e9)
    if exponent is None:
        _core.row_sums(gradients, targets, count, out, threads)
    else:
        _core.row_exact_sums(gradients, targets, exponent, count, out, threads)
    return out


@pytest.mark.parametrize("exponent", [None, 30])
def test_sums_are_those_of_float64_for_any_threads_and_instruction_set(
    exponent: int | None, simd: str
) -> None:
    gradients, targets = sums_case()
    wanted = torch.zeros(2500, 13, dtype=torch.float64).index_add_(0, targets, gradients.double()) / 3
    found = sums_of(gradients, targets, 3.0, exponent)
    assert (found - wanted).abs().max() < 2e-6
    _core.use_simd("baseline")
    assert all(
        torch.equal(found, sums_of(gradients, targets, 3.0, exponent, threads)) for threads in (1, 2, 3)
    )


def test_exact_sums_have_the_same_bits_in_any_order_and_sums_in_float32_do_not() -> None:
    gradients, targets = sums_case()
    orders = [torch.randperm(len(targets), generator=torch.Generator().manual_seed(s)) for s in range(3)]
    exact = [sums_of(gradients[o], targets[o], 3.0, 24) for o in orders]
    in_order = [sums_of(gradients[o], targets[o], 3.0) for o in orders]
    assert torch.equal(exact[0], exact[1]) and torch.equal(exact[0], exact[2])
    assert not torch.equal(in_order[0], in_order[1])


def test_exact_sums_are_integers_clamped_and_nan_where_a_gradient_is_not_finite() -> None:
    gradients = torch.tensor([[0.5, 1.5, 1e30], [1.0, 1.0, -1.0], [float("inf"), 1.0, 1.0]])
    out = torch.empty(2, 3)
    _core.row_exact_sums(gradients, torch.tensor([0, 0, 1]), 0, 1.0, out)
    assert out[0].tolist() == [1.0, 3.0, 2.0**50]  # halves go to even: 0 and 2
    assert out[1].isnan().all()


def test_a_row_that_nothing_targets_is_zero() -> None:
    for exponent in (None, 10):
        found = sums_of(torch.empty(0, 4), torch.empty(0, dtype=torch.int64), 1.0, exponent)
        assert torch.equal(found, torch.zeros(2500, 4))


# ---- keys


def test_an_index_numbers_keys_as_they_come_and_finds_any_64_bit_key() -> None:
    index, known = _core.RowIndex(), dict[int, int]()
    g = np.random.default_rng(5)
    extremes = np.array([0, -1, 2**63 - 1, -(2**63), 1, 7])
    for round_ in range(6):
        keys = np.concatenate([g.integers(-(2**63), 2**63 - 1, 3000), g.integers(0, 2000, 3000), extremes])
        rows = np.empty(len(keys), np.int64)
        total = index.add(keys, rows)
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            assert row == known.setdefault(key, len(known))
        assert total == len(index) == len(known)
        found, none = np.empty_like(rows), np.empty(2, np.int64)
        index.find(keys, found, 1 + round_ % 3)
        assert (found == rows).all()
        index.find(np.array([2**62 + 12345, -(2**61)]), none)
        assert none.tolist() == [-1, -1]
    out = np.empty(len(index), np.int64)
    index.keys(out)
    assert out.tolist() == list(known)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_a_route_puts_keys_by_owner_evenly_and_in_order(world: int) -> None:
    keys = torch.arange(0, 40_000, 3)
    order, counts = torch.empty_like(keys), torch.empty(world, dtype=torch.int64)
    _core.row_route(keys, 77, order, counts)
    assert order.sort().values.equal(torch.arange(len(keys)))
    assert counts.sum() == len(keys)
    assert (counts - len(keys) / world).abs().max() < 5 * (len(keys) / world) ** 0.5
    starts = [0, *counts.cumsum(0).tolist()]
    for begin, end in pairwise(starts):
        assert (order[begin:end].diff() > 0).all()
        alone = keys[order[begin:end]]
        again, other = torch.empty_like(alone), torch.empty(world, dtype=torch.int64)
        _core.row_route(alone, 77, again, other)
        assert (other > 0).sum() == (len(alone) > 0)


def test_values_follow_from_seed_table_and_key_alone_and_are_as_stated() -> None:
    def values(keys: Tensor, table: int = 1, seed: int = 2, normal: bool = True, threads: int = 1) -> Tensor:
        out = torch.empty(len(keys), 16)
        _core.row_values(keys, table, seed, normal, 0.5, out, threads)
        return out

    keys = torch.arange(20_000)
    whole = values(keys)
    picked = torch.tensor([5, 19_999, 0, 777])
    assert torch.equal(values(picked), whole[picked])
    assert torch.equal(values(keys, threads=3), whole)
    assert abs(whole.mean().item()) < 0.003 and abs(whole.std().item() - 0.5) < 0.003
    assert abs(((whole / 0.5) ** 4).mean().item() - 2.9) < 0.05  # 3 - 6 / (5 * 12): twelve uniforms
    flat = values(keys, normal=False)
    assert -0.5 <= flat.min() < -0.4999 and 0.4999 < flat.max() < 0.5
    assert abs(flat.std().item() - 0.5 / 3**0.5) < 0.003
    for other in (values(keys, table=3), values(keys, seed=4), values(keys + 20_000)):
        assert abs(torch.corrcoef(torch.stack([whole.view(-1), other.view(-1)]))[0, 1].item()) < 0.01
    assert values(picked[:1]).tolist()[0][:3] == GOLDEN


GOLDEN = [
    -0.507415771484375,
    -0.1517791748046875,
    0.5856094360351562,
]  # the same on every machine: rows that nobody has touched yet are in no checkpoint


# ---- refusals


def test_wrong_sizes_are_refused() -> None:
    w, g = torch.zeros(4, 3), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"row 4 after 1: rows increase, and there are 4"):
        _core.row_sgd(w, torch.tensor([1, 4]), g, 0.1)
    with pytest.raises(ValueError, match=r"row 1 after 1: rows increase"):
        _core.row_sgd(w, torch.tensor([1, 1]), g, 0.1)
    with pytest.raises(ValueError, match="gradients has 6 elements: 1 rows of 3 have 3"):
        _core.row_sgd(w, torch.tensor([1]), g, 0.1)
    with pytest.raises(ValueError, match="squares has 3 elements: 4 rows of 1 have 4"):
        _core.row_row_adagrad(w, torch.zeros(3), torch.tensor([1, 2]), g, 0.1, 0.0)
    with pytest.raises(ValueError, match="target 2 is none of the 2 rows of out"):
        _core.row_sums(g, torch.tensor([0, 2]), 1.0, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="counts has no element"):
        _core.row_route(torch.tensor([1]), 0, torch.tensor([1]), torch.empty(0, dtype=torch.int64))
    with pytest.raises(TypeError, match="weights are float32 or bfloat16"):
        _core.row_sgd(w.double(), torch.tensor([1, 2]), g, 0.1)
