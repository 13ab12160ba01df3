"""What a strategy costs this device by size: driven over a dry wire, every rank at the same time, as they are in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tacit.errors import ConfigError
from tacit.layout import Layout
from tacit.plan.dry import DryWire, all_reduce_of
from tacit.plan.values import BASELINES, Curve, OperationUse, RequestCost, StrategyCost
from tacit.requests import (
    STEADY_STEP,
    Codec,
    LocalMemory,
    Merge,
    Request,
    ShapedCodec,
    as_reduced,
    context_for,
)
from tacit.rounds import GradientRule, MergeRule
from tacit.schemes import AllReduce, Gossip, Scheme, Sharded
from tacit.strategy import Strategy
from tacit.transports.process_group import ring_nbytes

NUMELS = (1 << 14, 1 << 17, 1 << 20)
COPIED = (1 << 14, 1 << 18, 1 << 22)
REPEATS = 4
ASSUMED_PERIOD = 16.0  # of rules that decide by themselves when to exchange
HALVES = {"DDP fp16": torch.float16, "DDP bf16": torch.bfloat16}


@dataclass(slots=True)
class _Times:
    """Seconds of one piece: on the clock, and of this process's CPU."""

    s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, s: float, cpu_s: float) -> None:
        self.s.append(max(0.0, s))
        self.cpu_s.append(max(0.0, cpu_s))


@dataclass(slots=True)
class _Watch:
    """Reads both clocks; on an accelerator it waits for the work that was started."""

    device: torch.device
    at_s: float = 0.0
    cpu_s: float = 0.0

    def start(self) -> None:
        self._wait()
        self.at_s, self.cpu_s = time.perf_counter(), time.process_time()

    def lap(self, into: _Times, idle_s: float = 0.0) -> None:
        """Books the time since the last lap, less `idle_s`, which was computing too."""
        self._wait()
        now_s, cpu_s = time.perf_counter(), time.process_time()
        took_s, used_s = now_s - self.at_s, cpu_s - self.cpu_s
        into.add(took_s - idle_s, used_s - (used_s / took_s if took_s else 0.0) * idle_s)
        self.start()

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@dataclass(slots=True)
class _Piece:
    """One size: the times of each request, and the operations that answer it."""

    encode: list[_Times]
    owner: list[_Times]
    decode: _Times
    kinds: list[str]
    used: list[list[tuple[str, float]]]
    sent_nbytes: float = 0.0


def cost_of(
    choice: str,
    world: int,
    *,
    device: torch.device | None = None,
    numels: Sequence[int] = NUMELS,
    repeats: int = REPEATS,
    together: Callable[[], None] = lambda: None,
    worst: Callable[[list[float]], list[float]] = list,
) -> StrategyCost:
    """Drives `choice` over a dry wire among `world` ranks. `together` is called before each size, so that all ranks begin at
    once; `worst` takes this rank's figures and returns those of the slowest rank."""
    device = device or torch.device("cpu")
    if choice in BASELINES:
        pieces = [_hook(choice, numel, world, device, repeats, together) for numel in numels]
        return _collected(choice, numels, pieces, worst, lossy=choice != "DDP", in_flight=2)
    strategy = Strategy.parse(choice)
    strategy.check(world)
    scheme = strategy.who
    if not isinstance(scheme, AllReduce | Sharded | Gossip):
        raise ConfigError(
            f"{choice}: the probe knows allreduce, sharded and gossip, not {scheme}; `tacit lab` measures it, --what-if switch=aggregator "
            f"estimates star"
        )
    if isinstance(scheme, Gossip):
        pieces = [_met(strategy.what, numel, device, repeats, together) for numel in numels]
    else:
        pieces = [_driven(strategy.what, scheme, numel, world, device, repeats, together) for numel in numels]
    in_flight = 2 if isinstance(scheme, AllReduce) else 1
    lossy = not strategy.what.traits.exact
    found = _collected(str(strategy), numels, pieces, worst, lossy=lossy, in_flight=in_flight)
    return replace(found, period=period_of(strategy))


def measurable(choices: Iterable[str], world: int, device: torch.device | None = None) -> dict[str, str]:
    """Why each of `choices` cannot be measured: one sentence, "" where it can. A codec of somebody else's package may raise anything."""
    found = {}
    for choice in choices:
        try:
            cost_of(choice, world, device=device, numels=NUMELS[:1], repeats=1)
            found[choice] = ""
        except Exception as cause:
            reason = str(cause).partition("\n")[0][:200]
            found[choice] = (
                f"{choice} is left out, it fails over a dry wire: {type(cause).__name__}: {reason}"
            )
    return found


def period_of(strategy: Strategy) -> float:
    """Steps from one exchange to the next, as far as a rule fixes them."""
    rule = strategy.when
    if isinstance(rule, GradientRule):
        return 1.0
    if isinstance(rule, MergeRule):
        return float(rule.period(0, None))
    return ASSUMED_PERIOD


def _driven(
    codec: Codec,
    scheme: Scheme,
    numel: int,
    world: int,
    device: torch.device,
    repeats: int,
    together: Callable[[], None],
) -> _Piece:
    x = gradient(numel, device)
    rounds = codec.traits.rounds
    memory = LocalMemory(x, given=layout_for(codec, numel))
    first = -(-STEADY_STEP // world) * world  # rank 0 is the one that leads, where ranks do in turn
    piece = _Piece([_Times() for _ in range(rounds)], [_Times() for _ in range(rounds)], _Times(), [], [])
    together()
    for turn in range(repeats + 1):
        context = context_for(memory, seed=0, step=first + turn * world, bucket="plan", rank=0, world=world)
        spent = (
            piece
            if turn
            else _Piece(
                [_Times() for _ in range(rounds)], [_Times() for _ in range(rounds)], _Times(), [], []
            )
        )
        wire = DryWire(world)
        watch = _Watch(device)
        watch.start()
        talk, answer = codec.reduce(x, context), None
        piece.kinds, piece.used = [], []
        for request_number in range(rounds):
            request: Request = talk.send(answer)
            watch.lap(spent.encode[request_number])
            before, wire.idle_s = len(wire.used), 0.0
            wire.own = request.value if isinstance(request, Merge) else None
            answer = scheme.start(wire, request, context.own_seed)()
            watch.lap(spent.owner[request_number], wire.idle_s)
            piece.kinds.append(type(request).__name__)
            piece.used.append(wire.used[before:])
        _end(talk, answer, x, world)
        watch.lap(spent.decode)
        piece.sent_nbytes = float(wire.sent_nbytes)
    return piece


def _met(
    codec: Codec, numel: int, device: torch.device, repeats: int, together: Callable[[], None]
) -> _Piece:
    """A meeting of two: what both send each other goes as one message each way."""
    piece = _driven(codec, Sharded(), numel, 2, device, repeats, together)
    nbytes = float(codec.nbytes(numel))
    piece.used = [[("send", nbytes)], *([] for _ in piece.used[1:])]
    piece.sent_nbytes = nbytes
    return piece


def _end(talk: Any, answer: Any, x: Tensor, world: int) -> None:
    """What the exchange does once all answers are here: the mean, the check, and the copy over the gradient."""
    try:
        talk.send(answer)
    except StopIteration as end:
        total = as_reduced(end.value).total
        mean = total.div_(world) if total is not x else total / world
        bool(mean.sum().isfinite())
        torch.empty_like(x).copy_(mean)


def _hook(
    choice: str, numel: int, world: int, device: torch.device, repeats: int, together: Callable[[], None]
) -> _Piece:
    """DDP's own path: a division, or a cast and a division before, and a copy back after."""
    x, dtype = gradient(numel, device), HALVES.get(choice, torch.float32)
    piece = _Piece([_Times()], [_Times()], _Times(), ["Sum"], [])
    together()
    for turn in range(repeats + 1):
        spent = piece if turn else _Piece([_Times()], [_Times()], _Times(), [], [])
        watch = _Watch(device)
        watch.start()
        sent = x.to(dtype).div_(world) if choice in HALVES else x.div_(1.0)
        watch.lap(spent.encode[0])
        watch.lap(spent.owner[0])
        if choice in HALVES:
            x.copy_(sent)
        watch.lap(spent.decode)
        if choice in HALVES:
            x.mul_(world)
    size = dtype.itemsize
    piece.used = [[(all_reduce_of(dtype), float(size * numel))]]
    piece.sent_nbytes = float(ring_nbytes(numel, size, world, 0))
    return piece


def _collected(
    choice: str,
    numels: Sequence[int],
    pieces: Sequence[_Piece],
    worst: Callable[[list[float]], list[float]],
    *,
    lossy: bool,
    in_flight: int,
) -> StrategyCost:
    sizes, last = tuple(float(n) for n in numels), pieces[-1]

    def curve(times: Sequence[_Times]) -> Curve:
        return _curve(numels, times, worst)

    requests = []
    for j, kind in enumerate(last.kinds):
        names = [name for name, _ in last.used[j]]
        uses = [
            OperationUse(
                name, tuple(piece.used[j][k][1] if k < len(piece.used[j]) else 0.0 for piece in pieces)
            )
            for k, name in enumerate(names)
        ]
        encode, owner = curve([p.encode[j] for p in pieces]), curve([p.owner[j] for p in pieces])
        requests.append(RequestCost(kind, encode, owner, tuple(uses)))
    decode = curve([p.decode for p in pieces])
    sent = tuple(p.sent_nbytes for p in pieces)
    return StrategyCost(choice, sizes, tuple(requests), decode, sent, lossy, in_flight)


def copy_cost(
    device: torch.device,
    *,
    together: Callable[[], None] = lambda: None,
    worst: Callable[[list[float]], list[float]] = list,
    repeats: int = REPEATS,
) -> Curve:
    """A copy of so many gradients, as DDP makes one of every gradient into its buckets."""
    found = []
    for numel in COPIED:
        x, into, times = gradient(numel, device), torch.empty(numel, device=device), _Times()
        together()
        for turn in range(repeats + 1):
            watch = _Watch(device)
            watch.start()
            into.copy_(x)
            watch.lap(times if turn else _Times())
        found.append(times)
    return _curve(COPIED, found, worst)


def _curve(
    numels: Sequence[int], times: Sequence[_Times], worst: Callable[[list[float]], list[float]]
) -> Curve:
    """The slowest rank's, size by size."""
    p50, low, high = (tuple(worst([pick(each.s) for each in times])) for pick in (median, min, _high))
    cpu = tuple(worst([median(each.cpu_s) for each in times]))
    return Curve(tuple(float(n) for n in numels), p50, low, high, cpu)


def _high(values: Sequence[float]) -> float:
    """The upper quartile of a few."""
    return sorted(values)[(3 * (len(values) - 1)) // 4]


def gradient(numel: int, device: torch.device) -> Tensor:
    """Gaussian, of the size that gradients have."""
    rng = torch.Generator().manual_seed(0)
    return (1e-3 * torch.randn(numel, generator=rng)).to(device)


def layout_for(codec: Codec, numel: int) -> Layout | None:
    """Codecs that look at shapes get a matrix as square as it can be."""
    if not isinstance(codec, ShapedCodec):
        return None
    rows = 1 << (numel.bit_length() - 1) // 2
    return Layout.of({"matrix": (rows, numel // rows)}) if numel % rows == 0 else None
