"""Light: assignments hold for any transfers, faults are caught and named, and the counts of the literature come out."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.errors import ConfigError, ScheduleError
from tacit.schedules import Stage, build
from tacit.sim.wavelengths import (
    Assignment,
    Paths,
    assign,
    check,
    check_schedule,
    colours,
    loads,
    optical_notes,
    route,
)
from tacit.topology import OpticalRing


@st.composite
def stages(draw, most=40):
    """Any transfers between any nodes, and maybe the way round."""
    n = draw(st.integers(2, most))
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, n - 1), st.integers(1, n - 1), st.integers(1, 5)),
            min_size=1,
            max_size=60,
        )
    )
    src, ahead, count = np.array(pairs).T
    way = draw(st.none() | st.lists(st.booleans(), min_size=len(src), max_size=len(src)))
    return n, Stage.of(src, (src + ahead) % n, count=count), way


@pytest.mark.slow
@given(made=stages(), w=st.integers(1, 9), stripe=st.booleans())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_every_assignment_passes_the_check_and_wastes_little(made, w, stripe):
    n, stage, way = made
    ring = OpticalRing(n, w)
    light = assign(stage, ring, clockwise=way, stripe=stripe)
    check(stage, light, ring)
    peak = int(loads(light.paths, n).max())
    assert -(-peak // w) <= light.parts <= -(-2 * peak // w)
    assert light.most_wavelengths <= w
    if stripe and light.parts == 1 and (stage.count == stage.count[0]).all():
        assert light.stripes.min() >= max(1, w // (2 * peak))


@pytest.mark.slow
@given(made=stages(), w=st.integers(1, 9), senders=st.integers(1, 4), stripe=st.booleans())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_no_node_drives_more_wavelengths_than_it_has_transceivers(made, w, senders, stripe):
    n, stage, way = made
    ring = OpticalRing(n, w, transceivers=senders)
    light = assign(stage, ring, clockwise=way, stripe=stripe)
    check(stage, light, ring)
    for end in (stage.src, stage.dst):
        for part in range(light.parts):
            assert np.bincount(end, np.where(light.part == part, light.stripes, 0)).max() <= senders
    assert light.parts >= max(-(-np.bincount(end).max() // senders) for end in (stage.src, stage.dst))


def test_a_node_with_too_few_transceivers_serves_the_rest_in_further_parts():
    star = Stage.of(np.arange(1, 9), 0)
    parts = [assign(star, OpticalRing(9, 8, transceivers=t)).parts for t in (1, 2, 3, 4, 8, None)]
    assert parts == [8, 4, 3, 2, 1, 1]
    pair = Stage.of([0], [1])
    stripes = [
        assign(pair, OpticalRing(9, 8, transceivers=t), stripe=True).stripes[0] for t in (1, 3, 8, None)
    ]
    assert stripes == [1, 3, 8, 8]
    every = Stage.of(*(np.array([(a, b) for a in range(9) for b in range(9) if a != b]).T))
    assert [assign(every, OpticalRing(9, 64, transceivers=t)).parts for t in (1, 2, 4, 8)] == [8, 4, 2, 1]
    light = assign(star, OpticalRing(9, 8))
    with pytest.raises(
        ScheduleError, match="node 0 receives on 8 wavelengths at once in part 0; it has 3 transceivers"
    ):
        check(star, light, OpticalRing(9, 8, transceivers=3))


@pytest.mark.slow
@given(made=stages(), w=st.integers(1, 6), data=st.data())
@settings(max_examples=250, deadline=None, derandomize=True)
def test_the_check_agrees_with_counting_every_wavelength_on_every_arc(made, w, data):
    n, stage, way = made
    m = len(stage)
    numbers = st.lists(st.integers(0, w - 1), min_size=m, max_size=m)
    first, part = np.array(data.draw(numbers)), np.array(data.draw(numbers)) % 2
    light = Assignment(route(stage, OpticalRing(n), way), 2, part, np.arange(m), first, np.ones(m, int))
    used, twice = set(), False
    for i in range(m):
        for hop in range(light.paths.hops[i]):
            key = (part[i], light.paths.clockwise[i], first[i], (light.paths.start[i] + hop) % n)
            twice |= key in used
            used.add(key)
    if twice:
        with pytest.raises(ScheduleError, match="is used twice"):
            check(stage, light, OpticalRing(n, w))
    else:
        check(stage, light, OpticalRing(n, w))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=80))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_on_a_line_no_wavelength_is_wasted(arcs):
    start, hops = np.array(arcs).T
    found = colours(start, hops, 100)
    load = np.zeros(100, int)
    for s, h in arcs:
        load[s : s + h] += 1
    assert found.max() + 1 == load.max()


PATHS = Paths(np.array([True, True]), np.array([10, 11]), np.array([4, 2]))
STAGE = Stage.of([10, 11], [14, 13])
GOOD = Assignment(PATHS, 1, np.zeros(2, int), np.arange(2), np.array([7, 8]), np.ones(2, int))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            {"first": np.array([7, 7])},
            "stage 3: wavelength 7 clockwise is used twice between nodes 11 and 12: by 10 -> 14 and 11 -> 13",
        ),
        (
            {"first": np.array([6, 7]), "width": np.array([2, 1])},
            "stage 3: wavelength 7 clockwise is used twice between nodes 11 and 12: by 10 -> 14 and 11 -> 13",
        ),
        (
            {"paths": replace(PATHS, clockwise=np.array([True, False]))},
            "stage 3: 11 -> 13 goes counter-clockwise over 2 arcs from node 11: that path does not join the two",
        ),
        (
            {"paths": replace(PATHS, hops=np.array([4, 3]))},
            "stage 3: 11 -> 13 goes clockwise over 3 arcs from node 11: that path does not join the two",
        ),
        ({"transfer": np.array([0, 0])}, "stage 3: 11 -> 13 has no wavelength"),
        ({"first": np.array([7, 16])}, "stage 3: 11 -> 13 uses wavelengths 16 to 16; there are 0 to 15"),
        ({"part": np.array([0, 1])}, "stage 3: a transfer runs in a part outside 0..0"),
        ({"part": np.array([0])}, "stage 3: light for 1 of 2 transfers; every transfer needs a path"),
        ({"transfer": np.array([0, 5])}, "stage 3: a band of light belongs to no transfer of the stage"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_caught_and_named(broken, message):
    ring = OpticalRing(20, 16)
    check(STAGE, GOOD, ring, "stage 3")
    with pytest.raises(ScheduleError) as caught:
        check(STAGE, replace(GOOD, **broken), ring, "stage 3")
    assert str(caught.value) == message


def test_a_path_that_wraps_past_node_0_collides_there_too():
    stage = Stage.of([18, 0], [2, 1])
    light = assign(stage, OpticalRing(20, 2))
    check(stage, light, OpticalRing(20, 2))
    with pytest.raises(ScheduleError, match="between nodes 0 and 1: by 0 -> 1 and 18 -> 2"):
        check(stage, replace(light, first=np.zeros(2, int)), OpticalRing(20, 2))


def test_a_path_beyond_the_power_budget_is_named():
    ring = OpticalRing(20, 16, most_hops=3)
    with pytest.raises(ScheduleError, match="the path 10 -> 14 is 4 hops long; the power budget allows 3"):
        check(STAGE, GOOD, ring)


def test_a_tie_goes_clockwise_towards_the_higher_number():
    paths = route(Stage.of([0, 4, 1, 7], [4, 0, 7, 2]), OpticalRing(8))
    assert paths.clockwise.tolist() == [True, False, False, True]
    assert paths.start.tolist() == [0, 0, 7, 7]
    assert paths.hops.tolist() == [4, 4, 2, 3]


@pytest.mark.parametrize(("w", "sub_stages"), [(4, 257), (16, 67), (64, 21), (256, 11)])
def test_sub_stages_of_recursive_doubling(w, sub_stages):
    ring = OpticalRing(1024, w)
    lights = [assign(phase.stage, ring) for phase in build("recursive_doubling", 1024).phases]
    assert sum(light.parts for light in lights) == sub_stages
    check_schedule(build("recursive_doubling", 1024), ring)


@pytest.mark.parametrize(("world", "all_to_all"), list(product((1024, 4096), (False, True))))
def test_the_light_of_wrht_is_found_anew_and_as_told(world, all_to_all):
    schedule, ring = build("wrht", world, all_to_all=all_to_all), OpticalRing(world)
    told = [note["wavelengths"] for note in schedule.notes["optical"]]
    hops = 0
    for i, phase in enumerate(schedule.phases):
        way, wavelength = optical_notes(schedule, i)
        for given_ in (None, wavelength):
            light = assign(phase.stage, ring, clockwise=way, wavelength=given_)
            check(phase.stage, light, ring)
            assert int(light.first.max()) + 1 == light.most_wavelengths == told[i]
        hops = max(hops, int(light.paths.hops.max()))
    assert hops == {1024: 516, 4096: 2064}[world]
    if all_to_all and world == 1024:
        assert told == [64, 8, 64]


def test_a_schedule_that_counts_on_more_wavelengths_runs_in_parts():
    schedule, ring = build("wrht", 100, wavelengths=8), OpticalRing(100, 3)
    check_schedule(schedule, ring)
    way, wavelength = optical_notes(schedule, 0)
    assert assign(schedule.phases[0].stage, ring, clockwise=way, wavelength=wavelength).parts == 3


@pytest.mark.parametrize("nodes", range(2, 18))
def test_all_pairs_on_a_small_ring_need_what_theory_says(nodes):
    src, dst = (a[~np.eye(nodes, dtype=bool).ravel()] for a in np.divmod(np.arange(nodes**2), nodes))
    ahead = (dst - src) % nodes
    way = (2 * ahead < nodes) | ((2 * ahead == nodes) & (src % 2 == 0))
    light = assign(Stage.of(src, dst), OpticalRing(nodes, 100), clockwise=way)
    assert int(light.first.max()) + 1 == -(-(nodes**2 // 4) // 2)


def test_bands_follow_the_bytes():
    stage = Stage.of([0, 1], [2, 3], count=[3, 1])
    light = assign(stage, OpticalRing(10, 8), stripe=True)
    check(stage, light, OpticalRing(10, 8))
    assert light.stripes.tolist() == [6, 2]


def test_bad_input_gets_one_sentence():
    with pytest.raises(
        ConfigError, match="the transfer 3 -> 9 leaves the optical ring of 8 nodes; give it more nodes"
    ):
        route(Stage.of([3], [9]), OpticalRing(8))
    with pytest.raises(ConfigError, match="2 ways round for 1 transfers; give one each"):
        route(Stage.of([3], [5]), OpticalRing(8), [True, False])
    with pytest.raises(ConfigError, match="2 wavelengths for 1 transfers"):
        assign(Stage.of([3], [5]), OpticalRing(8), wavelength=[0, 1])


@pytest.mark.parametrize("hops", range(1, 25))
def test_arcs_from_every_node_need_as_many_colours_as_fit_round_the_ring(hops):
    """Not the load: of 50 nodes, 17 hops fit twice, so 25 colours serve what loads every arc 17 times."""
    stage, ring = Stage.of(np.arange(50), (np.arange(50) + hops) % 50), OpticalRing(50, 60)
    light = assign(stage, ring)
    check(stage, light, ring)
    assert int(light.first.max()) + 1 == -(-50 // (50 // hops))
