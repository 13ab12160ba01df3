"""H-Ring has the shape of the paper's cost model, whether or not the group size divides the world."""

import math

import numpy as np
import pytest
from schedules.cases import for_each

from tacit.schedules import hierarchical

GROUPS = [1, 2, 3, 4, 5, 8]


@pytest.mark.parametrize("group", GROUPS)
@for_each("n", [*range(1, 34), 64, 100, 1000])
def test_stages_and_sizes_are_those_of_the_cost_model(n, group):
    schedule = hierarchical(n, group=group)
    m, g = min(group, n), -(-n // min(group, n))
    assert schedule.chunks == math.lcm(m, g)
    sizes = [set(stage.count.tolist()) for stage in schedule.stages()]
    inside, between = {schedule.chunks // m}, {schedule.chunks // g}
    assert sizes == [inside] * (2 * (m - 1)) + [between] * (2 * (g - 1)) + [inside] * (2 * (m - 1))


@pytest.mark.parametrize(("n", "stages"), [(1024, 424), (2048, 834), (3072, 1244), (4096, 1654)])
def test_stages_at_the_sizes_of_the_paper(n, stages):
    assert hierarchical(n).stage_count == stages == 4 * 4 + 2 * (math.ceil(n / 5) - 1)


@pytest.mark.parametrize("group", GROUPS)
@for_each("n", [*range(1, 34), 64, 100])
def test_every_rank_sends_what_the_docstring_says(n, group):
    m = min(group, n)
    g = -(-n // m)
    schedule = hierarchical(n, group=group)
    pieces, between = schedule.chunks // m, 2 * (g - 1) * schedule.chunks // g
    for first in range(0, n, m):
        size = min(m, n - first)
        wanted = [m + m - 1] * size  # once up, then along in the all-gather
        wanted[0] = 2 * (m - 1) if size > 1 else 0
        if size > 1:
            wanted[-1] = m
        if 1 < size < m:
            wanted[-2] -= m - size
        wanted = np.array(wanted) * pieces
        wanted[0] += between
        assert schedule.sent_chunks()[first : first + size].tolist() == wanted.tolist()


@pytest.mark.parametrize("n", [12, 13, 1024])
def test_in_a_stage_nobody_sends_or_receives_twice(n):
    for stage in hierarchical(n).stages():
        assert len(np.unique(stage.src)) == len(np.unique(stage.dst)) == len(stage)


def test_a_world_below_the_group_size_is_one_group():
    assert hierarchical(3, group=5).notes == {"group": 3, "groups": 1}
    assert hierarchical(3, group=5).stage_count == 4 * 2
