"""Networks from text, and the same questions to wires and to light."""

from dataclasses import replace

import pytest

from tacit.errors import ConfigError, ScheduleError
from tacit.schedules import SCHEDULES, build, ring, star, tree, wrht
from tacit.sim.fabric import parse_fabric, rate_words
from tacit.topology import Network, OpticalRing


@pytest.mark.parametrize(
    ("rate_bps", "words"),
    [
        (320e9, "40 GB/s (320 Gbit/s)"),
        (40e9, "5 GB/s (40 Gbit/s)"),
        (10e9, "1.25 GB/s (10 Gbit/s)"),
        (1e6, "125 kB/s (1 Mbit/s)"),
        (8.0, "1 B/s (8 bit/s)"),
        (8e12, "1 TB/s (8 Tbit/s)"),
    ],
)
def test_rates_are_said_in_bytes_and_in_bits(rate_bps, words):
    assert rate_words(rate_bps) == words


def test_an_optical_ring_reads_all_its_options():
    fabric = parse_fabric("optical(nodes=9, wavelengths=4, rate=40Gbit, setup=1ms, hop=5ns, most_hops=3)")
    assert fabric.network == OpticalRing(9, 4, 40e9, 1e-3, 3, hop_s=5e-9)
    assert parse_fabric("optical", 16).network == OpticalRing(16)
    lossy = parse_fabric("optical(budget=30dB, fixed=5dB, pass=0.01dB, resonators=64)", 16)
    assert lossy.ring is not None and lossy.ring.most_hops == 39  # 25 dB at 0.64 dB a hop


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("star(rate=1Gbit)", 24),
        ("ring", 24),
        ("torus", 24),
        ("fat_tree(rate=1Gbit)", 54),
        ("leaf_spine(hosts=5)", 25),
        ("star(nodes=30)", 30),
    ],
)
def test_as_many_hosts_as_ranks_unless_the_text_says_how_many(text, hosts):
    fabric = parse_fabric(text, 24)
    assert isinstance(fabric.network, Network) and fabric.nodes == hosts


def test_a_file_may_hold_a_line_or_a_graph(tmp_path):
    (tmp_path / "light.toml").write_text('network = "optical(wavelengths=2)"\n')
    assert parse_fabric(str(tmp_path / "light.toml"), 5).network == OpticalRing(5, 2)
    (tmp_path / "bad.toml").write_text("[[host]\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        parse_fabric(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    "text",
    [
        "optical(rate=40)",
        "optical(wavelengths=two)",
        "optical(3)",
        "optical(fixed=1dB)",
        "optical(most_hops=0)",
    ],
)
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError):
        parse_fabric(text, 8)


def test_the_formula_is_the_simulation_where_nothing_is_shared():
    for fabric in (
        parse_fabric("star(rate=1Gbit, latency=3us)", 12),
        parse_fabric("optical(wavelengths=64)", 12),
    ):
        for name in ("ring", "tree", "halving_doubling"):
            schedule = build(name, 12)
            cost = fabric.cost(schedule, 1e6)
            assert fabric.alpha_beta_s(schedule, cost) == pytest.approx(cost.time_s)


def test_a_shared_link_takes_longer_than_the_formula():
    fabric, schedule = (
        parse_fabric("two_racks(rate=10Gbit, uplink_rate=1Gbit)", 8),
        build("recursive_doubling", 8),
    )
    cost = fabric.cost(schedule, 1e8)
    assert cost.time_s > 5 * fabric.alpha_beta_s(schedule, cost)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "on",
    [
        "star(rate=1Gbit, latency=3us)",
        "two_racks(rate=1Gbit)",
        "fat_tree(rate=2Gbit)",
        "optical(nodes=20)",
        "optical",
    ],
)
def test_nothing_beats_the_lower_bound(name, on):
    fabric = parse_fabric(on, 12, stripe="optical" in on)
    schedule = build(name, 12)
    network = fabric.network
    if schedule.aggregators > (len(network.switches) if isinstance(network, Network) else network.nodes - 12):
        with pytest.raises(ConfigError):  # no room for the aggregators
            fabric.cost(schedule, 1e6)
        return
    bound_s = fabric.lower_bound_s(schedule, 1e6)
    assert bound_s is None or 0 < bound_s <= fabric.cost(schedule, 1e6).time_s


def test_bounds_of_a_star_by_hand():
    fabric = parse_fabric("star(rate=8Gbit, latency=10us)", 4)
    assert fabric.lower_bound_s(ring(4), 1e6) == pytest.approx(1.5e-3 + 10e-6)
    assert fabric.lower_bound_s(star(4), 1e6) == pytest.approx(1e-3 + 10e-6)  # an aggregator halves it
    assert (
        fabric.lower_bound_s(ring(1), 1e6) == 0
        and fabric.lower_bound_s(build("ring_all_gather", 4), 1e6) is None
    )


def test_light_is_proven_before_it_is_believed():
    fabric, schedule = parse_fabric("optical(wavelengths=4)", 100), wrht(100, wavelengths=4)
    fabric.prove(schedule)
    told = schedule.notes["optical"][0]["wavelength"]
    twice = {
        "optical": ({**schedule.notes["optical"][0], "wavelength": 0 * told}, *schedule.notes["optical"][1:])
    }
    with pytest.raises(ScheduleError, match="stage 0: wavelength 0 clockwise is used twice between nodes"):
        fabric.prove(replace(schedule, notes=twice))
    with pytest.raises(ConfigError, match="take a schedule with shorter paths"):
        parse_fabric("optical(most_hops=5)", 100).prove(tree(100))


def test_a_network_is_values_in_json():
    light = parse_fabric("optical(nodes=9, wavelengths=4, rate=40Gbit/s, setup=1ms, hop=5ns, transceivers=2)")
    assert light.ring == OpticalRing(9, 4, 40e9, 1e-3, hop_s=5e-9, transceivers=2)
    assert light.as_record() == {
        "kind": "optical",
        "nodes": 9,
        "wavelengths": 4,
        "rate_bps": 40e9,
        "setup_s": 1e-3,
        "most_hops": None,
        "hop_s": 5e-9,
        "transceivers": 2,
        "stripe": False,
        "text": light.text,
    }
    assert "2 senders and receivers a node" in light.text
    assert parse_fabric("optical(transceivers=all)", 8).ring == OpticalRing(8)
    wires = parse_fabric("two_racks(nodes=4, rate=10Gbit, uplink_rate=2.5Gbit, latency=5us)").as_record()
    assert (wires["kind"], wires["nodes"], wires["switches"], wires["links"]) == ("graph", 4, 2, 5)
    assert (wires["rate_bps"], wires["most_rate_bps"]) == (2.5e9, 10e9)
    assert (wires["latency_s"], wires["most_latency_s"]) == (pytest.approx(5e-6), pytest.approx(5e-6))


@pytest.mark.parametrize("field", ["rate_bps", "setup_s", "hop_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_an_optical_ring_takes_finite_numbers_only(field, value):
    with pytest.raises(ConfigError, match="and finite"):
        OpticalRing(8, **{field: value})


@pytest.mark.parametrize("field", ["nodes", "wavelengths", "most_hops", "transceivers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 10**20])
def test_an_optical_ring_counts_in_whole_numbers(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}; give 1 or more"):
        OpticalRing(**({"nodes": 8} | {field: value}))
