"""Rules of rounds/ and gossip, each trained alone from start to end: what was sent, how long it took, and what it learned.

[[job]]
kind = "rounds"
task = "fashion_mlp"
strategies = ["every / none / gossip", "adaptive(0.02) / hush / gossip"]      # the first is the baseline
train_steps = 2000
seeds = [0, 1, 2]

Beside it, compute alone is timed with all ranks at work: what a step takes longer than that is communication, and its share is told.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tacit
from tacit.demo.facts import TASKS
from tacit.demo.tasks import BUILDERS, Task, learning_rates
from tacit.lab.jobs.common import Network, Progress, arguments, joined, over_ranks, say
from tacit.lab.jobs.orders import Rounds

ALONE_STEPS = 40


@dataclass(frozen=True, slots=True)
class Trained:
    """One rank's figures of one training."""

    seconds: float
    sent_nbytes: float
    interface_nbytes: int
    merge_nbytes: int
    apart: float
    metric: float


def run(order: Rounds, network: Network) -> None:
    """Every seed, every strategy; rank 0 says a `rounds` for each."""
    task = BUILDERS[order.task]()
    compute_s = _alone_s(task)
    baseline = order.strategies[0]
    for seed in order.seeds:
        for text in order.strategies:
            found = _train(order, task, text, seed, network)
            _tell(order, network, text, seed, compute_s, found, text == baseline)


def _alone_s(task: Task) -> float:
    """A step of compute, while every rank computes and nobody talks: the slowest rank's mean."""
    model = task.model()
    optimizer, rng = task.optimizer(model), torch.Generator().manual_seed(dist.get_rank())
    _step(task, model, optimizer, rng)
    dist.barrier()
    began = time.monotonic()
    for _ in range(ALONE_STEPS):
        _step(task, model, optimizer, rng)
    return over_ranks([(time.monotonic() - began) / ALONE_STEPS], dist.ReduceOp.MAX)[0]


def _step(task: Task, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rng: torch.Generator) -> None:
    x, y = task.batch(rng)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def _train(order: Rounds, task: Task, text: str, seed: int, network: Network) -> Trained:
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    handle = tacit.attach(model, optimizer, text, seed=seed)
    schedule, rng = (
        learning_rates(optimizer, order.train_steps),
        torch.Generator().manual_seed(seed + 1000 * dist.get_rank()),
    )
    progress = Progress(order.job, f"{text}, seed {seed}", order.train_steps)
    dist.barrier()
    before, began = network.transmitted(), time.monotonic()
    for _ in range(order.train_steps):
        _step(task, model, optimizer, rng)
        schedule.step()
        progress.advance()
    seconds = time.monotonic() - began
    dist.barrier()
    trained = network.transmitted()
    sent = float(handle.stats.sent_nbytes)
    apart = handle.consensus()
    dist.barrier()
    compared = network.transmitted()
    handle.merge()
    dist.barrier()
    merged = network.transmitted()
    metric = task.evaluate(model) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    handle.close()
    return Trained(seconds, sent, trained - before, merged - compared, apart, metric)


def _tell(
    order: Rounds, network: Network, text: str, seed: int, compute_s: float, own: Trained, baseline: bool
) -> None:
    mean, slowest = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    world = dist.get_world_size()
    sent, interface, merge, metric = over_ranks(
        [own.sent_nbytes, float(own.interface_nbytes), float(own.merge_nbytes), own.metric], mean
    )
    seconds = over_ranks([own.seconds], slowest)[0]
    facts: dict[str, Any] = {
        "job": order.job, "workload": order.task, "configuration": text, "baseline": baseline, "seed": seed,
        "ranks": world, "steps": order.train_steps, "network": network.text, "shaped": network.shaped,
        "rate_bps": network.rate_bps, "metric": TASKS[order.task].metric, "final": metric, "apart": own.apart,
        "seconds": seconds, "compute_s": compute_s, "sent_nbytes": sent / world,
        "interface_nbytes": interface / world if network.interface else None,
        "merge_nbytes": merge / world if network.interface else None,
        "communicating": max(0.0, 1 - compute_s * order.train_steps / seconds),
    }  # fmt: skip
    say("rounds", **facts)


def main() -> None:
    """Joins the group that the environment describes, and trains what the arguments order."""
    table, network = arguments(__doc__ or "")
    with joined():
        run(Rounds.read(table), network)


if __name__ == "__main__":
    main()
