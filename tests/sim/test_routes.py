"""Paths: joined end to end, as short as a search finds, spread so that a full fat tree has no collision."""

import numpy as np
import pytest

from tacit.errors import ConfigError
from tacit.sim import routes as module
from tacit.sim.routes import Routes, link_text, route
from tacit.topology import Network, fat_tree, leaf_spine, ring, star, torus, two_racks

REGULAR = [
    star(7),
    fat_tree(4),
    fat_tree(6),
    leaf_spine(3, 4, 2),
    torus((4, 5)),
    torus((2, 3, 2)),
    torus((1, 6, 1)),
    ring(8),
    ring(2),
]


def as_graph(network: Network) -> Network:
    return Network.of(network.hosts, network.switches, network.links)


def all_pairs(network: Network) -> tuple[np.ndarray, np.ndarray]:
    src, dst = np.divmod(np.arange(len(network.hosts) ** 2), len(network.hosts))
    return src[src != dst], dst[src != dst]


def walk(network: Network, routes: Routes, flow: int, start: int) -> int:
    """Where the links of a flow lead, each beginning where one of the others ends."""
    at, left = start, routes.link[routes.flow == flow].tolist()
    while left:
        ends = {link: network.ends[link >> 1][:: -1 if link & 1 else 1] for link in left}
        link = next(link for link, (a, _) in ends.items() if a == at)
        at = int(ends[link][1])
        left.remove(link)
    return at


@pytest.mark.parametrize("network", REGULAR, ids=str)
def test_arithmetic_gives_joined_paths_as_short_as_a_search(network):
    src, dst = all_pairs(network)
    direct, searched = route(network, src, dst), route(as_graph(network), src, dst)
    assert (direct.hops() == searched.hops()).all()
    for routes in (direct, searched):
        assert (np.diff(routes.flow) >= 0).all()
        assert [walk(network, routes, i, src[i]) for i in range(len(src))] == dst.tolist()


def test_a_path_from_or_to_a_switch_is_found_too():
    for network in (star(5), fat_tree(4), two_racks(4)):
        hosts = len(network.hosts)
        src, dst = np.array([0, hosts, 1]), np.array([hosts, 2, 3])
        routes = route(network, src, dst)
        assert [walk(network, routes, i, src[i]) for i in range(3)] == dst.tolist()


def test_nobody_crosses_a_link_to_reach_itself():
    for network in REGULAR:
        assert route(network, np.array([1]), np.array([1])).hops().tolist() == [0]


@pytest.mark.parametrize("k", [4, 8, 16])
def test_no_two_transfers_meet_in_a_fat_tree_in_a_shift_or_an_exchange(k):
    network = fat_tree(k)
    host = np.arange(len(network.hosts))
    partners = [(host + shift) % len(host) for shift in (1, 2, 3, k, len(host) // 2, len(host) - 1)]
    partners += [host ^ (1 << i) for i in range(len(host).bit_length() - 1)]
    for partner in partners:
        assert np.bincount(route(network, host, partner).link).max() == 1


def test_half_way_round_an_even_ring_both_ways_are_used_alike():
    host = np.arange(8)
    load = np.bincount(route(ring(8), host, (host + 4) % 8).link)
    assert set(load) == {2}  # 8 transfers of 4 links over 16 directed ones


def test_equal_ways_through_a_graph_are_spread_by_destination():
    src, dst = np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7])
    links = route(as_graph(leaf_spine(2, 4, 4)), src, dst).link
    assert len(set(links.tolist())) == len(links)


def test_a_search_in_blocks_finds_the_same_paths(monkeypatch):
    network = as_graph(fat_tree(4))
    src, dst = all_pairs(network)
    whole = route(network, src, dst)
    monkeypatch.setattr(module, "_BLOCK", 300)
    blocks = route(network, src, dst)
    assert (whole.flow == blocks.flow).all() and (whole.link == blocks.link).all()


def test_latency_adds_up_along_the_path():
    network = torus((4, 4), latency_s=2e-6)
    assert route(network, np.array([0]), np.array([10])).along(network.latency_s) == pytest.approx(4 * 2e-6)


def test_a_link_is_named_in_the_direction_in_which_it_is_crossed():
    network = star(3)
    assert [link_text(network, link) for link in (2, 3)] == ["h1 -> switch", "switch -> h1"]


def test_paths_that_would_not_fit_in_memory_are_refused(monkeypatch):
    monkeypatch.setattr(module, "_MOST_HOPS", 100)
    host = np.arange(64)
    with pytest.raises(
        ConfigError, match="cross 2,048 links, more than the 100 that fit in memory; take fewer nodes"
    ):
        route(ring(64), host, (host + 32) % 64)
