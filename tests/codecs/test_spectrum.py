"""Ranks by spectrum: given out one by one, where a column carries most for its bytes."""

import pytest
import torch

from tacit.codecs.spectrum import allocate, energies_of, uniform


def spent(ranks, costs):
    return sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))


def test_spectra_that_are_alike_get_like_ranks():
    assert allocate([[1.0] * 8, [1.0] * 8], [10, 10], [50, 50], 160) == [8, 8]
    assert allocate([[1.0] * 8] * 4, [10] * 4, [50] * 4, 320) == [8] * 4


def test_a_small_column_before_large_ones_hides_none_of_them():
    ranks = allocate([[1e-6, *[1.0] * 7], [1.0] * 8], [10, 10], [50, 50], 160)
    assert abs(ranks[0] - ranks[1]) <= 2


def test_scale_does_not_matter_and_the_fall_of_a_spectrum_does():
    steep, flat = [0.5**j for j in range(8)], [0.99**j for j in range(8)]
    ranks = allocate([[1e9 * e for e in steep], flat], [10, 10], [50, 50], 160)
    assert ranks == [6, 10] == allocate([steep, flat], [10, 10], [50, 50], 160)


def test_a_cheap_matrix_gets_more_of_the_same_spectrum():
    spectrum = [0.7**j for j in range(8)]
    cheap, dear = allocate([spectrum, spectrum], [1, 10], [50, 50], 88)
    assert cheap > dear


@pytest.mark.parametrize(
    ("energies", "most", "budget", "ranks"),
    [
        ([[1.0] * 4], [3], 1000, [3]),  # its largest
        ([[1.0] * 8], [50], 1000, [10]),  # a quarter more at a time
        ([[1.0]], [50], 1000, [2]),
        ([[0.0] * 4, [0.0] * 4], [9, 9], 80, [4, 4]),  # nothing is known of either
        ([[1.0, 1.0]], [50], 15, [1]),
        ([[1.0] * 8], [50], 15, [6]),  # above its budget, as in another bucket: it comes down step by step
        ([], [], 10, []),
    ],
)
def test_at_the_edges(energies, most, budget, ranks):
    assert allocate(energies, [10] * len(most), most, budget) == ranks


@pytest.mark.parametrize(
    ("budget", "ranks"), [(9, [1, 1]), (25, [1, 1]), (60, [2, 2]), (95, [3, 4]), (1000, [3, 50])]
)
def test_one_rank_for_all_is_as_large_as_the_budget_allows(budget, ranks):
    assert uniform([10, 15], [3, 50], budget) == ranks


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_energies_are_whole_numbers_that_no_order_of_adding_changes(scale):
    r = (
        torch.randn(5, 3000, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1, 2, 3, 0.1, 0])[:, None]
    )
    found = energies_of(r * scale)
    assert found.dtype == torch.int64 and found[4] == 0
    assert torch.equal(found, energies_of((r * scale).flip(1)))
    torch.testing.assert_close(
        found.double() / found[0],
        (r.double().square().sum(1) / r[0].double().square().sum()),
        rtol=1e-3,
        atol=0,
    )
    assert not energies_of(torch.zeros(2, 4)).any()
