"""A row server: a process that keeps rows and trains nothing.

    if dist.get_rank() == 4:
        tacit.rows.serve(servers=1)                    # returns when the ranks have closed their tables
    else:
        ranks = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
        tables = tacit.rows.shard(model, optimizer=..., servers=1)
        model = DDP(model, process_group=ranks)
        ...
        tables.close()

It learns tables, optimizer and options from the ranks. In every exchange it sends its header without knowing what the ranks do, finds that from
theirs, and then runs the same function as they, with no keys of its own: pull, push, gather, save, load.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

from tacit.errors import CheckpointError, ConfigError
from tacit.rows.description import described
from tacit.rows.exchanges import ABSENT, Pulled, float_of, pull, push, push_pulled
from tacit.rows.held import HeldRows
from tacit.rows.owners import Kind, Owners, owners_of
from tacit.rows.traffic import RowTraffic


def serve(servers: int, *, timeout: timedelta | None = None) -> RowTraffic:
    """Keeps the rows of ranks that call `tacit.rows.shard(..., servers=servers)`, until they close their tables.

    Args:
        servers: how many of the job's last ranks serve rows; this is one of them, and all call it.
        timeout: bounds the wait for the ranks' next exchange; None for the process group's own.

    Returns:
        What was sent by this server.

    Raises:
        ConfigError: this rank is none of the last ones, or ranks do different things.
        TransportError: a rank or another server went away, or none sent anything in time.

    Example:
        >>> if dist.get_rank() >= dist.get_world_size() - 2:
        ...     tacit.rows.serve(servers=2)
    """
    if servers < 1:
        raise ConfigError(f"servers={servers}: at least 1 rank serves rows")
    owners = owners_of(None, servers, timeout)
    try:
        if not owners.serves:
            raise ConfigError(
                f"rank {owners.rank} is none of the last {servers} ranks of {owners.members}, which serve rows; call tacit.rows.shard there"
            )
        server = RowServer(owners)
        while server.answer():
            pass
        return owners.traffic
    finally:
        owners.close()


class RowServer:
    """One member that owns rows of all tables, from the ranks' description on. Used by one thread."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        kind, numbers = owners.listen([])
        owners.answered()
        if kind != Kind.AGREE or numbers[0] != owners.servers:
            raise ConfigError(
                f"the ranks have servers={numbers[0]}, and row server {owners.part} (rank {owners.rank}) has servers={owners.servers}; pass the same"
            )
        given = described(owners.texts("")[0])
        owners.go_through(given.through)
        owners.numbers = 2 * len(given.tables) + 1
        self._held = HeldRows(
            given.tables, owners, given.optimizer, given.adding, given.hot, given.in_the_network
        )
        for name in given.begins:
            self._held.begin(name, None)
        self._names = [table.name for table in given.tables]
        self._pulled: Pulled | None = None  # whose gradients may follow
        self._calls: dict[int, Callable[[list[int]], object]] = {
            Kind.GATHER: lambda numbers: self._held.gather_rows(
                self._names[numbers[0]], None if numbers[1] < 0 else numbers[1]
            ),
            Kind.SAVE: lambda _: self._held.save(""),
            Kind.LOAD: lambda _: self._held.load(""),
            Kind.SETTLE: lambda _: self._settle(),
        }

    def answer(self) -> bool:
        """This server's part of the ranks' next exchange; False when they have closed their tables."""
        tables = len(self._names)
        kind, numbers = self._owners.listen(
            [*[0] * tables, *(each.own for each in self._held.adders.values())]
        )
        if kind in (Kind.PULL, Kind.PULL_TO_TRAIN):
            self._pull(Kind(kind), self._in(numbers))
            self._settle()
        elif kind in (Kind.PUSH, Kind.PUSH_PULLED):
            self._push(Kind(kind), self._in(numbers), float_of(numbers[2 * tables]))
        else:
            self._owners.answered()
            if kind == Kind.CLOSE:
                return False
            if kind not in self._calls:
                raise ConfigError(
                    f"the ranks do something in exchange {self._owners.exchanges} that row servers do not know (kind {kind}); run the "
                    f"same version on all"
                )
            with suppress(CheckpointError):  # the ranks have it too, and may go on
                self._calls[kind](numbers)
        return True

    def _settle(self) -> None:
        if self._held.hot:
            self._held.hot.settle()

    def _in(self, numbers: list[int]) -> list[str]:
        """The tables that an exchange is about."""
        return [name for name, number in zip(self._names, numbers, strict=False) if number != ABSENT]

    def _pull(self, kind: Kind, names: list[str]) -> None:
        held = self._held
        pulled = pull(self._owners, held.shards, {name: _no_keys() for name in names}, kind, held.hot)
        if kind == Kind.PULL_TO_TRAIN:
            self._pulled = pulled

    def _push(self, kind: Kind, names: list[str], lr: float) -> None:
        held, owners, keys = self._held, self._owners, {name: _no_keys() for name in names}
        if kind == Kind.PUSH:
            push(owners, held.shards, held.adders, keys, {}, lr, held.hot)
        elif self._pulled is not None and list(self._pulled.keys) == names:
            push_pulled(owners, held.shards, held.adders, self._pulled, {}, lr, held.hot)
        else:
            raise ConfigError(
                f"the ranks push gradients of rows that they have not pulled (exchange {owners.exchanges})"
            )
        self._pulled = None
        if held.hot:
            held.hot.end_step()


def _no_keys() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)
