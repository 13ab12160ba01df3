"""Max-min fairness: feasible, every flow held by a full link on which nobody has more, and cases solved by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.sim.fairness import finish, max_min
from tacit.sim.routes import Routes


def over(*paths, weight=None) -> Routes:
    """Flow i crosses the links paths[i]."""
    flow = np.repeat(np.arange(len(paths)), [len(p) for p in paths])
    return Routes.of(flow, np.array([link for path in paths for link in path], int), len(paths), weight)


@st.composite
def loads(draw):
    links = draw(st.integers(1, 8))
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=links, unique=True)
    paths = draw(st.lists(path, min_size=1, max_size=25))
    numbers = st.floats(0.1, 100)
    capacity = draw(st.lists(numbers, min_size=links, max_size=links))
    each = st.lists(numbers, min_size=len(paths), max_size=len(paths))
    return paths, np.array(capacity), np.array(draw(each)), np.array(draw(each))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(loads(), st.booleans())
def test_shares_are_feasible_and_every_flow_has_a_full_link_where_nobody_gets_more(load, by_penalty):
    paths, capacity, penalty, _ = load
    penalty = penalty if by_penalty else np.ones(len(paths))
    shares = max_min(over(*paths), capacity, penalty)
    carried = np.zeros(len(capacity))
    for path, rate in zip(paths, shares.rate_bps, strict=True):
        carried[path] += rate
    assert (carried <= capacity * (1 + 1e-6)).all()
    for i, path in enumerate(paths):
        full = shares.full[i]
        others = [j for j, other in enumerate(paths) if full in other]
        assert full in path and carried[full] == pytest.approx(capacity[full], rel=1e-6)
        level = shares.rate_bps * penalty
        assert level[i] >= max(level[others]) * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(loads())
def test_every_bit_is_carried_and_no_link_carries_more_than_it_can(load):
    paths, capacity, bits, _ = load
    ended = finish(over(*paths), bits, capacity)
    for link in range(len(capacity)):
        carried = sum(b for b, path in zip(bits, paths, strict=True) if link in path)
        last = max((t for t, path in zip(ended.time_s, paths, strict=True) if link in path), default=0)
        assert carried <= capacity[link] * last * (1 + 1e-6)
    for time_s, b, path in zip(ended.time_s, bits, paths, strict=True):
        assert time_s >= b / min(capacity[link] for link in path) * (1 - 1e-6)


def test_the_textbook_case_two_links_and_a_flow_over_both():
    shares = max_min(over([0, 1], [0], [1]), np.array([1.0, 2.0]))
    assert shares.rate_bps == pytest.approx([0.5, 0.5, 1.5])
    assert shares.full.tolist() == [0, 0, 1]


def test_when_a_flow_ends_the_others_share_what_it_leaves():
    # 3 flows of 1, 2 and 3 bits over one link of 1 bit/s: 1/3 each until 3 s, 1/2 until 5 s, then alone until 6 s.
    ended = finish(over([0], [0], [0]), np.array([1.0, 2.0, 3.0]), np.array([1.0]))
    assert ended.time_s == pytest.approx([3, 5, 6])
    assert ended.sharing.tolist() == [3, 2, 1]


def test_a_flow_may_slow_down_when_another_ends():
    # Link 0 (4) carries a and b, link 1 (3) carries b and c: b and c get 1.5, a 2.5. c ends: b gets 2, a falls to 2.
    ended = finish(over([0], [0, 1], [1]), np.array([20.0, 20.0, 3.0]), np.array([4.0, 3.0]))
    at = 2.0
    assert ended.time_s[2] == pytest.approx(at)
    left_a, left_b = 20 - 2.5 * at, 20 - 1.5 * at
    a = at + left_a / 2
    assert ended.time_s[0] == pytest.approx(a)
    assert ended.time_s[1] == pytest.approx(a + (left_b - left_a) / 3)


def test_a_flow_that_starts_later_shares_from_then_on():
    ended = finish(over([0], [0]), np.array([2.0, 2.0]), np.array([1.0]), start_s=np.array([0.0, 1.0]))
    assert ended.time_s == pytest.approx([3, 4])


def test_nothing_to_send_ends_at_once_and_no_link_means_no_limit():
    ended = finish(over([0], []), np.array([0.0, 5.0]), np.array([1.0]))
    assert ended.time_s.tolist() == [0, 0] and ended.full.tolist() == [-1, -1]


def test_acknowledgements_take_their_share_of_the_way_back():
    # Two flows, each the other's way back at 5 %: both get 1 / 1.05.
    routes = over([0, 1], [1, 0], weight=np.array([1.0, 0.05, 1.0, 0.05]))
    assert max_min(routes, np.ones(2)).rate_bps == pytest.approx([1 / 1.05] * 2)


def test_a_penalty_of_three_gets_a_third():
    assert max_min(over([0], [0]), np.array([4.0]), np.array([1.0, 3.0])).rate_bps == pytest.approx([3, 1])
