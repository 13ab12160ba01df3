"""Every rank receives every payload, and adds them in rank order: one stage, n - 1 payloads sent by each rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tacit import Codec, Payload, Sum, TableSum, Total
from tacit.schemes import Scheme
from tacit.transports import Wire


@dataclass(frozen=True, slots=True)
class Gathered(Scheme):
    """For few ranks and short vectors, where latency costs more than bytes."""

    def __str__(self) -> str:
        return "gathered"

    def check(self, codec: Codec, world: int | None) -> None:
        """Any codec: whoever adds has all payloads, and may decode them."""

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload: Payload = request.payload
        total = torch.zeros(payload.numel, device=payload.data.device)
        for data in wire.all_gather([payload.data.numel()] * wire.world, payload.data):
            payload.format.unpack_add(data, total)
        return Total(total, wire.world)

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        lanes = request.index.new_zeros(request.numel, dtype=request.lanes.dtype)
        for index in wire.all_gather([request.index.numel()] * wire.world, request.index):
            request.add(index, lanes)
        return Total(lanes, wire.world)
