"""Networks: builders count right, text reads back, and a bad one is refused with one sentence."""

from pathlib import Path

import numpy as np
import pytest

from tacit.errors import ConfigError
from tacit.topology import (
    NETWORKS,
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
from tacit.topology_files import network_from, parse_network, read_network

EXAMPLES = Path(__file__).parent.parent / "experiments" / "topologies"


@pytest.mark.parametrize(
    ("network", "hosts", "switches", "links"),
    [
        (star(64), 64, 1, 64),
        (fat_tree(4), 16, 20, 48),
        (fat_tree(8), 128, 80, 384),
        (leaf_spine(4, 8, 2), 32, 6, 40),
        (torus((4, 5, 3)), 60, 0, 180),
        (torus((4, 2)), 8, 0, 12),
        (ring(5), 5, 0, 5),
        (ring(2), 2, 0, 1),
        (ring(1), 1, 0, 0),
        (two_racks(7), 7, 2, 8),
        (one_slow_host(3), 3, 1, 3),
    ],
    ids=str,
)
def test_a_builder_makes_as_many_hosts_switches_and_links_as_it_says(network, hosts, switches, links):
    assert (len(network.hosts), len(network.switches), len(network.ends)) == (hosts, switches, links)
    rebuilt = Network.of(network.hosts, network.switches, network.links)  # names unique, all nodes joined
    assert (rebuilt.ends == network.ends).all() and (rebuilt.rate_bps == network.rate_bps).all()


@pytest.mark.parametrize("k", [4, 6])
def test_every_switch_of_a_fat_tree_has_k_ports(k):
    network = fat_tree(k)
    ports = np.bincount(network.ends.ravel())
    assert (ports[len(network.hosts) :] == k).all() and (ports[: len(network.hosts)] == 1).all()


def test_uplinks_carry_what_hosts_send_over_the_oversubscription():
    network = leaf_spine(leaves=4, hosts=8, spines=2, rate_bps=10e9, oversubscription=4)
    assert set(network.rate_bps[:32]) == {10e9} and set(network.rate_bps[32:]) == {8 * 10e9 / (2 * 4)}


def test_one_slow_host_is_slow_and_the_others_are_not():
    assert one_slow_host(4, 10e9, 1e9).rate_bps.tolist() == [10e9, 10e9, 10e9, 1e9]


@pytest.mark.parametrize(
    "text",
    [
        "star(nodes=64, rate=10Gbit, latency=5us)",
        "one_slow_host(nodes=4, rate=1Gbit, slow_rate=100Mbit, latency=0us)",
        "two_racks(nodes=8, rate=10Gbit, uplink_rate=2.5Gbit, latency=5us)",
        "leaf_spine(leaves=4, hosts=8, spines=2, rate=25Gbit, oversubscription=2.5, latency=1.5us)",
        "fat_tree(k=4, rate=100Gbit, latency=1us)",
        "torus(dims=4x4x2, rate=200Gbit, latency=0.5us)",
        "ring(nodes=9, rate=1.6Tbit, latency=5us)",
        "star(nodes=4, rate=1Gbit, latency=0us, mtu=9000, loss=0.01)",
    ],
)
def test_the_text_of_a_network_parses_back_to_itself(text):
    assert str(parse_network(text)) == text


def test_every_link_has_the_mtu_and_the_loss_of_the_line():
    links = list(parse_network("two_racks(nodes=4, mtu=9000, loss=0.01)").links)
    assert {(link.mtu, link.loss) for link in links} == {(9000, 0.01)}


def test_bytes_a_second_are_eight_times_bits_a_second():
    assert parse_network("star(nodes=2, rate=40GB/s)").rate_bps[0] == 320e9
    assert parse_network("star(nodes=2, rate=40Gbit)").rate_bps[0] == 40e9


def test_the_example_files_are_read():
    assert {str(read_network(path)) for path in EXAMPLES.glob("*.toml")} >= {
        "two_racks(nodes=8, rate=10Gbit, uplink_rate=2.5Gbit, latency=5us)",
        "one_slow_host(nodes=4, rate=1Gbit, slow_rate=100Mbit, latency=10us)",
    }
    office = parse_network(str(EXAMPLES / "office.toml"))
    assert office.hosts == ("anna", "ben", "laptop", "server") and office.switches == ("office", "basement")
    laptop, server = list(office.links)[2], list(office.links)[4]
    assert (laptop.rate_bps, laptop.latency_s, laptop.loss, laptop.mtu) == (300e6, 2e-3, 0.001, 1500)
    assert (server.rate_bps, server.mtu) == (10e9, 9000)


def graph(**changes):
    table = {
        "host": [{"name": "a"}, {"name": "b"}],
        "switch": [{"name": "s"}],
        "link": [{"a": "a", "b": "s", "rate": "1Gbit"}, {"a": "b", "b": "s", "rate": "1Gbit"}],
    }
    return table | changes


def test_a_small_graph_is_read():
    network = network_from(graph(), "g.toml")
    assert (network.hosts, network.switches, len(network.ends)) == (("a", "b"), ("s",), 2)
    assert network.latency_s.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            graph(link=[{"a": "a", "b": "s", "rate": 10}]),
            r"g\.toml: the link a - s: rate 10 has no unit; write for example 10Gbit",
        ),
        (
            graph(link=[{"a": "a", "b": "x", "rate": "1Gbit"}]),
            r"the link a - x names 'x', which is no host or switch; its nodes are a, b, s",
        ),
        (
            graph(host=[{"name": "alpha"}, {"name": "beta"}], link=[{"a": "alpa", "b": "s", "rate": "1Gbit"}]),
            r"names 'alpa', which is no host or switch; did you mean 'alpha'\?",
        ),
        (
            graph(host=[{"name": "a"}, {"name": "a"}]),
            r"two nodes called 'a'; every host and switch needs a name of its own",
        ),
        (graph(switch=[{"name": "a"}]), r"two nodes called 'a'"),
        (
            graph(link=[{"a": "a", "b": "s", "rate": "1Gbit"}]),
            r"is in two parts: a, s and b; join them with a link",
        ),
        (graph(link=[{"a": "a", "b": "a", "rate": "1Gbit"}]), r"a link joins 'a' to itself; join two nodes"),
        (graph(link=[{"a": "a", "b": "s"}]), r"the link a - s lacks 'rate'; a link has a, b and rate"),
        (graph(link=[{"a": "a", "b": "s", "rate": "1Gbit", "speed": 1}]), r"has the unknown key 'speed'"),
        (graph(link=[{"a": "a", "b": "s", "rate": "0Gbit"}]), r"rate of the link a - s is 0; it must be above 0"),
        (graph(link=[{"a": "a", "b": "s", "rate": "1Gbit", "loss": 1.5}]), r"loss from 0 to below 1"),
        (graph(link=[{"a": "a", "b": "s", "rate": "1Gbit", "mtu": "big"}]), r"mtu is a whole number"),
        (graph(link=[{"a": "a", "b": "s", "rate": "1Gbit", "latency": 5}]), r"time 5 has no unit; write for example 25us"),
        (graph(host=[]), r"g\.toml has no host; give at least one"),
        (graph(host=[{"nam": "a"}]), r"\[\[host\]\] \{'nam': 'a'\} must say name"),
        (graph(host={"name": "a"}), r"host is one table; write \[\[host\]\], with double brackets"),
        (graph(node=[]), r"unknown table 'node'; a network has \[\[host\]\]"),
        (graph(network="star(nodes=2)"), r"both a network line and tables"),
    ],
)  # fmt: skip
def test_a_bad_graph_gets_one_sentence(table, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        network_from(table, "g.toml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("star(nodes=64, rate=10)", "rate '10' has no unit; write for example 10Gbit"),
        ("star(nodes=64, latency=5)", "time '5' has no unit"),
        ("star(nodes=0)", "nodes=0; give 1 or more"),
        ("star(nodes=-1)", "nodes=-1; give 1 or more"),
        ("star(nodes=many)", "nodes=many is no number; write for example nodes=64"),
        ("star(nodes=2.5)", "nodes=2.5 is no number"),
        (
            "star(64)",
            "does not fit its options (nodes, rate, latency, mtu, loss): '64' is without its option's name",
        ),
        (
            "star(size=64)",
            "does not fit its options (nodes, rate, latency, mtu, loss): it has no option 'size'",
        ),
        ("star(nodes=4, mtu=big)", "mtu=big is no number; write for example mtu=9000"),
        ("star(nodes=4, loss=1)", "loss from 0 to below 1"),
        ("star", "lacks nodes=...; write for example star"),
        ("sta(nodes=4)", "unknown network 'sta'; did you mean 'star'"),
        ("star(nodes=4", "cannot be read; write for example star"),
        ("star(nodes=4, rate=0Gbit)", "rate is 0; it must be above 0"),
        ("two_racks(nodes=1)", "nodes=1; give 2 or more"),
        ("two_racks(nodes=4, uplink_rate=0Gbit)", "uplink rate is 0"),
        ("fat_tree(k=3)", "k=3: a fat tree is made of switches with an even number of ports"),
        ("torus(dims=4y4)", "dims=4y4 is no number; write for example dims=4x4"),
        ("torus(dims=4x0)", "a dimension=0; give 1 or more"),
        ("leaf_spine(leaves=2, hosts=2, oversubscription=0)", "oversubscription is 0"),
        ("nowhere.toml", "nowhere.toml cannot be opened: No such file or directory"),
    ],
)
def test_a_bad_line_gets_one_sentence(text, sentence):
    with pytest.raises(
        ConfigError, match=sentence.replace("(", r"\(").replace(")", r"\)").replace("'?", "'.")
    ) as error:
        parse_network(text)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_toml_gets_one_sentence(tmp_path):
    (tmp_path / "x.toml").write_text("[[host]\n")
    with pytest.raises(ConfigError, match=r"x\.toml is not TOML"):
        read_network(tmp_path / "x.toml")


def test_an_unknown_node_is_named_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"has no node 'h9'; its nodes are h0, h1, switch"):
        star(2).node("h9")
    many = Network.of([f"h{i}" for i in range(9)], ["s"], [Link(f"h{i}", "s", 1e9) for i in range(9)], "big")
    with pytest.raises(ConfigError, match=r"\.\.\. \(10 in all\)"):
        many.node("x")


def test_the_builders_are_these():
    assert list(NETWORKS) == ["star", "one_slow_host", "two_racks", "leaf_spine", "fat_tree", "torus", "ring"]
