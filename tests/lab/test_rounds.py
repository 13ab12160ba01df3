"""Rules and gossip as a job of the lab, by two real ranks: each trained to its end, the first the baseline."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from tacit.errors import ConfigError
from tacit.lab.jobs.orders import Rounds

TEXTS = ["every / none / gossip", "adaptive(0.05) / int8 / gossip", "local(10) / none", "diloco(10) / hush"]


def trained(rank: int, world: int, table: dict[str, Any]) -> list[dict[str, Any]]:
    from tacit.lab.jobs.common import Network
    from tacit.lab.jobs.rounds import run

    out = io.StringIO()
    with redirect_stdout(out):
        run(Rounds.read(table), Network())
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_every_strategy_is_trained_to_its_end_and_told(ranks: Any) -> None:
    pytest.importorskip("sklearn")
    table = {"job": "test", "task": "digits", "strategies": TEXTS, "train_steps": 60}
    first, others = ranks.run(2, trained, table)
    assert others == []
    told = [record for record in first if record["kind"] == "rounds"]
    assert [r["configuration"] for r in told] == TEXTS and [r["baseline"] for r in told] == [
        True,
        False,
        False,
        False,
    ]
    for record in told:
        assert record["final"] > 0.5 and record["seconds"] > 0 and 0 <= record["communicating"] < 1
        assert record["sent_nbytes"] > 0 and record["interface_nbytes"] is None  # loopback is shared
    numel = 64 * 256 + 256 + 256 * 256 + 256 + 2570
    assert told[2]["sent_nbytes"] == pytest.approx(
        6 * 4 * numel, rel=0.01
    )  # 6 rounds, 2(n-1)/n of the model each


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"task": "imagenet", "strategies": TEXTS}, "no task 'imagenet'"),
        ({"task": "digits", "strategies": []}, "name one strategy"),
        ({"task": "digits"}, "strategies is missing"),
        ({"task": "digits", "strategies": TEXTS, "step": 3}, "unknown key 'step'"),
    ],
)
def test_a_mistake_is_one_sentence(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Rounds.read(table, "job 1")
