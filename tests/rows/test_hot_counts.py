"""Counts that fade, exact and sketched."""

import numpy as np
import pytest

from tacit.errors import ConfigError
from tacit.rows.hot_counts import SKETCH_CELLS, DecayedCounts, SketchedCounts

BOTH = [lambda **options: DecayedCounts(**options), lambda **options: SketchedCounts(1000, **options)]


@pytest.mark.parametrize("make", BOTH, ids=["exact", "sketch"])
def test_a_touch_counts_half_after_the_half_life(make):
    counts = make(half_life_touches=1000)
    counts.add([3], [64], rank_steps=4)
    before = counts.of(np.array([3]))[0]
    counts.add([5], [1000 - 64])
    assert before == pytest.approx(64 * 2**-0.064)
    assert counts.of(np.array([3, 4]))[0] == pytest.approx(32)
    assert counts.total == pytest.approx(32 + 936 * 2**-0.936)
    assert counts.rank_steps == pytest.approx(2 + 2**-0.936)


@pytest.mark.parametrize("make", BOTH, ids=["exact", "sketch"])
def test_counts_are_those_of_the_formula_over_many_half_lives(make):
    rng, counts, half_life = np.random.default_rng(1), make(half_life_touches=500), 500
    expected = np.zeros(50)
    for _ in range(400):  # 40 half-lives: stored counts are scaled down on the way
        slots = rng.integers(0, 50, 50)
        expected = (expected + np.bincount(slots, minlength=50)) * 2 ** (-len(slots) / half_life)
        counts.add(slots)
    assert counts.of(np.arange(50)) == pytest.approx(expected, rel=1e-4)
    assert counts.total == pytest.approx(expected.sum(), rel=1e-6)


def test_an_addition_of_many_half_lives_leaves_nothing_of_what_was():
    for counts in (DecayedCounts(half_life_touches=1), SketchedCounts(10, half_life_touches=1)):
        counts.add([1, 2], [1e6, 1])
        counts.add([2])
        assert counts.of(np.array([1]))[0] < 1e-6 and np.isfinite(counts.total)


def test_without_a_half_life_nothing_fades():
    counts = DecayedCounts(half_life_touches=np.inf)
    for _ in range(100):
        counts.add([0, 1, 1])
    assert counts.of(np.array([0, 1, 2])).tolist() == [100, 200, 0]
    assert counts.rank_steps == 100


def test_exact_counts_grow_with_the_highest_slot():
    counts = DecayedCounts(4)
    counts.add([3])
    assert counts.nbytes == 16
    counts.add([1000, 3])
    assert counts.nbytes == 4 * 1001
    slots, found = counts.candidates(0.5)
    assert slots.tolist() == [3, 1000] and (found > 0.5).all()


def test_a_sketch_never_counts_too_little_and_keeps_the_highest():
    rng, exact, sketch = np.random.default_rng(2), DecayedCounts(half_life_touches=np.inf), SketchedCounts(500, half_life_touches=np.inf)  # fmt: skip
    for _ in range(20):
        slots = rng.zipf(1.3, 20_000) % 300_000
        exact.add(slots)
        sketch.add(slots)
    keys = np.arange(300_000)
    assert (sketch.of(keys) >= exact.of(keys)).all()
    best = set(np.argsort(-exact.of(keys), kind="stable")[:100].tolist())
    found, counts = sketch.candidates(0)
    assert best <= set(found.tolist()) and len(found) == 500
    assert (np.diff(found) > 0).all() and (counts >= exact.of(found)).all()


def test_a_sketch_holds_any_keys_in_the_same_memory():
    sketch, rng = SketchedCounts(1000), np.random.default_rng(3)
    for _ in range(5):
        sketch.add(rng.integers(-(2**63), 2**63 - 1, 300_000))
        assert sketch.nbytes == 4 * 4 * SKETCH_CELLS + 12 * 1000


def test_what_cannot_be_counted_gets_one_sentence():
    for half_life in (0, -1, np.nan):
        with pytest.raises(ConfigError, match="above 0"):
            DecayedCounts(half_life_touches=half_life)
    with pytest.raises(ConfigError, match="0 or more"):
        DecayedCounts().add([-1])
    with pytest.raises(ConfigError, match="one for each"):
        DecayedCounts().add([1, 2], [1])
    with pytest.raises(ConfigError, match="at least 1"):
        SketchedCounts(0)


def test_nothing_may_be_added():
    for counts in (DecayedCounts(), SketchedCounts(3)):
        counts.add([])
        assert counts.total == 0 and counts.rank_steps == 1 and len(counts.candidates(0.1)[0]) == 0
