"""What every scheme is: it answers the requests of codecs with transfers over a wire, alike on all ranks.

`Scheme.answer` and `Scheme.answer_rows` are the only places that look at what kind a request is. A new kind of request gets a line in each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.requests import (
    Codec,
    Dense,
    Gather,
    Max,
    Merge,
    Merged,
    Payload,
    Request,
    Sum,
    TableSum,
    Total,
    add_shard,
    merge_stages,
    seed_of,
)
from tacit.stats import Losses
from tacit.transports import Wire


class Scheme(ABC):
    """The third part of a Strategy, where all ranks exchange at the same time. Objects hold options only, until they are opened."""

    __slots__ = ()
    scatters: ClassVar[bool] = True
    """Whether FSDP2 can use it: the sum of a row reaches only its own rank."""
    lingers: ClassVar[bool] = False
    """Whether `start` returns before a sum or a maximum is here, so that others may begin meanwhile. Where sums block, an answer that
    lingered would be handed on after the next of them only."""

    @property
    def losses(self) -> Losses | None:
        """What it has left out; None where all ranks are in every sum. Where it is not None ranks may be at different steps, so what asks all
        of them for something has them wait for each other."""
        return None

    @property
    def ahead(self) -> int:
        """Between two steps: chunks that the others have closed already, from this rank's next one on."""
        return 0

    @abstractmethod
    def check(self, codec: Codec, world: int | None) -> None:
        """Raises PairingError, with the way out, if this codec cannot be used with this scheme."""

    @abstractmethod
    def sum(self, wire: Wire, request: Sum, seed: int) -> Total: ...

    @abstractmethod
    def table_sum(self, wire: Wire, request: TableSum) -> Total: ...

    def prepare(self) -> None:  # noqa: B027, most have nothing to do here
        """Raises ConfigError where this rank lacks what it takes to open it: before a process group is made, in which the others would wait."""

    def open(self, wire: Wire, timeout: timedelta | None) -> "Scheme":
        """The scheme that answers requests over `wire`: itself, unless it has a link to a node that is none of the ranks. All ranks
        call it together, before the first request."""
        return self

    def on_lost(self, fail: Callable[[BaseException], None]) -> None:  # noqa: B027, most have nothing to do here
        """Has `fail` called, from any thread, once a rank is known to be gone while others may still wait for it."""

    def close(self) -> None:  # noqa: B027, most have nothing to do here
        """Closes the link that `open` made, once this rank has made its last request."""

    def answer(self, wire: Wire, request: Request, seed: int) -> Any:
        """The answer to one request, the same on every rank; blocks until it is here."""
        with wire.purpose(type(request).__name__):
            match request:
                case Sum() if (
                    request.payload.numel == 0
                ):  # nothing of this kind is in the bucket: nothing travels
                    return Total(request.payload.unpack(), wire.world)
                case Sum():
                    return self.sum(wire, request, seed)
                case TableSum() if request.numel == 0:
                    return Total(request.look_up(), wire.world)
                case TableSum():
                    return self.table_sum(wire, request)
                case Max() if request.value.numel() == 0:
                    return request.value
                case Max():
                    return max_over_ranks(wire, request.value)
                case Gather():
                    return _gather(wire, request)
                case Merge():
                    return _merge(wire, request)

    def start(self, wire: Wire, request: Request, seed: int) -> Callable[[], Any]:
        """Begins to answer a request, and returns what waits for the answer. All ranks begin in one order; most schemes have it by then."""
        answer = self.answer(wire, request, seed)
        return lambda: answer

    def answer_rows(self, wire: Wire, requests: Sequence[Request], seed: int) -> list[Any]:
        """Answers to one request of the same kind a row, row r being rank r's (FSDP2). A sum reaches only the row's own rank, unless it is
        to_all; in the other rows this rank receives its own payload, which is enough to know what it contributed."""
        with wire.purpose("reduce-scatter"):
            match requests[0]:
                case Sum() if any(isinstance(r, Sum) and r.to_all for r in requests):
                    return self._sum_of_all_rows(wire, requests, seed)
                case Sum():
                    return _scatter_sum(wire, requests)
                case TableSum():
                    return _scatter_table_sum(wire, requests)
                case Max():  # all rows in one
                    values = [r.value for r in requests if isinstance(r, Max)]
                    whole = max_over_ranks(wire, torch.cat([value.reshape(-1) for value in values]))
                    parts = whole.split([value.numel() for value in values])
                    return [part.view_as(value) for part, value in zip(parts, values, strict=True)]
                case Gather():
                    return [_gather(wire, r) for r in requests if isinstance(r, Gather)]
                case Merge():
                    return [_merge(wire, r) for r in requests if isinstance(r, Merge)]

    def _sum_of_all_rows(self, wire: Wire, requests: Sequence[Request], seed: int) -> list[Total]:
        payloads = [r.payload for r in requests if isinstance(r, Sum)]
        format = payloads[0].format
        if not isinstance(format, Dense) or format.dtype not in (torch.float32, torch.float64):
            return _gathered_sum(wire, payloads, seed)  # what its rounding loses is a rank's own
        whole = self.sum(wire, Sum(Payload.dense(torch.cat([p.data for p in payloads]))), 0).value
        return [Total(part, wire.world) for part in whole.split([p.numel for p in payloads])]


@dataclass(frozen=True, slots=True)
class RowRequests:
    """One request of a kind for every row of a reduce-scatter, row r being rank r's."""

    requests: tuple[Request, ...]


@dataclass(slots=True)
class Channel:
    """A wire, and the scheme that was opened over it."""

    wire: Wire
    scheme: Scheme
    _closed: bool = False

    @classmethod
    def open(cls, wire: Wire, scheme: Scheme, timeout: timedelta | None) -> Self:
        wire.measure()
        return cls(wire, scheme.open(wire, timeout))

    def answer(self, request: Request, seed: int) -> Any:
        return self.scheme.answer(self.wire, request, seed)

    def start(self, request: Request | RowRequests, seed: int) -> Callable[[], Any]:
        if isinstance(request, RowRequests):
            answers = self.scheme.answer_rows(self.wire, request.requests, seed)
            return lambda: answers
        return self.scheme.start(self.wire, request, seed)

    def lingers(self, request: Request | RowRequests) -> bool:
        """Whether `start` returns before the answer is here."""
        return self.scheme.lingers and isinstance(request, Sum | Max)

    def close(self) -> None:
        """Closes the scheme's link, if it has one; safe to call twice."""
        if not self._closed:
            self._closed = True
            self.scheme.close()


def max_over_ranks(wire: Wire, value: Tensor) -> Tensor:
    """The element-wise maximum; NaN counts as infinity."""
    return start_max(wire, value)()


def start_max(wire: Wire, value: Tensor) -> Callable[[], Tensor]:
    """The same, begun: returns what waits for it."""
    ordered = value.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return wire.start_all_reduce(ordered, dist.ReduceOp.MAX)


def _gather(wire: Wire, request: Gather) -> list[Tensor]:
    value = request.value
    if not request.ragged:
        return wire.all_gather([value.numel()] * wire.world, value, shape=value.shape)
    length = torch.tensor([value.numel()], dtype=torch.int64, device=value.device)
    lengths = torch.cat(wire.all_gather([1] * wire.world, length))
    return wire.all_gather(lengths.tolist(), value)


def _merge(wire: Wire, request: Merge) -> Merged:
    """Up the tree, where each partial sum is as long as a payload, and down again: (n - 1) payloads each way among all ranks."""
    stages = merge_stages(wire.world)
    own, left_out = request.value.contiguous(), list[Any]()
    received = torch.empty_like(own)
    for stage in stages:
        for source, rank in stage:
            if wire.rank == source:
                wire.exchange([(rank, own)], [])
            elif wire.rank == rank:
                wire.exchange([], [(source, received)])
                own, left = request.join(own, received)
                left_out.append(left)
    for stage in reversed(stages):
        for source, rank in stage:
            if wire.rank == source:
                wire.exchange([], [(rank, received)])
                own = received
            elif wire.rank == rank:
                wire.exchange([(source, own)], [])
    return Merged(own, tuple(left_out))


def _scatter_sum(wire: Wire, requests: Sequence[Request]) -> list[Total]:
    """n - 1 rows leave each rank, half of what gloo's reduce_scatter sends; they are added in float32, and nothing is packed twice."""
    payloads = [r.payload for r in requests if isinstance(r, Sum)]
    own = payloads[wire.rank]
    total = torch.zeros(own.numel, dtype=torch.float32, device=own.data.device)
    for part in wire.all_to_all([p.data for p in payloads], [own.data.numel()] * wire.world):
        own.format.unpack_add(part, total)
    answers = [Total(p.unpack(), 1) for p in payloads]
    answers[wire.rank] = Total(total, wire.world)
    return answers


def _gathered_sum(wire: Wire, payloads: Sequence[Payload], seed: int) -> list[Total]:
    """As the sharded scheme: rank r adds row r in float32 and packs the sum, and every rank receives every packed row."""
    own = payloads[wire.rank]
    parts = wire.all_to_all([p.data for p in payloads], [own.data.numel()] * wire.world)
    packed, lost = add_shard(own.format, parts, own.numel, seed_of(seed, "shard"))
    rows = wire.all_gather([p.data.numel() for p in payloads], packed)
    totals = [Total(p.format.unpack(row, p.numel), wire.world) for p, row in zip(payloads, rows, strict=True)]
    if lost is not None:
        totals[wire.rank] = replace(totals[wire.rank], lost=(0, own.numel, lost))
    return totals


def _scatter_table_sum(wire: Wire, requests: Sequence[Request]) -> list[Total]:
    rows = [r for r in requests if isinstance(r, TableSum)]
    own = rows[wire.rank]
    own.lanes.check(wire.world)
    lanes = own.index.new_zeros(own.numel, dtype=own.lanes.dtype)
    for index in wire.all_to_all([row.index for row in rows], [own.index.numel()] * wire.world):
        own.add(index, lanes)
    if any(row.to_all for row in rows):
        return [Total(sums, wire.world) for sums in wire.all_gather([row.numel for row in rows], lanes)]
    answers = [Total(row.look_up(), 1) for row in rows]
    answers[wire.rank] = Total(lanes, wire.world)
    return answers
