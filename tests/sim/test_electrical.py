"""Electrical costs against closed forms, and contention solved by hand."""

import numpy as np
import pytest

from tacit import schedules
from tacit.errors import ConfigError
from tacit.schedules import SCHEDULES, Phase, Schedule, Stage, halving_doubling, recursive_doubling
from tacit.schedules import ring as ring_schedule
from tacit.schedules import star as star_schedule
from tacit.sim.electrical import SimGridFactors, alpha_beta, cost
from tacit.topology import fat_tree, leaf_spine, one_slow_host, ring, star, torus, two_racks
from tacit.topology_files import parse_network

RATE, LATENCY = 10e9, 5e-6
S = 100e6  # bytes


def one_stage(world, transfers, chunks=1, aggregators=0):
    src, dst, count = (list(column) for column in zip(*transfers, strict=True))
    return Schedule("mine", world, chunks, (Phase(Stage.of(src, dst, count=count)),), aggregators=aggregators)


@pytest.mark.parametrize("n", [2, 3, 4, 64, 1000])
def test_a_ring_on_a_star_takes_2_n_minus_1_chunks_and_latencies(n):
    found = cost(ring_schedule(n), S, star(n, RATE, LATENCY))
    assert found.time_s == pytest.approx(2 * (n - 1) * (8 * S / (n * RATE) + 2 * LATENCY), rel=1e-12)
    assert found.stage_count == 2 * (n - 1) and found.stages[0].hops == 2
    assert found.latency_s == pytest.approx(2 * (n - 1) * 2 * LATENCY)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_recursive_doubling_on_a_star_sends_the_vector_log_n_times(n):
    stages = n.bit_length() - 1
    assert cost(recursive_doubling(n), S, star(n)).time_s == pytest.approx(
        stages * (8 * S / RATE + 2 * LATENCY)
    )


def test_halving_doubling_on_a_star_sends_no_more_than_a_ring_in_far_fewer_stages():
    found = cost(halving_doubling(64), S, star(64))
    assert found.time_s == pytest.approx(2 * 63 / 64 * 8 * S / RATE + 12 * 2 * LATENCY)


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "tree_of_stars"])
@pytest.mark.parametrize("world", [2, 5, 16, 33])
def test_on_a_star_every_all_reduce_takes_what_alpha_beta_says(name, world):
    schedule = SCHEDULES[name](world)
    hops = 1 if schedule.aggregators else 2  # an aggregator on the switch is one link away
    found = cost(schedule, S, star(world)).time_s
    assert found == pytest.approx(alpha_beta(schedule, S, RATE, hops * LATENCY), rel=1e-9)


@pytest.mark.parametrize("make", [ring_schedule, recursive_doubling], ids=["ring", "recursive_doubling"])
def test_a_full_fat_tree_costs_what_a_star_costs_but_for_the_longer_way(make):
    schedule = make(128)
    found, flat = cost(schedule, S, fat_tree(8)), cost(schedule, S, star(128))
    assert found.time_s - found.latency_s == pytest.approx(flat.time_s - flat.latency_s)
    assert max(stage.hops for stage in found.stages) == 6


def test_a_ring_on_a_ring_meets_nobody_and_crosses_one_link():
    found = cost(ring_schedule(16), S, ring(16))
    assert found.time_s == pytest.approx(30 * (8 * S / (16 * RATE) + LATENCY))


def test_recursive_doubling_on_a_ring_shares_links_by_the_distance():
    # Exchange with rank ^ 4 on 16 hosts: 4 transfers each way over the links between the halves of every 8.
    host = np.arange(16)
    found = cost(one_stage(16, [(r, r ^ 4, 1) for r in host]), S, ring(16))
    assert found.stages[0].transfer_s == pytest.approx(4 * 8 * S / RATE)
    assert "shared by 4 transfers" in found.stages[0].limit


def test_all_to_one_shares_the_receivers_link():
    found = cost(one_stage(5, [(r, 0, 1) for r in range(1, 5)]), S, star(5)).stages[0]
    assert found.transfer_s == pytest.approx(4 * 8 * S / RATE)
    assert found.limit == "link switch -> h0, 10Gbit, shared by 4 transfers"


def test_links_are_full_duplex():
    both = cost(one_stage(2, [(0, 1, 1), (1, 0, 1)]), S, star(2))
    assert both.time_s == pytest.approx(8 * S / RATE + 2 * LATENCY)


def test_unequal_transfers_share_until_the_short_one_ends():
    # 1 and 3 chunks into one link: together 4 chunks' time, whatever the order; latency once.
    found = cost(one_stage(3, [(1, 0, 1), (2, 0, 3)], chunks=4), S, star(3)).stages[0]
    assert found.transfer_s == pytest.approx(8 * S / RATE)
    assert found.nbytes == 0.75 * S and found.limit == "link switch -> h0, 10Gbit"


def test_several_chunks_from_one_rank_to_another_are_one_message():
    split = Schedule("mine", 2, 4, (Phase(Stage.of([0, 0], [1, 1], chunk=[0, 2], count=[1, 2])),))
    found = cost(split, S, star(2), overhead_s=1e-3).stages[0]
    assert found.nbytes == 0.75 * S and found.transfers == 2
    assert found.latency_s == pytest.approx(1e-3 + 2 * LATENCY)


def test_every_message_costs_its_sender_the_overhead():
    found = cost(one_stage(4, [(0, r, 1) for r in (1, 2, 3)]), 0, star(4), overhead_s=1e-4).stages[0]
    assert found.latency_s == pytest.approx(3e-4 + 2 * LATENCY)


def test_one_slow_worker_shows_and_is_named():
    even, slow = (
        cost(ring_schedule(8), S, star(8)),
        cost(ring_schedule(8), S, one_slow_host(8, RATE, RATE / 10)),
    )
    assert slow.time_s - slow.latency_s == pytest.approx(10 * (even.time_s - even.latency_s))
    assert "h7" in slow.stages[0].limit and "1Gbit" in slow.stages[0].limit


def test_a_ring_crosses_between_two_racks_once_and_recursive_doubling_with_everybody():
    network = two_racks(8, RATE, uplink_rate_bps=RATE)
    assert cost(ring_schedule(8), S, network).stages[0].transfer_s == pytest.approx(8 * S / 8 / RATE)
    across = cost(recursive_doubling(8), S, network).stages
    assert max(stage.transfer_s for stage in across) == pytest.approx(4 * 8 * S / RATE)
    assert any("rack0 -> rack1, 10Gbit, shared by 4 transfers" in stage.limit for stage in across)


@pytest.mark.parametrize("oversubscription", [1.0, 2.0, 4.0])
def test_oversubscription_slows_what_crosses_the_spine_by_its_factor(oversubscription):
    network = leaf_spine(4, 8, 4, RATE, oversubscription)
    host = np.arange(32)
    found = cost(one_stage(32, [(r, (r + 8) % 32, 1) for r in host]), S, network).stages[0]
    assert found.transfer_s == pytest.approx(oversubscription * 8 * S / RATE)


def test_a_short_vector_is_limited_by_latency_and_the_path_is_named():
    found = cost(ring_schedule(16), 1000, fat_tree(4)).stages[0]
    assert found.limit == "latency of h3 -> h4, 6 links, 30 us"


def test_an_aggregator_in_the_switch_takes_one_vector_up_and_one_down():
    found = cost(star_schedule(8), S, star(8))
    assert found.time_s == pytest.approx(2 * (8 * S / RATE + LATENCY))


def test_an_aggregator_on_a_host_is_limited_by_its_own_link():
    found = cost(star_schedule(8), S, star(9), aggregators_on="hosts")
    assert found.time_s == pytest.approx(2 * (8 * 8 * S / RATE + 2 * LATENCY))
    named = cost(star_schedule(8), S, star(9), aggregators_on=["h8"])
    assert named.time_s == found.time_s
    assert cost(star_schedule(8), S, star(9), aggregators_on="switch").time_s < found.time_s


def test_a_tree_of_stars_fits_leaves_and_spine_and_crosses_an_oversubscribed_uplink_once():
    schedule = schedules.build("tree_of_stars", 32, fan=8)
    found = cost(schedule, S, leaf_spine(4, 8, 1, RATE, oversubscription=8))
    assert found.time_s == pytest.approx(4 * (8 * S / RATE + LATENCY))


def test_an_aggregator_at_the_core_of_a_fat_tree_is_fed_through_its_few_links():
    found = cost(star_schedule(16), S, fat_tree(4), aggregators_on=["core0"])
    assert found.stages[0].transfer_s == pytest.approx(
        4 * 8 * S / RATE
    )  # a pod's 4 hosts share one link to core 0


def test_phases_alike_are_costed_once_and_empty_vectors_cost_latency_only():
    found = cost(ring_schedule(4096), 0, star(4096))
    assert found.time_s == pytest.approx(2 * 4095 * 2 * LATENCY)
    assert cost(ring_schedule(1), S, star(1)).time_s == 0


def test_a_network_from_a_file_costs_what_the_same_network_by_arithmetic_does(tmp_path):
    network = fat_tree(4)
    lines = [f'[[host]]\nname = "{h}"' for h in network.hosts] + [
        f'[[switch]]\nname = "{s}"' for s in network.switches
    ]
    lines += [
        f'[[link]]\na = "{link.a}"\nb = "{link.b}"\nrate = "10Gbit"\nlatency = "5us"'
        for link in network.links
    ]
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    found = cost(ring_schedule(16), S, parse_network(str(tmp_path / "mine.toml")))
    assert found.time_s == pytest.approx(cost(ring_schedule(16), S, network).time_s)


@pytest.mark.slow
def test_a_large_ring_and_structured_schedules_at_100_000_ranks_are_costed():
    assert cost(ring_schedule(4096), S, fat_tree(26)).stage_count == 8190
    network = star(100_000)
    for name in ("ring", "halving_doubling", "torus", "tree"):
        schedule = schedules.build(name, 100_000)
        assert cost(schedule, S, network).time_s == pytest.approx(alpha_beta(schedule, S, RATE, 2 * LATENCY))


def test_simgrids_factors_come_to_three_numbers_where_all_paths_are_alike():
    found = cost(recursive_doubling(16), S, star(16), simgrid=SimGridFactors())
    stage_s = 13.01 * 2 * LATENCY + 8 * S / (0.97 / 1.05 * RATE)
    assert found.time_s == pytest.approx(4 * stage_s)
    neutral = SimGridFactors(latency=1, rate=1, acknowledgements=0)
    assert cost(recursive_doubling(16), S, star(16), simgrid=neutral).time_s == pytest.approx(
        cost(recursive_doubling(16), S, star(16)).time_s
    )


def test_a_slow_path_on_a_torus_is_the_long_one():
    found = cost(one_stage(16, [(0, 10, 1)]), 1, torus((4, 4))).stages[0]
    assert found.hops == 4 and found.latency_s == pytest.approx(4 * LATENCY)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: cost(ring_schedule(9), S, star(8)),
            r"ring has 9 ranks, star\(.*\) has 8 hosts; each rank needs one",
        ),
        (lambda: cost(ring_schedule(4), -1, star(4)), r"-1 bytes, 0\.0 s a message: neither may be negative"),
        (lambda: cost(ring_schedule(4), S, star(4), overhead_s=-1.0), r"neither may be negative"),
        (lambda: cost(star_schedule(4), S, ring(4)), r"1 aggregators, ring\(.*\) has 0 switches for them; name their"),
        (lambda: cost(star_schedule(4), S, star(4), aggregators_on="hosts"), r"has 0 hosts for them"),
        (lambda: cost(star_schedule(4), S, star(4), aggregators_on=["h9"]), r"has no node 'h9'"),
        (lambda: cost(star_schedule(4), S, star(4), aggregators_on=["h1", "h2"]), r"2 places are named; name one for"),
    ],
)  # fmt: skip
def test_what_cannot_be_costed_gets_one_sentence(call, sentence):
    with pytest.raises(ConfigError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)
