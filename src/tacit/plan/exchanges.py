"""The exchange of a whole model under one choice, with all of its buckets ready at once, as `attach` or DDP would do it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tacit.plan.predicting import crossing_of, ddp_buckets, exchange_alone, tacit_buckets
from tacit.plan.values import BASELINES, BucketSizes, Probe, StrategyCost
from tacit.schemes import Channel
from tacit.sim.workloads import Layer, Workload
from tacit.stats import Stats
from tacit.strategy import Strategy

_MOST_S = 0.8  # of one exchange: a longer one stops after the buckets that fit

Gradients = dict[str, Tensor]
"""A model's gradients by layer, each 1-D."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """A bucket: gradients as autograd leaves them, the bucket that they are copied into, and where the mean goes; all three whole, and the
    first and the second layer by layer, as DDP handles them."""

    gradients: Tensor
    bucket: Tensor
    mean: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]

    def fill(self) -> Tensor:
        for x, part in self.layers:
            part.copy_(x)
        return self.bucket


@dataclass(slots=True)
class ModelExchange:
    """One choice: `begin` starts an exchange of so many elements a bucket, and returns what waits for its end."""

    choice: str
    predicted_s: float  # what the pieces add up to
    numels: list[int]
    begin: Callable[[], Callable[[], None]]
    close: Callable[[], None] = lambda: None
    nmse: Callable[[], float | None] = lambda: None

    def seconds(self, beside: Callable[[], object] = lambda: None) -> float:
        """One exchange, with something else in this thread meanwhile."""
        start = time.perf_counter()
        finish = self.begin()
        beside()
        finish()
        return time.perf_counter() - start


class ModelExchanges:
    """Makes them for one model. Strategies read the same vectors and write their means to the same place: one at a time runs."""

    def __init__(
        self, bench: Bench, probe: Probe, work: Workload, sizes: BucketSizes, gradients: Gradients | None
    ):
        self._bench, self._probe, self._work, self._sizes = bench, probe, work, sizes
        self._gradients = gradients
        self._shared: dict[str, _Buffers] = {}

    def of(self, choice: str) -> ModelExchange:
        cost = self._probe.cost(choice)
        plain = choice in BASELINES
        layers = ddp_buckets(self._work, self._sizes) if plain else tacit_buckets(self._work, self._sizes)
        layers = _fitting(self._probe, cost, layers)
        numels = [sum(layer.parameters for layer in bucket) for bucket in layers]
        predicted_s = exchange_alone(self._probe, cost, numels)
        if plain:
            made = [self._buffers(bucket) for bucket in layers]
            return ModelExchange(choice, predicted_s, numels, lambda: _ddp(self._bench, choice, made))
        return self._strategy(choice, cost, predicted_s, layers)

    def _vector(self, layers: Sequence[Layer]) -> Tensor:
        if self._gradients is None:
            return gradient(sum(layer.parameters for layer in layers), self._bench.device)
        return torch.cat([self._gradients[layer.name].reshape(-1).float() for layer in layers])

    def _buffers(self, layers: Sequence[Layer]) -> _Buffers:
        key = "/".join(layer.name for layer in layers)
        if key not in self._shared:
            x = self._vector(layers)
            bucket, numels = torch.empty_like(x), [layer.parameters for layer in layers]
            pairs = tuple(zip(x.split(numels), bucket.split(numels), strict=True))
            self._shared[key] = _Buffers(x, bucket, torch.empty_like(x), pairs)
        return self._shared[key]

    def _strategy(
        self, choice: str, cost: StrategyCost, predicted_s: float, layers: Sequence[Sequence[Layer]]
    ) -> ModelExchange:
        bench, strategy = self._bench, Strategy.parse(choice)
        exchange = Exchange(Channel(bench.wire, strategy.scheme), strategy.what, Stats(), device=bench.device)
        parts = [
            Bucket(i, layout_of(bucket), "plan", torch.float32, bench.device)
            for i, bucket in enumerate(layers)
        ]
        buffers = [self._buffers(bucket) for bucket in layers]
        crossing = crossing_of(ddp_buckets(self._work, self._sizes), layers)
        delivers = [_into(*each) for each in zip(buffers, crossing, strict=True)]
        memory, steps = MemoryStore(), iter(range(1 << 20))

        def begin() -> Callable[[], None]:
            step = next(steps)
            jobs = []
            for bucket, own, deliver in zip(parts, buffers, delivers, strict=True):
                x = own.fill()
                jobs.append(
                    exchange.reduce(
                        bucket, x, memory, deliver, seed=0, step=step, in_place=True, elsewhere=dict
                    )
                )

            def finish() -> None:
                exchange.wait(jobs)
                bench.wait()

            return finish

        def nmse() -> float | None:
            return _nmse(bench, buffers) if self._gradients is not None and cost.lossy else None

        return ModelExchange(
            choice, predicted_s, [own.mean.numel() for own in buffers], begin, exchange.close, nmse
        )


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


def _into(own: _Buffers, crosses: bool) -> Callable[[Tensor], None]:
    """Writes a mean where gradients are: at once, or layer by layer where they lie in several of DDP's buckets."""
    numels = [part.numel() for _, part in own.layers]

    def deliver(found: Tensor) -> None:
        if not crosses:
            own.mean.copy_(found)
            return
        for part, mean in zip(own.mean.split(numels), found.split(numels), strict=True):
            part.copy_(mean)

    return deliver


def _nmse(bench: Bench, buffers: Sequence[_Buffers]) -> float:
    """|mean - exact|^2 / |exact|^2 over all vectors."""
    off, whole = 0.0, 0.0
    for own in buffers:
        exact = own.gradients.double()
        dist.all_reduce(exact, group=bench.wire.group)
        exact /= bench.wire.world
        off += float((own.mean.double() - exact).square().sum())
        whole += float(exact.square().sum())
    if not whole:
        raise ConfigError(
            "all gradients of the recorded step are zero; give an example batch from which the model learns"
        )
    return off / whole


def _ddp(bench: Bench, choice: str, buffers: Sequence[_Buffers]) -> Callable[[], None]:
    """What DDP and its hooks do with buckets that are all ready."""
    world, works = bench.wire.world, []
    for own in buffers:
        x = own.bucket
        if choice in HALVES:
            sent = own.fill().to(HALVES[choice]).div_(world)
        else:
            sent = x
            for gradients, part in own.layers:
                torch.div(gradients, world, out=part)
        works.append((x, sent, dist.all_reduce(sent, group=bench.wire.group, async_op=True)))

    def finish() -> None:
        for x, sent, work in works:
            if work is not None:
                work.wait()
            if sent is not x:
                x.copy_(sent)
        bench.wait()

    return finish
