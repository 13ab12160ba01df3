"""Stages, chunks and bytes of every docstring, as figures."""

import math
from collections import Counter

import numpy as np
import pytest
from schedules.cases import for_each

from tacit.schedules import (
    direct_all_gather,
    direct_all_to_all,
    double_tree,
    exponential_gossip,
    halving_doubling,
    neighbour_exchange,
    random_gossip,
    recursive_doubling,
    ring,
    ring_all_gather,
    server,
    sharded,
    shift_all_to_all,
    star,
    torus,
    tree,
    tree_of_stars,
)

WORLDS = [*range(1, 34), 64, 100, 1000]


def log2_up(n):
    return (n - 1).bit_length()


def log2_down(n):
    return n.bit_length() - 1


@for_each("n", WORLDS)
def test_ring_and_sharded_server_send_the_least_in_twice_n_minus_1_stages(n):
    for schedule in (ring(n), sharded(n)):
        assert (schedule.stage_count, schedule.chunks) == (2 * (n - 1), n)
        assert (schedule.sent_chunks() == 2 * (n - 1)).all()


@for_each("n", WORLDS)
def test_a_direct_sharded_server_needs_two_stages_for_the_same_bytes(n):
    schedule = sharded(n, direct=True)
    assert schedule.stage_count == (2 if n > 1 else 0)
    assert (schedule.sent_chunks() == 2 * (n - 1)).all()


@for_each("n", WORLDS)
def test_tree_sends_one_vector_up_and_one_to_each_child(n):
    schedule = tree(n)
    assert (schedule.stage_count, schedule.chunks) == (2 * log2_up(n), 1)
    sent = schedule.sent_chunks()
    for r in range(n):
        below = [k for k in range(log2_up(n)) if (r == 0 or 2**k < r & -r) and r + 2**k < n]
        assert sent[r] == len(below) + (r > 0)
    assert sent[0] == log2_up(n)
    assert sent.sum() == 2 * (n - 1)


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@for_each("n", WORLDS)
def test_double_tree_pipelines_its_pieces_one_stage_apart(n, pieces):
    schedule = double_tree(n, pieces=pieces)
    assert schedule.stage_count == (2 * log2_up(n) + pieces - 1 if n > 1 else 0)
    assert schedule.chunks == 2 * pieces
    sent = schedule.sent_chunks()
    assert sent.sum() == 4 * (n - 1) * pieces
    assert sent.max() <= 4 * pieces  # two vectors


@for_each("n", WORLDS)
def test_both_trees_are_binary_and_who_has_children_in_one_is_a_leaf_of_the_other(n):
    below = [Counter(), Counter()]
    for stage in list(double_tree(n).stages())[log2_up(n) :]:
        for src, chunk in zip(stage.src.tolist(), stage.chunk.tolist(), strict=True):
            below[chunk][src] += 1
    assert all(count <= 2 for tree_ in below for count in tree_.values())
    both = below[0].keys() & below[1].keys()
    # in an odd world rank 0, a root with one child, has one more child: three halves sent in all
    assert both <= {0}
    assert all(below[0][r] == below[1][r] == 1 for r in both)


@for_each("n", WORLDS)
def test_steady_stages_of_a_pipelined_double_tree_are_one_phase(n):
    assert len(double_tree(n, pieces=1000).phases) <= 4 * log2_up(n)


@for_each("n", WORLDS)
def test_recursive_doubling_folds_what_is_over_a_power_of_two(n):
    schedule, p = recursive_doubling(n), 2 ** log2_down(n)
    assert schedule.stage_count == log2_down(n) + 2 * (n > p)
    assert schedule.chunks == 1
    assert sorted(schedule.sent_chunks()) == sorted(_folded(n, p, each=log2_down(n), vector=1))


@for_each("n", WORLDS)
def test_halving_doubling_sends_as_little_as_a_ring_in_a_logarithm_of_stages(n):
    schedule, p = halving_doubling(n), 2 ** log2_down(n)
    assert schedule.stage_count == 2 * log2_down(n) + 2 * (n > p)
    assert schedule.chunks == p
    assert sorted(schedule.sent_chunks()) == sorted(_folded(n, p, each=2 * (p - 1), vector=p))


def _folded(n, p, each, vector):
    """n - p folded ranks, as many that unfold them, and the others."""
    return [vector] * (n - p) + [each + vector] * (n - p) + [each] * (2 * p - n)


@for_each("n", WORLDS)
def test_torus_is_as_square_as_n_allows_and_sends_the_least(n):
    schedule = torus(n)
    a, b = schedule.notes["rows"], schedule.notes["columns"]
    assert a * b == n and a <= b
    assert not any(n % d == 0 for d in range(a + 1, math.isqrt(n) + 1))
    assert (schedule.stage_count, schedule.chunks) == (2 * (a - 1) + 2 * (b - 1), n)
    assert (schedule.sent_chunks() == 2 * (n - 1)).all()


def test_a_torus_of_a_prime_world_is_a_ring_and_says_so():
    assert torus(31).notes == {"rows": 1, "columns": 31}
    assert torus(31).stage_count == ring(31).stage_count


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 12])
def test_the_rows_of_a_torus_can_be_chosen(rows):
    schedule = torus(12, rows=rows)
    schedule.verify()
    assert schedule.stage_count == 2 * (rows - 1) + 2 * (12 // rows - 1)


@for_each("n", WORLDS[1:])
def test_star_and_server_need_two_stages(n):
    assert star(n).stage_count == server(n).stage_count == 2
    assert star(n).sent_chunks().tolist() == [1] * n + [n]
    assert server(n).sent_chunks().tolist() == [n - 1] + [1] * (n - 1)


@pytest.mark.parametrize("fan", [2, 3, 16])
@for_each("n", WORLDS[1:])
def test_a_tree_of_stars_serves_racks_through_a_spine(n, fan):
    schedule, racks = tree_of_stars(n, fan=fan), -(-n // fan)
    sizes = [min(fan, n - fan * i) for i in range(racks)]
    if racks == 1:
        assert schedule.stage_count == 2
        assert schedule.sent_chunks().tolist() == [1] * n + [n]
    else:
        assert (schedule.stage_count, schedule.aggregators) == (4, racks + 1)
        assert schedule.sent_chunks().tolist() == [1] * n + [size + 1 for size in sizes] + [racks]


@for_each("n", WORLDS)
def test_all_gathers_send_n_minus_1_chunks_in_their_stages(n):
    stages = {
        ring_all_gather: n - 1,
        neighbour_exchange: n - 1 if n % 2 else n // 2,
        direct_all_gather: min(n - 1, 1),
    }
    for gather, count in stages.items():
        schedule = gather(n)
        assert (schedule.stage_count, schedule.chunks) == (count, n)
        assert (schedule.sent_chunks() == n - 1).all()


def test_all_gathers_at_1024_have_the_stages_that_optree_compares_with():
    assert (ring_all_gather(1024).stage_count, neighbour_exchange(1024).stage_count) == (1023, 512)


@for_each("n", WORLDS)
def test_all_to_alls_send_n_minus_1_chunks_in_their_stages(n):
    for exchange, count in {shift_all_to_all: n - 1, direct_all_to_all: min(n - 1, 1)}.items():
        schedule = exchange(n)
        assert (schedule.stage_count, schedule.chunks) == (count, n * n)
        assert (schedule.sent_chunks() == n - 1).all()


@for_each("n", WORLDS)
def test_exponential_gossip_meets_all_distances(n):
    schedule = exponential_gossip(n)
    assert schedule.stage_count == log2_up(n)
    for k, stage in enumerate(schedule.stages()):
        assert (np.abs(stage.src - stage.dst) == 2**k).all()
        assert set(stage.src.tolist()) == {r for r in range(n) if r ^ 2**k < n}


@pytest.mark.parametrize("n", [2, 16, 64])
def test_exponential_gossip_of_a_power_of_two_ends_with_the_sum_of_all(n):
    gossip = exponential_gossip(n)
    type(gossip)(gossip.name, n, 1, gossip.phases, "sum").verify()


@for_each("n", WORLDS)
def test_a_random_matching_leaves_out_one_rank_of_an_odd_world(n):
    schedule = random_gossip(n, stages=4, seed=3)
    assert schedule.stage_count == (4 if n > 1 else 0)
    assert all(len(stage) == n - n % 2 for stage in schedule.stages())


def test_a_random_matching_follows_its_seed():
    def pairs(seed):
        return [
            tuple(s.dst[np.argsort(s.src)].tolist()) for s in random_gossip(32, stages=3, seed=seed).stages()
        ]

    assert pairs(1) == pairs(1) != pairs(2)
    assert len(set(pairs(1))) == 3
