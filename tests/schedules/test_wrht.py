"""WRHT as published: stages, wavelengths and hops of the paper, groups that reuse their wavelengths."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.errors import ConfigError
from tacit.schedules import wrht, wrht_stage_count, wrht_wavelengths
from tacit.schedules.wrht import all_to_all_wavelengths
from tacit.sim.optical import cost
from tacit.sim.wavelengths import check_schedule
from tacit.topology import OpticalRing


@pytest.mark.parametrize(
    ("n", "with_all_to_all", "hops"), [(1024, 3, 516), (2048, 3, 1032), (3072, 4, 1548), (4096, 4, 2064)]
)
def test_stages_and_longest_paths_at_the_sizes_of_the_paper(n, with_all_to_all, hops):
    for all_to_all, stages in ((False, 4), (True, with_all_to_all)):
        schedule = wrht(n, wavelengths=64, all_to_all=all_to_all)
        assert schedule.stage_count == stages == wrht_stage_count(n, 64, 129, all_to_all)
        assert max(_hops(schedule)) == hops


def test_wavelengths_by_stage_at_1024_ranks():
    assert [note["wavelengths"] for note in wrht(1024, all_to_all=True).notes["optical"]] == [64, 8, 64]
    assert wrht_wavelengths(1024, 64, 129, True) == [64, 8, 64]
    assert wrht_wavelengths(1024, 64, 129, False) == [64, 4, 4, 64]


@pytest.mark.parametrize(
    ("nodes", "wavelengths"), [(1, 0), (2, 1), (3, 1), (5, 3), (8, 8), (16, 32), (22, 61), (24, 72)]
)
def test_wavelengths_of_an_all_to_all(nodes, wavelengths):
    assert all_to_all_wavelengths(nodes) == wavelengths


@given(n=st.integers(1, 400), w=st.integers(1, 9), data=st.data(), all_to_all=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_group_size_verifies_and_has_the_stages_of_the_closed_form(n, w, data, all_to_all):
    m = data.draw(st.integers(2, 2 * w + 1))
    schedule = wrht(n, wavelengths=w, group=m, all_to_all=all_to_all)
    schedule.verify()
    assert schedule.stage_count == wrht_stage_count(n, w, m, all_to_all)
    levels = next(k for k in range(20) if m**k >= n)  # ceil(log_m n), without rounding
    if not all_to_all:
        assert schedule.stage_count == 2 * levels
    elif n > 1:
        assert schedule.stage_count <= 2 * levels - schedule.notes["all_to_all"]
    used = [note["wavelengths"] for note in schedule.notes["optical"]]
    assert used == wrht_wavelengths(n, w, m, all_to_all)
    assert max(used, default=0) <= w


@given(n=st.integers(2, 300), w=st.integers(1, 9), all_to_all=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_bytes_in_all_are_those_of_the_docstring(n, w, all_to_all):
    schedule = wrht(n, wavelengths=w, all_to_all=all_to_all)
    top = 1
    if schedule.notes["all_to_all"]:
        kinds = [note["kind"] for note in schedule.notes["optical"]]
        top = len(set(list(schedule.stages())[kinds.index("all_to_all")].src.tolist()))
    assert schedule.sent_chunks().sum() == 2 * (n - top) + top * (top - 1)


@given(n=st.integers(2, 300), w=st.integers(1, 9), data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_no_wavelength_is_used_twice_on_an_arc(n, w, data):
    schedule = wrht(n, wavelengths=w, group=data.draw(st.integers(2, 2 * w + 1)))
    for stage, note in zip(schedule.stages(), schedule.notes["optical"], strict=True):
        lit = set()
        for src, dst, clockwise, wavelength in zip(
            stage.src.tolist(),
            stage.dst.tolist(),
            note["clockwise"].tolist(),
            note["wavelength"].tolist(),
            strict=True,
        ):
            assert (dst > src) == clockwise  # group stages never cross the end of the ring
            assert wavelength < note["wavelengths"]
            arcs = {(link, clockwise, wavelength) for link in range(min(src, dst), max(src, dst))}
            assert not arcs & lit
            lit |= arcs


@pytest.mark.parametrize("n", range(2, 65))
def test_an_all_to_all_takes_no_more_wavelengths_than_it_claims(n):
    claimed = math.ceil(n * n // 4 / 2)
    schedule = wrht(n, wavelengths=claimed, all_to_all=True)
    (stage,), (note,) = schedule.stages(), schedule.notes["optical"]
    assert note["kind"] == "all_to_all" and note["wavelengths"] == claimed == note["wavelength"].max() + 1
    lit = np.zeros((2, claimed, n), int)
    for src, dst, clockwise, wavelength in zip(
        stage.src, stage.dst, note["clockwise"], note["wavelength"], strict=True
    ):
        start, hops = (src, (dst - src) % n) if clockwise else (dst, (src - dst) % n)
        lit[int(clockwise), wavelength, (start + np.arange(hops)) % n] += 1
    assert lit.max() == 1


@pytest.mark.parametrize("stripe", [False, True])
def test_the_stages_that_are_claimed_are_the_stages_that_are_taken(stripe):
    """18 representatives of 1450 nodes need 41 wavelengths in their all-to-all, and have 41."""
    ring, schedule = OpticalRing(1450, 41), wrht(1450, wavelengths=41, all_to_all=True)
    check_schedule(schedule, ring, stripe=stripe)
    assert schedule.stage_count == cost(schedule, 1e6, ring, stripe=stripe).stage_count == 3
    wide = OpticalRing(1450, 82)
    assert cost(schedule, 1e6, wide, stripe=True).stages[1].stripes == 2


def test_the_middle_of_a_group_represents_it():
    reduce, broadcast = wrht(7, wavelengths=3).stages()
    assert set(reduce.dst.tolist()) == {3} and reduce.add.all()
    assert set(broadcast.src.tolist()) == {3} and not broadcast.add.any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"wavelengths": 4, "group": 10},
            "wrht: group=10: 4 wavelengths serve groups of 9 at most; lower group or give 5 wavelengths",
        ),
        ({"group": 1}, "wrht: group=1: give a whole number, 2 or more"),
        ({"group": 3.5}, "wrht: group=3.5: give a whole number, 2 or more"),
        ({"wavelengths": 0}, "wrht: wavelengths=0: give a whole number, from 1 to 10000000"),
        ({"all_to_all": 1}, "wrht: all_to_all=1: give True (one stage ends the sum where it fits) or False"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, sentence):
    for factory in (
        lambda: wrht(64, **options),
        lambda: wrht_stage_count(64, **{"wavelengths": 64} | options),
    ):
        with pytest.raises(ConfigError) as refused:
            factory()
        assert str(refused.value) == sentence


def test_an_all_to_all_too_large_to_write_out_is_refused():
    with pytest.raises(
        ConfigError, match="the all-to-all of wrht: 4096 ranks .* leave all_to_all out or lower wavelengths"
    ):
        wrht(4096, wavelengths=3_000_000, all_to_all=True)


def _hops(schedule):
    for stage, note in zip(schedule.stages(), schedule.notes["optical"], strict=True):
        ahead = (stage.dst - stage.src) % schedule.world
        yield int(np.where(note["clockwise"], ahead, schedule.world - ahead).max())
