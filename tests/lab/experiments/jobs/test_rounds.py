"""Rules and gossip as a job of the lab, by two real ranks: each trained to its end, the first the baseline."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

from tacit.errors import ConfigError
from tacit.lab.experiments.jobs.diary import Diary, marked_steps, together
from tacit.lab.experiments.jobs.specs import Rounds

GOSSIP, ADAPTIVE, LOCAL, DILOCO = TEXTS = [
    "every / none / gossip",
    "adaptive(0.05) / int8 / gossip",
    "local(10) / none",
    "diloco(10) / hush",
]
SUMMED, HUSH, ADACOMM = SUMS = ["every / none", "every / hush / sharded", "adacomm(8) / none"]
NUMEL = 64 * 256 + 256 + 256 * 256 + 256 + 2570


def trained(rank: int, world: int, table: dict[str, Any]) -> list[dict[str, Any]]:
    from tacit.lab.experiments.jobs.common import WorkerNetwork
    from tacit.lab.experiments.jobs.rounds import run

    out = io.StringIO()
    with redirect_stdout(out):
        run(Rounds.read(table), WorkerNetwork())
    return [json.loads(line) for line in out.getvalue().splitlines()]


def told(ranks: Any, **table: Any) -> list[dict[str, Any]]:
    first, others = ranks.run(2, trained, {"job": "test", "evaluations": 4} | table)
    assert others == []
    return [record for record in first if record["kind"] == "rounds"]


@pytest.fixture(scope="module")
def records(ranks: Any) -> dict[str, dict[str, Any]]:
    pytest.importorskip("sklearn")
    found = told(ranks, task="digits", strategies=TEXTS, train_steps=60)
    assert [r["configuration"] for r in found] == TEXTS
    assert [r["baseline"] for r in found] == [True, False, False, False]
    return {record["configuration"]: record for record in found}


def test_every_strategy_is_trained_to_its_end_and_told(records: dict[str, dict[str, Any]]) -> None:
    for record in records.values():
        assert record["final"] > 0.5 and record["seconds"] > 0 and 0 <= record["communicating"] < 1
        assert record["sent_nbytes"] > 0 and record["interface_nbytes"] is None  # loopback is shared
        assert record["higher_is_better"] is True and record["steps"] == 60
    sent = records[LOCAL]["sent_nbytes"]
    assert sent == pytest.approx(6 * 4 * NUMEL, rel=0.01)  # 6 rounds, 2(n-1)/n of the model each


def test_each_stands_beside_the_baseline_of_its_seed(records: dict[str, dict[str, Any]]) -> None:
    base = records[GOSSIP]
    for record in records.values():
        assert record["bytes_share"] == pytest.approx(record["sent_nbytes"] / base["sent_nbytes"])
        assert record["time_ratio"] == pytest.approx(record["seconds"] / base["seconds"])
        assert record["difference"] == pytest.approx(record["final"] - base["final"])
        assert record["baseline_communicating"] == base["communicating"]
        assert record["over_seeds"]["final"] == dict.fromkeys(("mean", "least", "most"), record["final"]) | {
            "n": 1
        }


def test_the_curve_judges_the_mean_of_what_the_ranks_had_at_a_step(
    records: dict[str, dict[str, Any]],
) -> None:
    for record in records.values():
        assert [point["step"] for point in record["curve"]] == [15, 30, 45, 60]
        for before, after in zip(record["curve"], record["curve"][1:], strict=False):
            for key in ("seconds", "sent_nbytes", "exchanges"):
                assert all(a <= b for a, b in zip(before[key], after[key], strict=True))
        assert len(record["curve"][0]["seconds"]) == 2 and "interface_nbytes" not in record["curve"][0]
    points = records[LOCAL]["curve"]
    assert [point["apart"] > 0 for point in points] == [True, False, True, False]  # equal after a merge
    assert [point["exchanges"] for point in points] == [[1, 1], [3, 3], [4, 4], [6, 6]]
    assert points[-1]["metric"] == records[LOCAL]["final"]
    assert sum(points[-1]["sent_nbytes"]) / 2 == records[LOCAL]["sent_nbytes"]


def test_why_exchanges_fired_and_how_they_ended_is_told(records: dict[str, dict[str, Any]]) -> None:
    adaptive, local = records[ADAPTIVE], records[LOCAL]
    assert set(adaptive["why"]) == {"moved"} and adaptive["outcomes"]["met"] == adaptive["exchanges"] > 0
    assert adaptive["meeting_p90_s"] >= adaptive["meeting_p50_s"] > 0
    assert sum(len(times) for times in adaptive["exchange_times_s"]) == adaptive["outcomes"]["met"]
    drifts = [d for point in adaptive["curve"] for d in point["drift"] if d is not None]
    assert drifts and all(d > 0 for d in drifts)
    assert (local["why"], local["outcomes"], local["exchanges"]) == ({"every 10": 12}, {"merged": 12}, 6)
    assert local["meeting_p50_s"] is None and {d for p in local["curve"] for d in p["drift"]} == {None}


def test_gradients_are_a_baseline_too_and_seeds_are_summed_up(ranks: Any) -> None:
    pytest.importorskip("sklearn")
    found = told(ranks, task="digits", strategies=SUMS, train_steps=24, seeds=[0, 1])
    assert [(r["seed"], r["configuration"]) for r in found] == [
        (seed, text) for seed in (0, 1) for text in SUMS
    ]
    plain, hush, adacomm = found[3:]
    for record in (plain, hush):
        assert (record["exchanges"], record["outcomes"], record["apart"]) == (24, {"summed": 48}, 0)
        assert [point["apart"] for point in record["curve"]] == [0, 0, 0, 0]
        assert [len(times) for times in record["exchange_times_s"]] == [24, 24]
    assert plain["baseline"] and 0.1 < hush["bytes_share"] < 0.3 and 0 < adacomm["exchanges"] < 24
    both = hush["over_seeds"]["final"]
    assert both["n"] == 2 and both["mean"] == pytest.approx((found[1]["final"] + hush["final"]) / 2)
    assert found[1]["over_seeds"]["final"]["n"] == 1  # so far


def test_a_transformer_with_adamw_is_judged_by_its_loss(ranks: Any) -> None:
    (record,) = told(ranks, task="bytes", strategies=[SUMMED], train_steps=3, evaluations=1)
    assert (record["metric"], record["higher_is_better"]) == ("validation loss", False)
    assert record["curve"][-1]["metric"] == pytest.approx(record["final"]) and 3 < record["final"] < 6


def test_another_learning_rate_is_for_those_who_average_models(ranks: Any) -> None:
    pytest.importorskip("sklearn")
    texts = ["every / none", "local(2) / none", "local(2, after=20) / none"]
    summed, averaged, both = told(
        ranks, task="digits", strategies=texts, train_steps=40, evaluations=2, learning_rate_times=1e-9
    )
    assert (summed["learning_rate_times"], averaged["learning_rate_times"]) == (1.0, 1e-9)
    assert "learning rate x 1e-09 where models are averaged" in averaged["workload"]
    assert summed["final"] > 0.5 and averaged["final"] < 0.3  # nothing was learned
    assert both["outcomes"] == {"summed": 40, "merged": 20} and both["learning_rate_times"] == 1e-9
    assert both["curve"][0]["step"] == 20 and both["curve"][0]["metric"] > averaged["final"] + 0.1
    assert both["final"] == pytest.approx(both["curve"][0]["metric"])  # nothing since the models parted


def test_a_diary_counts_by_step_and_keeps_the_model_as_it_was() -> None:
    diary, model = Diary(marked_steps(4, 2), lambda: 0), torch.nn.Linear(2, 1)
    diary.begin()
    for step in range(1, 5):
        diary.stepped(step, model, 10.0 * step, summed=False)
        diary.record("step", step=step)  # not an exchange
        diary.record(
            "exchange", step=step, why=f"moved {step} %", outcome="met" if step != 3 else "busy", seconds=0.5
        )
        with torch.no_grad():
            model.weight += 1
    assert [mark.step for mark in diary.marks] == [2, 4]
    assert torch.equal(diary.marks[0].model + torch.tensor([2.0, 2.0, 0.0]), diary.marks[1].model)
    told = diary.told()
    assert (told["exchanges"], told["sent_nbytes"], told["done"]) == ([2, 3], [20.0, 40.0], 3)
    assert told["drift"] == pytest.approx([0.015, 0.04])
    both = together([told, told])
    assert (both["exchanges"], both["outcomes"], both["why"]) == (6, {"met": 6, "busy": 2}, {"moved": 8})
    assert both["meeting_p50_s"] == 0.5


def test_marks_are_evenly_spread_and_the_last_step_is_one() -> None:
    assert sorted(marked_steps(4000, 20)) == list(range(200, 4001, 200))
    assert sorted(marked_steps(3, 20)) == [1, 2, 3] and sorted(marked_steps(7, 2)) == [4, 7]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"task": "imagenet", "strategies": TEXTS}, "no task 'imagenet'"),
        ({"task": "digits", "strategies": []}, "name one strategy"),
        ({"task": "digits"}, "strategies is missing"),
        ({"task": "digits", "strategies": TEXTS, "step": 3}, "unknown key 'step'"),
        ({"task": "digits", "strategies": TEXTS, "evaluations": 0}, "evaluations = 0"),
        ({"task": "digits", "strategies": TEXTS, "learning_rate_times": 0.0}, "learning_rate_times = 0"),
        ({"task": "digits", "strategies": TEXTS, "learning_rate_times": float("nan")}, "above 0, and finite"),
        ({"task": "digits", "strategies": [LOCAL, LOCAL]}, "named twice"),
        ({"task": "digits", "strategies": [LOCAL], "seeds": [1, 1]}, "seed 1 is named twice"),
    ],
)
def test_a_mistake_is_one_sentence(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rounds.read(table, "job 1")


def test_no_record_holds_the_secret_of_a_strategy(ranks: Any) -> None:
    pytest.importorskip("sklearn")
    text = "every / none / star(at='127.0.0.1:1', secret='{}')"
    table = {
        "job": "test",
        "evaluations": 1,
        "task": "digits",
        "train_steps": 2,
        "strategies": [text.format("hunter2hunter2")],
    }
    first, _ = ranks.run(2, trained, table)
    assert [r["configuration"] for r in first if r["kind"] == "rounds"] == [text.format("...")]
    assert "hunter2" not in json.dumps(first)
