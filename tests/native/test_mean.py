"""A mean and whether it is finite, in one pass: torch's own bits on every instruction set."""

from __future__ import annotations

import pytest
import torch

from tacit import _core


@pytest.mark.parametrize("count", [1, 3, 4, 6, 1000])
@pytest.mark.parametrize("numel", [0, 1, 511, 513, 10_007])
def test_a_mean_has_the_bits_of_a_division_on_every_instruction_set(numel: int, count: int) -> None:
    rng, before = torch.Generator().manual_seed(numel), _core.simd()
    total = torch.randn(numel, generator=rng) * 10.0 ** torch.randint(-44, 38, (numel,), generator=rng)
    try:
        for variant in _core.simd_variants():
            _core.use_simd(variant)
            out, own = torch.full((numel,), 9e9), total.clone()
            assert _core.mean(total, count, out) is True
            assert _core.mean(own, count, own) is True
            assert torch.equal(out, total / count)
            assert torch.equal(own, out)
    finally:
        _core.use_simd(before)


@pytest.mark.parametrize("count", [3, 4])
def test_a_mean_of_bfloat16_is_the_mean_of_what_it_stands_for(count: int) -> None:
    total = (torch.randn(10_007, generator=torch.Generator().manual_seed(1)) * 1e20).bfloat16()
    before = _core.simd()
    try:
        for variant in _core.simd_variants():
            _core.use_simd(variant)
            out = torch.empty(10_007)
            assert _core.mean_bf16(total.view(torch.uint16), count, out) is True
            assert torch.equal(out, total.float() / count)
    finally:
        _core.use_simd(before)
    total[700] = float("nan")
    assert _core.mean_bf16(total.view(torch.uint16), count, torch.empty(10_007)) is False


@pytest.mark.parametrize("place", [0, 600, 1024])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(place: int, bad: float) -> None:
    total = torch.ones(1025)
    total[place] = bad
    assert _core.mean(total, 4, torch.empty(1025)) is False


def test_sizes_must_agree_and_a_mean_is_of_somebody() -> None:
    with pytest.raises(ValueError, match="3 and 2 elements"):
        _core.mean(torch.zeros(3), 2, torch.empty(2))
    with pytest.raises(ValueError, match="a mean of 0 ranks"):
        _core.mean(torch.zeros(3), 0, torch.empty(3))
