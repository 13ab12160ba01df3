"""Real training for the lab, by two real ranks: accuracy against steps, steps timed in turn, peers beside strategies."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tacit.errors import ConfigError
from tacit.lab.experiments.jobs.specs import Train, steps_to

PEERS = ["fp32", "fp16", "powersgd(rank=2)"]
NAMES = [
    "plain DDP",
    "DDP fp16 hook",
    "DDP PowerSGD rank 2",
    "every / none / allreduce",
    "every / hush / sharded",
]
STEPS, SEEDS = 30, (0, 1)
EXPERIMENTS = Path(__file__).parents[4] / "experiments"


def trained(rank: int, world: int, table: dict[str, Any]) -> list[dict[str, Any]]:
    from tacit.lab.experiments.jobs.common import WorkerNetwork
    from tacit.lab.experiments.jobs.train import run

    out = io.StringIO()
    with redirect_stdout(out):
        run(Train.read(table), WorkerNetwork())
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture(scope="module")
def said(ranks: Any) -> list[dict[str, Any]]:
    pytest.importorskip("sklearn")
    table = {
        "job": "test", "task": "digits", "peers": PEERS, "strategies": ["none", "hush / sharded"], "steps": 3,
        "train_steps": STEPS, "judge_every": 10, "seeds": list(SEEDS), "target": 0.6, "tune": ["25MiB"],
    }  # fmt: skip
    first, *others = ranks.run(2, trained, table)
    assert others == [[]]
    return list(first)


def accuracies(said: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(a["configuration"], a["seed"]): a for a in said if a["kind"] == "accuracy"}


def test_every_configuration_is_judged_along_the_way_for_every_seed(said: list[dict[str, Any]]) -> None:
    found = accuracies(said)
    assert list(found) == [(name, seed) for seed in SEEDS for name in NAMES]
    for a in found.values():
        assert [step for step, _ in a["curve"]] == [10, 20, 30]
        assert (a["job"], a["workload"], a["ranks"], a["steps"]) == ("test", "digits", 2, STEPS)
        assert (a["metric"], a["higher_is_better"], a["target"]) == ("test accuracy", True, 0.6)
        assert a["final"] == a["curve"][-1][1] > 0.4
        assert a["steps_to_target"] == steps_to(a["curve"], 0.6, True)


def test_saying_everything_trains_as_plain_ddp_does_and_seeds_differ(said: list[dict[str, Any]]) -> None:
    found = accuracies(said)
    for seed in SEEDS:
        plain, whole = found["plain DDP", seed]["curve"], found["every / none / allreduce", seed]["curve"]
        assert whole == [[step, pytest.approx(value, abs=0.02)] for step, value in plain]
    assert found["plain DDP", 0]["curve"] != found["plain DDP", 1]["curve"]


def test_step_times_are_told_with_compute_and_communication_alone(said: list[dict[str, Any]]) -> None:
    timings = [t for t in said if t["kind"] == "timing"]
    assert [t["configuration"] for t in timings] == NAMES
    assert [t["baseline"] for t in timings] == [True, False, False, False, False]
    for t in timings:
        assert (t["workload"], t["replayed"], t["scale"], t["step_n"]) == ("digits", False, 1.0, 3)
        assert t["compute_s"] == timings[0]["compute_s"] > 0
        assert t["communication_p50_s"] > 0 and t["network"] == "loopback, unshaped"
        assert t["link_share"] is None and t["rate_bps"] is None
    sent = [t["sent_nbytes_a_step"] for t in timings]
    assert sent[0] == 4 * timings[0]["parameters"] and sent[1] == sent[0] / 2
    assert sent[3] == sent[0] + 48  # the note that ranks compare in every step
    assert [t["sent_is"] for t in timings] == [*["computed"] * 4, "counted"]


@pytest.mark.parametrize(
    ("target", "higher", "step"),
    [
        (0.5, True, 10 + 10 * 2 / 3),
        (0.6, True, 20),
        (0.7, True, 25),
        (0.75, True, 27.5),
        (0.9, True, None),
        (0.3, True, 10),
        (0.2, True, 10),
        (0.3, False, 10),
        (0.1, False, None),
        (None, True, None),
    ],
)
def test_steps_to_a_target_lie_on_the_line_between_the_points_around_it(
    target: float | None, higher: bool, step: float | None
) -> None:
    found = steps_to([(10, 0.3), (20, 0.6), (30, 0.8), (40, 0.7)], target, higher)
    assert found == (None if step is None else pytest.approx(step))


def test_steps_to_a_loss_fall_on_the_line_and_a_metric_not_finite_gives_no_line() -> None:
    assert steps_to([(5, 4.0), (10, 3.0), (15, 1.0)], 2.5, False) == pytest.approx(11.25)
    for strange in (float("nan"), float("inf")):
        assert steps_to([(5, strange), (10, 2.0)], 2.5, False) == 10


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "task is missing"),
        ({"task": "cifar"}, "choose from digits, bytes, fashion"),
        ({"task": "digits", "steps": 0}, "give steps to time or train_steps to train"),
        ({"task": "digits", "train_steps": 10, "seeds": []}, "name one or more"),
        ({"task": "digits", "target": "high"}, "no number"),
    ],
    ids=str,
)
def test_a_bad_order_is_refused_in_one_sentence(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Train.read(table, "job 1")


# ---- peers ----


def with_a_broken_hook(rank: int, world: int, peer: str) -> tuple[str, str] | None:
    """What stands in for `peer` where torch's hook raises on the first gradient."""
    from tacit.lab.experiments import baselines

    def broken(state, bucket):  # DDP reads annotations, and would refuse these as text
        raise RuntimeError("gloo knows no such type")

    kept = dict(baselines._HALVES), baselines.powerSGD_hook.powerSGD_hook
    try:
        baselines._HALVES.update(dict.fromkeys(baselines._HALVES, broken))
        baselines.powerSGD_hook.powerSGD_hook = broken
        found = baselines.runnable(baselines.named(peer))
    finally:
        baselines._HALVES.update(kept[0])
        baselines.powerSGD_hook.powerSGD_hook = kept[1]
    return (found.name, found.note) if found else None


def test_where_a_hook_of_torch_fails_tacits_own_cast_stands_in_and_says_so(ranks: Any) -> None:
    for peer in ("fp16", "bf16"):
        for name, note in ranks.run(2, with_a_broken_hook, peer):
            assert name == f"every / {peer} / allreduce"
            assert "gloo knows no such type" in note and "tacit's own cast" in note
    assert ranks.run(2, with_a_broken_hook, "powersgd(rank=1)") == [None, None]
    assert ranks.run(2, with_a_broken_hook, "fp32") == [("plain DDP", "")] * 2


@pytest.mark.parametrize(("text", "name"), [("FP32", "plain DDP"), ("powersgd", "DDP PowerSGD rank 4"),
                                            ("int8", "every / int8(block=256) / sharded")])  # fmt: skip
def test_a_configuration_is_named_by_a_word_or_a_strategy(text: str, name: str) -> None:
    from tacit.lab.experiments.baselines import named

    assert named(text).name == name


def test_a_power_of_rank_nothing_is_refused() -> None:
    from tacit.lab.experiments.baselines import named

    with pytest.raises(ConfigError, match="1 or more"):
        named("powersgd(rank=0)")


@pytest.mark.parametrize("name", ["thc", "thc_quick", "replay_check"])
def test_the_experiments_are_readable_and_every_name_in_them_is_known(name: str) -> None:
    from tacit.lab.experiments.experiment import read

    found = read(EXPERIMENTS / f"{name}.toml")
    assert found.ranks == 4
    for job in found.jobs:
        job.spec.check_names()
        if job.kind == "replay":
            job.spec.check_memory(4, available_nbytes=8 * 10**9)
    if name != "replay_check":
        assert [(job.name, job.rates_bps) for job in found.jobs] == [
            ("vgg16", (1e8, 2e8)), ("fashion steps", (1e8, 2e8)), ("fashion accuracy", (5e8,))
        ]  # fmt: skip
        assert (
            len({(*job.spec.peers, *job.spec.strategies) for job in found.jobs}) == 1
        )  # or nothing is joined
