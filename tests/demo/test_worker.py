"""The worker, as two real ranks over gloo: every configuration trains, and says as many bytes as its codec promises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ranks import Ranks, printed

from tacit.demo.facts import CONFIGURATIONS, PLAIN
from tacit.launch import reserved_port

STEPS = 60


@pytest.fixture(scope="module")
def trainings(ranks: Ranks) -> dict[str, dict[str, Any]]:
    pytest.importorskip("sklearn")
    words = ["--tasks", "digits", "--steps", str(STEPS)]
    with reserved_port() as port:
        told, *others = ranks.run(2, printed, "tacit.demo.worker", words, port)
    assert others == [""]
    heard = [json.loads(line) for line in told.splitlines()]
    assert {message["kind"] for message in heard} == {"progress", "training"}
    return {message["configuration"]: message for message in heard if message["kind"] == "training"}


def test_every_configuration_is_trained_in_order(trainings: dict[str, dict[str, Any]]) -> None:
    assert tuple(trainings) == CONFIGURATIONS
    assert all(len(training["loss"]) == STEPS for training in trainings.values())


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_loss_falls_and_the_ranks_stay_equal(
    trainings: dict[str, dict[str, Any]], configuration: str
) -> None:
    training = trainings[configuration]
    assert training["loss"][-1] < 0.8 * training["loss"][0]
    assert training["final"] > 0.4
    assert training["replica_spread"] == 0


@pytest.mark.parametrize(
    ("configuration", "least", "most"),
    [
        ("every / none / allreduce", 0.99, 1.01),
        ("every / fp16 / allreduce", 1.95, 2.01),
        ("every / bf16 / allreduce", 1.95, 2.01),
        ("every / int8(block=256) / sharded", 3.5, 4.0),
        ("every / int4(block=64) / sharded", 6.0, 8.0),
        ("every / ef(int4(block=64)) / sharded", 6.0, 8.0),
    ],
)
def test_bytes_fall_as_the_codec_promises(
    trainings: dict[str, dict[str, Any]], configuration: str, least: float, most: float
) -> None:
    plain = trainings[PLAIN]
    assert plain["sent_nbytes_a_step"] == 4 * plain["parameters"]  # 2(n-1)/n is 1 for two ranks
    assert trainings[configuration]["sent_is"] == ("computed" if "allreduce" in configuration else "counted")
    assert least < plain["sent_nbytes_a_step"] / trainings[configuration]["sent_nbytes_a_step"] < most


def test_times_are_told_against_plain_ddp_step_by_step(trainings: dict[str, dict[str, Any]]) -> None:
    assert trainings[PLAIN]["step_ratio"] == 1
    assert all(0.2 < training["step_ratio"] < 20 for training in trainings.values())
    assert all(training["step_p50_s"] <= training["step_p95_s"] for training in trainings.values())


def test_saying_everything_trains_as_plain_ddp_does(trainings: dict[str, dict[str, Any]]) -> None:
    assert trainings["every / none / allreduce"]["loss"] == pytest.approx(trainings[PLAIN]["loss"], rel=1e-3)
