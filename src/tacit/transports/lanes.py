"""Sums of 32-bit integers over all ranks, which wrap around: through an aggregator where there is one, else over the process group.

Integers add to the same bits in any order, so nobody need know which way a sum took.
"""

from itertools import pairwise

import torch
from torch import Tensor

from tacit.aggregator.spec import NO_TABLE
from tacit.aggregator.wire import LaneType
from tacit.transports.aggregator_link import AggregatorLink, SumRequest
from tacit.transports.process_group import Wire


def sum_lanes(wire: Wire, link: AggregatorLink | None, own: Tensor) -> Tensor:
    """The sum of every rank's int32 vector; over the process group while the aggregator of `link` is gone."""
    if link is None:
        return add_lanes(wire, own)
    request = SumRequest(
        LaneType.I32, NO_TABLE, own.view(torch.uint8), own.numel(), lambda: add_lanes(wire, own)
    )
    return link.sum(request)


def add_lanes(wire: Wire, own: Tensor) -> Tensor:
    """The same over the process group: each rank adds a part, and all receive all parts."""
    cuts = [own.numel() * rank // wire.world for rank in range(wire.world + 1)]
    parts = [own[a:b] for a, b in pairwise(cuts)]
    received = wire.all_to_all(parts, [parts[wire.rank].numel()] * wire.world)
    total = torch.stack(received).sum(0, dtype=torch.int32)
    return torch.cat(wire.all_gather([part.numel() for part in parts], total))
