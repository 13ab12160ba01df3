"""One exchange of the model alone, a choice at a time: what the pieces leave out (threads that hand over, cores that are shared) is in
it, and so is the error on gradients, where these are the model's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.buckets import Bucket
from tacit.errors import ConfigError
from tacit.exchange import Exchange
from tacit.layout import Layout
from tacit.memory import MemoryStore
from tacit.plan.costs import HALVES, gradient
from tacit.plan.operations import Bench
from tacit.plan.pipeline import Work
from tacit.plan.predicting import Pace, ddp_buckets, exchange_alone, exchange_beside, own_buckets
from tacit.plan.values import (
    BASELINES,
    BucketSizes,
    CalibratedExchange,
    GradientError,
    Probe,
    RecordedStep,
    StrategyCost,
)
from tacit.schemes import Channel
from tacit.sim.workloads import Layer, Workload
from tacit.stats import Stats
from tacit.strategy import Strategy

ROUNDS = 4
_SLOW_S = 0.2  # an exchange that long is the link's, and has less noise
_MOST_S = 0.8  # of one exchange: a longer one stops after the buckets that fit
_LEAST_SPREAD = 0.02
_CORES = (0.4, 3.0)  # of those that the kernel shows: the least and the most that is believed
_HALVINGS = 12

Gradients = dict[str, Tensor]
"""A model's gradients by layer, each 1-D."""


@dataclass(slots=True)
class _Runner:
    """How one choice exchanges, and what came of it."""

    choice: str
    predicted_s: float
    begin: Callable[[], Callable[[], None]]
    numels: list[int]
    close: Callable[[], None] = lambda: None
    nmse: Callable[[], float | None] = lambda: None

    def seconds(self, beside: Callable[[], None] = lambda: None) -> float:
        """One exchange, with something else in this thread meanwhile."""
        start = time.perf_counter()
        finish = self.begin()
        beside()
        finish()
        return time.perf_counter() - start


def calibrated(
    bench: Bench,
    probe: Probe,
    step: RecordedStep,
    choices: Sequence[str],
    *,
    buckets: BucketSizes,
    gradients: Gradients | None = None,
    compute: Callable[[], object] | None = None,
    rounds: int = ROUNDS,
) -> tuple[tuple[CalibratedExchange, ...], tuple[GradientError, ...]]:
    """Runs the exchange of every choice `rounds` times, until the budget is used up; and as often beside `compute`."""
    exchanges = list[CalibratedExchange]()
    errors = list[GradientError]()
    for choice in choices:
        if exchanges and bench.late():
            break
        runner = _runner(bench, probe, step.workload, choice, buckets, gradients)
        try:
            found = _alone(bench, runner, rounds)
            if compute is not None:
                found = replace(
                    found, cores=_cores(bench, probe, step, runner, found.factor, compute, rounds)
                )
            if (nmse := runner.nmse()) is not None:
                errors.append(GradientError(choice, bench.worst([nmse])[0]))
        finally:
            runner.close()
        exchanges.append(found)
    return tuple(exchanges), tuple(errors)


def _alone(bench: Bench, runner: _Runner, rounds: int) -> CalibratedExchange:
    bench.together()
    first_s = bench.worst([runner.seconds()])[0]  # connects, makes memory
    took: list[float] = []
    for _ in range(rounds if first_s < _SLOW_S else rounds - 1):
        bench.together()
        took.append(bench.worst([runner.seconds()])[0])
    ratios = [s / runner.predicted_s for s in took]
    middle = _typical(ratios)
    low, high = min(*ratios, middle * (1 - _LEAST_SPREAD)), max(*ratios, middle * (1 + _LEAST_SPREAD))
    return CalibratedExchange(runner.choice, middle, low, high, sum(runner.numels))


def _cores(
    bench: Bench,
    probe: Probe,
    step: RecordedStep,
    runner: _Runner,
    factor: float,
    compute: Callable[[], object],
    rounds: int,
) -> float:
    """How many cores a rank has while it computes and exchanges: with so many the pipeline takes as long as both did together."""
    took = []
    for _ in range(rounds):
        bench.together()
        took.append(bench.worst([runner.seconds(lambda: void(compute()))])[0])
    measured_s, cost = _typical(took), probe.cost(runner.choice)
    work = Work(step.workload.forward_s + step.workload.backward_s, step.cpu)

    def predicted_s(cores: float) -> float:
        return exchange_beside(replace(probe, cores=cores), cost, runner.numels, work, Pace(factor=factor))

    low, high = probe.cores * _CORES[0], probe.cores * _CORES[1]
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if predicted_s(middle) > measured_s:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)


def _typical(values: Sequence[float]) -> float:
    """The lower median: what disturbs a measurement makes it longer, never shorter."""
    return sorted(values)[(len(values) - 1) // 2]


def void(_: object) -> None:
    """What is computed beside an exchange is thrown away."""


def _runner(
    bench: Bench, probe: Probe, work: Workload, choice: str, sizes: BucketSizes, gradients: Gradients | None
) -> _Runner:
    cost = probe.cost(choice)
    layers = ddp_buckets(work, sizes) if choice in BASELINES else own_buckets(work, sizes.nbytes)
    layers = _fitting(probe, cost, layers)
    vectors = [_vector(bucket, gradients, bench.device) for bucket in layers]
    numels = [sum(layer.parameters for layer in bucket) for bucket in layers]
    predicted_s = exchange_alone(probe, cost, numels)
    if choice in BASELINES:
        return _Runner(choice, predicted_s, lambda: _ddp(bench, choice, vectors), numels)
    return _strategy(bench, choice, cost, predicted_s, layers, vectors, gradients is not None)


def _fitting(probe: Probe, cost: StrategyCost, layers: list[list[Layer]]) -> list[list[Layer]]:
    """The first buckets, as many as are exchanged in about `_MOST_S`; at least one."""
    numels = [sum(layer.parameters for layer in bucket) for bucket in layers]
    for count in range(len(layers), 1, -1):
        if exchange_alone(probe, cost, numels[:count]) <= _MOST_S:
            return layers[:count]
    return layers[:1]


def layout_of(layers: Sequence[Layer]) -> Layout:
    """The layers as matrices that are as square as can be, and what is left of each as a vector."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        rows = max(1, isqrt(layer.parameters))
        columns = layer.parameters // rows
        shapes[layer.name] = (rows, columns)
        if rest := layer.parameters - rows * columns:
            shapes[f"{layer.name}.rest"] = (rest,)
    return Layout.of(shapes)


def _vector(layers: Sequence[Layer], gradients: Gradients | None, device: torch.device) -> Tensor:
    """A bucket of its own: baselines leave the mean in it."""
    if gradients is None:
        return gradient(sum(layer.parameters for layer in layers), device)
    return torch.cat([gradients[layer.name].reshape(-1).float() for layer in layers])


def _strategy(
    bench: Bench,
    choice: str,
    cost: StrategyCost,
    predicted_s: float,
    layers: Sequence[Sequence[Layer]],
    vectors: Sequence[Tensor],
    judge: bool,
) -> _Runner:
    strategy = Strategy.parse(choice)
    exchange = Exchange(Channel(bench.wire, strategy.scheme), strategy.what, Stats(), device=bench.device)
    parts = [
        Bucket(i, layout_of(bucket), "plan", torch.float32, bench.device) for i, bucket in enumerate(layers)
    ]
    memory, steps = MemoryStore(), iter(range(1 << 20))
    means: list[Tensor] = [torch.empty_like(x) for x in vectors]

    def begin() -> Callable[[], None]:
        step = next(steps)
        jobs = [
            exchange.reduce(bucket, x, memory, _into(mean), seed=0, step=step)
            for bucket, x, mean in zip(parts, vectors, means, strict=True)
        ]

        def finish() -> None:
            exchange.wait(jobs)
            _wait(bench)

        return finish

    def nmse() -> float | None:
        return _nmse(bench, vectors, means) if judge and cost.lossy else None

    return _Runner(choice, predicted_s, begin, [x.numel() for x in vectors], exchange.close, nmse)


def _into(mean: Tensor) -> Callable[[Tensor], None]:
    def deliver(found: Tensor) -> None:
        mean.copy_(found)

    return deliver


def _nmse(bench: Bench, vectors: Sequence[Tensor], means: Sequence[Tensor]) -> float:
    """|mean - exact|^2 / |exact|^2 over all vectors."""
    off, whole = 0.0, 0.0
    for x, mean in zip(vectors, means, strict=True):
        exact = x.double()
        dist.all_reduce(exact, group=bench.wire.group)
        exact /= bench.wire.world
        off += float((mean.double() - exact).square().sum())
        whole += float(exact.square().sum())
    if not whole:
        raise ConfigError(
            "all gradients of the recorded step are zero; give an example batch from which the model learns"
        )
    return off / whole


def _ddp(bench: Bench, choice: str, vectors: Sequence[Tensor]) -> Callable[[], None]:
    """What DDP and its hooks do with buckets that are all ready."""
    world, works = bench.wire.world, []
    for x in vectors:
        sent = x.to(HALVES[choice]).div_(world) if choice in HALVES else x.div_(world)
        works.append((x, sent, dist.all_reduce(sent, group=bench.wire.group, async_op=True)))

    def finish() -> None:
        for x, sent, work in works:
            if work is not None:
                work.wait()
            if sent is not x:
                x.copy_(sent)
        _wait(bench)

    return finish


def _wait(bench: Bench) -> None:
    if bench.device.type != "cpu":
        torch.accelerator.synchronize()
