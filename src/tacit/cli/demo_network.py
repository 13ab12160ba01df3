"""The demo on a slow network: what `tacit demo` has the lab run, as an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.demo.facts import TASKS

if TYPE_CHECKING:
    from tacit.lab.experiments.experiment import Experiment

DEFAULT_TASKS = ("bytes",)
PEERS = ["fp32", "bf16"]
STRATEGIES = ["int8 / sharded", "hush / sharded", "int4 / sharded", "lowrank(8) / sharded"]
TIMED_STEPS = 10
TARGETS = {
    "bytes": 2.6,
    "digits": 0.93,
    "fashion": 0.85,
    "fashion_mlp": 0.84,
}  # all configurations come so far in a task's steps
JUDGED = 10  # times in a training


def experiment(tasks: tuple[str, ...], ranks: int, rate: str, steps: int | None) -> Experiment:
    """Step times of every task at `rate`; then its accuracy, which no link changes, on a link that does not delay it."""
    from tacit.lab.experiments.experiment import experiment_from

    jobs: list[dict[str, Any]] = []
    for task in tasks:
        compared = {"kind": "train", "task": task, "peers": PEERS, "strategies": STRATEGIES}
        trained = steps or TASKS[task].steps
        jobs.append(compared | {"name": task, "steps": TIMED_STEPS})
        jobs.append(
            compared
            | {"name": f"{task}, accuracy", "rates": ["1Gbit"], "steps": 0, "train_steps": trained}
            | {"judge_every": max(1, trained // JUDGED), "seeds": [0], "target": TARGETS[task]}
        )
    network = f"star(nodes={ranks}, rate={rate}, latency=0us)"
    return experiment_from({"network": network, "run": {"realtime": True}, "job": jobs}, Path("demo"))
