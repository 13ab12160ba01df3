"""A GPU model's step on machines without one: per-layer times are slept, gradients and their exchange are real.

A layer is one parameter. Its forward pass lasts as long as the workload has it; so does its backward pass, which then hands
out a gradient made once from a seed. DDP and tacit see what they always see, gradients that come last layer first, and
what overlaps with the rest of the backward pass overlaps here too.

The clock runs as a GPU's does: a layer ends when the times before it and its own have passed since the step began,
whatever the CPU did meanwhile (copying gradients, encoding). What the CPU could not keep up with is recorded as `late_s`.
No optimizer runs. Sizes are multiplied by `scale`: a network of rate R x scale then shows the ratios of one of rate R.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.lab.experiments.baselines import Configuration, ConnectedModel, connect, named, runnable
from tacit.lab.experiments.jobs.common import (
    Contender,
    Progress,
    WorkerNetwork,
    arguments,
    interleave,
    joined,
    say,
    slowest,
    timing,
)
from tacit.lab.experiments.jobs.specs import ComparisonSpec, Replay, replay_check
from tacit.redaction import without_secrets
from tacit.sim.workloads import Workload

WARMUP_STEPS = 4  # DDP regroups its buckets after the first step, PowerSGD starts with the third
TUNING_STEPS = 3
POWERSGD_SCALED = (
    "its factors shrink with the square root of the scale, so at full size it says less than its share here"
)


@dataclass(slots=True)
class Clock:
    """The time of one pass, from `start()` on; `late_s` is how long after its due time the last `spend` returned."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    late_s: float = 0.0
    _due_s: float = 0.0

    def start(self) -> None:
        self._due_s = self.now()

    def spend(self, seconds: float) -> None:
        """Returns when `seconds` more are due: due times add up exactly, so the errors of short sleeps do not."""
        self._due_s += seconds
        left_s = self._due_s - self.now()
        if left_s > 0:
            self.sleep(left_s)
        self.late_s = self.now() - self._due_s


@dataclass(frozen=True, slots=True)
class ReplayLayer:
    """A layer as it is played; `shape` is empty where it has no parameters."""

    name: str
    shape: tuple[int, ...]
    forward_s: float
    backward_s: float


def parts(workload: Workload, scale: float) -> list[ReplayLayer]:
    """The layers at `scale`, each as a matrix as square as can be: torch's PowerSGD leaves vectors alone."""
    return [
        ReplayLayer(layer.name, _square(layer.parameters, scale), layer.forward_s, layer.backward_s)
        for layer in workload.layers
    ]


def _square(parameters: int, scale: float) -> tuple[int, ...]:
    if parameters == 0:
        return ()
    numel = max(1, round(parameters * scale))
    rows = isqrt(numel)
    return rows, round(numel / rows)  # off by half a row at most


def gradients(layers: Sequence[ReplayLayer], *, seed: int, rank: int) -> list[Tensor]:
    """One gradient a layer, Gaussian, of a size of the layer's own (1e-4 to 1e-2); half of it is the same on all ranks."""
    common, own = (torch.Generator().manual_seed(seed + offset) for offset in (0, 1 + rank))
    sizes = 10 ** (torch.rand(len(layers), generator=common) * 2 - 4)
    return [
        (torch.randn(layer.shape, generator=common) + torch.randn(layer.shape, generator=own)) * size
        for layer, size in zip(layers, sizes, strict=True)
    ]


class Replayed(nn.Module):
    """The layers in spec. Parameters share `storage` with other configurations' models: nobody changes them."""

    def __init__(
        self,
        layers: Sequence[ReplayLayer],
        gradients: Sequence[Tensor],
        clock: Clock,
        storage: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self.layers, self.gradients, self.clock = layers, gradients, clock
        self.weights = nn.ParameterList(
            nn.Parameter(kept.detach()) for kept, layer in zip(storage, layers, strict=True) if layer.shape
        )

    def forward(self) -> Tensor:
        self.clock.start()
        token, weights = torch.zeros(()), iter(self.weights)
        for layer, gradient in zip(self.layers, self.gradients, strict=True):
            weight = next(weights) if layer.shape else None
            token = _Play.apply(token, weight, gradient, layer, self.clock)  # type: ignore[no-untyped-call]
        return token


class _Play(torch.autograd.Function):
    """One layer: a token goes in and out, which is what puts the layers in spec."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, weight: Tensor | None, gradient: Tensor, layer: ReplayLayer, clock: Clock
    ) -> Tensor:
        ctx.gradient, ctx.layer, ctx.clock = gradient, layer, clock
        clock.spend(layer.forward_s)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Any, ...]:
        ctx.clock.spend(ctx.layer.backward_s)
        return above[0], ctx.gradient if ctx.layer.shape else None, None, None, None


@dataclass(slots=True)
class ReplaySetup:
    """What all configurations of a replay share on this rank: layers, gradients, the memory behind the weights, a clock."""

    layers: Sequence[ReplayLayer]
    seed: int
    rank: int
    clock: Clock = field(default_factory=Clock)
    gradients: list[Tensor] = field(init=False)
    storage: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = gradients(self.layers, seed=self.seed, rank=self.rank)
        self.storage = [torch.zeros(layer.shape) for layer in self.layers]

    @property
    def numel(self) -> int:
        return sum(kept.numel() for kept, layer in zip(self.storage, self.layers, strict=True) if layer.shape)

    @property
    def compute_s(self) -> float:
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def contender(self, configuration: Configuration, bucket_nbytes: int, name: str = "") -> Contender:
        """The layers under `configuration`, ready to step."""
        replayed = Replayed(self.layers, self.gradients, self.clock, self.storage)
        link = connect(replayed, None, configuration, bucket_nbytes=bucket_nbytes, seed=self.seed)
        return self._played(name or configuration.name, replayed, link.model, link)

    def alone(self) -> Contender:
        """The layers of one rank that communicates with nobody: its step should last as long as the workload has it."""
        replayed = Replayed(self.layers, self.gradients, self.clock, self.storage)
        return self._played("no communication", replayed, replayed, None)

    def _played(
        self, name: str, replayed: Replayed, model: nn.Module, link: ConnectedModel | None
    ) -> Contender:
        weights = list(replayed.weights)  # looked up once: a ParameterList is slow to walk

        def step() -> None:
            model().backward()
            played.late_s.append(self.clock.late_s)
            for weight in weights:
                weight.grad = None

        played = Contender(name, step, link)
        return played


def tuned(stage: ReplaySetup, sizes_nbytes: Sequence[int], job: str, transmitted: Callable[[], int]) -> int:
    """The bucket size with which plain DDP is fastest; all ranks find the same one, and rank 0 records what was tried."""
    whole_nbytes = 4 * stage.numel + 1  # beyond the model all sizes are alike
    small = {whole_nbytes // 2, whole_nbytes // 4} if whole_nbytes <= min(sizes_nbytes) else set()
    sizes = sorted({min(size, whole_nbytes) for size in sizes_nbytes} | small)
    if len(sizes) == 1 or dist.get_world_size() == 1:
        return sizes[0]
    tried = [stage.contender(named("fp32"), size, f"bucket of {size}") for size in sizes]
    progress = Progress(job, "tuning plain DDP", len(tried) * (2 + TUNING_STEPS))
    interleave(tried, steps=TUNING_STEPS, warmup=2, progress=progress, transmitted=transmitted)
    step_s = [median(slowest(contender.step_s)) for contender in tried]
    rows = [{"bucket_nbytes": size, "step_p50_s": s} for size, s in zip(sizes, step_s, strict=True)]
    best = sizes[step_s.index(min(step_s))]
    say("tuning", job=job, step_n=TUNING_STEPS, rows=rows, best_nbytes=best)
    return best


def present(spec: ComparisonSpec) -> list[Configuration]:
    """The configurations that run here; one that does not is recorded with kind `left_out`."""
    found = []
    for text in (*spec.peers, *spec.strategies):
        configuration = runnable(named(text))
        if configuration is None:
            say(
                "left_out",
                job=spec.job,
                configuration=without_secrets(text),
                why="torch's hook does not run on this process group",
            )
        else:
            found.append(configuration)
    return found


def run(spec: Replay, network: WorkerNetwork) -> None:
    """Plays the workload under every configuration; rank 0 records a `timing` for each, and a `replay_check`."""
    workload = spec.read_workload()
    stage = ReplaySetup(parts(workload, spec.scale), spec.seed, dist.get_rank())
    configurations = present(spec)
    bucket_nbytes = tuned(stage, spec.tune_nbytes, spec.job, network.transmitted)
    contenders = [stage.contender(c, bucket_nbytes if c.peer else spec.bucket_nbytes) for c in configurations]
    alone = stage.alone()
    everyone = [*contenders, alone]
    progress = Progress(spec.job, "replay", len(everyone) * (WARMUP_STEPS + spec.steps))
    interleave(
        everyone, steps=spec.steps, warmup=WARMUP_STEPS, progress=progress, transmitted=network.transmitted
    )
    plain = next(
        c for c, configuration in zip(contenders, configurations, strict=True) if configuration.plain
    )
    facts = {
        "job": spec.job,
        "workload": workload.name,
        "source": workload.source,
        "replayed": True,
        "scale": spec.scale,
        "parameters": stage.numel,
    }
    say("replay_check", **facts, **replay_check(slowest(alone.step_s), stage.compute_s))
    for contender, configuration in zip(contenders, configurations, strict=True):
        figures = timing(contender, plain, network=network, compute_s=stage.compute_s, **facts)
        if configuration.peer == "powersgd" and spec.scale < 1:
            figures["note"] += f"; {POWERSGD_SCALED}"
        say("timing", **figures, late_p50_s=median(slowest(contender.late_s)))
    for contender in contenders:
        assert contender.link is not None
        contender.link.close()


def main() -> None:
    """Joins the group that the environment describes, and plays what the arguments specify."""
    table, network = arguments(__doc__ or "")
    with joined():
        run(Replay.read(table), network)


if __name__ == "__main__":
    main()
