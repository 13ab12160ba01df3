"""The verdict is one honest sentence: it names the winner, both rivals, and everything that weakens the claim."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.lab_sample import CNN, MBIT, write_costs, write_run
from report.model.test_comparisons import run_of, timed, trained

from tacit.report.model.comparisons import comparisons
from tacit.report.model.runs import Run, of_records
from tacit.report.model.verdicts import finding, verdicts

DDP, BF16, HUSH = "plain DDP", "DDP bf16 hook", "every / hush / sharded"


def said(run: Run) -> list[str]:
    return verdicts(run, comparisons([run]))


def judged(plain: float, half: float, hush: float, **more: object) -> str:
    """The sentence over three configurations with these step times, each trained to the target in 100 steps."""
    steps = {DDP: plain, BF16: half, HUSH: hush}
    records = [timed(name, step, baseline=name != HUSH, tuned=True, **more) for name, step in steps.items()]
    (sentence,) = said(run_of(*records, *(trained(name, 100, metric="accuracy") for name in steps)))
    return sentence


def test_a_win_is_told_against_tuned_fp32_and_against_bf16() -> None:
    assert judged(4.0, 2.0, 1.0) == (
        "To 90.0 % accuracy on w, at 100 Mbit “every / hush / sharded” is fastest: 4.00× as fast as tuned fp32 DDP, "
        "2.00× as fast as bf16."
    )


def test_where_bf16_wins_it_says_so_and_names_the_best_strategy() -> None:
    sentence = judged(4.0, 1.0, 2.0)
    assert (
        "bf16 wins (“DDP bf16 hook”): 4.00× as fast as tuned fp32 DDP, 2.00× as fast as tacit's best"
        in sentence
    )


def test_where_plain_ddp_wins_it_says_so() -> None:
    sentence = judged(1.0, 1.5, 2.0)
    assert (
        "uncompressed DDP wins (“plain DDP”): 1.50× as fast as bf16, 2.00× as fast as tacit's best"
        in sentence
    )


def test_a_difference_of_one_percent_is_level() -> None:
    assert "level with bf16" in judged(4.0, 1.01, 1.0)


def test_seeds_that_overlap_are_said_to() -> None:
    steps = [trained(name, count, seed) for name, counts in ((DDP, (90, 100, 110)), (HUSH, (80, 90, 120)))
             for seed, count in enumerate(counts)]  # fmt: skip
    (sentence,) = said(run_of(timed(DDP, 1.0, baseline=True), timed(HUSH, 1.0), *steps))
    assert "1.11× as fast as fp32 DDP (spreads overlap)" in sentence and "without bf16 beside it" in sentence


def test_step_time_alone_is_named_as_such_and_replay_and_scale_too() -> None:
    (sentence,) = said(
        run_of(
            timed(DDP, 2.0, baseline=True, replayed=True, scale=0.1),
            timed(HUSH, 1.0, replayed=True, scale=0.1),
        )
    )
    assert sentence.startswith("By step time on w, replayed, scaled to 1/10 (accuracy was not measured), ")


def test_an_unshaped_network_is_named() -> None:
    assert "over loopback, unshaped," in judged(4.0, 2.0, 1.0, shaped=False)


def test_where_calibration_refused_nothing_is_claimed(tmp_path: Path) -> None:
    run = of_records(write_run(tmp_path / "r.jsonl", refused=(100 * MBIT,), workloads=(CNN,)))
    (sentence,) = said(run)
    assert (
        "at 100 Mbit calibration refused the network, so nothing is claimed there; at 200 Mbit and 1 Gbit"
        in sentence
    )
    assert [finding(comparison).winner is None for comparison in comparisons([run])] == [True, False, False]
    refused = of_records(
        write_run(tmp_path / "s.jsonl", refused=(100 * MBIT,), rates=(100 * MBIT,), workloads=(CNN,))
    )
    assert said(refused)[0].startswith(
        "Calibration refused the network at 100 Mbit: it was not what it claims"
    )
    bare = of_records(
        write_run(tmp_path / "t.jsonl", refused=(100 * MBIT,), rates=(100 * MBIT,), workloads=())
    )
    assert said(bare)[0].startswith("Calibration refused") and "nothing is claimed" in said(bare)[0]


def test_a_job_that_calibration_kept_from_running_is_named_beside_those_that_ran() -> None:
    refused = {"kind": "refused", "job": "other", "rate_bps": 5e8, "why": "not what it claims"}
    failed = {"kind": "calibration", "job": "other", "rate_bps": 5e8, "passed": False, "rows": []}
    first, second = said(run_of(timed(DDP, 2.0, baseline=True), timed(HUSH, 1.0), failed, refused))
    assert "“every / hush / sharded” is fastest" in first
    assert second.startswith("Calibration refused the network (other at 500 Mbit): it was not what it claims")


def test_fp32_is_called_tuned_only_where_its_buckets_were() -> None:
    times = [timed(DDP, 2.0, baseline=True, bucket_nbytes=1 << 20), timed(HUSH, 1.0)]
    assert "as fast as fp32 DDP" in said(run_of(*times))[0]
    assert "as fast as tuned fp32 DDP" in said(run_of(*times, {"kind": "tuning", "job": "j"}))[0]


def test_trainings_without_a_target_rank_nobody() -> None:
    (sentence,) = said(run_of(timed(DDP, 2.0, baseline=True), trained(DDP, None, target=None)))
    assert sentence.startswith("By step time on w (no target was set for accuracy)")


def test_a_fast_configuration_that_missed_the_target_is_named_and_not_crowned(tmp_path: Path) -> None:
    first, second = said(of_records(write_run(tmp_path / "r.jsonl")))
    assert first.startswith(
        "To 88.5 % test accuracy on fashion-mnist cnn, from 100 Mbit to 1 Gbit “every / hush / sharded”"
    )
    assert first.endswith("“DDP PowerSGD rank 2” steps faster but missed that target.")
    assert "1.41× to 3.26× as fast as tuned fp32 DDP, 1.14× to 1.86× as fast as bf16" in first
    assert "“DDP PowerSGD rank 2” is fastest, a baseline" in second and "tacit's best" in second


def test_nobody_reached_the_target() -> None:
    (sentence,) = said(run_of(timed(DDP, 1.0, baseline=True), trained(DDP, None)))
    assert "no configuration got there with every seed" in sentence


def test_winners_that_change_with_the_rate_are_told_apart() -> None:
    records = [
        timed(name, step, rate_bps=rate, baseline=name != HUSH)
        for rate, steps in ((1e8, (4, 2, 1)), (1e9, (1.5, 1.0, 1.2)))
        for name, step in zip((DDP, BF16, HUSH), steps, strict=True)
    ]
    (sentence,) = said(run_of(*records))
    assert (
        "at 100 Mbit “every / hush / sharded” is fastest" in sentence and "; at 1 Gbit bf16 wins" in sentence
    )


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{"kind": "limits", "measured_s": 1.1, "theory_s": 1.0}], "All-reduce took 1.10× to 1.10×"),
        ([trained("a", 5)], "1 training of 1 configuration were recorded, but no step times"),
        ([{"kind": "calibration", "passed": True}], "Calibration passed; nothing else"),
    ],
)
def test_other_records_have_their_own_sentence(records: list[dict[str, object]], expected: str) -> None:
    assert said(run_of(*records))[0].startswith(expected)


def test_a_sweep_is_called_simulated(tmp_path: Path) -> None:
    (sentence,) = said(of_records(write_costs(tmp_path / "c.jsonl")))
    assert sentence.startswith(
        "Simulated, not measured: “wrht(w=64)” is the fastest schedule in 3 of 4 cases"
    )
