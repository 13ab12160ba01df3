"""The search: what it returns is proven, beats every rival in every case of the docs, and nothing is below the bounds."""

from dataclasses import replace
from pathlib import Path

import pytest

from tacit.errors import ConfigError
from tacit.schedules import build
from tacit.schedules.braid import braid, shortest_length
from tacit.schedules.two_way_ring import two_way_ring
from tacit.sim.bounds import fewest_stages, lower_bounds
from tacit.sim.contest import (
    RIVALS,
    bound_of,
    contest,
    markdown,
    parse_markdown,
    rival_s,
    standing_ring,
    with_propagation_s,
)
from tacit.sim.optical import cost, rescaled
from tacit.sim.papers import GBIT, GBYTE, MODELS, NAMES, NODES
from tacit.sim.search import search
from tacit.sim.wavelengths import check_schedule
from tacit.sim.workloads import PAPER_PARAMETERS
from tacit.topology import OpticalRing

DOCS = Path(__file__).parents[2] / "docs" / "optical.md"
UNIT = {world: OpticalRing(world, rate_bps=8.0, setup_s=1.0) for world in NODES}


@pytest.fixture(scope="module")
def rows():
    return parse_markdown(DOCS.read_text(encoding="utf-8"))


def test_the_docs_have_all_cases(rows):
    cases = {
        (NAMES[model], world, rate)
        for model in MODELS
        for world in NODES
        for rate in ("40 GB/s", "40 Gbit/s")
    }
    assert {(row["model"], row["world"], row["rate"]) for row in rows} == cases
    assert len(rows) == 32


def test_in_every_case_of_the_docs_the_braid_beats_every_rival(rows):
    for row in rows:
        for name in RIVALS:
            assert row["braid_s"] < row[f"{name}_s"], row
        assert 1 < row["ratio"] < 2.5


def test_the_docs_say_what_the_simulator_says(rows):
    """Each braid is built anew, its light assigned and its time counted; so are its rivals and its bound."""
    units = {}
    for row in rows:
        nbytes = 4 * PAPER_PARAMETERS[next(key for key, name in NAMES.items() if name == row["model"])]
        ring = OpticalRing(row["world"], rate_bps=GBYTE if row["rate"] == "40 GB/s" else GBIT)
        key = (row["world"], row["levels"], row["strands"])
        if key not in units:
            made = braid(key[0], levels=key[1], strands=key[2])
            units[key] = cost(made, 1.0, UNIT[key[0]], stripe=True)
        found = rescaled(units[key], nbytes, UNIT[key[0]], ring)
        assert found.stage_count == row["stages"]
        assert found.time_s == pytest.approx(row["braid_s"], rel=1e-3)
        assert bound_of(row) == pytest.approx(row["bound_s"], rel=2e-3)
        for name in RIVALS:
            assert rival_s(name, nbytes, ring) == pytest.approx(row[f"{name}_s"], rel=5e-3)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 16, 33, 60])
@pytest.mark.parametrize("nbytes", [1e3, 1e8])
def test_what_is_found_is_proven_and_not_below_the_bound(world, nbytes):
    ring = OpticalRing(world, 8, 40e9)
    found = search(world, nbytes, ring)
    made = found.schedule()
    made.verify()
    check_schedule(made, ring, stripe=True)
    assert found.cost.time_s == pytest.approx(cost(made, nbytes, ring, stripe=True).time_s)
    assert found.ratio >= 1


def test_a_new_search_beats_the_rivals_at_1024_nodes():
    row = next(contest((1024,), ("vgg16",), (GBYTE,), finalists=1))
    assert row["braid_s"] < min(row[f"{name}_s"] for name in RIVALS) / 2
    assert row["bound_s"] < row["braid_s"] < 2.2 * row["bound_s"]
    assert row["latency_bound_s"] < row["bound_s"] > row["node_bound_s"]
    assert (
        parse_markdown(f"<!-- contest -->\n{markdown([row])}\n<!-- /contest -->")[0]["levels"]
        == row["levels"]
    )


def test_a_power_budget_that_wrht_cannot_meet_leaves_braids():
    ring = OpticalRing(256, most_hops=40)
    found = search(256, 4 * 25e6, ring)
    assert max(stage.hops for stage in found.cost.stages) <= 40
    cost(found.schedule(), 1.0, ring, stripe=True)
    with pytest.raises(ConfigError, match="the power budget allows 40"):
        cost(build("wrht", 256), 1.0, ring)


@pytest.mark.parametrize(
    "name", ["ring", "two_way_ring", "tree", "wrht", "halving_doubling", "recursive_doubling", "sharded"]
)
@pytest.mark.parametrize("world", [2, 7, 64, 200])
def test_no_schedule_is_below_the_bounds(name, world):
    schedule = two_way_ring(world) if name == "two_way_ring" else build(name, world)
    was = OpticalRing(world, 4, 1e9, 0.0)
    found = cost(schedule, 1e7, was, stripe=True)  # the light is the same for every size and set-up
    for setup_s in (0.0, 1e-6, 1e-3):
        ring = replace(was, setup_s=setup_s)
        for nbytes in (0.0, 1e3, 1e7):
            bounds, time_s = lower_bounds(world, nbytes, ring), rescaled(found, nbytes, was, ring).time_s
            for bound_s in (bounds.latency_s, bounds.node_s, bounds.bisection_s):
                assert bound_s <= bounds.combined_s * (1 + 1e-9)
            assert bounds.combined_s <= time_s * (1 + 1e-9)


def test_the_two_way_ring_meets_the_bandwidth_bound_exactly():
    ring = OpticalRing(64, 8, 1e9, 0.0)
    assert cost(two_way_ring(64), 1e6, ring, stripe=True).time_s == pytest.approx(
        lower_bounds(64, 1e6, ring).combined_s
    )


def test_bounds_by_hand():
    assert [fewest_stages(n, 64) for n in (1, 2, 129, 130, 1024, 16641, 16642)] == [0, 1, 1, 2, 2, 2, 3]
    ring = OpticalRing(1024, 64, 8.0, 1.0)
    bounds = lower_bounds(1024, 64 * 8.625, ring)  # VGG16 at 40 GB/s, in units of the set-up
    best = min(k + 8.625 * (shortest_length(1024, k) + 1023) / 2048 for k in range(2, 100))
    assert bounds.combined_s == pytest.approx(best)
    assert (bounds.latency_s, round(bounds.node_s, 2), bounds.bisection_s, bounds.stages) == (
        2.0,
        8.62,
        4.3125,
        8,
    )


def test_the_arguments_against_us_are_counted(rows):
    row = next(r for r in rows if (r["model"], r["world"], r["rate"]) == ("VGG16", 1024, "40 GB/s"))
    still = with_propagation_s(row, 0.0)
    assert still["braid"] == pytest.approx(row["braid_s"], rel=1e-3)
    far = with_propagation_s(row, 50e-9)  # 10 m from node to node
    assert far["braid"] < 1.1 * still["braid"] < far["two_way_ring"] / 10
    standing = standing_ring(row)
    assert standing["time_s"] < row["braid_s"]  # set up once, and if a stage costs nothing else
    assert 0.1e-6 < standing["break_even_s"] < 1e-6


def test_bad_input_gets_one_sentence():
    with pytest.raises(
        ConfigError, match="search among 9 ranks on a ring of 8 nodes; give the ring as many nodes"
    ):
        search(9, 1.0, OpticalRing(8))
    with pytest.raises(ConfigError, match="finalists=0: give 1 or more"):
        search(8, 1.0, OpticalRing(8), finalists=0)
    with pytest.raises(
        ConfigError, match="no braid of 4096 nodes has paths of 1 hops or fewer; raise most_hops"
    ):
        search(4096, 1.0, OpticalRing(4096, most_hops=1))
    with pytest.raises(ConfigError, match="give 1 rank or more, and no negative size"):
        lower_bounds(0, 1.0, OpticalRing(8))
    with pytest.raises(ConfigError, match="the page has no place for the table"):
        parse_markdown("")
