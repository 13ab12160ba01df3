"""One exchange of the model alone, a choice at a time: what the pieces leave out (threads that hand over, cores that are shared) is in
it, and so is the error on gradients, where these are the model's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt
from statistics import median

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
from tacit.plan.predicting import ddp_buckets, exchange_alone, own_buckets
from tacit.plan.values import (
    BASELINES,
    BucketSizes,
    CalibratedExchange,
    GradientError,
    Probe,
    StrategyCost,
)
from tacit.schemes import Channel
from tacit.sim.workloads import Layer, Workload
from tacit.stats import Stats
from tacit.strategy import Strategy

ROUNDS = 3
_MOST_S = 0.8  # of one exchange: a longer one stops after the buckets that fit
_LEAST_SPREAD = 0.02

Gradients = dict[str, Tensor]
"""A model's gradients by layer, each 1-D."""


@dataclass(slots=True)
class _Runner:
    """How one choice exchanges, and what came of it."""

    choice: str
    predicted_s: float
    elements: int
    run: Callable[[], float]
    close: Callable[[], None] = lambda: None
    nmse: Callable[[], float | None] = lambda: None
    took_s: list[float] = field(default_factory=list)


def calibrated(
    bench: Bench,
    probe: Probe,
    work: Workload,
    choices: Sequence[str],
    *,
    buckets: BucketSizes,
    gradients: Gradients | None = None,
    rounds: int = ROUNDS,
) -> tuple[tuple[CalibratedExchange, ...], tuple[GradientError, ...]]:
    """Runs the exchange of every choice in turn, `rounds` times, until the budget is used up."""
    found, errors = [], []
    for choice in choices:
        if bench.late():
            break
        runner = _runner(bench, probe, work, choice, buckets, gradients)
        try:
            bench.together()
            runner.run()  # connects, makes memory
            for _ in range(rounds):
                bench.together()
                runner.took_s.append(bench.worst([runner.run()])[0])
            nmse = runner.nmse()
        finally:
            runner.close()
        ratios = [s / runner.predicted_s for s in runner.took_s]
        middle = median(ratios)
        low, high = min(*ratios, middle * (1 - _LEAST_SPREAD)), max(*ratios, middle * (1 + _LEAST_SPREAD))
        found.append(CalibratedExchange(choice, middle, low, high, runner.elements))
        if nmse is not None:
            errors.append(GradientError(choice, bench.worst([nmse])[0]))
    return tuple(found), tuple(errors)


def _runner(
    bench: Bench, probe: Probe, work: Workload, choice: str, sizes: BucketSizes, gradients: Gradients | None
) -> _Runner:
    cost = probe.cost(choice)
    layers = ddp_buckets(work, sizes) if choice in BASELINES else own_buckets(work, sizes.nbytes)
    layers = _fitting(probe, cost, layers)
    vectors = [_vector(bucket, gradients, bench.device) for bucket in layers]
    numels = [sum(layer.parameters for layer in bucket) for bucket in layers]
    predicted_s = exchange_alone(probe, cost, numels)
    elements = sum(numels)
    if choice in BASELINES:
        return _Runner(choice, predicted_s, elements, lambda: _ddp(bench, choice, vectors))
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
    if gradients is None:
        return gradient(sum(layer.parameters for layer in layers), device)
    return torch.cat([gradients[layer.name] for layer in layers])


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

    def run() -> float:
        step, start = next(steps), time.perf_counter()
        jobs = [
            exchange.reduce(bucket, x, memory, _into(mean), seed=0, step=step)
            for bucket, x, mean in zip(parts, vectors, means, strict=True)
        ]
        exchange.wait(jobs)
        _wait(bench)
        return time.perf_counter() - start

    def nmse() -> float | None:
        return _nmse(bench, vectors, means) if judge and cost.lossy else None

    return _Runner(choice, predicted_s, sum(x.numel() for x in vectors), run, exchange.close, nmse)


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


def _ddp(bench: Bench, choice: str, vectors: Sequence[Tensor]) -> float:
    """What DDP and its hooks do with buckets that are all ready."""
    start, world = time.perf_counter(), bench.wire.world
    works = []
    for x in vectors:
        sent = x.to(HALVES[choice]).div_(world) if choice in HALVES else x.div_(1.0)
        works.append((x, sent, dist.all_reduce(sent, group=bench.wire.group, async_op=True)))
    for x, sent, work in works:
        if work is not None:
            work.wait()
        if sent is not x:
            x.copy_(sent)
    _wait(bench)
    took_s = time.perf_counter() - start
    for x in vectors:
        x.normal_(0.0, 1e-3)  # sums would grow without end
    return took_s


def _wait(bench: Bench) -> None:
    if bench.device.type != "cpu":
        torch.accelerator.synchronize()
