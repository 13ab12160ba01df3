"""Ranks by spectrum: given out one by one, where a column carries most for its bytes."""

import pytest

from tacit.codecs.spectrum import allocate, uniform


def spent(ranks, costs):
    return sum(rank * cost for rank, cost in zip(ranks, costs, strict=True))


def test_spectra_that_are_alike_get_like_ranks():
    assert allocate([[1.0] * 8, [1.0] * 8], [10, 10], [50, 50], 160) == [8, 8]


def test_scale_does_not_matter_and_the_fall_of_a_spectrum_does():
    steep, flat = [0.5**j for j in range(8)], [0.99**j for j in range(8)]
    ranks = allocate([[1e9 * e for e in steep], flat], [10, 10], [50, 50], 160)
    assert spent(ranks, [10, 10]) == 160 and ranks[0] < 6 and ranks[1] > 10
    assert ranks == allocate([steep, flat], [10, 10], [50, 50], 160)


def test_a_cheap_matrix_gets_more_of_the_same_spectrum():
    spectrum = [0.7**j for j in range(8)]
    cheap, dear = allocate([spectrum, spectrum], [1, 10], [50, 50], 88)
    assert cheap > dear


@pytest.mark.parametrize(
    ("energies", "most", "budget", "ranks"),
    [
        ([[1.0] * 4], [3], 1000, [3]),  # its largest
        ([[1.0] * 4], [50], 1000, [8]),  # twice as many at a time
        ([[1.0]], [50], 1000, [2]),
        ([[0.0] * 4, [0.0] * 4], [9, 9], 80, [1, 7]),  # nothing is known of either
        ([[1.0, 1.0]], [50], 15, [1]),
        ([], [], 10, []),
    ],
)
def test_at_the_edges(energies, most, budget, ranks):
    found = allocate(energies, [10] * len(most), most, budget)
    assert spent(found, [10] * len(most)) <= max(budget, 10)
    if energies and not any(energies[0]):
        assert sorted(found) in ([1, 7], [4, 4])
    else:
        assert found == ranks


@pytest.mark.parametrize(
    ("budget", "ranks"), [(9, []), (25, [1, 1]), (60, [2, 2]), (95, [3, 4]), (1000, [3, 50])]
)
def test_one_rank_for_all_is_as_large_as_the_budget_allows(budget, ranks):
    assert uniform([10, 15], [3, 50], budget) == ranks
