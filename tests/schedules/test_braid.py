"""Braid: its tree is the shortest there is, its strands sum everything, and the text form says what it means."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.errors import ConfigError
from tacit.schedules.braid import braid, parse_levels, shortest_length, shortest_tree, sphere, strand, turns
from tacit.sim.studies.search import check_by_numbers


def _shortest(nodes: int, depth: int) -> int:
    """The least length of a tree of `depth` on a circle, by trying everything: depths of all nodes but the root, each told by the
    nearest that is told earlier.
    """
    best = nodes * nodes
    for told in product(range(1, depth + 1), repeat=nodes - 1):
        stage = np.array([0, *told])
        away = np.abs(np.arange(nodes)[:, None] - np.arange(nodes)[None, :])
        away = np.where(stage[None, :] < stage[:, None], np.minimum(away, nodes - away), nodes)
        best = min(best, int(away[1:].min(axis=1).sum()) if nodes > 1 else 0)
    return best


@pytest.mark.parametrize(
    ("nodes", "depth"), [(n, k) for k in (1, 2, 3) for n in range(1, 10 if k == 2 else 8)]
)
def test_no_tree_of_that_depth_is_shorter(nodes, depth):
    assert shortest_length(nodes, depth) == _shortest(nodes, depth)


@given(nodes=st.integers(1, 600), depth=st.integers(1, 12))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_tree_has_the_length_that_the_ball_promises(nodes, depth):
    stage, parent, root = shortest_tree(nodes, depth)
    others = np.arange(nodes) != root
    assert stage[root] == 0
    assert (stage[others] >= 1).all() and stage.max(initial=0) <= depth
    assert (stage[parent] < stage)[others].all()
    assert np.abs(np.arange(nodes) - parent)[others].sum() == shortest_length(nodes, depth)


def test_all_stages_of_a_tree_carry_nearly_the_same():
    lengths = [int(np.abs(src - dst).sum()) for _, src, dst in strand(1024, parse_levels("*/9"))]
    assert sum(lengths) == shortest_length(1024, 9) == 2871
    assert max(lengths) <= 1.15 * min(lengths)


def test_spheres_are_counted_by_their_formula():
    assert [sphere(2, r) for r in range(5)] == [1, 4, 8, 12, 16]
    assert [sphere(3, r) for r in range(6)] == [1, 6, 18, 38, 66, 102]
    assert [shortest_length(1024, k) for k in (1, 2, 512)] == [
        1024**2 // 4,
        15433,
        1023,
    ]  # a star, ..., a chain


@pytest.mark.parametrize("world", [*range(1, 34), 64, 100, 1000])
def test_every_world_sums_everything_once(world):
    for options in ({}, {"levels": "3 */2", "strands": 7}, {"levels": "2 5/2 */1", "strands": 3}):
        braid(world, **options).verify()


@given(world=st.integers(1, 150), levels=st.lists(st.tuples(st.integers(2, 9), st.integers(1, 4)), max_size=3), top=st.integers(1, 80),
       strands=st.integers(1, 40))  # fmt: skip
@settings(max_examples=120, deadline=None, derandomize=True)
def test_any_levels_and_strands_sum_everything_once(world, levels, top, strands):
    text = " ".join([*(f"{group}/{depth}" for group, depth in levels), f"*/{top}"])
    made = braid(world, levels=text, strands=strands)
    made.verify()
    assert made.chunks == strands
    assert made.stage_count <= 2 * (sum(depth for _, depth in levels) + top)
    assert made.sent_chunks().sum() == strands * 2 * (world - 1)


def test_a_hundred_thousand_ranks_sum_everything_once():
    check_by_numbers(braid(100_000, strands=8))


def test_a_braid_with_a_transfer_less_is_caught_by_numbers():
    made = braid(64)
    stage = made.phases[3].stage
    for name in ("src", "dst", "chunk", "count", "add"):
        object.__setattr__(stage, name, getattr(stage, name)[1:])
    with pytest.raises(ConfigError, match="that is not the sum of all ranks"):
        check_by_numbers(made)


def test_strands_that_are_alike_at_the_bottom_share_transfers():
    made = braid(1024, levels="4 */6", strands=64)
    first = made.phases[0].stage
    assert len(first) == 3 * 1024
    assert set(first.count.tolist()) == {16}


def test_strands_are_turned_evenly():
    turn = np.sort(turns(1024, parse_levels("8/3 8/3 */4"), 256))
    assert np.bincount(turn % 8).tolist() == [32] * 8
    assert np.bincount(turn % 64).tolist() == [4] * 64
    assert np.bincount(turn // 64).tolist() == [16] * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"levels": "5/2 7"},
            r"levels='5/2 7': the last level, and no other, joins all that are left: write it as \*/depth",
        ),
        ({"levels": "*/2 */3"}, "the last level, and no other"),
        ({"levels": ""}, "the last level, and no other"),
        ({"levels": "five */2"}, r"'five' in levels='five \*/2' is no level; write group/depth"),
        ({"levels": "1 */2"}, "with a group of 2 or more"),
        ({"levels": "*/0"}, "is no level"),
        ({"levels": "*/901"}, "is no level"),
        ({"strands": 0}, "strands=0: give a whole number, 1 or more"),
    ],
)
def test_bad_input_gets_one_sentence(options, message):
    with pytest.raises(ConfigError, match=message):
        braid(8, **options)
    with pytest.raises(ConfigError, match="world=0: give a whole number of ranks"):
        braid(0)


def test_too_many_strands_are_refused():
    with pytest.raises(ConfigError, match="the limit is 200 strands"):
        braid(100_000, strands=201)
