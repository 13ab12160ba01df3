"""Predictions from a probe that is worked out by hand."""

import pytest
from plan_probes import BF16, INT8, PLAIN, cost, probe

from tacit.errors import ConfigError
from tacit.plan import BucketSizes, RecordedStep, predict
from tacit.plan.predicting import ddp_buckets, own_buckets, tuned
from tacit.plan.values import CalibratedExchange, Curve
from tacit.sim.workloads import Layer, Workload

WORK = Workload("two", (Layer("a", 1_000_000, 0.1, 0.2), Layer("b", 1_000_000, 0.1, 0.2)), "by hand")
SMALL = BucketSizes(4_000_000, 4_000_000)  # a layer each


def only(found, work=WORK, sizes=SMALL):
    (prediction,) = predict(found, work, buckets=sizes)
    return prediction


def test_a_step_is_forward_backward_and_what_does_not_hide():
    # 4 MB take 0.4 s: bucket b from 0.4 (forward 0.2, backward 0.2) to 0.8, then a until 1.2
    plain = only(probe(PLAIN))
    assert plain.step_s == pytest.approx(1.2)
    assert (plain.compute_s, plain.wire_s, plain.limited_by) == (
        pytest.approx(0.6),
        pytest.approx(0.8),
        "wire",
    )
    assert plain.sent_nbytes == pytest.approx(2 * 1.5 * 4e6)


def test_the_optimizer_waits_for_all():
    assert only(probe(PLAIN), RecordedStep(WORK, other_s=0.5)).step_s == pytest.approx(1.7)


def test_what_encodes_and_adds_is_counted():
    # b: ready 0.4, encoded .41, sent .51, decoded .53; a: ready .6, .61, .71, .73
    assert only(probe(INT8)).step_s == pytest.approx(0.73)
    adding = cost("every / int8(block=256) / sharded", nbytes_each=1, owner_s=0.3)
    assert only(probe(adding)).step_s == pytest.approx(
        0.4 + 0.4 + 0.4
    )  # in the wire thread: the second waits for it


def test_gradients_reach_tacit_with_ddps_buckets():
    early = only(probe(INT8), sizes=BucketSizes(4_000_000, 4_000_000))
    late = only(
        probe(INT8), sizes=BucketSizes(4_000_000, 25 << 20)
    )  # nothing is ready before the end of the backward pass
    assert late.step_s == pytest.approx(0.6 + 0.01 + 0.1 + 0.1 + 0.02) and late.step_s > early.step_s


def test_a_calibration_scales_the_exchange_and_narrows_its_interval():
    found = probe(PLAIN, calibrations=(CalibratedExchange("DDP", 2.0, 1.5, 2.5, 2_000_000),))
    plain = only(found)
    assert plain.calibrated and plain.step_s == pytest.approx(0.4 + 2 * 0.8)
    assert (plain.low_s, plain.high_s) == (pytest.approx(0.4 + 1.5 * 0.8), pytest.approx(0.4 + 2.5 * 0.8))


def test_the_fastest_comes_first_and_what_was_not_measured_is_refused():
    assert [each.choice for each in predict(probe(PLAIN, BF16, INT8), WORK, buckets=SMALL)] == [
        INT8.choice,
        "DDP bf16",
        "DDP",
    ]
    with pytest.raises(ConfigError, match="has not measured 'thc'; probe again with it, or choose of DDP"):
        predict(probe(PLAIN), WORK, ["thc"])


def test_models_exchanged_between_steps_are_a_mean_with_a_caution():
    rounds = cost("local(8) / none / allreduce", nbytes_each=4, period=8.0)
    found = only(probe(rounds))
    assert found.step_s == pytest.approx(0.6 + 0.8 / 8) and "mean over 8 steps" in found.caution
    assert found.sent_nbytes == pytest.approx(2 * 1.5 * 4e6 / 8)


def test_buckets_are_cut_as_ddp_and_as_tacit_cut_them():
    layers = tuple(Layer(name, numel) for name, numel in (("a", 30), ("b", 10), ("c", 20), ("d", 5)))
    work = Workload("cut", layers, "by hand")

    def names(buckets):
        return ["".join(layer.name for layer in bucket) for bucket in buckets]

    assert names(ddp_buckets(work, BucketSizes(0, 80, 20))) == [
        "d",
        "c",
        "ba",
    ]  # closed once they hold the limit
    assert names(own_buckets(work, 100)) == ["dc", "b", "a"]  # closed before they would hold more


def test_a_curve_goes_on_straight_beyond_its_ends():
    curve = Curve((10.0, 20.0, 40.0), (1.0, 2.0, 6.0), (1.0,) * 3, (9.0,) * 3, (0.0,) * 3)
    assert [curve.at(size) for size in (0, 10, 15, 20, 30, 40, 50)] == [1, 1, 1.5, 2, 4, 6, 8]


def test_other_buckets_are_proposed_where_a_step_gains_by_them():
    late = only(probe(PLAIN), sizes=BucketSizes())  # DDP's 25 MiB hold the whole model: nothing is hidden
    assert late.step_s == pytest.approx(0.6 + 0.8)
    better = tuned(probe(PLAIN), WORK, late)
    assert better.step_s == pytest.approx(1.2) and better.buckets == BucketSizes(1 << 20, 1 << 20)
    assert tuned(probe(PLAIN), WORK, better) == better
