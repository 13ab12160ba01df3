"""Step times and trainings become standings: time to accuracy = steps to the target x median step."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from report import lab_sample as lab
from report.lab_sample import (
    BF16,
    CNN,
    CONFIGURATIONS,
    FP32,
    HUSH,
    MBIT,
    POWER,
    VGG,
    accuracy,
    step_s,
    write_run,
)

from tacit.records import Record
from tacit.report.figures.lab import training_parts
from tacit.report.model import tables
from tacit.report.model.comparisons import Comparison, Standing, comparisons, families
from tacit.report.model.runs import Run, load, of_records


def run_of(*records: Record, label: str = "made") -> Run:
    return Run(label, f"id-{label}", "", tuple({"time": 1.0, "run": f"id-{label}", **r} for r in records))


def timed(name: str, step: float, **more: object) -> Record:
    fields = {
        "workload": "w",
        "job": "j",
        "configuration": name,
        "step_p50_s": step,
        "rate_bps": 1e8,
        "shaped": True,
    }
    return {"kind": "timing", **fields, **more}


def trained(name: str, steps: float | None, seed: int = 0, **more: object) -> Record:
    fields = {"workload": "w", "configuration": name, "seed": seed, "target": 0.9, "steps_to_target": steps}
    return {"kind": "accuracy", **fields, **more}


def standing(comparison: Comparison, name: str) -> Standing:
    return next(s for s in comparison.standings if s.name == name)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> list[Comparison]:
    path = tmp_path_factory.mktemp("lab") / "records.jsonl"
    write_run(path)
    return comparisons(load([path]))


def test_a_comparison_is_one_workload_at_one_rate_and_rates_rise(sample: list[Comparison]) -> None:
    rates = [100 * MBIT, 200 * MBIT, 1000 * MBIT]
    assert [(c.workload, c.first.rate_bps) for c in sample] == [(w, r) for w in (CNN, VGG) for r in rates]
    assert all([s.name for s in c.standings] == list(CONFIGURATIONS) for c in sample)
    assert [len(family) for family in families(sample)] == [3, 3]
    assert sample[0].link == "100 Mbit" and sample[2].link == "1 Gbit"


def test_time_to_accuracy_is_steps_to_target_times_the_median_step(sample: list[Comparison]) -> None:
    steps = [accuracy(HUSH, seed)["steps_to_target"] for seed in lab.SEEDS]
    step = step_s(CNN, HUSH, 100 * MBIT)
    spread = standing(sample[0], HUSH).to_target
    assert spread is not None and spread.n == 3
    assert spread.p50 == pytest.approx(median(steps) * step)
    assert (spread.least, spread.most) == pytest.approx((min(steps) * step, max(steps) * step))


def test_ratios_are_against_fp32_and_bf16_of_the_same_comparison(sample: list[Comparison]) -> None:
    comparison = sample[0]
    hush, fp32, bf16 = (standing(comparison, name) for name in (HUSH, FP32, BF16))
    assert comparison.fp32 is fp32 and comparison.bf16 is bf16
    assert hush.to_target and fp32.to_target and bf16.to_target
    assert comparison.ratio(hush, fp32) == pytest.approx(fp32.to_target.p50 / hush.to_target.p50)
    assert comparison.ratio(hush, bf16) == pytest.approx(bf16.to_target.p50 / hush.to_target.p50)
    assert hush.speedup == pytest.approx(step_s(CNN, FP32, 1e8) / step_s(CNN, HUSH, 1e8))


def test_a_configuration_that_missed_the_target_with_one_seed_has_no_time(sample: list[Comparison]) -> None:
    power = standing(sample[0], POWER)
    assert power.reached == 0 and power.to_target is None and sample[0].time_s(power) is None
    assert power not in sample[0].ranked()
    one_missing = comparisons([run_of(timed("a", 1.0), trained("a", 10, 0), trained("a", None, 1))])[0]
    assert one_missing.standings[0].reached == 1 and one_missing.standings[0].to_target is None


def test_without_trainings_the_step_ranks(sample: list[Comparison]) -> None:
    vgg = sample[3]
    assert vgg.trained is None and vgg.first.replayed and vgg.first.scale == 0.1
    assert [s.name for s in vgg.ranked()][:2] == [POWER, HUSH]


def test_the_tuned_baseline_is_the_fastest_of_several_buckets() -> None:
    found = comparisons(
        [
            run_of(
                timed("plain DDP, 25 MB", 2.0, baseline=True),
                timed("plain DDP, 1 MB", 1.5, baseline=True),
                timed("DDP bf16 hook", 1.2, baseline=True),
                timed("every / none / allreduce", 1.0),
                timed("every / ef(bf16) / sharded", 0.9),
            )
        ]
    )[0]
    assert found.fp32 and found.fp32.name == "plain DDP, 1 MB"
    assert found.bf16 and found.bf16.name == "DDP bf16 hook"


def test_trainings_of_another_world_or_target_are_not_joined() -> None:
    run = run_of(
        timed("a", 1.0, ranks=8),
        timed("b", 2.0, ranks=8),
        trained("a", 10, 0, ranks=4),
        trained("b", 10, 0, ranks=8),
        trained("b", 12, 1, ranks=8),
        trained("b", 99, 2, ranks=8, target=0.99),
    )
    comparison = comparisons([run])[0]
    assert standing(comparison, "a").seeds == ()
    assert [seed.steps_to_target for seed in standing(comparison, "b").seeds] == [10, 12]


def test_trainings_of_another_run_serve_a_run_that_has_none() -> None:
    times = run_of(timed("a", 0.5), label="times")
    accurate = run_of(trained("a", 10), trained("a", 14, 1), trained("a", 30, 2), label="accuracy")
    spread = comparisons([times, accurate])[0].standings[0].to_target
    assert spread is not None and (spread.p50, spread.least, spread.most, spread.n) == (7.0, 5.0, 15.0, 3)


def test_a_rate_that_calibration_refused_is_not_trusted() -> None:
    calibrated = [{"kind": "calibration", "rate_bps": 1e8, "passed": False, "rows": []}]
    calibrated += [{"kind": "calibration", "rate_bps": 2e8, "passed": True, "rows": []}]
    found = comparisons([run_of(*calibrated, timed("a", 1.0), timed("a", 0.5, rate_bps=2e8))])
    assert [(c.link, c.trusted) for c in found] == [("100 Mbit", False), ("200 Mbit", True)]
    other_job = {"kind": "calibration", "job": "k", "rate_bps": 1e8, "passed": False}
    assert comparisons([run_of(other_job, timed("a", 1.0))])[0].trusted


def test_records_that_lack_everything_optional_still_stand() -> None:
    bare = {"kind": "timing", "configuration": "a", "step_p50_s": 1.0}
    broken = {"kind": "timing", "configuration": "b", "step_p50_s": None}
    odd = {
        "kind": "timing",
        "configuration": "c",
        "step_p50_s": 2.0,
        "rate_bps": "fast",
        "split": 3,
        "ranks": True,
    }
    comparison = comparisons(
        [run_of(bare, broken, odd, {"kind": "accuracy", "workload": "?", "curve": [[1], "x", [2, None]]})]
    )[0]
    assert [s.name for s in comparison.standings] == ["a", "c"]
    assert comparison.link == "loopback, unshaped" and comparison.fp32 is None


def test_what_the_training_thread_does_adds_up_to_the_step(sample: list[Comparison]) -> None:
    for comparison in sample:
        for each in comparison.standings:
            parts = training_parts(each)
            assert sum(parts.values()) == pytest.approx(each.timing.step_p50_s)
            assert all(seconds >= 0 for seconds in parts.values())


def test_rows_tell_limits_predictions_and_calibration(tmp_path: Path) -> None:
    run = of_records(write_run(tmp_path / "r.jsonl", rates=(100 * MBIT,)))
    limit = tables.limit_rows(run)[1]
    assert limit["theory_s"] == pytest.approx(8 * 1.5 * 10e6 / 1e8) and limit["ratio"] == pytest.approx(
        1.046, rel=0.01
    )
    assert limit["unexplained"] == pytest.approx(0.003, rel=0.01)
    assert tables.calibration_rows(run)[0]["ratio"] == pytest.approx(1.021)
    assert tables.drop_rows(run) == []
    predicted = tables.prediction_rows(comparisons([run]))
    assert len(predicted) == 12 and max(abs(row["error"]) for row in predicted) <= 0.07
    assert POWER not in {row["configuration"] for row in predicted}


def test_a_row_of_calibration_has_its_own_verdict_limits_and_attempts() -> None:
    rows = [
        {"nbytes": 1, "measured_s": 2.0, "theory_s": 2.0, "least_s": 1.5, "most_s": 2.5, "passed": True},
        {"nbytes": 2, "measured_s": 9.0, "theory_s": 4.0, "least_s": 3.5, "most_s": 4.5, "passed": False},
        {"nbytes": 3, "measured_s": 9.0, "theory_s": 4.0, "least_s": 3.5, "most_s": None, "passed": True},
        {"nbytes": 4, "measured_s": 4.0, "theory_s": 4.0},  # as older records have it
    ]
    record = {"kind": "calibration", "rate_bps": 1e8, "passed": False, "attempts": 3, "rows": rows}
    told = tables.calibration_rows(run_of(record))
    assert [row["passed"] for row in told] == [True, False, True, False]
    assert [(row["least_s"], row["most_s"]) for row in told] == [
        (1.5, 2.5),
        (3.5, 4.5),
        (3.5, None),
        (None, None),
    ]
    assert {(row["attempts"], row["network_passed"]) for row in told} == {(3, False)}


def test_drops_are_told_by_link_and_in_one_sentence() -> None:
    record = {"kind": "counters", "job": "j", "rate_bps": 1e8, "nodes": lab.counters(1200)}
    quiet = {"kind": "counters", "job": "k", "rate_bps": 1e8, "nodes": lab.counters(0)}
    odd = {"kind": "counters", "job": "l", "nodes": {"h0": 3, "h1": {"eth0": None}}}
    rows = tables.drop_rows(run_of(record, quiet, odd))
    assert [(row["job"], row["link"], row["drops"]) for row in rows] == [
        ("j", "h0 eth0", 1200),
        ("j", "switch port0", 1199),
    ]
    said = tables.drops_text(rows)
    assert said.startswith(
        "2,399 packets were dropped at 100 Mbit (most on h0 eth0: 1,200): a queue had no room"
    )
    assert tables.drops_text(rows[:0]) == ""


def test_codec_time_at_full_size_is_what_was_measured_over_the_scale(sample: list[Comparison]) -> None:
    for comparison in sample:
        for each in comparison.standings:
            t = each.timing
            if t.split.encode_s is None or t.split.decode_s is None:
                assert t.codec_s is None and t.codec_full_s is None
            else:
                assert t.codec_full_s == pytest.approx((t.split.encode_s + t.split.decode_s) / t.scale)
    row = next(r for r in tables.standing_rows(sample) if (r["workload"], r["configuration"]) == (VGG, HUSH))
    assert row["codec_full_s"] == pytest.approx(10 * row["codec_s"]) and row["codec_s"] > 0


def test_runs_are_compared_where_workload_link_and_configuration_match(tmp_path: Path) -> None:
    for name, slower, rates in (("a", 1.0, (1e8, 2e8)), ("b", 1.5, (1e8,))):
        write_run(tmp_path / f"{name}.jsonl", slower=slower, rates=rates, workloads=(CNN,))
    found = comparisons(load([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]))
    rows = tables.compared_rows(found)
    assert [row["configuration"] for row in rows] == list(CONFIGURATIONS) and {
        row["link"] for row in rows
    } == {"100 Mbit"}
    plain = rows[0]
    assert plain["step_s"] == pytest.approx(
        {"thc (a)": step_s(CNN, FP32, 1e8), "thc (b)": step_s(CNN, FP32, 1e8, 1.5)}
    )
    assert plain["change"] == pytest.approx(step_s(CNN, FP32, 1e8, 1.5) / step_s(CNN, FP32, 1e8))
    assert tables.compared_text(rows).startswith("Where the runs match (7 configurations")
