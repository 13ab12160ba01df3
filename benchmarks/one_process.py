"""Accuracy of a codec with no network: ranks take turns in one process, on the lab's batches, buckets and schedule.

    python benchmarks/one_process.py --task bytes --steps 1200 --seeds 0 1 2 --codecs none int4 'lowrank(8)'

What a codec does to gradients does not depend on who carries them, so a training here ends where the lab's `train` job ends, at a quarter
of its cost on 2 cores, and several can run side by side. One JSON record a training and line; `bytes` is what a rank hands over, against float32.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from tacit.buckets import Bucket, outer_names, parameter_names, plan
from tacit.codecs import Dgc
from tacit.demo.facts import TASKS
from tacit.demo.tasks import BUILDERS, Task, learning_rates
from tacit.lab.experiments.jobs.specs import steps_to
from tacit.requests import Codec, LocalMemory, declared_nbytes, loop_back
from tacit.strategy import parse_codec


class Ranks:
    """One model; every rank's gradients of it, reduced by a codec bucket by bucket."""

    def __init__(self, model: nn.Module, codec: Codec, world: int, bucket_nbytes: int, seed: int) -> None:
        self.model, self.codec, self.world, self.seed = model, codec, world, seed
        self.parameters = parameter_names(model)
        labels = dict.fromkeys(self.parameters, "0")
        self.buckets = plan(self.parameters, labels, bucket_nbytes, outer_names(model, self.parameters))
        self.memories = [
            [LocalMemory(torch.empty(bucket.layout.numel), given=bucket.layout) for _ in range(world)]
            for bucket in self.buckets
        ]

    def backward(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]], step: int) -> None:
        """Leaves the mean over ranks, as the codec brings it, in the gradients."""
        found: list[list[torch.Tensor]] = []
        for x, y in batches:
            self.model.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            found.append([self._flat(bucket) for bucket in self.buckets])
        for index, bucket in enumerate(self.buckets):
            inputs = [gradients[index] for gradients in found]
            reduced = loop_back(
                self.codec,
                inputs,
                memories=self.memories[index],
                step=step,
                seed=self.seed + index,
                layout=bucket.layout,
            )
            mean = reduced[0].total / self.world
            for name, part in bucket.layout.split(mean).items():
                self.parameters[name].grad = part.clone()

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        parts = [self.parameters[name].grad for name in bucket.names]
        return torch.cat([part.reshape(-1) for part in parts if part is not None])

    @property
    def share(self) -> float:
        """Bytes that a rank hands over in a step, against float32."""
        whole = sum(4 * bucket.layout.numel for bucket in self.buckets)
        return sum(declared_nbytes(self.codec, bucket.layout) for bucket in self.buckets) / whole


def train(task: Task, text: str, seed: int, options: argparse.Namespace) -> dict[str, object]:
    facts = TASKS[options.task]
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    schedule = learning_rates(optimizer, options.steps)
    codec = parse_codec(text)
    if isinstance(codec, Dgc) and codec.momentum:  # it has the momentum, or there would be two
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    ranks = Ranks(model, codec, options.world, options.bucket, seed)
    rngs = [torch.Generator().manual_seed(seed + 1000 * rank) for rank in range(options.world)]
    curve: list[tuple[int, float]] = []
    began = time.monotonic()
    for step in range(1, options.steps + 1):
        ranks.backward([task.batch(rng) for rng in rngs], step - 1)
        optimizer.step()
        schedule.step()
        if step % options.judge_every == 0 or step == options.steps:
            with torch.no_grad():
                curve.append((step, task.evaluate(model)))
            print(f"{text} seed {seed}: step {step}, {curve[-1][1]:.4f}", end="\r", file=sys.stderr)
    return {
        "benchmark": "one process",
        "task": options.task,
        "codec": text,
        "seed": seed,
        "world": options.world,
        "steps": options.steps,
        "metric": facts.metric,
        "final": curve[-1][1],
        "target": options.target,
        "steps_to_target": options.target and steps_to(curve, options.target, facts.higher_is_better),
        "bytes": round(ranks.share, 5),
        "seconds": round(time.monotonic() - began, 1),
        "curve": curve,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(BUILDERS), default="bytes")
    parser.add_argument("--codecs", nargs="+", default=["none", "int4", "lowrank(8)"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--bucket", type=int, default=1 << 20, help="bytes of a bucket")
    parser.add_argument("--judge-every", type=int, default=40)
    parser.add_argument("--target", type=float, help="metric whose first step is recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = BUILDERS[options.task]()
    for seed in options.seeds:
        for text in options.codecs:
            print(json.dumps(train(task, text, seed, options)), flush=True)


if __name__ == "__main__":
    main()
