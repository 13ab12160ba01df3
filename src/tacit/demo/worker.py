"""What each rank of the demo runs: a task under every configuration, all in one process group.

The configurations train side by side, a step each in turn on the same batch: whatever else the machine does then
slows all of them alike, and a ratio of their times means something. Rank 0 prints JSON lines: `progress` while it
trains, then one `training` for each configuration.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

import tacit
from tacit.demo.description import described, sent_is
from tacit.demo.facts import PLAIN, SEED, STRATEGIES, TASKS, ring_allreduce_nbytes
from tacit.demo.tasks import BUCKET_MB, BUILDERS, WARMUP_STEPS, Batch, Task, learning_rates

PROGRESS_S = 1.0


@dataclass(slots=True)
class DemoTraining:
    """One configuration in training on this rank, and what was seen of it so far."""

    configuration: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    handle: tacit.Handle | None
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        """One optimizer step, its time and loss kept."""
        x, y = batch
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.step_s.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.schedule.step()

    def sent_nbytes(self) -> float:
        """Bytes this rank sent in all steps, as tacit books them; for plain DDP, which books nothing, as a ring would."""
        if self.handle is not None:
            return float(self.handle.stats.sent_nbytes)
        gradient_nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return ring_allreduce_nbytes(gradient_nbytes, dist.get_world_size()) * len(self.losses)


def main() -> None:
    """Joins the group that the environment describes, and trains all that the arguments name."""
    args = _arguments()
    torch.set_num_threads(1)  # the ranks share the machine's cores
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        for name in args.tasks.split(","):
            _run(
                name,
                args.steps or TASKS[name].steps,
                [PLAIN, *filter(None, args.strategies.split(";"))],
                args.seed,
            )
    finally:
        dist.destroy_process_group()


def _run(name: str, steps: int, configurations: list[str], seed: int) -> None:
    task = BUILDERS[name]()
    trainings = [_begin(task, configuration, seed, steps) for configuration in configurations]
    rng = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
    told = 0.0
    for step in range(1, steps + 1):
        batch = task.batch(rng)
        for training in trainings:
            training.step(batch)
        if step == steps or time.perf_counter() - told > PROGRESS_S:
            told = time.perf_counter()
            losses = {training.configuration: training.losses[-1] for training in trainings}
            _say("progress", task=name, step=step, steps=steps, losses=losses)
    for training in trainings:
        if training.handle is not None:
            training.handle.close()
    for training in trainings:
        _say("training", seed=seed, **_result(name, task, training, baseline=trainings[0]))


def _begin(task: Task, configuration: str, seed: int, steps: int) -> DemoTraining:
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.model(), bucket_cap_mb=BUCKET_MB)
    optimizer = task.optimizer(model)
    handle = None
    if configuration != PLAIN:
        # Cut as plain DDP cuts the model, so that both overlap alike.
        handle = tacit.attach(model, optimizer, configuration, bucket=f"{BUCKET_MB}MiB")
    return DemoTraining(configuration, model, optimizer, learning_rates(optimizer, steps), handle)


def _result(name: str, task: Task, training: DemoTraining, baseline: DemoTraining) -> dict[str, Any]:
    """A training as a record: medians over its steps, losses averaged over the ranks, the metric at its end."""
    strategy = training.handle.strategy if training.handle else None
    steps = len(training.losses)
    skip = min(WARMUP_STEPS, steps - 1)
    timed, paired = training.step_s[skip:], zip(training.step_s[skip:], baseline.step_s[skip:], strict=True)
    parameters = nn.utils.parameters_to_vector(training.model.parameters()).detach()
    return {
        "task": name,
        "configuration": training.configuration,
        "baseline": training is baseline,
        **described(strategy),
        "ranks": dist.get_world_size(),
        "steps": steps,
        "parameters": parameters.numel(),
        "step_p50_s": median(timed),
        "step_p95_s": quantiles(timed, n=20, method="inclusive")[-1] if len(timed) > 1 else timed[0],
        "step_ratio": median(mine / other for mine, other in paired),
        "step_n": len(timed),
        "sent_nbytes_a_step": _mean_over_ranks([training.sent_nbytes()])[0] / steps,
        "sent_is": sent_is(strategy),
        "loss": _mean_over_ranks(training.losses),
        "metric": TASKS[name].metric,
        "higher_is_better": TASKS[name].higher_is_better,
        "final": _evaluate(task, training.model.module),
        "replica_spread": _spread_over_ranks(parameters),
        "data_sha256": task.data_sha256,
        "stats": training.handle.stats.as_dict() if training.handle else None,
    }


def _mean_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def _spread_over_ranks(parameters: torch.Tensor) -> float:
    """How far apart the ranks' parameters ended, at most: 0 where every rank decoded the same bytes."""
    high, low = parameters.clone(), parameters.clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return (high - low).max().item()


def _evaluate(task: Task, module: nn.Module) -> float | None:
    if dist.get_rank() != 0:
        return None  # the other ranks wait in the next collective
    with torch.no_grad():
        return task.evaluate(module)


def _say(kind: str, **fields: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"kind": kind, **fields}), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: each task's own number")
    parser.add_argument("--strategies", default=";".join(STRATEGIES), help="beside plain DDP, separated by ;")
    parser.add_argument("--seed", type=int, default=SEED)
    return parser.parse_args()


if __name__ == "__main__":
    main()
