"""Trainings whose ranks take turns in one process: shared out over the processes, and as good as those of real ranks."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

from tacit.errors import ConfigError
from tacit.lab.experiments.jobs.specs import Accuracy, Train

STRATEGIES = ["none", "hush", "dgc(0.01, warmup=0)"]
TABLE = {"job": "test", "task": "digits", "train_steps": 20, "judge_every": 10, "target": 0.3}


def trained(rank: int, world: int, table: dict[str, Any]) -> list[dict[str, Any]]:
    """What this rank prints of an `accuracy` job, and then of the same strategies as a `train` job."""
    from tacit.lab.experiments.jobs import accuracy, train
    from tacit.lab.experiments.jobs.common import WorkerNetwork

    out = io.StringIO()
    with redirect_stdout(out):
        accuracy.run(Accuracy.read(table), rank, world)
        train.run(Train.read(table | {"peers": ["fp32"], "steps": 0, "bucket": "1MiB"}), WorkerNetwork())
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_ranks_that_take_turns_end_where_real_ranks_end(ranks: Any) -> None:
    pytest.importorskip("sklearn")
    found = ranks.run(2, trained, TABLE | {"strategies": STRATEGIES})
    told = [[line for line in own if line["kind"] == "accuracy"] for own in found]
    turns = {line["configuration"]: line for own in told for line in own if "turns" in line["note"]}
    real = {line["configuration"]: line for line in told[0] if "turns" not in line["note"]}
    assert len(turns) == len(STRATEGIES) and [len(own) for own in told] == [2 + 4, 1]  # shared out
    for name, line in turns.items():
        assert [step for step, _ in line["curve"]] == [10, 20]
        assert line["curve"] == [
            [step, pytest.approx(value, abs=0.02)] for step, value in real[name]["curve"]
        ]
        assert (line["ranks"], line["steps"], line["workload"]) == (2, 20, "digits")
    assert turns["every / none / allreduce"]["bytes_share"] == 1
    assert turns["every / hush / sharded"]["bytes_share"] < 0.14


def test_a_codec_with_momentum_takes_it_from_the_optimizer() -> None:
    from tacit.lab.experiments.jobs.accuracy import hand_over_momentum
    from tacit.strategy import parse_codec

    for text, left in (("dgc", 0.0), ("dgc(momentum=0)", 0.9), ("int8", 0.9)):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
        hand_over_momentum(optimizer, parse_codec(text))
        assert optimizer.param_groups[0]["momentum"] == left


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"strategies": []}, "name one strategy"),
        ({"strategies": ["int8", "int8"]}, "'int8' is named twice"),
        ({"strategies": ["int8"], "train_steps": 0}, "each is 1 or more"),
        ({"strategies": ["int8"], "task": "cifar"}, "choose from digits, bytes, fashion"),
        ({"strategies": ["diloco(64) / hush"]}, "use a job of kind rounds"),
    ],
    ids=str,
)
def test_a_bad_order_is_refused_in_one_sentence(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Accuracy.read({"task": "digits"} | table, "job 1").check_names()
    assert "\n" not in str(caught.value)
