"""What is chosen from a probe, and what reports that a plan no longer holds: figures in, a sentence out."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from toys import WIDTH, batch, deep

from tacit.attachments.auto.choice import Choice, Expected
from tacit.attachments.auto.clock import StepClock
from tacit.attachments.auto.deciding import confirmed, contenders_for, decide
from tacit.attachments.auto.live_check import IN_A_ROW, SKIPPED, WINDOW, LiveCheck, StepParts
from tacit.attachments.auto.options import HALF, LOSSY, TRIAL, Auto
from tacit.plan.values import (
    BucketSizes,
    Curve,
    GradientError,
    OperationCurve,
    OperationUse,
    Probe,
    ProbedMachine,
    RecordedStep,
    RequestCost,
    StrategyCost,
)
from tacit.sim.workloads import Layer, Workload

INT8, INT4 = LOSSY[:2]
MEGA = 1 << 20
NUMELS = (1.0, 16.0 * MEGA)
STEP = RecordedStep(Workload("w", tuple(Layer(f"l{i}", MEGA, 0.002, 0.004) for i in range(8)), "made up"))


def straight(seconds_a_mega: float, sizes: tuple[float, ...] = NUMELS, spread: float = 0.01) -> Curve:
    middle = tuple(seconds_a_mega * size / MEGA for size in sizes)
    low, high = (tuple(f * s for s in middle) for f in (1 - spread, 1 + spread))
    return Curve(sizes, middle, low, high, tuple(0.0 for _ in sizes))


def cost(choice: str, operation: str, nbytes: float, codec_s: float) -> StrategyCost:
    """`nbytes` an element, and `codec_s` for a million elements to encode, as much to decode."""
    use = OperationUse(operation, tuple(nbytes * n for n in NUMELS))
    request = RequestCost("Sum", straight(codec_s), straight(0.0), (use,))
    sent = tuple(nbytes * n for n in NUMELS)
    return StrategyCost(choice, NUMELS, (request,), straight(codec_s), sent, choice not in (TRIAL,))


def probed(bytes_a_s: float, *, codec_s: float = 0.001, spread: float = 0.01) -> Probe:
    """A link of so many bytes a second, all operations alike."""
    sizes = (1.0, 64.0 * MEGA)
    names = ("all_reduce float32", "all_reduce bfloat16", "all_to_all long")
    link = straight(MEGA / bytes_a_s, sizes, spread)
    costs = (
        cost(TRIAL, names[0], 4.0, 0.0),
        cost(HALF, names[1], 2.0, 0.0005),
        cost(INT8, names[2], 1.0, codec_s),
        cost(INT4, names[2], 0.5, 1.2 * codec_s),
        cost(LOSSY[2], names[2], 0.5, 2 * codec_s),
    )
    machine = ProbedMachine("cpu", 2, 1 << 34, "2", 2)
    operations = tuple(OperationCurve(name, link) for name in names)
    errors = (GradientError(INT4, 0.0123),)
    return Probe(4, "gloo", "cpu", 4.0, machine, operations, costs, errors=errors)


@pytest.mark.parametrize(
    ("bytes_a_s", "lossy", "strategy"),
    [
        (10e6, True, INT4),  # the wire is everything
        (10e6, False, HALF),
        (100e9, True, TRIAL),  # nothing can be won
        (100e9, False, TRIAL),
    ],
)
def test_slow_links_get_a_codec_where_it_is_allowed_and_fast_ones_none(bytes_a_s, lossy, strategy):
    choice = decide(probed(bytes_a_s), STEP, Auto(lossy=lossy), BucketSizes(4 * MEGA, 1, None))
    assert choice.strategy == strategy and choice.how == "probed" and choice.expected is not None
    assert choice.expected.low_s <= choice.expected.step_s <= choice.expected.high_s
    if strategy == INT4:
        assert "limited by wire, bf16 would take" in choice.why
        assert "error 0.012 (NMSE) on this model's gradients: auto(lossy=False) rules it out" in choice.why


def test_where_the_intervals_of_a_codec_and_bf16_overlap_it_is_bf16():
    found = probed(500e6, codec_s=0.0015, spread=0.2)
    assert decide(found, STEP, Auto(), BucketSizes(4 * MEGA, 1, None)).strategy in (HALF, TRIAL)


def test_where_operations_cost_latency_buckets_are_ddps_own_and_no_larger():
    found, sizes = probed(100e9), (1.0, 64.0 * MEGA)
    latency = Curve(sizes, (0.01, 0.0101), (0.0099, 0.01), (0.0101, 0.0102), (0.0, 0.0))
    operations = tuple(replace(each, curve=latency) for each in found.operations)
    slow = replace(found, operations=operations)
    assert (
        decide(slow, STEP, Auto(lossy=False), BucketSizes(4 * MEGA, 7 * MEGA, None)).bucket_nbytes == 7 * MEGA
    )


def test_what_is_tried_is_the_choice_its_bucket_as_asked_and_what_it_must_beat():
    choice = Choice(INT4, 4 * MEGA, "probed", "")
    tried = [(each.strategy, each.bucket_nbytes) for each in contenders_for(choice, MEGA)]
    assert tried == [(INT4, 4 * MEGA), (INT4, MEGA), (HALF, 4 * MEGA)]
    tried = [each.strategy for each in contenders_for(replace(choice, strategy=HALF), 4 * MEGA)]
    assert tried == [HALF, TRIAL]


@pytest.mark.parametrize(
    ("first", "measured_s", "strategy", "nbytes"),
    [
        (INT4, (0.10, 0.12, 0.20), INT4, 4 * MEGA),
        (INT4, (0.12, 0.10, 0.20), INT4, MEGA),
        (INT4, (0.199, 0.21, 0.20), HALF, 4 * MEGA),  # as fast as bf16, which loses less
        (INT4, (0.30, 0.31, 0.20), HALF, 4 * MEGA),
        (HALF, (0.20, 0.21, 0.19), TRIAL, 4 * MEGA),
        (HALF, (0.20, 0.19, 0.21), HALF, MEGA),
    ],
)
def test_steps_of_the_training_confirm_or_refute_the_choice(first, measured_s, strategy, nbytes):
    expected = Expected(0.1, 0.09, 0.11, 0.05, 0.05, 0.01)
    contenders = contenders_for(Choice(first, 4 * MEGA, "probed", "limited by wire", expected), MEGA)
    found = confirmed(contenders, measured_s)
    assert (found.strategy, found.bucket_nbytes) == (strategy, nbytes)
    assert (
        f"measured {min(measured_s) * 1e3:.0f} ms a step" in found.why
        or "measured 200 ms a step" in found.why
    )
    if found.expected is not None:  # what was measured, in an interval as wide
        assert found.expected.step_s == measured_s[0 if nbytes == 4 * MEGA else 1]
        assert found.expected.high_s == pytest.approx(1.1 * found.expected.step_s)
    assert (found.expected is None) == (strategy != first) == ("was to be faster and is not" in found.why)


def test_a_choice_is_read_as_it_was_kept_and_nothing_else_is():
    kept = Choice(HALF, 4 * MEGA, "probed", "because", Expected(0.1, 0.09, 0.12, 0.05, 0.06, 0.01), 2.0)
    assert Choice.read(kept.as_plain()) == kept
    plain = kept.as_plain()
    for wrong in (
        None,
        [],
        {},
        {**plain, "more": 1},
        {**plain, "bucket_nbytes": "4MiB"},
        {**plain, "bucket_nbytes": 0},
        {**plain, "strategy": "every / nothing"},
        {**plain, "strategy": "local(8) / int8 / sharded"},  # not between two steps of a training
        {**plain, "strategy": 5},
        {**plain, "start_up_s": "x"},
        {**plain, "expected": {**plain["expected"], "step_s": "x"}},
    ):
        assert Choice.read(wrong) is None


# ---- the model's own step


def test_a_step_that_is_timed_in_training_adds_up_and_has_every_parameter():
    model = deep(layers=4)
    parameters = dict(model.named_parameters())
    clock = StepClock(model, parameters, torch.device("cpu"))
    for step in range(4):
        time.sleep(0.02)  # the optimizer's place
        x, label = batch(0, step)
        model(x)  # a pass that nobody learns from
        torch.nn.functional.cross_entropy(model(x), label).backward()
        clock.computed()
        clock.ended()
    found, totals = clock.recorded()
    clock.close()
    layers = found.workload.layers
    assert [layer.name for layer in layers] == list(parameters)
    assert found.workload.parameters == sum(p.numel() for p in parameters.values()) > WIDTH
    assert found.other_s >= 0.02 and found.workload.backward_s > 0 and found.workload.forward_s > 0
    assert len(totals) == 4 and min(totals) > 0
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks) and not model._forward_hooks and not model._forward_pre_hooks


def test_a_module_whose_hooks_are_not_called_counts_its_forward_pass_to_the_rest():
    model = deep(layers=1)
    inside = model[0]  # as a compiled module does, `model` itself is not called
    clock = StepClock(model, dict(model.named_parameters()), torch.device("cpu"))
    for step in range(3):
        x, label = batch(0, step)
        torch.nn.functional.cross_entropy(model[1](inside(x)), label).backward()
        clock.computed()
        clock.ended()
    found, _totals = clock.recorded()
    assert found.workload.forward_s == 0 and found.workload.backward_s > 0 and found.other_s > 0
    clock.close()


# ---- whether a plan holds

USUAL = StepParts(step_s=0.100, own_s=0.060, wire_s=0.040, codec_s=0.010)


def judged(changed: StepParts | list[StepParts], windows: int = IN_A_ROW, world: int = 4, expected=None):
    """What is reported after a first window as usual and `windows` changed ones."""
    live = LiveCheck(expected)
    found = [live.judge([USUAL] * world, 100)]
    ranks = changed if isinstance(changed, list) else [changed] * world
    found += [live.judge(ranks, 120 + 20 * number) for number in range(windows)]
    return [drift for drift in found if drift is not None]


@pytest.mark.parametrize(
    ("now", "part", "cause"),
    [
        (StepParts(0.150, 0.060, 0.090, 0.010), "wire", "the link is slower, or somebody shares it"),
        (StepParts(0.070, 0.060, 0.010, 0.010), "wire", "the link is faster"),
        (
            StepParts(0.150, 0.110, 0.040, 0.010),
            "compute",
            "every rank computes longer, as with another batch size",
        ),
        (
            StepParts(0.060, 0.025, 0.038, 0.010),
            "compute",
            "every rank computes shorter, as with another batch size",
        ),
        (StepParts(0.150, 0.110, 0.045, 0.030), "compute", "so other work shares the cores"),
        (StepParts(0.150, 0.065, 0.045, 0.060), "codec", "so other work shares the cores"),
    ],
)
def test_the_part_that_changed_is_named_once(now, part, cause):
    (drift,) = judged(now, windows=6)
    assert drift.part == part and cause in drift.sentence
    assert drift.sentence.startswith("step 140: a step takes") and drift.sentence.endswith(
        "handle.replan() chooses anew"
    )
    assert (drift.expected_s, drift.measured_s) == (USUAL.step_s, now.step_s)


def test_one_slow_rank_is_named_and_not_the_link_on_which_the_others_wait():
    waits = StepParts(0.150, 0.060, 0.090, 0.010)
    slow = StepParts(0.150, 0.110, 0.040, 0.010)
    (drift,) = judged([waits, waits, slow, waits])
    assert (
        drift.part == "compute"
        and "rank 2 computes longer than it did, and the others wait for it" in drift.sentence
    )


@pytest.mark.parametrize(
    ("now", "windows"),
    [
        (StepParts(0.115, 0.065, 0.045, 0.012), 5),  # as usual
        (StepParts(0.400, 0.060, 0.300, 0.010), IN_A_ROW - 1),  # one window alone
    ],
)
def test_what_is_usual_and_what_passes_is_not_reported(now, windows):
    assert judged(now, windows) == []


def test_windows_that_are_longer_and_shorter_in_turn_are_no_change():
    live, longer = LiveCheck(None), StepParts(0.150, 0.110, 0.040, 0.010)
    live.judge([USUAL], 100)
    shorter = StepParts(0.060, 0.025, 0.038, 0.010)
    assert [live.judge([ranks], 120) for ranks in (longer, shorter, longer, shorter)] == [None] * 4
    drift = live.judge([shorter], 200)
    assert drift is not None and drift.measured_s == shorter.step_s


def test_a_first_window_that_is_not_as_predicted_is_reported_with_its_part():
    expected = Expected(0.070, 0.065, 0.075, 0.058, 0.012, 0.010)
    (drift,) = judged(USUAL, expected=expected)
    assert drift.part == "wire" and (drift.expected_s, drift.measured_s) == (0.070, 0.100)
    assert (
        "a step takes 100 ms and the plan expected 70 ms (65 ms to 75 ms); most of it is wire: 40 ms against 12 ms"
        in drift.sentence
    )
    assert judged(USUAL, expected=Expected(0.090, 0.080, 0.100, 0.058, 0.03, 0.010)) == []


def test_a_window_is_the_median_of_its_steps_after_the_first_few():
    live = LiveCheck(None)
    for _ in range(SKIPPED):
        assert live.add(StepParts(9.0, 9.0, 9.0, 9.0)) is None
    found = [live.add(StepParts(0.1 + 0.001 * number, 0.06, 0.04, 0.01)) for number in range(WINDOW)]
    assert found[:-1] == [None] * (WINDOW - 1)
    assert found[-1].step_s == pytest.approx(0.1095)
