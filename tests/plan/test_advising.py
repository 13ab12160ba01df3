"""What is advised: the fastest, unless what loses less is as fast as far as one can tell."""

from dataclasses import replace

import pytest
from plan_probes import BF16, INT8, PLAIN, probe

from tacit.errors import ConfigError
from tacit.plan import BucketSizes, Prediction, advise
from tacit.plan.values import PairRates

CODEC = INT8.choice
FOUND = probe(PLAIN, BF16, INT8)


def told(choice, step_s, spread=0.02, compute_s=0.5, **more):
    return Prediction(
        choice,
        step_s,
        step_s * (1 - spread),
        step_s * (1 + spread),
        compute_s,
        0.1,
        0.1,
        "wire",
        1e6,
        BucketSizes(),
        **more,
    )


def test_a_codec_that_is_clearly_faster_is_advised_with_its_risk_and_its_line():
    found = advise(FOUND, [told("DDP", 2.0), told("DDP bf16", 1.4), told(CODEC, 1.0, nmse=1e-4)])
    assert found.winner.choice == CODEC and found.verdict.startswith(
        f"use {CODEC}: limited by the wire, a step takes 1 s, 1.40 x"
    )
    assert "not judged on your task" in found.risk and "NMSE" in found.risk
    assert found.runner_up.choice == "DDP bf16" and found.margin == pytest.approx(0.4)
    assert found.margin_low == pytest.approx(1.372 / 1.02 - 1)
    assert (
        f'tacit.attach(model, optimizer, "{CODEC}", bucket="4MiB")' in found.line
        and "bucket_cap_mb=25" in found.line
    )


def test_where_intervals_overlap_bf16_is_advised():
    found = advise(FOUND, [told("DDP", 2.0), told("DDP bf16", 1.08, 0.05), told(CODEC, 1.0, 0.05)])
    assert found.winner.choice == "DDP bf16" and found.fastest.choice == CODEC
    assert "would bring 7 %, which the probe cannot tell from none" in found.verdict
    assert "lambda state, bucket: default_hooks.bf16_compress_hook" in found.line  # gloo


def test_a_codec_that_is_hardly_faster_is_not_worth_its_risk_however_narrow_the_intervals():
    found = advise(FOUND, [told("DDP", 2.0), told("DDP bf16", 1.04, 0.001), told(CODEC, 1.0, 0.001)])
    assert found.winner.choice == "DDP bf16"
    assert "would bring 4 %, too little for what it may cost in accuracy" in found.verdict
    assert advise(FOUND, [told("DDP bf16", 1.06, 0.001), told(CODEC, 1.0, 0.001)]).winner.choice == CODEC


def test_what_torch_has_itself_wins_where_it_is_as_fast():
    ours = told("every / bf16 / allreduce", 1.0)
    assert advise(FOUND, [ours, told("DDP bf16", 1.04), told("DDP", 2.0)]).winner.choice == "DDP bf16"
    assert advise(FOUND, [ours, told("DDP bf16", 1.07), told("DDP", 2.0)]).winner is ours


def test_a_wide_interval_does_not_make_a_slow_choice_as_good():
    assert advise(FOUND, [told("DDP bf16", 1.3, 0.5), told(CODEC, 1.0, 0.5)]).winner.choice == CODEC


def test_plain_ddp_is_advised_where_its_exchange_is_hidden():
    found = advise(
        FOUND, [told("DDP", 1.01, compute_s=1.0), told("DDP bf16", 1.0, compute_s=1.0), told(CODEC, 1.2)]
    )
    assert (
        found.winner.choice == "DDP"
        and "hides behind the computation, and no codec would be faster" in found.verdict
    )
    assert found.risk == "none: the numbers are sent as they are"


def test_who_wants_nothing_lossy_gets_a_cast_at_most():
    choices = [told("DDP", 2.0), told("every / bf16 / allreduce", 1.4), told(CODEC, 1.0)]
    assert advise(FOUND, choices, lossy=False).winner.choice == "every / bf16 / allreduce"


def test_rules_that_exchange_less_often_are_never_advised():
    found = advise(FOUND, [told("local(8) / none / allreduce", 0.1), told("DDP", 1.0)])
    assert found.winner.choice == "DDP" and found.predictions[0].choice.startswith("local")
    with pytest.raises(ConfigError, match="no choice to advise on"):
        advise(FOUND, [told("local(8) / none / allreduce", 0.1)])


def test_a_shared_uplink_is_noted():
    shared = probe(PLAIN)
    shared = type(shared)(
        **{name: getattr(shared, name) for name in shared.__slots__} | {"alone_bps": 4 * shared.at_once_bps}
    )
    assert "4.0 x as fast" in advise(shared, [told("DDP", 1.0)]).notes[0]


def test_a_link_that_is_slower_than_most_is_named():
    slow = replace(FOUND, pairs=PairRates(8e9, 8e8, 1, 2))
    notes = advise(slow, [told("DDP", 1.0)]).notes
    assert "from rank 1 to rank 2 go 100 MB/s and between most pairs 1 GB/s" in notes[0]
    assert not advise(replace(FOUND, pairs=PairRates(8e9, 6e9, 1, 2)), [told("DDP", 1.0)]).notes


def test_a_codec_whose_trainings_nobody_has_on_file_is_advised_only_where_there_is_no_other():
    fast, slow = told("every / dgc(share=0.001) / sharded", 0.5), told("DDP", 2.0)
    assert advise(FOUND, [slow, told(CODEC, 1.0), fast]).winner.choice == CODEC
    assert advise(FOUND, [slow, fast]).winner is fast
