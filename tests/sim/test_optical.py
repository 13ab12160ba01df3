"""Optical rings: times by formula, symmetry at scale, power budgets, the published stage counts."""

import numpy as np
import pytest

from tacit.errors import ConfigError
from tacit.schedules import Phase, Schedule, Stage, build
from tacit.schedules.two_way_ring import two_way_ring
from tacit.sim.optical import PowerBudget, cost, rescaled, too_long
from tacit.topology import OpticalRing

VGG16 = 4 * 138e6
X, A = VGG16 / 40e9, 25e-6


@pytest.mark.parametrize(
    ("name", "options", "world", "stages", "time_s"),
    [
        ("ring", {}, 1024, 2046, 2046 * (X / 1024 + A)),
        ("hierarchical", {"group": 5}, 1024, 424, 16 * (X / 5 + A) + 408 * (X / 205 + A)),
        ("tree", {}, 1024, 20, 20 * (X + A)),
        ("wrht", {}, 1024, 4, 4 * (X + A)),
        ("wrht", {"all_to_all": True}, 1024, 3, 3 * (X + A)),
        ("recursive_doubling", {}, 1024, 21, 21 * (X + A)),
        ("ring", {}, 4096, 8190, 8190 * (X / 4096 + A)),
        ("wrht", {}, 4096, 4, 4 * (X + A)),
        ("ring", {}, 100_000, 199_998, 199_998 * (X / 100_000 + A)),
        ("wrht", {}, 100_000, 6, 6 * (X + A)),
        ("tree", {}, 100_000, 34, 34 * (X + A)),
    ],
)
def test_times_are_those_of_the_closed_forms(name, options, world, stages, time_s):
    found = cost(build(name, world, **options), VGG16, OpticalRing(world))
    assert found.stage_count == stages
    assert found.time_s == pytest.approx(time_s, rel=1e-9)
    assert found.latency_s == pytest.approx(stages * A)


def test_the_published_milliseconds_at_1024_nodes():
    times = [
        (name, options, 1e3 * cost(build(name, 1024, **options), VGG16, OpticalRing(1024)).time_s)
        for name, options in [
            ("ring", {}),
            ("hierarchical", {}),
            ("tree", {}),
            ("wrht", {}),
            ("wrht", {"all_to_all": True}),
        ]
    ]
    assert [round(ms, 1) for _, _, ms in times] == [78.7, 82.2, 276.5, 55.3, 41.5]


@pytest.mark.parametrize(("rate_bps", "ms"), [(320e9, 51.6), (40e9, 54.6)])
def test_a_ring_striped_over_all_wavelengths_is_a_fair_baseline(rate_bps, ms):
    found = cost(build("ring", 1024), VGG16, OpticalRing(1024, rate_bps=rate_bps), stripe=True)
    assert round(1e3 * found.time_s, 1) == ms
    assert {stage.stripes for stage in found.stages} == {64}


def test_two_way_ring_keeps_every_wavelength_of_both_directions_busy():
    found = cost(two_way_ring(1024), VGG16, OpticalRing(1024), stripe=True)
    assert found.time_s == pytest.approx(2046 * (X / (2 * 1024 * 64) + A))
    assert {(stage.stripes, stage.wavelengths) for stage in found.stages} == {(64, 64)}


@pytest.mark.parametrize("world", [*range(1, 34), 64, 100])
def test_two_way_ring_sums_everything_once(world):
    two_way_ring(world).verify()


def test_two_way_ring_sends_half_of_a_vector_each_way():
    schedule = two_way_ring(12)
    assert schedule.stage_count == 22
    assert set(schedule.sent_chunks() / schedule.chunks) == {2 * 11 / 12}


def _levelled_all_gather(world: int, radix: int) -> Schedule:
    """All-gather by digits of the rank, the farthest first: ranks that differ in one digit send each other all they hold."""
    rank, phases, held, step = np.arange(world), [], np.arange(world)[:, None], world // radix
    while step:
        others = np.stack([rank - rank // step % radix * step + k * step for k in range(radix)], axis=1)
        src, dst = np.repeat(rank, radix), others.ravel()
        src, dst = src[src != dst], dst[src != dst]
        each = np.repeat(np.arange(len(src)), held.shape[1])
        ahead = (dst - src) % world
        way = (
            (2 * ahead < world) | ((2 * ahead == world) & (src % 2 == 0))
            if step == world // radix
            else dst > src
        )
        phases.append((Phase(Stage.of(src[each], dst[each], chunk=held[src].ravel())), way[each]))
        held = held[others].reshape(world, -1)
        step //= radix
    light = tuple({"clockwise": way} for _, way in phases)
    return Schedule(
        "levels", world, world, tuple(phase for phase, _ in phases), "gather", notes={"optical": light}
    )


def test_stages_of_the_all_gathers_that_optree_compares():
    """OpTree (arXiv 2211.15119): k levels take (2 k - 1) N^(1 + 1/k) / (8 w) stages; at best 70 at N = 1024, w = 64."""
    ring = OpticalRing(1024)
    stages = {k: (2 * k - 1) * 1024 ** (1 + 1 / k) / (8 * 64) for k in range(1, 11)}
    optree = int(np.ceil(min(stages.values())))
    gather = cost(build("ring_all_gather", 1024), 1.0, ring).stage_count
    neighbours = cost(build("neighbour_exchange", 1024), 1.0, ring).stage_count
    assert (optree, gather, neighbours) == (70, 1023, 512)
    reductions = [100 * (1 - optree / other) for other in (259, gather, neighbours)]  # 259: WRHT, as reported
    assert reductions == pytest.approx([72.97, 93.15, 86.32], abs=0.02)


def test_optrees_formula_comes_out_of_the_wavelengths():
    schedule = _levelled_all_gather(256, 4)
    schedule.verify()
    assert cost(schedule, 1.0, OpticalRing(256, 16)).stage_count == 7 * 256 ** (1 + 1 / 4) / (8 * 16)


def test_light_takes_its_time():
    near = cost(build("wrht", 1024), VGG16, OpticalRing(1024, hop_s=5e-9))
    assert near.time_s - cost(build("wrht", 1024), VGG16, OpticalRing(1024)).time_s == pytest.approx(
        2 * (64 + 516) * 5e-9
    )
    assert [stage.hops for stage in near.stages] == [64, 516, 516, 64]


def test_a_cost_for_another_vector_and_rate_needs_no_new_light():
    schedule, was = build("wrht", 300), OpticalRing(300)
    ring = OpticalRing(300, rate_bps=1e9, setup_s=1e-3, hop_s=1e-9)
    found = cost(schedule, 1e6, was, stripe=True)
    assert rescaled(found, 3e6, was, ring) == cost(schedule, 3e6, ring, stripe=True)
    for other in (OpticalRing(300, 8), OpticalRing(300, transceivers=4)):
        with pytest.raises(ConfigError, match="as many nodes, wavelengths and transceivers"):
            rescaled(found, 3e6, was, other)


def test_too_long_a_path_is_refused_with_its_name():
    ring = OpticalRing(1024, most_hops=500)
    assert list(too_long(build("ring", 1024), ring)) == []
    assert list(too_long(build("wrht", 1024), ring)) == [
        f"wrht: stage {stage}: the path {path} is 516 hops long; the power budget allows 500"
        for stage, path in ((1, "64 -> 580"), (2, "580 -> 64"))
    ]
    with pytest.raises(
        ConfigError, match="wrht: stage 1: the path 64 -> 580 is 516 hops long; .* use a schedule with"
    ):
        cost(build("wrht", 1024), VGG16, ring)


def test_a_power_budget_says_how_far_light_goes():
    budget = PowerBudget(budget_db=30.0, fixed_db=5.0, pass_db=0.01, resonators=64, propagation_db=0.1)
    assert budget.hop_db == pytest.approx(0.74)
    assert budget.most_hops == 33
    assert PowerBudget(30.0, 5.0, 0.0, 64).most_hops is None
    with pytest.raises(
        ConfigError, match=r"power budget 5 dB: .* no light reaches a neighbour; raise the budget"
    ):
        PowerBudget(5.0, 5.0, 0.01, 64)
    with pytest.raises(ConfigError, match="none may be negative"):
        PowerBudget(5.0, -1.0, 0.01, 64)


def test_bad_input_gets_one_sentence():
    with pytest.raises(ConfigError, match="ring has 9 nodes, the optical ring 8; give the ring as many"):
        cost(build("ring", 9), 1.0, OpticalRing(8))
    with pytest.raises(ConfigError, match="give a finite size that is not negative"):
        cost(build("ring", 8), -1.0, OpticalRing(8))


def test_the_breakdown_says_what_sets_the_time():
    found = cost(build("wrht", 1024), VGG16, OpticalRing(1024), stripe=True)
    top = found.stages[1]
    assert (top.stripes, top.wavelengths, top.hops, top.parts) == (16, 64, 516, 1)
    assert top.limit == "4 paths clockwise between nodes 451 and 452, 16 wavelengths each"
