"""A wire that leads nowhere: what a strategy costs this device, with the operations it would use, and without a network.

The codec and the scheme run as in training; where a transfer would be, its operation is written down, and this rank's own payload
comes back in the place of the others'. What is timed is the rest: encoding, adding for the others, decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import recycled
from tacit.plan.predicting import length_name
from tacit.transports.process_group import Wire, ring_nbytes


class DryWire(Wire):
    """The wire of rank 0 among `world` ranks, of which there are no others."""

    __slots__ = ("idle_s", "own", "used")

    def __init__(self, world: int) -> None:
        self.rank, self.world, self.sent_nbytes = 0, world, 0
        self.lost_ranks, self._purpose = tuple, "dry run"
        self.used: list[tuple[str, float]] = []  # operations and their bytes
        self.idle_s = 0.0  # spent on making up what would have come
        self.own: Tensor | None = None  # a Merge's payload, before anything was merged into it

    def start_all_reduce(
        self, value: Tensor, op: Any = dist.ReduceOp.SUM, *, in_place: bool = False
    ) -> Callable[[], Tensor]:
        out = recycled.clone(value)
        if value.numel():
            self.used.append((all_reduce_of(value.dtype), float(value.nbytes)))
            self.sent_nbytes += ring_nbytes(value.numel(), value.element_size(), self.world, 0)
        return lambda: out

    def all_to_all(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        start = time.perf_counter()
        size = parts[0].element_size()
        longest = size * max(*(part.numel() for part in parts), *numels)
        self.used.append((length_name(longest), float(longest)))
        self.sent_nbytes += sum(size * part.numel() for part in parts[1:])
        own = parts[0].contiguous().view(-1)
        came = [own if numel == own.numel() else _fitted(own, numel) for numel in numels]
        self.idle_s += time.perf_counter() - start
        return came

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        self.used.append(("send", float(max((t.nbytes for _, t in (*sends, *receives)), default=0))))
        self.sent_nbytes += sum(t.nbytes for _, t in sends)
        start = time.perf_counter()
        for _, into in receives:
            into.zero_() if self.own is None else into.copy_(self.own)
        self.idle_s += time.perf_counter() - start


def all_reduce_of(dtype: torch.dtype) -> str:
    """The operation's name in a probe."""
    return f"all_reduce {str(dtype).removeprefix('torch.')}"


def _fitted(own: Tensor, numel: int) -> Tensor:
    """`own` made as long as another rank's part would be."""
    if not own.numel():
        return own.new_zeros(numel)
    return own.repeat(-(-numel // own.numel()))[:numel]
