"""The hot set: what it covers, how it follows a shift, what it changes, and that all owners of shards agree."""

from functools import cache

import numpy as np
import pytest

from tacit.errors import ConfigError
from tacit.rows.hot_counts import DecayedCounts, SketchedCounts
from tacit.rows.hot_set import (
    HOT_ROWS,
    PAYS_FROM,
    STEPS,
    CountSteps,
    HotCost,
    HotRule,
    HotSet,
    agree_in_one_process,
    decide,
    threshold,
)

ROWS = 5_000_000
LOOK_UPS = 4096 * 26  # of a rank in a step
STEP_COUNT = 10  # a million look-ups
FAR = 1_000_000  # where every second hot row's place goes, and back, in a shift
FEW_SERVERS = HotCost(world=8, ratio=4, hot_nbytes=64, cold_nbytes=68)
ON_RANKS = HotCost(world=8, ratio=1, hot_nbytes=64, cold_nbytes=68 * 7 / 8)


@cache
def law(skew):
    """Chances, and their sums."""
    chance = np.arange(1, ROWS + 1) ** -float(skew)
    chance /= chance.sum()
    edges = np.cumsum(chance)
    return chance, edges / edges[-1]


def step(skew, rng, shifted=False):
    """The rows that a rank touches in one step, each once."""
    keys = np.unique(np.searchsorted(law(skew)[1], np.sort(rng.random(LOOK_UPS))))
    return moved(keys) if shifted else keys


def moved(keys):
    """Every second hot row changes its place with a cold one."""
    odd, near, far = keys % 2 == 1, keys < HOT_ROWS, (keys >= FAR) & (keys < FAR + HOT_ROWS)
    return np.where(odd & near, keys + FAR, np.where(odd & far, keys - FAR, keys))


def coverage(skew, slots, shifted=False):
    """Of the look-ups that come, those of these rows."""
    return law(skew)[0][moved(slots) if shifted else slots].sum()


# ---- coverage ----


@pytest.mark.parametrize("skew", [0.7, 0.9, 1.05, 1.2])
def test_after_a_million_look_ups_and_after_a_shift_the_hot_rows_are_nearly_the_best(skew):
    rng, counts = np.random.default_rng(3), DecayedCounts(ROWS)
    hot = HotSet(counts, FEW_SERVERS)
    oracle = law(skew)[0][:HOT_ROWS].sum()
    for shifted, points in ((False, 0.03), (True, 0.05)):
        for _ in range(STEP_COUNT):
            counts.add(step(skew, rng, shifted))
            change = agree_in_one_process([hot])
        assert coverage(skew, hot.slots, shifted) > oracle - points
        assert len(hot.slots) == hot.size == change.size <= HOT_ROWS
    assert counts.nbytes == 4 * ROWS


@pytest.mark.parametrize(("skew", "points"), [(0.7, 0.05), (1.05, 0.03)])
def test_so_are_those_of_a_sketch_in_bounded_memory(skew, points):
    rng, counts = np.random.default_rng(4), SketchedCounts(4 * HOT_ROWS)
    hot = HotSet(counts, FEW_SERVERS)
    for _ in range(STEP_COUNT):
        counts.add(step(skew, rng))
    agree_in_one_process([hot])
    assert coverage(skew, hot.slots) > law(skew)[0][:HOT_ROWS].sum() - points
    assert counts.nbytes <= (2 << 20) + 12 * 4 * HOT_ROWS


def test_hysteresis_changes_a_quarter_of_the_rows_for_the_same_coverage():
    rng, skew = np.random.default_rng(5), 1.05
    counts = DecayedCounts(ROWS)
    sets = [HotSet(counts, FEW_SERVERS, rule) for rule in (HotRule(enter=1, leave=1), HotRule())]
    changed = np.zeros(2)
    for number in range(40):
        counts.add(step(skew, rng))
        for place, hot in enumerate(sets):
            change = agree_in_one_process([hot])
            changed[place] += (number >= 20) * (len(change.enter) + len(change.leave))
    assert changed[0] > 4 * changed[1] > 0
    plain, steady = (coverage(skew, hot.slots) for hot in sets)
    assert steady == pytest.approx(plain, abs=0.005)


# ---- several owners ----


@pytest.mark.parametrize("owners", [1, 3])
def test_all_owners_hold_what_was_agreed(owners):
    rng = np.random.default_rng(6)
    rule = HotRule(most=500)
    parts = [DecayedCounts(half_life_touches=1e5 / owners) for _ in range(owners)]
    sets = [
        HotSet(counts, FEW_SERVERS, rule, owner, keys_of=lambda slots, owner=owner: slots * owners + owner)
        for owner, counts in enumerate(parts)
    ]
    listed = np.zeros(0, np.int64)
    for _ in range(6):
        for _ in range(8):
            keys = np.unique(rng.zipf(1.3, 3000) % 100_000)
            for owner, counts in enumerate(parts):
                counts.add(keys[keys % owners == owner] // owners)
        change = agree_in_one_process(sets)
        assert not np.isin(change.enter, listed).any() and np.isin(change.leave, listed).all()
        listed = np.union1d(np.setdiff1d(listed, change.leave), change.enter)
        held = np.sort(np.concatenate([hot.slots * owners + hot.owner for hot in sets]))
        assert held.tolist() == listed.tolist()
        assert len(listed) == change.size <= 500
        assert {hot.size for hot in sets} == {change.size}
    assert change.size == change.decision.hot == 500


def test_sharding_changes_hardly_any_row():
    rng, keys_of_steps = np.random.default_rng(8), []
    for _ in range(30):
        keys_of_steps.append(np.unique(rng.zipf(1.2, 5000) % 50_000))
    found = []
    for owners in (1, 4):
        parts = [DecayedCounts(half_life_touches=np.inf) for _ in range(owners)]
        sets = [HotSet(counts, FEW_SERVERS, HotRule(most=300), owner, keys_of=lambda slots, n=owners, o=owner: slots * n + o)
                for owner, counts in enumerate(parts)]  # fmt: skip
        for keys in keys_of_steps:
            for owner, counts in enumerate(parts):
                counts.add(keys[keys % owners == owner] // owners)
        found.append((np.sort(agree_in_one_process(sets).enter), sets[0].size))
    assert found[0][0].tolist() == found[1][0].tolist()  # nothing fades: the counts are the same


# ---- the rule ----


def test_with_a_shard_on_every_rank_no_row_is_hot_and_hot_ones_leave():
    rng, counts = np.random.default_rng(9), DecayedCounts()
    hot = HotSet(counts, FEW_SERVERS, HotRule(most=1000, pays_from=1.2))
    for _ in range(20):
        counts.add(np.unique(rng.zipf(1.2, 5000) % 50_000))
    assert agree_in_one_process([hot]).size == 1000
    hot.cost = ON_RANKS
    change = agree_in_one_process([hot])
    assert change.size == 0 and len(change.leave) == 1000 and len(hot.slots) == 0
    assert change.decision.hot == 0 and change.decision.gain < PAYS_FROM


def test_h_by_the_histogram_is_that_of_the_simulators_bytes():
    from tacit.sim.popularity import zipf
    from tacit.sim.row_packets import RowFraming
    from tacit.sim.rows import PAYS_FROM as SIMULATED
    from tacit.sim.rows import rows_cost

    assert SIMULATED == PAYS_FROM
    for world, servers in ((4, 1), (8, 2), (8, 1)):
        found = rows_cost(zipf(1.05), world=world, servers=servers, headers=False, hot_steps=4)
        job, touched = found.job, found.touched
        assert job.framing == RowFraming(headers=False)
        cost = HotCost(world, job.ratio, job.hot_nbytes, job.cold_nbytes, job.touch_bits / 8)
        hot = np.concatenate(([0.0], 2 ** np.arange(8, 22, 0.25)))
        cold = (touched.unique[-1] - np.interp(hot, touched.rows, touched.unique)) * job.cold_nbytes
        lanes = np.interp(hot, touched.rows, touched.union) * job.hot_nbytes + hot * job.touch_bits / 8
        step = np.maximum(2 * job.ratio * cold, lanes + 2 * cold)
        rank_steps = 1e6
        with np.errstate(divide="ignore"):
            expected = -np.expm1(LOOK_UPS * np.log1p(-law(1.05)[0])) * rank_steps
        decision = decide(
            CountSteps().histogram(expected), expected.sum(), rank_steps, cost, HotRule(most=ROWS)
        )
        assert decision.hot == pytest.approx(hot[step.argmin()], rel=0.5)  # steps of sqrt(2) in counts
        assert decision.gain == pytest.approx(step[0] / step.min(), rel=0.05)
        assert decision.gain == pytest.approx(found.on_servers.gain, rel=0.05)


def test_the_threshold_is_the_count_of_the_last_hot_row():
    counts = np.random.default_rng(10).pareto(1.0, 100_000) + 1
    histogram = CountSteps().histogram(counts)
    assert histogram.sum() == len(counts) and len(histogram) == STEPS
    decision = decide(histogram, 10 * counts.sum(), counts.max(), FEW_SERVERS, HotRule(most=777, pays_from=0))
    assert decision.hot == 777
    steps = CountSteps()
    inside = counts[(counts >= steps.edge(decision.step)) & (counts < steps.edge(decision.step + 1))]
    limit = threshold(decision, steps.inside(decision.step).histogram(inside))
    exact = np.sort(counts)[-777]
    assert exact / 1.006 < limit <= exact
    assert 777 <= (counts >= limit).sum() < 790


def test_a_gain_near_the_limit_does_not_empty_and_fill_the_list():
    histogram = CountSteps().histogram(np.full(1000, 100.0))
    gains = [
        decide(histogram, total, 1e3, FEW_SERVERS, HotRule(pays_from=0)).gain for total in (3e6, 1.8e6, 1e6)
    ]
    assert gains[0] < 1.05 < gains[1] < PAYS_FROM < gains[2]
    for size, hot in ((0, [0, 0, 1000]), (1000, [0, 1000, 1000])):
        found = [
            decide(histogram, total, 1e3, FEW_SERVERS, HotRule(), size).hot for total in (3e6, 1.8e6, 1e6)
        ]
        assert found == hot


def test_nothing_counted_is_nothing_hot():
    hot = HotSet(DecayedCounts(), FEW_SERVERS)
    change = agree_in_one_process([hot])
    assert change.size == change.decision.hot == 0 and change.threshold == np.inf
    hot = HotSet(DecayedCounts(10), FEW_SERVERS, HotRule(most=0))
    hot.counts.add([1, 2, 2, 2])
    assert agree_in_one_process([hot]).size == 0


def test_a_rule_that_would_flutter_is_refused():
    for options in ({"enter": 0.9}, {"leave": 1.1}, {"leave": 0}, {"enter": np.nan}, {"most": -1}):
        with pytest.raises(ConfigError):
            HotRule(**options)
