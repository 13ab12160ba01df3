"""All-reduce: the process group adds payloads itself, in its own ring or tree, in the payload's own numbers.

Bytes that leave a rank: 2 (n - 1) / n x payload. Only payloads that add where they stand can take this road.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tacit.errors import PairingError
from tacit.requests import Codec, Dense, Max, Request, Sum, TableSum, Total
from tacit.schemes.scheme import Scheme, start_max
from tacit.transports import Wire


@dataclass(frozen=True, slots=True)
class AllReduce(Scheme):
    """Native all-reduce; gloo's reduce_scatter, which is a whole all-reduce in disguise, is never called."""

    lingers: ClassVar[bool] = True

    def __str__(self) -> str:
        return "allreduce"

    def check(self, codec: Codec, world: int | None) -> None:
        if not codec.traits.summable:
            raise PairingError(
                f"{codec} payloads cannot be added in flight by allreduce; write '{codec} / sharded'"
            )

    def start(self, wire: Wire, request: Request, seed: int) -> Callable[[], Any]:
        with wire.purpose(type(request).__name__):
            match request:
                case Sum() if request.payload.numel:
                    return self._start_sum(wire, request)
                case Max() if request.value.numel():
                    return start_max(wire, request.value)
        return Scheme.start(self, wire, request, seed)

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        return self._start_sum(wire, request)()

    def _start_sum(self, wire: Wire, request: Sum) -> Callable[[], Total]:
        added = wire.start_all_reduce(request.payload.data, in_place=request.room is not None)
        return lambda: Total(_unpacked(request, added()), wire.world)

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        lanes = request.look_up()
        if lanes.dtype == torch.int16:
            lanes = lanes.int()  # neither gloo nor nccl adds 16-bit integers
        return Total(wire.all_reduce(lanes), wire.world)


def _unpacked(request: Sum, total: Tensor) -> Tensor:
    """The total in float32; in bfloat16 as it came, where whoever set the room widens it with the pass that writes there."""
    payload, room = request.payload, request.room
    if room is not None and room.dtype == torch.float32 and payload.format == Dense(torch.bfloat16):
        return total
    return payload.format.unpack(total, payload.numel)
