"""What overlapping brings where communication takes about as long as computation: steps of replayed models on shaped links, in turn in one run.

    python benchmarks/overlap.py                       # VGG16, ResNet50 and GPT-2 under DDP, then FSDP2 (about 8 minutes; root)
    python benchmarks/overlap.py --models vgg16 --codecs none --turns 3

A layer is a module with one parameter; its times are slept as a GPU would take them (`tacit lab` replays alike), its gradient and the exchange
are real, and SGD takes its steps. Ranks are real processes in a star of the lab. First every contender takes steps without any computation;
then computation is stretched to what the faster of the two that are compared needs for that, and they take turns, some steps each. A step is
the time between the beginnings of two forward passes, the slowest rank's. One JSON record a line:

- DDP: `backward`, whose optimizer waits for all gradients, with the fastest of several bucket sizes; plain DDP with its fastest; `forward`, whose
  next forward pass waits for each module's own (`overlap="forward"`), with the fastest of the same sizes.
- FSDP2: int8 between replicas (`group=`), and in the reduce-scatter of one mesh with bf16 all-gathers; `waits`, as FSDP2 would have it, against `late`.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit import lab, launch
from tacit.attachments.fsdp_units import Unit
from tacit.lab.experiments.jobs.common import joined, slowest
from tacit.lab.experiments.jobs.replay import ReplayLayer, gradients, parts
from tacit.records import host_facts
from tacit.sim.workloads import workload
from tacit.topology import star
from tacit.units import parse_rate

STEPS = 5  # in a row; of the times between their beginnings the first is left out: nothing was on its way when it began
PARTS = (8, 16, 32)  # of the model in a bucket, tried for DDP
ALONE = 3  # turns without computation


@dataclass(frozen=True)
class Case:
    model: str
    codec: str
    numel: float  # about as many parameters
    rate: str
    ranks: int = 4
    fsdp: str = ""  # "replicas" or "mesh"


@dataclass
class ReplayClock:
    """As a GPU's: computation lasts as long as it should, whatever the CPU does meanwhile; waiting for gradients delays it."""

    stretch: float = 0.0
    due_s: float = 0.0
    waited: Callable[[], float] = lambda: 0.0
    _waited_s: float = 0.0

    def start(self) -> None:
        self.due_s, self._waited_s = time.perf_counter(), self.waited()

    def spend(self, seconds: float) -> None:
        waited_s = self.waited()
        if waited_s - self._waited_s > 1e-4:
            self.due_s = max(self.due_s, time.perf_counter())
        self._waited_s = waited_s
        self.due_s += seconds * self.stretch
        if (left_s := self.due_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor | None, layer: "Played") -> Tensor:
        ctx.layer = layer
        layer.clock.spend(layer.layer.forward_s)
        return token.clone()

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Any, ...]:
        ctx.layer.clock.spend(ctx.layer.layer.backward_s)
        return above[0], ctx.layer.gradient, None


class Played(nn.Module):
    """One layer."""

    def __init__(self, layer: ReplayLayer, gradient: Tensor | None, clock: ReplayClock):
        super().__init__()
        self.layer, self.gradient, self.clock = layer, gradient, clock
        self.weight = nn.Parameter(torch.zeros(layer.shape)) if layer.shape else None

    def forward(self, token: Tensor) -> Tensor:
        if self.gradient is not None and self.weight.dtype != self.gradient.dtype:
            self.gradient = self.gradient.to(self.weight.dtype)
        return _Pass.apply(token, self.weight, self)


@dataclass
class Runner:
    """One way to exchange, and the steps it has taken."""

    name: str
    bucket_nbytes: int
    step: Callable[[], None]
    finish: Callable[[], None]
    clock: ReplayClock
    step_s: list[float] = field(default_factory=list)

    def run(self, stretch: float) -> list[float]:
        """Times of the steps of one turn, the slowest rank's."""
        self.clock.stretch = stretch
        dist.barrier()
        begins = []
        for _ in range(STEPS):
            begins.append(time.perf_counter())
            self.clock.start()
            self.step()
        self.finish()
        return slowest([b - a for a, b in pairwise(begins[1:])])


def played(case: Case, clock: ReplayClock) -> nn.Sequential:
    model = workload(case.model)
    layers = parts(model, case.numel / model.parameters)
    found = gradients(layers, seed=1, rank=dist.get_rank())
    return nn.Sequential(
        *(Played(a, g if a.shape else None, clock) for a, g in zip(layers, found, strict=True))
    )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    token = torch.zeros((), requires_grad=True)

    def step() -> None:
        model(token).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def under_ddp(case: Case, name: str, bucket_nbytes: int) -> Runner:
    clock = ReplayClock()
    ddp = DistributedDataParallel(
        played(case, clock),
        bucket_cap_mb=bucket_nbytes / 2**20,
        gradient_as_bucket_view=True,
        init_sync=False,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    if name == "plain DDP":
        return Runner(name, bucket_nbytes, trained(ddp, optimizer), lambda: None, clock)
    handle = tacit.attach(ddp, optimizer, case.codec, bucket=bucket_nbytes, overlap=name)
    if name == "forward":
        clock.waited = lambda: handle.stats._seconds["wait"]
    return Runner(name, bucket_nbytes, trained(ddp, optimizer), handle.flush, clock)


def under_fsdp(case: Case, name: str) -> Runner:
    clock = ReplayClock(
        waited=time.perf_counter
    )  # as a CPU's: a layer begins when the one before it has let go
    model = played(case, clock)
    world = dist.get_world_size()
    policy, group = MixedPrecisionPolicy(), None
    if case.fsdp == "replicas":
        meshes = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replica", "shard"))
        mesh, group = meshes["shard"], meshes.get_group("replica")
    else:
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if layer.weight is not None:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tacit.attach(model, optimizer, case.codec, group=group)
    step = trained(model, optimizer)

    def waiting() -> None:
        with mock.patch.object(Unit, "lands_late", return_value=False):
            step()

    return Runner(name, 0, step if name == "late" else waiting, lambda: None, clock)


def alone_s(runner: Runner) -> float:
    """A step without computation."""
    return median(s for turn in [runner.run(0.0) for _ in range(ALONE + 1)][1:] for s in turn)


def fastest(runners: list[Runner], stretch: float) -> Runner:
    """With computation; all ranks find the same one."""
    took: dict[int, list[float]] = {}
    for turn in range(2):
        for at, runner in enumerate(runners):
            took.setdefault(at, []).extend(runner.run(stretch) if turn else runner.run(stretch)[:0])
    return runners[min(took, key=lambda at: median(took[at]))]


def compared(case: Case) -> tuple[list[Runner], Callable[[float], list[Runner]]]:
    """Who tells how long communication takes, and who is then compared."""
    if case.fsdp:
        runners = [under_fsdp(case, name) for name in ("waits", "late")]
        return runners[:1], lambda stretch: runners
    numel = sum(p.numel() for p in played(case, ReplayClock()).parameters())
    sizes = [4 * numel // share + 1 for share in PARTS]
    names = ["backward", "forward"] + ["plain DDP"] * (case.codec.split()[0] == "none")
    tried = {name: [under_ddp(case, name, size) for size in sizes] for name in names}
    return tried["backward"][:2], lambda stretch: [fastest(found, stretch) for found in tried.values()]


def work(case: Case, turns: int) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"joined": True}), flush=True)
    compute_s = sum(layer.forward_s + layer.backward_s for layer in workload(case.model).layers)
    timed, choose = compared(case)
    for runner in timed * 2:  # DDP cuts its buckets anew, and `forward` measures what its order follows from
        runner.run(0.0)
    communication_s = min(alone_s(runner) for runner in timed)
    stretch = communication_s / compute_s
    runners = choose(stretch)
    for turn in range(turns):
        for runner in runners if turn % 2 else runners[::-1]:
            runner.step_s += runner.run(stretch)
    base = runners[0]
    for runner in runners:
        low, middle, high = quantiles(runner.step_s, n=4)
        ratios = [a / b for a, b in zip(runner.step_s, base.step_s, strict=True)]
        record = {
            **asdict(case),
            "kind": runner.name,
            "bucket_nbytes": runner.bucket_nbytes,
            "communication_ms": 1e3 * communication_s,
            "p25_ms": 1e3 * low,
            "p50_ms": 1e3 * middle,
            "p75_ms": 1e3 * high,
            "ratio": middle / median(base.step_s),
            "ratio_of_turns": median(ratios),
            "n": len(runner.step_s),
        }
        if dist.get_rank() == 0:
            print(json.dumps({"benchmark": "overlap", **record, "host": host_facts()}), flush=True)


def cases(args: argparse.Namespace) -> list[Case]:
    found = [
        Case(model, codec, args.numel * (1 if codec.startswith("none") else args.more), args.rate, args.ranks)
        for codec in args.codecs
        for model in args.models
    ]
    return found + [
        Case("resnet50", "int8 / sharded", args.numel * args.more, args.rate, args.ranks, fsdp)
        for fsdp in args.fsdp
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["vgg16", "resnet50", "gpt2"])
    parser.add_argument("--codecs", nargs="+", default=["none / allreduce", "int4 / sharded"])
    parser.add_argument("--fsdp", nargs="*", default=["replicas", "mesh"], choices=["replicas", "mesh"])
    parser.add_argument("--rate", default="200Mbit")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--numel", type=float, default=1e6, help="parameters that the models are scaled to")
    parser.add_argument("--more", type=float, default=4.0, help="times that, with codecs that send less")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        with joined():
            work(Case(**args.worker), args.turns)
        return
    with (
        tempfile.TemporaryDirectory() as logs,
        lab.up(star(args.ranks, rate_bps=parse_rate(args.rate), latency_s=0.0)) as network,
    ):

        def heard(rank: int, message: launch.Message) -> None:
            if "joined" in message:  # and imported torch
                network.raise_priority()
            else:
                print(json.dumps(message), flush=True)

        here = {"PYTHONPATH": str(Path(__file__).parent)}
        for case in cases(args):
            launch.run(
                "overlap",
                ["--worker", json.dumps(asdict(case)), "--turns", str(args.turns)],
                ranks=args.ranks,
                on_message=heard,
                log_dir=Path(logs),
                rank_specs=[
                    launch.RankSpec(spec.prefix, {**spec.env, **here}) for spec in network.rank_specs()
                ],
            )


if __name__ == "__main__":
    sys.exit(main())
