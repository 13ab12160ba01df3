"""A rank of benchmarks/plan.py: on one network it predicts every set-up from a probe, then measures it. One JSON record a set-up.

Nothing measured goes into a prediction: the probe is over before the first step is taken.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tacit.demo.tasks import BUILDERS
from tacit.errors import ConfigError
from tacit.lab.experiments.baselines import connect, named
from tacit.lab.experiments.jobs.common import Contender, Progress, interleave, joined, say, slowest
from tacit.lab.experiments.jobs.replay import Replayed, ReplaySetup, parts
from tacit.lab.network.exec_in_host import REALTIME
from tacit.plan import BucketSizes, Prediction, Probe, RecordedStep, advise, predict, probe, record_step
from tacit.plan.files import as_record
from tacit.plan.steps import CommonStopwatch
from tacit.plan.steps import slowest as slowest_step
from tacit.sim.workloads import Layer, Workload, workload

PEERS = {"DDP": "fp32", "DDP fp16": "fp16", "DDP bf16": "bf16"}
SCALED_BPS = 100e6  # replays are as large on every link as they must be for half a second of plain DDP on one of this rate
PASSES = 2  # of each pair, connected anew: how far they are apart is what no prediction can be better than
RECORDED = 8  # steps that a model is recorded for
WARMUP = 2  # DDP cuts its buckets anew after the first step


@dataclass(frozen=True)
class Order:
    """What the ranks of one network do."""

    rate_bps: float | None
    models: tuple[str, ...]
    strategies: tuple[str, ...]
    steps: int
    budget_s: float
    realtime: bool = False


@dataclass(frozen=True)
class Setup:
    """One model on one network: its step as a value, and how to take a step under a choice."""

    model: str
    step: RecordedStep
    buckets: BucketSizes
    contender: Callable[[str], Contender]
    alone: Contender
    compute: Callable[[], object]  # as it is beside an exchange


@dataclass(frozen=True)
class Pass:
    """One measurement of all choices of a set-up, the slowest rank's steps."""

    compute_s: list[float]
    step_s: dict[str, list[float]]
    split: dict[str, dict[str, float]]


def replayed(name: str) -> Setup:
    """A known model, scaled alike on all links, so that fast ones have little to send and slow ones much."""
    whole = workload(name)
    scale = 0.45 * SCALED_BPS / (8 * 1.5 * 4 * whole.parameters)
    stage = ReplaySetup(parts(whole, scale), 0, dist.get_rank())
    nbytes = bucket_nbytes(stage.numel)
    alone = stage.alone()
    step, alone.step = alone.step, partial(together, alone.step)
    return Setup(
        f"{name}, {stage.numel:,} parameters",
        recorded_replay(name, stage),
        BucketSizes(nbytes, nbytes),
        lambda choice: stage.contender(named(PEERS.get(choice, choice)), nbytes, choice),
        alone,
        step,
    )


def recorded_replay(name: str, stage: ReplaySetup) -> RecordedStep:
    """A replay's step as it runs here: what it sleeps, and what autograd makes of its gradients."""
    model = Replayed(stage.layers, stage.gradients, stage.clock, stage.storage)
    weights, named_layers = list(model.weights), [layer for layer in stage.layers if layer.shape]
    arrived_s: list[float] = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: arrived_s.append(time.perf_counter()))
    stopwatch, steps = CommonStopwatch(), list[list[float]]()

    def step() -> None:
        arrived_s.clear()
        start_s = time.perf_counter()
        token = model()
        forward_s = time.perf_counter()
        token.backward()
        ends_s = [start_s, forward_s, *arrived_s]
        steps.append([b - a for a, b in pairwise(ends_s)])
        for weight in weights:
            weight.grad = None

    step()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    totals = [stopwatch.seconds(step) for _ in range(RECORDED)]
    cpu = (time.process_time() - cpu_s) / (time.perf_counter() - start_s)
    forward_s, *backward_s = (median(column) for column in zip(*steps[1:], strict=True))
    layers = tuple(
        Layer(layer.name, weight.numel(), forward_s / len(weights), s)
        for layer, weight, s in zip(named_layers, weights, reversed(backward_s), strict=True)
    )
    return slowest_step(RecordedStep(Workload(name, layers, "replayed"), cpu=cpu), totals=totals)


def real(task_name: str) -> Setup:
    """A task of the demo: real computation, on cores that the ranks share."""
    task = BUILDERS[task_name]()
    x, y = task.batch(torch.Generator().manual_seed(1000 * dist.get_rank()))

    def loss(out: Any) -> torch.Tensor:
        return F.cross_entropy(out, y)

    torch.manual_seed(0)
    model = task.model()
    recorded = record_step(
        model, [x], loss=loss, optimizer=task.optimizer(model), name=task_name, repeats=RECORDED
    )
    nbytes = bucket_nbytes(recorded.workload.parameters)

    def contender(choice: str) -> Contender:
        torch.manual_seed(0)
        trained = task.model()
        optimizer = task.optimizer(trained)
        link = connect(trained, optimizer, named(PEERS.get(choice, choice)), bucket_nbytes=nbytes)

        def step() -> None:
            optimizer.zero_grad()
            loss(link.model(x)).backward()
            optimizer.step()

        return Contender(choice, step, link)

    own = task.optimizer(model)

    def compute() -> None:
        loss(model(x)).backward()

    def alone() -> None:
        own.zero_grad()
        compute()
        own.step()

    step = partial(together, alone)
    about = f"{task_name}, {recorded.workload.parameters:,} parameters"
    return Setup(
        about, recorded, BucketSizes(nbytes, nbytes), contender, Contender("no communication", step), compute
    )


def together(step: Callable[[], object]) -> None:
    """The step of all ranks: on cores that they share, one may begin when another has ended."""
    step()
    dist.barrier()


def bucket_nbytes(numel: int) -> int:
    """Some buckets, whatever the size of the model."""
    return min(4 << 20, max(128 << 10, 4 * numel // 5))


def compared(setup: Setup, order: Order) -> dict[str, Any]:
    """The predictions, and then the measured steps."""
    choices = [*PEERS, *order.strategies]
    found = probed(setup, choices, order)
    predictions = predict(found, setup.step, buckets=setup.buckets)
    advice = advise(found, predictions)
    passes = [_steps(setup, [each.choice for each in predictions], order.steps) for _ in range(PASSES)]
    return {
        "rate_bps": order.rate_bps,
        "model": setup.model,
        "parameters": setup.step.workload.parameters,
        "compute_s": setup.step.compute_s,
        "measured_compute_s": median(
            s for each in passes for s in each.compute_s
        ),  # the same steps without an exchange: apart from compute_s, the machine changed meanwhile
        "drift": found.drift,
        "probe_s": found.took_s,
        "chosen": advice.winner.choice,
        "verdict": advice.verdict,
        "probe": as_record(found),
        "step": as_record(setup.step),
        "bucket_nbytes": setup.buckets.nbytes,
        "rows": [_row(each, passes) for each in predictions],
    }


def _steps(setup: Setup, choices: Sequence[str], steps: int) -> Pass:
    """Every choice is connected anew, and all of them and the computation alone take their steps in turn."""
    contenders = [setup.contender(choice) for choice in choices]
    everyone = [*contenders, setup.alone]
    progress = Progress(setup.model, "steps", len(everyone) * (WARMUP + steps))
    interleave(everyone, steps=steps, warmup=WARMUP, progress=progress, transmitted=lambda: 0)
    found = Pass(
        slowest(setup.alone.step_s),
        {each.name: slowest(each.step_s) for each in contenders},
        {each.name: _split(each) for each in contenders},
    )
    for each in contenders:
        assert each.link is not None
        each.link.close()
    return found


def _split(contender: Contender) -> dict[str, float]:
    """Of rank 0, the median seconds of each part of a step that tacit measures."""
    return {part: median(step[part] for step in contender.split_s) for part in contender.split_s[0]}


def probed(setup: Setup, choices: list[str], order: Order) -> Probe:
    """The probe; once more where it was refused, as it is on links that somebody else uses."""
    for last in (False, False, True):
        try:
            return probe(
                setup.step,
                choices,
                buckets=setup.buckets,
                compute=setup.compute,
                finalists=len(choices),
                budget_s=order.budget_s,
            )
        except ConfigError:
            if last:
                raise
    raise AssertionError("the last try returns or raises")


def _row(prediction: Prediction, passes: Sequence[Pass]) -> dict[str, Any]:
    steps_s = [each.step_s[prediction.choice] for each in passes]
    return {
        "choice": prediction.choice,
        "predicted_s": prediction.step_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "limited_by": prediction.limited_by,
        "wire_s": prediction.wire_s,
        "codec_s": prediction.codec_s,
        "measured_s": median(s for each in steps_s for s in each),
        "pass_s": [median(each) for each in steps_s],
        "steps_s": steps_s,
        "split": passes[-1].split[prediction.choice],
    }


def before_others() -> None:
    """On loopback, where no lab does it: all threads of this rank go before the ordinary processes of the machine."""
    with suppress(PermissionError):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(REALTIME))


def main() -> None:
    order = Order(
        **{key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(sys.argv[1]).items()}
    )
    with joined():
        say("ready")
        if order.realtime and order.rate_bps is None:
            before_others()
        time.sleep(1.0)  # the runner may put the ranks before other processes
        for name in order.models:
            make = partial(real, name) if name in BUILDERS else partial(replayed, name)
            say("setup", **compared(make(), order))
            gc.collect()  # models of a set-up must not outlive the process group
        dist.barrier()


if __name__ == "__main__":
    main()
