"""Real training under every configuration: step times on the link, and accuracy against steps, which no link changes.

Steps are timed with all configurations in turn on one batch. Compute alone (every rank, nothing sent) and communication
alone (the same gradients' shapes, no compute) are timed beside them: real compute on shared cores is noisy, and the two
show what of a step is the link's. Accuracy is trained without hurry, side by side on the same batches, for each seed;

    time to accuracy = steps to the target x median step time on the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler

from tacit.demo.facts import TASKS
from tacit.demo.tasks import BUILDERS, Batch, Task, learning_rates
from tacit.lab.experiments.baselines import Configuration, ConnectedModel, connect
from tacit.lab.experiments.jobs.accuracy import hand_over_momentum
from tacit.lab.experiments.jobs.common import (
    Contender,
    Progress,
    WorkerNetwork,
    arguments,
    interleave,
    joined,
    over_ranks,
    say,
    slowest,
    timing,
)
from tacit.lab.experiments.jobs.replay import WARMUP_STEPS, ReplayLayer, ReplaySetup, present, tuned
from tacit.lab.experiments.jobs.specs import Train, steps_to


@dataclass(slots=True)
class LabTraining:
    """One configuration in training on this rank."""

    configuration: Configuration
    link: ConnectedModel
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    curve: list[tuple[int, float]] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        x, y = batch
        self.optimizer.zero_grad()
        F.cross_entropy(self.link.model(x), y).backward()
        self.optimizer.step()
        self.schedule.step()


def begin(
    task: Task, configuration: Configuration, *, bucket_nbytes: int, seed: int, steps: int
) -> LabTraining:
    """The same model on all ranks and for all configurations of a seed."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    hand_over_momentum(optimizer, configuration.strategy and configuration.strategy.what)
    link = connect(model, optimizer, configuration, bucket_nbytes=bucket_nbytes, seed=seed)
    return LabTraining(configuration, link, optimizer, learning_rates(optimizer, steps))


def shapes(model: nn.Module) -> list[ReplayLayer]:
    """The model's parameters as layers that take no time."""
    return [ReplayLayer(name, tuple(p.shape), 0.0, 0.0) for name, p in model.named_parameters()]


def run(spec: Train, network: WorkerNetwork) -> None:
    """Times `steps` steps on this network, then trains `train_steps` for every seed; either may be 0."""
    task = BUILDERS[spec.task]()
    configurations = present(spec)
    if spec.steps:
        time_steps(spec, task, configurations, network)
    for seed in spec.seeds if spec.train_steps else ():
        train(spec, task, configurations, seed)


def time_steps(
    spec: Train, task: Task, configurations: Sequence[Configuration], network: WorkerNetwork
) -> None:
    """Records a `timing` for every configuration: whole steps, compute alone and communication alone."""
    stage = ReplaySetup(shapes(task.model()), spec.seed, dist.get_rank())
    best_nbytes = tuned(stage, spec.tune_nbytes, spec.job, network.transmitted)
    batch = task.batch(torch.Generator().manual_seed(spec.seed + 1000 * dist.get_rank()))
    whole: list[Contender] = []
    wires: list[Contender] = []
    for configuration in configurations:
        size = best_nbytes if configuration.peer else spec.bucket_nbytes
        training = begin(task, configuration, bucket_nbytes=size, seed=spec.seed, steps=spec.steps)
        whole.append(Contender(configuration.name, partial(training.step, batch), training.link))
        wires.append(stage.contender(configuration, size))
    alone = _alone(task, batch, spec.seed)
    everyone = [*whole, alone, *wires]
    progress = Progress(spec.job, "step times", len(everyone) * (WARMUP_STEPS + spec.steps))
    interleave(
        everyone, steps=spec.steps, warmup=WARMUP_STEPS, progress=progress, transmitted=network.transmitted
    )
    compute_s = median(slowest(alone.step_s))
    plain = next(c for c, configuration in zip(whole, configurations, strict=True) if configuration.plain)
    facts = {
        "job": spec.job,
        "workload": spec.task,
        "replayed": False,
        "scale": 1.0,
        "parameters": stage.numel,
    }
    for contender, wire in zip(whole, wires, strict=True):
        figures = timing(contender, plain, network=network, compute_s=compute_s, **facts)
        say("timing", **figures, communication_p50_s=median(slowest(wire.step_s)))
    for contender in (*whole, *wires):
        assert contender.link is not None
        contender.link.close()


def _alone(task: Task, batch: Batch, seed: int) -> Contender:
    """A step of one rank that talks to nobody."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return Contender("no communication", step)


def train(spec: Train, task: Task, configurations: Sequence[Configuration], seed: int) -> None:
    """Trains all configurations side by side, and records an `accuracy` for each."""
    trainings = [
        begin(task, configuration, bucket_nbytes=spec.bucket_nbytes, seed=seed, steps=spec.train_steps)
        for configuration in configurations
    ]
    rng = torch.Generator().manual_seed(seed + 1000 * dist.get_rank())
    progress = Progress(spec.job, f"training, seed {seed}", spec.train_steps)
    for step in range(1, spec.train_steps + 1):
        batch = task.batch(rng)
        for training in trainings:
            training.step(batch)
        if step % spec.judge_every == 0 or step == spec.train_steps:
            for training, value in zip(trainings, judged(task, trainings), strict=True):
                training.curve.append((step, value))
        progress.advance()
    facts = TASKS[spec.task]
    for training in trainings:
        say(
            "accuracy",
            job=spec.job,
            workload=spec.task,
            configuration=training.configuration.name,
            baseline=training.configuration.plain,
            **training.configuration.description(),
            seed=seed,
            ranks=dist.get_world_size(),
            steps=spec.train_steps,
            metric=facts.metric,
            higher_is_better=facts.higher_is_better,
            curve=training.curve,
            target=spec.target,
            steps_to_target=steps_to(training.curve, spec.target, facts.higher_is_better),
            final=training.curve[-1][1],
            data_sha256=task.data_sha256,
            note=training.link.note,
        )
    for training in trainings:
        training.link.close()


def judged(task: Task, trainings: Sequence[LabTraining]) -> list[float]:
    """The metric of every training. The ranks' models are equal, so each rank judges some of them."""
    own = [0.0] * len(trainings)
    with torch.no_grad():
        for index in range(dist.get_rank(), len(trainings), dist.get_world_size()):
            model: Any = trainings[index].link.model.module
            own[index] = task.evaluate(model)
    return over_ranks(own, dist.ReduceOp.SUM)


def main() -> None:
    """Joins the group that the environment describes, and trains what the arguments specify."""
    table, network = arguments(__doc__ or "")
    with joined():
        run(Train.read(table), network)


if __name__ == "__main__":
    main()
