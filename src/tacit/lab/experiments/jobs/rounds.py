"""Rules of rounds/ and gossip, each trained alone from start to end: what was sent, how long it took, and what it learned.

[[job]]
kind = "rounds"
task = "fashion_mlp"
strategies = ["every / none / gossip", "adaptive / hush / gossip"]      # the first is the baseline
train_steps = 2000
seeds = [0, 1, 2]
evaluations = 20                                                              # points of the curve
step_ms = 12                                                                  # a step takes so long at least, slept if need be
learning_rate_times = 2                                                       # of the task's, once models are averaged and not gradients

Beside it, compute alone is timed with all ranks at work: what a step takes longer than that is communication, and its share is recorded.

The curve disturbs nothing: at the same steps, whenever it gets there, each rank keeps a copy of its model; when the training is over,
the mean of the copies of a step is judged, and how far they were apart. Only making the copy is in the time (a pass over the model).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

import tacit
from tacit.demo.description import described
from tacit.demo.facts import TASKS
from tacit.demo.tasks import BUILDERS, Task, learning_rates
from tacit.lab.experiments.jobs.common import Progress, WorkerNetwork, arguments, joined, over_ranks, say
from tacit.lab.experiments.jobs.diary import Diary, Mark, marked_steps, together
from tacit.lab.experiments.jobs.specs import Rounds
from tacit.redaction import without_secrets
from tacit.rounds import MergeRule
from tacit.schemes import Gossip
from tacit.strategy import Strategy

ALONE_STEPS = 40
OVER_SEEDS = ("final", "difference", "bytes_share", "time_ratio", "communicating", "seconds")


@dataclass(frozen=True, slots=True)
class Trained:
    """One rank's figures of one training; metrics are 0 where another rank judges."""

    learning_rate_times: float
    seconds: float
    sent_nbytes: float
    interface_nbytes: int
    merge_nbytes: int
    apart: float
    metric: float
    diary: Diary


def run(spec: Rounds, network: WorkerNetwork) -> None:
    """Every seed, every strategy; rank 0 records a `rounds` for each."""
    task = BUILDERS[spec.task]()
    told: list[dict[str, Any]] = []
    for seed in spec.seeds:
        compute_s = _alone_s(task, min(ALONE_STEPS, spec.train_steps), spec.step_ms / 1e3)
        for text in spec.strategies:
            facts = _figures(spec, task, _train(spec, task, text, seed, network), network, compute_s)
            shown = without_secrets(text)
            description = described(Strategy.parse(text))
            facts = {"job": spec.job, "configuration": shown, "seed": seed, **description, **facts}
            facts |= _against(facts, next((f for f in told if f["seed"] == seed), facts))
            told.append(facts)
            say("rounds", **facts, over_seeds=_over_seeds([f for f in told if f["configuration"] == shown]))


def _alone_s(task: Task, steps: int, least_s: float) -> float:
    """A step of compute, while every rank computes and nobody talks: the slowest rank's mean."""
    model = task.model()
    optimizer, rng = task.optimizer(model), torch.Generator().manual_seed(dist.get_rank())
    _step(task, model, optimizer, rng)
    dist.barrier()
    began = time.monotonic()
    for _ in range(steps):
        _step(task, model, optimizer, rng, least_s=least_s)
    return over_ranks([(time.monotonic() - began) / steps], dist.ReduceOp.MAX)[0]


def _step(
    task: Task,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rng: torch.Generator,
    on_loss: Callable[[torch.Tensor], None] = lambda loss: None,
    least_s: float = 0.0,
) -> None:
    """Forward and backward take `least_s` at least."""
    began = time.monotonic()
    x, y = task.batch(rng)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    on_loss(loss.detach())
    if (left_s := began + least_s - time.monotonic()) > 0:
        time.sleep(left_s)
    optimizer.step()


def _train(spec: Rounds, task: Task, text: str, seed: int, network: WorkerNetwork) -> Trained:
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    diary = Diary(marked_steps(spec.train_steps, spec.evaluations), network.transmitted)
    handle = tacit.attach(model, optimizer, text, seed=seed)
    handle.on_record = diary.record  # in memory: a file's lines would be in the time
    summed = _summed_steps(handle.strategy, spec.train_steps)
    times = 1.0 if summed >= spec.train_steps else spec.learning_rate_times
    if not summed:
        _multiply(optimizer, times)
    schedule = learning_rates(optimizer, spec.train_steps)
    rng = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
    progress = Progress(spec.job, f"{without_secrets(text)}, seed {seed}", spec.train_steps)
    dist.barrier()
    diary.begin()
    for step in range(1, spec.train_steps + 1):
        _step(task, model, optimizer, rng, handle.report_loss, spec.step_ms / 1e3)
        schedule.step()
        if step == summed:
            _multiply(optimizer, times)
        diary.stepped(step, model, handle.stats.sent_nbytes, summed=step <= summed)
        progress.advance()
    seconds = time.monotonic() - diary.began_s
    dist.barrier()
    trained = network.transmitted()
    sent = float(handle.stats.sent_nbytes)
    apart = handle.divergence()
    dist.barrier()
    compared = network.transmitted()
    handle.merge()
    dist.barrier()
    merged = network.transmitted()
    metric = _evaluate(task, model) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    handle.close()
    return Trained(
        times, seconds, sent, trained - diary.before_nbytes, merged - compared, apart, metric, diary
    )


def _summed_steps(strategy: Strategy, steps: int) -> int:
    """How many steps at the beginning add up gradients; models are averaged from then on."""
    if isinstance(strategy.who, Gossip):
        return 0
    return strategy.when.after if isinstance(strategy.when, MergeRule) else steps


def _multiply(optimizer: torch.optim.Optimizer, times: float) -> None:
    """What is left of a schedule follows, since it goes on from the rate that it finds."""
    for group in optimizer.param_groups:
        group["lr"] *= times


@torch.no_grad()
def _evaluate(task: Task, model: torch.nn.Module) -> float:
    model.eval()
    return task.evaluate(model)


def _judged(task: Task, marks: Sequence[Mark]) -> tuple[list[float], list[float]]:
    """Of every mark the metric of the ranks' mean model, and how far they were apart, relative to its length.

    The ranks share the work of judging. Buffers are a fresh model's: no task of the demo has any.
    """
    model, rank, world = task.model(), dist.get_rank(), dist.get_world_size()
    metrics, far, lengths = [0.0] * len(marks), [], []
    for place, mark in enumerate(marks):
        mean = mark.model.clone()
        dist.all_reduce(mean)
        mean /= world
        far.append(float((mark.model - mean).double().square().sum()))
        lengths.append(float(mean.double().square().sum()))
        if place % world == rank:
            vector_to_parameters(mean, model.parameters())
            metrics[place] = _evaluate(task, model)
    apart = [
        (all_far / world / length) ** 0.5 if length else 0.0
        for all_far, length in zip(over_ranks(far, dist.ReduceOp.SUM), lengths, strict=True)
    ]
    return over_ranks(metrics, dist.ReduceOp.SUM), apart


def _figures(
    spec: Rounds, task: Task, own: Trained, network: WorkerNetwork, compute_s: float
) -> dict[str, Any]:
    """The figures of one training over all ranks; `exchanges` and the curve come from diary.py."""
    world, about = dist.get_world_size(), TASKS[spec.task]
    seconds = over_ranks([own.seconds], dist.ReduceOp.MAX)[0]
    figures = [own.sent_nbytes, float(own.interface_nbytes), float(own.merge_nbytes), own.metric]
    sent, interface, merge, metric = over_ranks(figures, dist.ReduceOp.SUM)
    metrics, apart = _judged(task, own.diary.marks)
    ranks: list[dict[str, Any]] = [{}] * world
    dist.all_gather_object(ranks, own.diary.told())
    return {
        "workload": _workload(spec), "ranks": world, "steps": spec.train_steps, "learning_rate_times": own.learning_rate_times, "network": network.text,
        "shaped": network.shaped, "rate_bps": network.rate_bps, "metric": about.metric,
        "higher_is_better": about.higher_is_better, "final": metric, "apart": own.apart, "seconds": seconds,
        "compute_s": compute_s, "sent_nbytes": sent / world,
        "interface_nbytes": interface / world if network.interface else None,
        "merge_nbytes": merge / world if network.interface else None,
        "communicating": max(0.0, 1 - compute_s * spec.train_steps / seconds),
        **together(ranks),
        "curve": _curve(own.diary.marks, metrics, apart, ranks, counted=network.interface is not None),
    }  # fmt: skip


def _workload(spec: Rounds) -> str:
    slept = f", steps of {spec.step_ms} ms" if spec.step_ms else ""
    times = spec.learning_rate_times
    return (
        spec.task + slept + (f", learning rate x {times:g} where models are averaged" if times != 1 else "")
    )


def _curve(
    marks: Sequence[Mark],
    metrics: Sequence[float],
    apart: Sequence[float],
    ranks: Sequence[dict[str, Any]],
    *,
    counted: bool,
) -> list[dict[str, Any]]:
    """A point a mark: what the mean model was worth there, and of every rank when it got there and what it had sent by then.

    `exchanges` are those that it had begun. `drift` is how far a rank's model had moved when an exchange fired since the last mark (a mean), where that was the reason.
    """
    keys = ["seconds", "sent_nbytes", *(["interface_nbytes"] if counted else []), "exchanges", "drift"]
    return [
        {"step": mark.step, "metric": metrics[k], "apart": apart[k]}
        | {key: [rank[key][k] for rank in ranks] for key in keys}
        for k, mark in enumerate(marks)
    ]


def _against(facts: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """What the training comes to beside the baseline's of the same seed; the first of a seed is the baseline."""
    key = "sent_nbytes" if facts["interface_nbytes"] is None else "interface_nbytes"
    return {
        "baseline": facts is baseline,
        "bytes_share": facts[key] / baseline[key] if baseline[key] else None,
        "time_ratio": facts["seconds"] / baseline["seconds"],
        "difference": facts["final"] - baseline["final"],
        "baseline_communicating": baseline["communicating"],
    }


def _over_seeds(trainings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean, extremes and count over the seeds so far: after the last one, over all."""
    found = {}
    for key in OVER_SEEDS:
        values = [f[key] for f in trainings if f[key] is not None and isfinite(f[key])]
        if values:
            found[key] = {"mean": fmean(values), "least": min(values), "most": max(values), "n": len(values)}
    return found


def main() -> None:
    """Joins the group that the environment describes, and trains what the arguments specify."""
    table, network = arguments(__doc__ or "")
    with joined():
        run(Rounds.read(table), network)


if __name__ == "__main__":
    main()
