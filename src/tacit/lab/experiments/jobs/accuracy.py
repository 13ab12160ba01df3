"""Accuracy of many strategies with no network: one process trains one strategy, its ranks taking turns, on the lab's batches.

[[job]]
kind = "accuracy"
task = "bytes"
strategies = ["none", "int4", "lowrank(8)"]
train_steps = 600
seeds = [0]

What a codec does to gradients does not depend on who carries them, so a training here ends where a `train` job ends, at a quarter of its
cost. The processes share the trainings out; each is recorded as it ends, so that of a run which is cut the first ones are there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit import environment
from tacit.buckets import Bucket, outer_names, parameter_names, plan
from tacit.codecs import Dgc
from tacit.demo.description import described
from tacit.demo.facts import TASKS
from tacit.demo.tasks import BUILDERS, Batch, Task, learning_rates
from tacit.lab.experiments.jobs.common import PROGRESS_S, arguments
from tacit.lab.experiments.jobs.specs import Accuracy, steps_to
from tacit.requests import Codec, LocalMemory, Request, declared_nbytes, loop_back
from tacit.strategy import Strategy


class Turns:
    """One model; every rank's gradients of it, reduced by a codec bucket by bucket. `changed`, called with the rank, may change them first."""

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        world: int,
        bucket_nbytes: int,
        seed: int,
        changed: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.model, self.codec, self.world, self.seed, self._changed = model, codec, world, seed, changed
        self.sent_nbytes = 0  # what a rank has handed to its requests
        self.parameters = parameter_names(model)
        labels = dict.fromkeys(self.parameters, "0")
        self.buckets = plan(self.parameters, labels, bucket_nbytes, outer_names(model, self.parameters))
        self.memories = [
            [LocalMemory(torch.empty(bucket.layout.numel), given=bucket.layout) for _ in range(world)]
            for bucket in self.buckets
        ]

    def backward(self, batches: Sequence[Batch], step: int) -> None:
        """Leaves the mean over ranks, as the codec brings it, in the gradients."""
        found: list[list[Tensor]] = []
        for rank, (x, y) in enumerate(batches):
            self.model.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self._changed(rank)
            found.append([self._flat(bucket) for bucket in self.buckets])
        for index, bucket in enumerate(self.buckets):
            reduced = loop_back(
                self.codec,
                [gradients[index] for gradients in found],
                memories=self.memories[index],
                step=step,
                seed=self.seed + index,
                layout=bucket.layout,
                observe=self._count,
            )
            mean = reduced[0].total / self.world
            for name, part in bucket.layout.split(mean).items():
                self.parameters[name].grad = part.clone()

    def _flat(self, bucket: Bucket) -> Tensor:
        parts = [self.parameters[name].grad for name in bucket.names]
        return torch.cat([part.reshape(-1) for part in parts if part is not None])

    def _count(self, request: Request) -> None:
        self.sent_nbytes += request.nbytes

    @property
    def share(self) -> float:
        """Bytes that a rank hands over in a step, against float32."""
        whole = sum(4 * bucket.layout.numel for bucket in self.buckets)
        return sum(declared_nbytes(self.codec, bucket.layout) for bucket in self.buckets) / whole


def hand_over_momentum(optimizer: torch.optim.Optimizer, codec: object) -> None:
    """Leaves the momentum to a codec that has it; `attach` refuses an optimizer that would apply its own as well."""
    if isinstance(codec, Dgc) and codec.momentum:
        for group in optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = 0.0


def train(
    spec: Accuracy,
    task: Task,
    strategy: Strategy,
    seed: int,
    world: int,
    on_step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """One training from start to end; what a record of kind `accuracy` has."""
    facts = TASKS[spec.task]
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    hand_over_momentum(optimizer, strategy.what)
    schedule = learning_rates(optimizer, spec.train_steps)
    ranks = Turns(model, strategy.what, world, spec.bucket_nbytes, seed)
    rngs = [torch.Generator().manual_seed(seed + 1000 * rank) for rank in range(world)]
    curve, began = list[tuple[int, float]](), time.monotonic()
    for step in range(1, spec.train_steps + 1):
        ranks.backward([task.batch(rng) for rng in rngs], step - 1)
        optimizer.step()
        schedule.step()
        if step % spec.judge_every == 0 or step == spec.train_steps:
            with torch.no_grad():
                curve.append((step, task.evaluate(model)))
        on_step()
    return {
        "job": spec.job,
        "workload": spec.task,
        "configuration": str(strategy),
        **described(strategy),
        "seed": seed,
        "ranks": world,
        "steps": spec.train_steps,
        "metric": facts.metric,
        "higher_is_better": facts.higher_is_better,
        "curve": curve,
        "target": spec.target,
        "steps_to_target": steps_to(curve, spec.target, facts.higher_is_better),
        "final": curve[-1][1],
        "bytes_share": ranks.share,
        "seconds": time.monotonic() - began,
        "data_sha256": task.data_sha256,
        "note": "ranks took turns in one process",
    }


def run(spec: Accuracy, rank: int, world: int) -> None:
    """This process's part of the trainings: each `world`-th from `rank` on, the first seed of all strategies first."""
    task = BUILDERS[spec.task]()
    own = [(seed, text) for seed in spec.seeds for text in spec.strategies][rank::world]
    steps, done, shown_s = len(own) * spec.train_steps, 0, 0.0

    def on_step() -> None:  # every process prints: one that is silent for minutes counts as stuck
        nonlocal done, shown_s
        done += 1
        if time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            _print("progress", job=spec.job, phase="training, ranks in turn", step=done, steps=steps)

    for seed, text in own:
        _print("accuracy", **train(spec, task, Strategy.parse(text), seed, world, on_step))


def _print(kind: str, **fields: Any) -> None:
    """One JSON line, from any rank: each has trainings of its own."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def main() -> None:
    """Trains this process's part of what the arguments specify; it joins no group, since nobody waits for anybody."""
    table, _ = arguments(__doc__ or "")
    torch.set_num_threads(1)  # the processes share the machine's cores
    run(Accuracy.read(table), environment.rank(), environment.world_size())


if __name__ == "__main__":
    main()
