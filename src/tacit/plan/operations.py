"""The process group's own operations by size, as tacit and DDP use them: not a ping, and all ranks at once.

A time is the slowest rank's, of operations one after the other, as they are in a step. Sizes rise until one operation takes longer than
`_LONG_S`, or the budget is used up; beyond the last size a curve goes on straight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.plan.predicting import LONG_NBYTES
from tacit.plan.values import Curve, OperationCurve, PairRates
from tacit.transports import Wire

_SHORT = (64, 16 << 10, LONG_NBYTES - 64)
_TWICE_FROM = 64 << 10  # smaller ones are not worth telling apart
_SIZES = (64, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_LONG_S = 0.08
_ROUNDS = 3
_SHORT_S = 0.015  # operations that are shorter are measured several at a time
_MOST_AT_A_TIME = 5
_SLOW_S = 0.03
_MOST_SHIFTS = 15
_LEAST_SIZES = 3  # whatever they take: two points have no check


@dataclass(slots=True)
class Bench:
    """What measures: a wire of all ranks, where tensors are, and until when."""

    wire: Wire
    device: torch.device
    until_s: float  # on time.perf_counter()

    def together(self) -> None:
        """All ranks come to the same place."""
        dist.barrier(self.wire.group)

    def worst(self, values: Sequence[float]) -> list[float]:
        """Element by element, the largest of all ranks."""
        found = torch.tensor(list(values), dtype=torch.float64)
        if self.wire.world > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.wire.group)
        largest: list[float] = found.tolist()
        return largest

    def late(self) -> bool:
        """Whether the budget is used up: alike on all ranks."""
        return self.worst([float(time.perf_counter() > self.until_s)])[0] > 0

    def seconds(
        self, operation: Callable[[], object], rounds: int = _ROUNDS
    ) -> tuple[list[float], list[float]]:
        """Seconds of `operation`, the slowest rank's, and CPU seconds; a value a round."""
        operation()  # connects, and fills the lists of recycled memory
        self.together()
        start = time.perf_counter()
        operation()
        once_s = self.worst([time.perf_counter() - start])[0]
        at_a_time = max(1, min(_MOST_AT_A_TIME, int(_SHORT_S / once_s)))
        rounds = (
            rounds if once_s < _SLOW_S else max(2, rounds - 1)
        )  # the link decides, and noise is a small part
        took, cpu = [], []
        for _ in range(rounds):
            self.together()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(at_a_time):
                operation()
            self.wait()
            took.append((time.perf_counter() - start) / at_a_time)
            cpu.append((time.process_time() - cpu_start) / at_a_time)
        return self.worst(took), self.worst(cpu)

    def wait(self) -> None:
        """An accelerator has done what was started on it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def curve(self, sizes: Sequence[int], operation_at: Callable[[int], Callable[[], object]]) -> Curve:
        """Seconds by size, from the smallest on."""
        points: list[tuple[float, float, float, float, float]] = []
        for size in sizes:
            took, cpu = self.seconds(operation_at(size))
            points.append((float(size), median(took), min(took), max(took), median(cpu)))
            enough = len(points) >= min(_LEAST_SIZES, len(sizes))
            if enough and (median(took) > _LONG_S or self.late()):
                break
        columns = list(zip(*points, strict=True))
        return Curve(*columns)


def measured(bench: Bench, largest: Mapping[str, float]) -> tuple[OperationCurve, ...]:
    """The curves of these operations, as a probe names them, up to the bytes that are needed of each."""
    makers: dict[str, Callable[[], Curve]] = {}
    for name, most in sorted(largest.items()):
        sizes = _up_to(most)
        kind, _, rest = name.partition(" ")
        if kind == "all_reduce":
            dtype = getattr(torch, rest)
            two = [size for size in sizes if size >= _TWICE_FROM][-2:-1] or [_TWICE_FROM]
            makers[name] = partial(bench.curve, sizes, partial(_all_reduce, bench, dtype, 1))
            makers[f"{name} x2"] = partial(_halved, bench, two, partial(_all_reduce, bench, dtype, 2))
        elif name == "all_to_all short":
            makers[name] = partial(bench.curve, _SHORT, partial(_all_to_all, bench))
        elif name == "all_to_all long":
            long = [size for size in sizes if size >= LONG_NBYTES]
            makers[name] = partial(
                bench.curve, long or [LONG_NBYTES, 4 * LONG_NBYTES], partial(_all_to_all, bench)
            )
        elif name == "send":
            makers[name] = partial(bench.curve, _SIZES[:5], partial(_send, bench))
    return tuple(OperationCurve(name, make()) for name, make in makers.items())


def alone(bench: Bench, nbytes: int) -> float:
    """Seconds of a message from rank 0 to rank 1, while all others are silent."""
    data = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    rank, came = bench.wire.rank, torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    sends = [(1, data)] if rank == 0 else []
    receives = [(0, came)] if rank == 1 else []
    took, _ = bench.seconds(lambda: bench.wire.exchange(sends, receives))
    return median(took)


def pair_rates(bench: Bench, nbytes: int) -> PairRates:
    """Every rank sends to the next but k at the same time, for each k: all pairs, or `_MOST_SHIFTS` for each rank where there are more;
    after the budget no other k."""
    rank, world = bench.wire.rank, bench.wire.world
    data = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    came, rounds = torch.empty_like(data), dict[int, list[float]]()
    for shift in range(1, world, -(-(world - 1) // _MOST_SHIFTS)):
        if rounds and bench.late():
            break
        took_s = []
        for _ in range(_ROUNDS):
            bench.together()
            start_s = time.perf_counter()
            bench.wire.exchange([((rank + shift) % world, data)], [((rank - shift) % world, came)])
            bench.wait()
            took_s.append(time.perf_counter() - start_s)
        rounds[shift] = bench.worst([min(took_s) if each == rank else 0.0 for each in range(world)])
    return rates_of(rounds, nbytes)


def rates_of(seconds: Mapping[int, Sequence[float]], nbytes: int) -> PairRates:
    """From how long each rank took to send to the rank `shift` places on and to receive: a link took no longer than either of its ends."""
    took_s = {
        (sender, receiver := (sender + shift) % len(own_s)): min(own_s[sender], own_s[receiver])
        for shift, own_s in seconds.items()
        for sender in range(len(own_s))
    }
    (sender, receiver), slowest_s = max(took_s.items(), key=lambda each: each[1])
    return PairRates(8 * nbytes / median(took_s.values()), 8 * nbytes / slowest_s, sender, receiver)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a probe measures at its start and at its end: an all-reduce, and a computation, which shows what other programs do."""

    reduced_s: tuple[float, ...]
    computed_s: tuple[float, ...]


def reference(bench: Bench, nbytes: int) -> Reference:
    """Seconds of an all-reduce of so many bytes, and of a pass over as many."""
    x = torch.ones(nbytes // 4, device=bench.device)
    reduced_s, _ = bench.seconds(_all_reduce(bench, torch.float32, 1, nbytes), rounds=4)
    computed_s, _ = bench.seconds(x.sqrt, rounds=4)
    return Reference(tuple(reduced_s), tuple(computed_s))


def _all_reduce(bench: Bench, dtype: torch.dtype, at_once: int, nbytes: int) -> Callable[[], object]:
    """In place: what tacit does before and after it counts to its scheme."""
    values = [
        torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=bench.device)
        for _ in range(at_once)
    ]

    def run() -> None:
        works = [dist.all_reduce(value, group=bench.wire.group, async_op=True) for value in values]
        for work in works:
            if work is not None:
                work.wait()

    return run


def _halved(bench: Bench, sizes: Sequence[int], operation_at: Callable[[int], Callable[[], object]]) -> Curve:
    """Of two at the same time, one's share."""
    return bench.curve(sizes, operation_at).scaled(0.5)


def _up_to(most: float) -> list[int]:
    """The sizes below `most` and the first that is not."""
    return [size for place, size in enumerate(_SIZES) if place < 2 or _SIZES[place - 1] < most]


def _all_to_all(bench: Bench, nbytes: int) -> Callable[[], object]:
    world = bench.wire.world
    parts: list[Tensor] = [torch.zeros(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(world)]
    return lambda: bench.wire.all_to_all(parts, [nbytes] * world)


def _send(bench: Bench, nbytes: int) -> Callable[[], object]:
    rank, world = bench.wire.rank, bench.wire.world
    data = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    came = torch.empty_like(data)
    return lambda: bench.wire.exchange([((rank + 1) % world, data)], [((rank - 1) % world, came)])
