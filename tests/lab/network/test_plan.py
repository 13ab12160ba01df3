"""What is to be built, as values: addresses, routes, tables and shapers. Nothing is built here."""

from __future__ import annotations

from itertools import permutations

import pytest

from tacit.lab.errors import LabError
from tacit.lab.network.plan import at_rate, crossed, plan, shaper
from tacit.topology import (
    Link,
    Network,
    fat_tree,
    leaf_spine,
    one_slow_host,
    ring,
    star,
    torus,
    two_racks,
)

NETWORKS = (star(4), two_racks(5), one_slow_host(3), ring(5), torus((3, 3)), leaf_spine(3, 2, 2), fat_tree(4))


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_a_packet_reaches_every_host_from_every_other_on_a_shortest_path(network: Network) -> None:
    built = plan(network)
    for src, dst in permutations(network.hosts, 2):
        nodes = [src]
        for cable in crossed(built, src, dst):
            assert nodes[-1] in (cable.a.node, cable.b.node)
            nodes.append(cable.b.node if cable.a.node == nodes[-1] else cable.a.node)
        assert nodes[-1] == dst and len(set(nodes)) == len(nodes)
        assert len(nodes) - 1 == _hops(network, src, dst)


def _hops(network: Network, src: str, dst: str) -> int:
    far, pairs = {network.node(src): 0}, network.ends.tolist()
    pairs += [(b, a) for a, b in pairs]
    for _ in range(network.nodes):  # Bellman and Ford
        for a, b in pairs:
            if a in far:
                far[b] = min(far[a] + 1, far.get(b, network.nodes))
    return far[network.node(dst)]


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_no_two_interfaces_share_a_mac_and_no_two_hosts_an_address(network: Network) -> None:
    built = plan(network)
    ports = [port for cable in built.cables for port in (cable.a, cable.b)]
    assert len({port.mac for port in ports}) == len(ports)
    assert len({(port.node, port.device) for port in ports}) == len(ports)
    assert len({host.address for host in built.hosts}) == len(network.hosts)


def test_hosts_of_one_leaf_spread_over_two_spines() -> None:
    built = plan(leaf_spine(2, 2, 2))
    spines = {crossed(built, "h0", dst)[1].b.node for dst in ("h2", "h3")}
    assert spines == {"spine0", "spine1"}


def test_a_host_with_several_links_has_its_address_on_a_device_of_its_own() -> None:
    assert {host.device for host in plan(ring(4)).hosts} == {"net0"}
    assert {host.device for host in plan(star(4)).hosts} == {"eth0"}


def test_what_passes_at_once_is_little_against_a_hundred_kilobytes() -> None:
    for rate_bps in (10e6, 100e6, 200e6, 500e6):
        assert shaper(rate_bps).free_nbytes < 0.25 * 100_000
    assert shaper(100e6).burst_nbytes == 2000 and shaper(100e6).gso_nbytes == 8192
    assert shaper(1e9).burst_nbytes == 8000 and shaper(1e9).gso_nbytes == 32750
    assert shaper(10e9).gso_nbytes == 65536


def test_a_bucket_holds_a_packet_of_the_mtu_and_a_lost_packet_is_one_segment() -> None:
    assert shaper(100e6, mtu=9000).burst_nbytes >= 9014
    assert shaper(100e6, loss=0.01).gso_nbytes < 2 * 1448 + 66


def test_short_delays_are_not_added_and_long_ones_need_netem() -> None:
    assert plan(star(2, latency_s=5e-6)).needs == ()
    assert plan(star(2, latency_s=1e-3)).needs == ("netem",)
    lossy = Network.of(["a", "b"], [], [Link("a", "b", 1e8, loss=0.1)])
    assert plan(lossy).needs == ("nft",)


def test_packets_are_no_longer_than_the_slowest_link_allows() -> None:
    assert plan(one_slow_host(3, 10e9, 100e6)).gso_nbytes == 8192


def test_a_window_is_some_milliseconds_of_the_slowest_link_so_that_no_flow_overruns_its_queue() -> None:
    assert plan(star(4, 1e8)).window_nbytes == 100_000
    slow = plan(one_slow_host(4, 1e9, 1e8))
    assert slow.window_nbytes == 100_000 < min(cable.shaper.queue_nbytes for cable in slow.cables)
    assert plan(star(2, 1e6)).window_nbytes == 65536
    far = plan(star(2, 1e9, 5e-3))  # 10 ms and back, twice
    assert far.window_nbytes == 1_000_000 + round(2 * 2e-2 * 1e9 / 8)


def test_routes_know_the_smallest_mtu_of_their_path_where_links_differ() -> None:
    links = [Link("a", "s", 1e9, mtu=9000), Link("s", "b", 1e9, mtu=1500), Link("s", "c", 1e9, mtu=9000)]
    hosts = plan(Network.of(["a", "b", "c"], ["s"], links)).hosts
    assert [[route.mtu for route in host.routes] for host in hosts] == [
        [1500, 9000],
        [1500, 1500],
        [9000, 1500],
    ]
    assert all(route.mtu is None for host in plan(star(3)).hosts for route in host.routes)


def test_every_link_at_another_rate_is_the_same_network() -> None:
    network = one_slow_host(3, 1e9, 1e8)
    changed = at_rate(network, 2e8)
    assert {cable.shaper.rate_bps for cable in plan(changed).cables} == {2e8}
    assert plan(changed).hosts == plan(network).hosts and str(changed).endswith("at 200Mbit")


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (star(300), "301 hosts and switches; the lab builds up to 250"),
        (Network.of(["a/b", "c"], [], [Link("a/b", "c", 1e9)]), "'a/b' cannot be a namespace's"),
    ],
)
def test_what_no_kernel_could_build_is_refused(network: Network, said: str) -> None:
    with pytest.raises(LabError, match=said):
        plan(network)
