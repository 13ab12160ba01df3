"""Dedicated: a process that trains nothing adds for all, as parameter servers once did.

    worker r -> server: its payload (worker 0 first announces what comes);   server: adds in rank order;   -> every worker

    if dist.get_rank() == 4:
        tacit.serve([0, 1, 2, 3])                 # returns when the workers have closed their handles
    else:
        workers = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
        model = DDP(net, process_group=workers)
        handle = tacit.attach(model, optimizer, "every / thc / dedicated(rank=4)")

Bytes that leave a worker: its payload once. The server sends the sum n times: its link is the limit, which is what
sharding the server, or an aggregator in the network, takes away. Sums must not need packing again, since the server keeps
no memory of what that loses: payloads that add, or indices. The server adds on the CPU: the workers' tensors must be there.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.errors import ConfigError, PairingError, TransportError
from tacit.requests import Codec, Dense, Lanes, Sum, TableSum, Total, add_shard
from tacit.schemes.scheme import Scheme
from tacit.transports import Wire
from tacit.transports.server_link import ServerLink

_STOP, _SUM, _TABLE_SUM = range(3)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 4 + 256  # kind, numel, dtype or lane bits, length of the table; the table


@dataclass(frozen=True, slots=True)
class Dedicated(Scheme):
    """`rank` is the server's in the whole job; it runs `tacit.serve` and is not among those who attach."""

    rank: int

    scatters: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 0:
            raise ConfigError(f"rank={self.rank}: the server is a rank of the whole job, 0 or more")

    def __str__(self) -> str:
        return f"dedicated(rank={self.rank})"

    def check(self, codec: Codec, world: int | None) -> None:
        if not codec.traits.summable:
            raise PairingError(
                f"sums of {codec} would be packed again by a server that remembers nothing; write '{codec} / sharded'"
            )

    def open(self, wire: Wire, timeout: timedelta | None) -> "OpenDedicated":
        """Links `wire`'s ranks to the server, which must call `serve` meanwhile."""
        workers = dist.get_process_group_ranks(wire.group)
        if self.rank in workers or self.rank >= dist.get_world_size():
            raise ConfigError(
                f"{self}: the server is one of the {dist.get_world_size()} ranks of the job, and none of those "
                f"who train ({', '.join(map(str, workers))}); give the workers a process group without it"
            )
        return OpenDedicated(ServerLink(workers, self.rank, timeout, leads=wire.rank == 0))

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        raise _unopened()

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        raise _unopened()


@dataclass(frozen=True, slots=True)
class OpenDedicated(Scheme):
    """A worker's end, once it is linked to the server."""

    link: ServerLink

    def check(self, codec: Codec, world: int | None) -> None:
        """Done by `Dedicated`."""

    def close(self) -> None:
        """Ends the server's loop."""
        if self.link.leads:
            with suppress(TransportError):  # a server that is gone already needs no message
                self.link.send(_note([_STOP]), self.link.server)

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload = request.payload
        assert isinstance(payload.format, Dense), "a summable payload is plain numbers"
        dtype = _DTYPES.index(payload.format.dtype)
        header = [_SUM, payload.numel, dtype, 0]
        total = self._request(wire, header, payload.data, torch.empty_like(payload.data))
        return Total(payload.format.unpack(total, payload.numel), wire.world)

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        header = [_TABLE_SUM, request.numel, request.lanes.bits, len(request.table), *request.table]
        lanes = request.index.new_empty(request.numel, dtype=request.lanes.dtype)
        return Total(self._request(wire, header, request.index, lanes), wire.world)

    def _request(self, wire: Wire, header: list[int], data: Tensor, answer: Tensor) -> Tensor:
        link = self.link
        before = link.sent_nbytes
        if link.leads:
            link.send(_note(header), link.server)
        link.send(data.contiguous(), link.server)
        link.receive([(answer, link.server)])
        wire.sent_nbytes += link.sent_nbytes - before
        return answer


def _unopened() -> ConfigError:
    return ConfigError("this process group has no dedicated server; give the workers a group of their own")


def _note(header: list[int]) -> Tensor:
    return torch.tensor(header + [0] * (_HEADER - len(header)), dtype=torch.int64)


def serve(workers: Sequence[int], *, timeout: timedelta | None = None) -> int:
    """Adds for `workers` until they close, on a rank that does not train.

    Args:
        workers: Ranks of the whole job, without this one.
        timeout: Bounds the wait for the next request (default: half an hour).

    Returns:
        How many requests were answered.

    Raises:
        ConfigError: `workers` is empty, or names this rank.
        TransportError: A worker died, or none sent a request in time.

    Example:
        >>> if dist.get_rank() == 2:
        ...     tacit.serve([0, 1])
        ... else:
        ...     handle = tacit.attach(model, optimizer, "every / thc / dedicated(rank=2)", group=workers)
    """
    own = dist.get_rank()
    if own in workers or not workers:
        raise ConfigError(f"rank {own} serves ranks {list(workers)}: name others, at least one")
    link = ServerLink(workers, own, timeout)
    note = _note([])
    answered = 0
    while True:
        link.receive([(note, link.workers[0])])
        kind, numel, what, length, *rest = note.tolist()
        if kind == _STOP:
            return answered
        total = (
            _sum_of(link, numel, _DTYPES[what])
            if kind == _SUM
            else _lanes_of(link, numel, what, tuple(rest[:length]))
        )
        for place in link.workers:
            link.send(total, place)
        answered += 1


def _sum_of(link: ServerLink, numel: int, dtype: torch.dtype) -> Tensor:
    parts = [torch.empty(numel, dtype=dtype) for _ in link.workers]
    link.receive(list(zip(parts, link.workers, strict=True)))
    return add_shard(Dense(dtype), parts, numel, seed=0)[0]


def _lanes_of(link: ServerLink, numel: int, bits: int, table: tuple[int, ...]) -> Tensor:
    request = TableSum(torch.empty(0, dtype=torch.uint8), table, numel, Lanes(bits, max(table)))
    per_byte = 8 // request.bits
    parts = [torch.empty(-(-numel // per_byte), dtype=torch.uint8) for _ in link.workers]
    link.receive(list(zip(parts, link.workers, strict=True)))
    lanes = torch.zeros(numel, dtype=request.lanes.dtype)
    for index in parts:
        request.add(index, lanes)
    return lanes
