"""The process group's own operations by size, as tacit and DDP use them: not a ping, and all ranks at once.

A time is the slowest rank's, of operations one after the other, as they are in a step. Sizes rise until one operation takes longer than
`_LONG_S`, or the budget is used up; beyond the last size a curve goes on straight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.plan.dry import LONG_NBYTES
from tacit.plan.values import Curve, OperationCurve
from tacit.transports import Wire

_SIZES = (64, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_LONG_S = 0.1
_ROUNDS = 3
_SHORT_S = 0.02  # operations that are shorter are measured several at a time
_MOST_AT_A_TIME = 6
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
        took, cpu = [], []
        for _ in range(rounds):
            self.together()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(at_a_time):
                operation()
            self._wait()
            took.append((time.perf_counter() - start) / at_a_time)
            cpu.append((time.process_time() - cpu_start) / at_a_time)
        return self.worst(took), self.worst(cpu)

    def _wait(self) -> None:
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


def measured(bench: Bench, names: Collection[str]) -> tuple[OperationCurve, ...]:
    """The curves of these operations, as a probe names them."""
    makers: dict[str, Callable[[], Curve]] = {}
    for name in sorted(names):
        kind, _, rest = name.partition(" ")
        if kind == "all_reduce":
            dtype = getattr(torch, rest)
            makers[name] = lambda dtype=dtype: bench.curve(_SIZES, lambda n: _all_reduce(bench, dtype, n, 1))  # type: ignore[misc]
            makers[f"{name} x2"] = (
                lambda dtype=dtype: _halved(  # type: ignore[misc]
                    bench.curve(_SIZES[3:6], lambda n: _all_reduce(bench, dtype, n, 2))
                )
            )
        elif name == "all_to_all short":
            makers[name] = lambda: bench.curve(
                (64, 16 << 10, LONG_NBYTES - 64), lambda n: _all_to_all(bench, n)
            )
        elif name == "all_to_all long":
            makers[name] = lambda: bench.curve(_SIZES[2:], lambda n: _all_to_all(bench, n))
        elif name == "send":
            makers[name] = lambda: bench.curve(_SIZES[:6], lambda n: _send(bench, n))
    return tuple(OperationCurve(name, make()) for name, make in makers.items())


def alone(bench: Bench, nbytes: int) -> float:
    """Seconds of a message from rank 0 to rank 1, while all others are silent."""
    data = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    rank, came = bench.wire.rank, torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    sends = [(1, data)] if rank == 0 else []
    receives = [(0, came)] if rank == 1 else []
    took, _ = bench.seconds(lambda: bench.wire.exchange(sends, receives))
    return median(took)


def reference(bench: Bench, nbytes: int) -> list[float]:
    """Seconds of the all-reduce by which a probe notices that the links changed meanwhile."""
    return bench.seconds(_all_reduce(bench, torch.float32, nbytes, 1), rounds=4)[0]


def _all_reduce(bench: Bench, dtype: torch.dtype, nbytes: int, at_once: int) -> Callable[[], object]:
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


def _halved(curve: Curve) -> Curve:
    """Of two at the same time, one's share."""
    return curve.scaled(0.5)


def _all_to_all(bench: Bench, nbytes: int) -> Callable[[], object]:
    world = bench.wire.world
    parts: list[Tensor] = [torch.zeros(nbytes, dtype=torch.uint8, device=bench.device) for _ in range(world)]
    return lambda: bench.wire.all_to_all(parts, [nbytes] * world)


def _send(bench: Bench, nbytes: int) -> Callable[[], object]:
    rank, world = bench.wire.rank, bench.wire.world
    data = torch.zeros(nbytes, dtype=torch.uint8, device=bench.device)
    came = torch.empty_like(data)
    return lambda: bench.wire.exchange([((rank + 1) % world, data)], [((rank - 1) % world, came)])
