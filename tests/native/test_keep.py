"""A copy and how far it is from a reference, in one pass: the same bits on every instruction set, and right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tacit import _core


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 511, 512, 513, 100_003])
def test_a_copy_and_its_distance_on_every_instruction_set(numel: int) -> None:
    rng, before, found = np.random.default_rng(numel), _core.simd(), []
    x, reference = (rng.standard_normal(numel).astype(np.float32) for _ in range(2))
    try:
        for variant in _core.simd_variants():
            _core.use_simd(variant)
            out = np.full(numel, 9e9, np.float32)
            found.append(_core.keep(x, reference, out))
            assert np.array_equal(out, x)
    finally:
        _core.use_simd(before)
    exact = float(np.square(x.astype(np.float64) - reference).sum())
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(exact, rel=1e-6)


def test_what_is_not_finite_is_not_hidden() -> None:
    x = torch.tensor([1.0, float("nan"), 2.0])
    assert np.isnan(_core.keep(x, torch.zeros(3), torch.empty(3)))


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="3, 3 and 2 elements"):
        _core.keep(torch.zeros(3), torch.zeros(3), torch.empty(2))
