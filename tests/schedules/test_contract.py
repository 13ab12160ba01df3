"""What every schedule keeps: it verifies at any world, its phases are alike, bad input gets one sentence."""

import numpy as np
import pytest
from schedules.cases import ALL, NAMED, for_each

from tacit.errors import ConfigError
from tacit.schedules import SCHEDULES, SHAPES, Phase, build, ring, sharded

FAST_AT_100_000 = ["ring", "tree", "double_tree", "recursive_doubling", "halving_doubling", "hierarchical", "torus",
                   "star", "tree_of_stars", "server", "wrht", "ring_all_gather", "exponential_gossip"]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@for_each("world", [*range(1, 34), 64, 100])
def test_it_verifies_at_this_world(name, world):
    schedule = ALL[name](world)
    schedule.verify()
    assert schedule.world == world
    assert schedule.name == name.partition("(")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_it_verifies_at_a_thousand_ranks(name):
    ALL[name](1000).verify()


def test_sums_and_other_shapes_have_a_registry_each():
    assert {factory(4).goal for factory in SCHEDULES.values()} == {"sum"}
    assert {factory(4).goal for factory in SHAPES.values()} == {"gather", "exchange", "meet"}
    assert not SCHEDULES.keys() & SHAPES.keys()


@pytest.mark.parametrize("name", ALL)
@for_each("world", [2, 5, 12, 33])
def test_the_stages_of_a_phase_differ_in_their_chunks_only(name, world):
    schedule = ALL[name](world)
    for phase in schedule.phases:
        assert phase.times >= 1 and len(phase.stage) >= 1
        np.testing.assert_array_equal(phase.at(0).chunk, phase.stage.chunk)
        for k in range(phase.times):
            stage = phase.at(k)
            for part in ("src", "dst", "count", "add"):
                np.testing.assert_array_equal(getattr(stage, part), getattr(phase.stage, part))
    assert schedule.stage_count == len(list(schedule.stages()))
    assert schedule.transfer_count == sum(len(stage) for stage in schedule.stages())


@pytest.mark.parametrize("name", ALL)
def test_what_is_sent_is_counted_by_phases_as_by_stages(name):
    schedule = ALL[name](11)
    sent = np.zeros(schedule.nodes, int)
    for stage in schedule.stages():
        np.add.at(sent, stage.src, stage.count)
    np.testing.assert_array_equal(schedule.sent_chunks(), sent)


@pytest.mark.parametrize("name", ALL)
def test_one_rank_has_nobody_to_talk_to(name):
    assert ALL[name](1).transfer_count == 0


@pytest.mark.parametrize("name", ALL)
def test_a_world_may_be_a_number_of_numpy(name):
    schedule = ALL[name](np.int64(6))
    schedule.verify()
    assert type(schedule.world) is type(schedule.chunks) is int


@pytest.mark.parametrize("name", NAMED)
@for_each("world", [0, -1, True, 2.5, "4", None])
def test_a_world_that_is_none_is_refused_in_one_sentence(name, world):
    with pytest.raises(ConfigError) as refused:
        NAMED[name](world)
    assert str(refused.value) == f"{name}: world={world!r}: give a whole number of ranks, 1 or more"


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("double_tree", {"pieces": 0}, "double_tree: pieces=0: give a whole number, 1 or more"),
        ("hierarchical", {"group": 0}, "hierarchical: group=0: give a whole number, 1 or more"),
        ("hierarchical", {"group": 2.0}, "hierarchical: group=2.0: give a whole number, 1 or more"),
        ("torus", {"rows": 13}, "torus: rows=13: give a whole number, from 1 to 12"),
        (
            "torus",
            {"rows": 5},
            "torus: rows=5 does not divide 12 ranks; leave rows out for the squarest torus",
        ),
        ("tree_of_stars", {"fan": 1}, "tree_of_stars: fan=1: give a whole number, 2 or more"),
        (
            "sharded",
            {"direct": 1},
            "sharded: direct=1: give True (one stage a half) or False (one shift a stage)",
        ),
        ("random_gossip", {"stages": 0}, "random_gossip: stages=0: give a whole number, 1 or more"),
        ("random_gossip", {"seed": -1}, "random_gossip: seed=-1: give a whole number, 0 or more"),
        (
            "ring",
            {"group": 3},
            r"schedule 'ring' does not fit its options (none): it has no option 'group'",
        ),
        (
            "ring",
            {"world": 3},  # given beside it, by whoever builds
            r"schedule 'ring' does not fit its options (none): it has no option 'world'",
        ),
        (
            "wrht",
            {"m": 3},
            r"schedule 'wrht' does not fit its options (wavelengths, group, all_to_all): it has no option 'm'",
        ),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(name, options, sentence):
    with pytest.raises(ConfigError) as refused:
        build(name, 12, **options)
    assert str(refused.value) == sentence


def test_a_schedule_is_built_by_its_name():
    assert build("hierarchical", 12, group=4).stage_count == 4 * 3 + 2 * 2
    with pytest.raises(
        ConfigError, match="unknown schedule 'rong'; did you mean 'ring'. known are ring, tree"
    ):
        build("rong", 4)


def test_33_million_transfers_of_a_ring_are_counted_and_never_written_out(monkeypatch):
    def expanded(*_):
        raise AssertionError("a stage was written out")

    monkeypatch.setattr(Phase, "at", expanded)
    schedule = ring(4096)
    assert schedule.stage_count == 8190
    assert schedule.transfer_count == 33_546_240
    assert (schedule.sent_chunks() == 8190).all()
    assert _kept_nbytes(schedule) < 500_000


@pytest.mark.parametrize("name", FAST_AT_100_000)
def test_a_hundred_thousand_ranks_are_a_few_arrays(name):
    schedule = NAMED[name](100_000)
    assert schedule.stage_count > 0
    assert _kept_nbytes(schedule) < 100_000_000


def test_the_shifts_of_a_sharded_server_are_views_of_one_array():
    schedule = sharded(100_000)
    assert schedule.stage_count == 199_998
    assert schedule.transfer_count == 199_998 * 100_000
    assert _kept_nbytes(schedule) < 5_000_000


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("direct_all_gather", 2048),
        ("direct_all_to_all", 2048),
        ("neighbour_exchange", 4096),
        ("shift_all_to_all", 4096),
    ],
)
def test_shapes_without_symmetry_end_at_a_stated_world(name, most):
    with pytest.raises(ConfigError, match=f"{name}: {most + 2} ranks are too many .* the limit is {most}: "):
        NAMED[name](most + 2)


def test_a_direct_sharded_server_points_to_the_shifts():
    assert sharded(2048, direct=True).transfer_count == 2 * 2048 * 2047
    with pytest.raises(ConfigError, match="the limit is 2048: leave direct out"):
        sharded(2049, direct=True)


def _kept_nbytes(schedule):
    """Memory behind the arrays of a schedule, views counted once."""
    owners = {}
    for phase in schedule.phases:
        for array in (
            phase.stage.src,
            phase.stage.dst,
            phase.stage.chunk,
            phase.stage.count,
            phase.stage.add,
            phase.first,
        ):
            while getattr(array, "base", None) is not None:
                array = array.base
            owners[id(array)] = getattr(array, "nbytes", 0)
    return sum(owners.values())
