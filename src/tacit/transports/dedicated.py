"""Dedicated: a process that trains nothing adds for all, as parameter servers once did.

    worker r -> server: its payload (worker 0 first says what comes);   server: adds in rank order;   -> every worker

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

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.errors import ConfigError, PairingError, TransportError
from tacit.requests import Codec, Dense, Lanes, Sum, TableSum, Total, add_shard
from tacit.transports.process_group import Wire

_STOP, _SUM, _TABLE_SUM = range(3)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 4 + 256  # kind, numel, dtype or lane bits, length of the table; the table


@dataclass(frozen=True, slots=True)
class Dedicated:
    """`rank` is the server's in the whole job; it runs `tacit.serve` and is not among those who attach."""

    rank: int

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

    def prepare(self) -> None:
        """Nothing: all that it takes is in the strategy, which ranks compare."""

    def open(self, wire: Wire, timeout: timedelta | None) -> None:
        """Links `wire`'s ranks to the server, which must call `serve` meanwhile."""
        workers = dist.get_process_group_ranks(wire.group)
        if self.rank in workers or self.rank >= dist.get_world_size():
            raise ConfigError(
                f"{self}: the server is one of the {dist.get_world_size()} ranks of the job, and none of those "
                f"who train ({', '.join(map(str, workers))}); give the workers a process group without it"
            )
        wire.outside = Link(workers, self.rank, timeout, speaks=wire.rank == 0)

    def sum(self, wire: Wire, request: Sum, seed: int) -> Total:
        payload = request.payload
        assert isinstance(payload.form, Dense), "a summable payload is plain numbers"
        dtype = _DTYPES.index(payload.form.dtype)
        total = _ask(wire, [_SUM, payload.numel, dtype, 0], payload.data, torch.empty_like(payload.data))
        return Total(payload.form.unpack(total, payload.numel), wire.world)

    def table_sum(self, wire: Wire, request: TableSum) -> Total:
        request.lanes.check(wire.world)
        header = [_TABLE_SUM, request.numel, request.lanes.bits, len(request.table), *request.table]
        lanes = request.index.new_empty(request.numel, dtype=request.lanes.dtype)
        return Total(_ask(wire, header, request.index, lanes), wire.world)


def _ask(wire: Wire, header: list[int], data: Tensor, answer: Tensor) -> Tensor:
    if not isinstance(link := wire.outside, Link):
        raise ConfigError("this process group has no dedicated server; give the workers a group of their own")
    before = link.sent_nbytes
    if link.speaks:
        link.send(_note(header), link.server)
    link.send(data.contiguous(), link.server)
    link.receive([(answer, link.server)])
    wire.sent_nbytes += link.sent_nbytes - before
    return answer


def _note(header: list[int]) -> Tensor:
    return torch.tensor(header + [0] * (_HEADER - len(header)), dtype=torch.int64)


class Link:
    """Sockets between some ranks of the job and the server, used by nobody else.

    Not a torch process group: the names of those depend on how many a process has made before, and the server has made
    fewer than the workers.
    """

    _opened: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(
        self, workers: Sequence[int], server: int, timeout: timedelta | None, *, speaks: bool = False
    ):
        members = sorted([*workers, server])
        Link._opened[tuple(members)] += 1
        name = f"tacit/server/{server}/{'-'.join(map(str, members))}/{Link._opened[tuple(members)]}"
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        own = members.index(dist.get_rank())
        self.server = members.index(server)
        self.workers = [place for place in range(len(members)) if place != self.server]
        self.speaks = speaks  # for all workers, of what comes
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        self.sent_nbytes = 0
        self._group: Any = dist.ProcessGroupGloo(store, own, len(members), timeout or dist.default_pg_timeout)
        self._who = f"rank {dist.get_rank()}"

    def send(self, data: Tensor, to: int) -> None:
        if data.numel():
            self._wait([self._group.send([data.view(torch.uint8)], to, 0)])
            self.sent_nbytes += data.numel() * data.element_size()

    def receive(self, parts: Sequence[tuple[Tensor, int]]) -> None:
        """(into, from) each, all at the same time."""
        self._wait(
            [self._group.recv([into.view(torch.uint8)], place, 0) for into, place in parts if into.numel()]
        )

    def lost(self) -> Sequence[int]:
        return ()

    def close(self) -> None:
        """Sends the server home."""
        if self.speaks:
            with suppress(TransportError):  # a server that is gone already needs no farewell
                self.send(_note([_STOP]), self.server)

    def _wait(self, works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as cause:
            raise TransportError(
                f"{self._who} lost the dedicated server or one of its workers: it ended or stalled beyond the time-out; "
                f"restart all ranks from the last checkpoint ({' '.join(str(cause).split())[:300]})"
            ) from cause


def serve(workers: Sequence[int], *, timeout: timedelta | None = None) -> int:
    """Adds for `workers` (ranks of the whole job) until they close; returns how many requests were answered.

    `timeout` bounds the wait for the next request (default: half an hour). A worker that dies ends it with a
    TransportError.
    """
    own = dist.get_rank()
    if own in workers or not workers:
        raise ConfigError(f"rank {own} serves ranks {list(workers)}: name others, at least one")
    link = Link(workers, own, timeout)
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


def _sum_of(link: Link, numel: int, dtype: torch.dtype) -> Tensor:
    parts = [torch.empty(numel, dtype=dtype) for _ in link.workers]
    link.receive(list(zip(parts, link.workers, strict=True)))
    return add_shard(Dense(dtype), parts, numel, seed=0)[0]


def _lanes_of(link: Link, numel: int, bits: int, table: tuple[int, ...]) -> Tensor:
    request = TableSum(torch.empty(0, dtype=torch.uint8), table, numel, Lanes(bits, max(table)))
    per_byte = 8 // request.bits
    parts = [torch.empty(-(-numel // per_byte), dtype=torch.uint8) for _ in link.workers]
    link.receive(list(zip(parts, link.workers, strict=True)))
    lanes = torch.zeros(numel, dtype=request.lanes.dtype)
    for index in parts:
        request.add(index, lanes)
    return lanes
