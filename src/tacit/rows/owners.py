"""The ranks that look rows up and the members that own them, as one of them sees the others: one all-to-all of headers, one of keys, one of
rows, for all tables together.

    pull    header ->   keys ->                 <- rows
    push    header ->   keys ->   gradients ->

Every header has the kind of exchange, its number, what it is about, and how many keys of each table follow for this receiver. So a rank that
does something else than the others, or has refused its batch, ends the exchange on all ranks with one sentence, and nobody waits for it.

Without row servers every rank is a holder of rows. With S of them the holders are the last S members, which look nothing up: they send the
header SERVES, find from the others' what is to be done, and do their part of it (serving.py).
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import environment
from tacit.errors import ConfigError, TransportError
from tacit.requests import seed_of
from tacit.rows.through import Through
from tacit.rows.traffic import RowTraffic
from tacit.transports.process_group import Wire
from tacit.transports.row_link import PATIENCE_S, RowLink

_FIXED = 3  # numbers of a header before those of the tables
ALIVE_S = 2.0  # for others to report that they, too, have lost an exchange
_SERVED: WeakSet[dist.ProcessGroup] = WeakSet()  # jobs whose row servers keep this rank's tables


class Kind(IntEnum):
    """What an exchange is for."""

    PULL = 1  # rows to read
    PULL_TO_TRAIN = 2  # and whose gradients follow
    PUSH = 3  # gradients, with their keys
    PUSH_PULLED = 4  # gradients of what was pulled: owners know the keys
    GATHER = 5
    AGREE = 6  # on tables and options
    HOT = 7  # agreement on hot rows, and rows that become hot
    TEXT = 8  # a text of each member
    REFUSED = 9
    SERVES = 10  # whatever the ranks do
    BACK = 11  # hot rows, as ranks have trained them, to row servers
    SAVE = 12
    LOAD = 13
    CLOSE = 14
    SETTLE = 15  # the end of a step with hot rows


_VERBS = {
    Kind.PULL: "looks rows up without training",
    Kind.PULL_TO_TRAIN: "looks rows up to train them",
    Kind.PUSH: "pushes gradients of several look-ups",
    Kind.PUSH_PULLED: "pushes gradients of one look-up",
    Kind.GATHER: "gathers",
    Kind.AGREE: "shards tables",
    Kind.HOT: "agrees on hot rows",
    Kind.TEXT: "exchanges options",
    Kind.BACK: "brings hot rows back",
    Kind.SAVE: "saves",
    Kind.LOAD: "loads",
    Kind.CLOSE: "closes its tables",
    Kind.SETTLE: "ends a step",
    Kind.SERVES: "serves rows",
}


@dataclass(slots=True)
class Owners:
    """The members of one process group: the first `world` are ranks, which look rows up; `holders` own them. Used by one thread at a time."""

    wire: Wire | None  # among all members; None: a world of one
    traffic: RowTraffic = field(default_factory=RowTraffic)
    link: RowLink | None = None  # through an aggregator; None: rows take the process group
    exchanges: int = 0
    numbers: int = (
        1  # of a header, beside the fixed ones: the same in every exchange, so that a stray one is understood
    )
    servers: int = 0  # the last members, which own all rows; 0: every rank owns some
    between: Wire | None = None  # the ranks alone, for sums
    meeting: dist.ProcessGroup | None = None  # the ranks alone, beside row servers
    met: bool = False  # whether an AggregatorLink has `meeting`, and frees it
    closed: bool = False
    job: dist.ProcessGroup | None = None  # whose row servers are ours until they end
    _heard: list[list[int]] | None = None  # a row server's next headers, received already

    @property
    def rank(self) -> int:
        """This member's number."""
        return self.wire.rank if self.wire else 0

    @property
    def members(self) -> int:
        return self.wire.world if self.wire else 1

    @property
    def world(self) -> int:
        """Ranks that look rows up: means are over them."""
        return self.members - self.servers

    @property
    def holders(self) -> range:
        """The members that own rows; key k is of holders[mix(table, k) mod len(holders)]."""
        return range(self.world if self.servers else 0, self.members)

    @property
    def part(self) -> int | None:
        """This member's place among the holders; None: it owns nothing."""
        return self.rank - self.holders.start if self.rank in self.holders else None

    @property
    def serves(self) -> bool:
        """Whether this member is a row server."""
        return self.rank >= self.world

    def by_member(self, by_holder: Sequence[int]) -> list[int]:
        """The same numbers, with zeros for members that own nothing."""
        return [0] * self.holders.start + list(by_holder)

    def announce(self, kind: Kind, about: object, numbers: Sequence[Sequence[int]]) -> list[list[int]]:
        """numbers[m] goes to member m; back comes what each has for this one. Raises ConfigError unless all ranks do the same."""
        own = [int(kind), self.exchanges + (self._heard is None), seed_of(about) >> 1]
        received, self._heard = self._heard or self._exchanged([[*own, *each] for each in numbers]), None
        for rank, header in enumerate(received):
            if header[:_FIXED] != own and not self._listens(rank, header):
                self._free_job()
                raise ConfigError(self._differs(rank, header, kind, about))
        return [header[_FIXED:] for header in received]

    def check_open(self) -> None:
        """Raises ConfigError after `close`: without a wire this would look like a world of one."""
        if self.closed:
            raise ConfigError(
                "the tables were closed; shard the model again, or make another store, to go on"
            )

    def listen(self, numbers: Sequence[int]) -> tuple[int, list[int]]:
        """A row server's: the kind of the ranks' next exchange, and what rank 0's header has. The next `announce` has its headers."""
        heard = self._exchanged([[int(Kind.SERVES), self.exchanges + 1, 0, *numbers]] * self.members)
        first = heard[0]
        for rank, header in enumerate(heard[: self.world]):
            if header[:_FIXED] != first[:_FIXED] or header[0] == Kind.REFUSED:
                kind = Kind(first[0]) if first[0] in _VERBS else Kind.AGREE
                raise ConfigError(self._differs(rank, header, kind, None, by="rank 0"))
        self._heard = heard
        return first[0], first[_FIXED:]

    def answered(self) -> None:
        """A row server's: the headers were all there was to the exchange."""
        self._heard = None

    def call(self, kind: Kind, *numbers: int) -> None:
        """A rank's: row servers do their part of what follows. Without servers nothing is sent."""
        if self.servers and not self.serves:
            self.announce(kind, numbers, [numbers] * self.members)

    def texts(self, own: str) -> list[str]:
        """Every member's text, on all members."""
        data = torch.tensor(list(own.encode()), dtype=torch.uint8)
        sizes = [header[0] for header in self.announce(Kind.TEXT, "text", [[len(data)]] * self.members)]
        return [bytes(each.tolist()).decode() for each in self.send_hot([data] * self.members, sizes)]

    def _exchanged(self, headers: Sequence[Sequence[int]]) -> list[list[int]]:
        self.check_open()
        self.exchanges += 1
        parts = [self._header(each) for each in headers]
        sizes = [len(parts[0])] * self.members
        return [part.tolist() for part in self._moved(parts, sizes, "header_nbytes")]

    def _listens(self, rank: int, header: Sequence[int]) -> bool:
        """Whether this is the header of a row server that follows the ranks."""
        return rank >= self.world and header[:2] == [Kind.SERVES, self.exchanges]

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Around what this rank checks before an exchange: if it refuses, the others end too. A CheckpointError is a ConfigError."""
        try:
            yield
        except ConfigError:
            self.refuse()
            raise

    def go_through(self, path: Through | None) -> None:
        """From here on all of it goes through the aggregator of `path`, if there is one; all members call it together."""
        if path is not None and self.wire is not None:
            patience_s = math.inf if self.serves else PATIENCE_S  # a row server waits for most of a step
            self.link = path.open(self.wire, timeout_of(self.wire.group), patience_s)

    def close(self) -> None:
        """Leaves the aggregator and frees the process groups; safe to call twice. Nothing is exchanged after that."""
        self.closed = True
        self._free_job()
        if self.link is not None:
            self.link.close()
            self.link = None
        if self.meeting is not None and not self.met:
            dist.destroy_process_group(self.meeting)
        if self.between is not None and self.between is not self.wire:
            dist.destroy_process_group(self.between.group)
        if self.wire is not None:
            dist.destroy_process_group(self.wire.group)
        self.wire = self.between = self.meeting = None

    def hold_job(self) -> None:
        """A rank's whose tables are on row servers: these answer to nobody else until they end."""
        if self.servers and dist.group.WORLD is not None:
            self.job = dist.group.WORLD
            _SERVED.add(self.job)

    def _free_job(self) -> None:
        """The row servers have ended, with an error or without one."""
        if self.job is not None:
            _SERVED.discard(self.job)
            self.job = None

    def refuse(self) -> None:
        """Takes the place of an exchange on a rank that cannot take part: the others end with one sentence instead of waiting."""
        self._free_job()
        self._exchanged([[Kind.REFUSED, self.exchanges + 1]] * self.members)

    def _header(self, numbers: Sequence[int]) -> Tensor:
        header = torch.zeros(_FIXED + self.numbers, dtype=torch.int64)
        header[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return header

    def send_keys(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """parts[m] goes to member m, numels[m] keys come from there."""
        return self._moved(parts, numels, "key_nbytes")

    def send_rows(
        self, parts: Sequence[Tensor], nbytes: Sequence[int], touches_nbytes: int = 0
    ) -> list[Tensor]:
        """Rows that were asked for, as bytes, `touches_nbytes` of touches among them."""
        received = self._moved(parts, nbytes, "row_nbytes")
        self.traffic.row_nbytes -= touches_nbytes
        self.traffic.touch_nbytes += touches_nbytes
        return received

    def send_gradients(self, parts: Sequence[Tensor], nbytes: Sequence[int]) -> list[Tensor]:
        """Rows of gradients, as bytes."""
        return self._moved(parts, nbytes, "gradient_nbytes")

    def send_touches(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """How many ranks have touched hot rows."""
        return self._moved(parts, numels, "touch_nbytes")

    def send_hot(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """Counts, rows that become hot or come back, and texts."""
        return self._moved(parts, numels, "agreement_nbytes")

    def _moved(self, parts: Sequence[Tensor], numels: Sequence[int], counter: str) -> list[Tensor]:
        if self.wire is None:
            return list(parts)
        before = self.wire.sent_nbytes
        try:
            with self.wire.purpose("transfer of rows"):
                received = (self.link or self.wire).all_to_all(parts, numels)
        except TransportError as cause:
            self._free_job()
            if not self.servers or not (gone := self._gone()):
                raise
            raise TransportError(
                f"{gone} went away; restart all ranks and row servers from the last checkpoint ({cause})"
            ) from cause
        sent = self.wire.sent_nbytes - before
        setattr(self.traffic, counter, getattr(self.traffic, counter) + sent)
        return received

    def _gone(self) -> str:
        """The members that this one cannot reach, and that have not reported to have lost others themselves."""
        assert self.wire is not None
        gone = list(self.wire.unreachable())
        with suppress(RuntimeError):  # the store may have gone with its host
            store = dist.distributed_c10d.PrefixStore(
                f"tacit/rows/{self.wire.group.group_name}", dist.distributed_c10d._get_default_store()
            )
            store.set(str(self.rank), "")
            deadline = time.monotonic() + ALIVE_S
            while gone and time.monotonic() < deadline:
                gone = [member for member in gone if not store.check([str(member)])]
                time.sleep(0.02)
        return ", ".join(map(self._named, gone))

    def _named(self, member: int) -> str:
        return (
            f"row server {member - self.world} (rank {member})" if member >= self.world else f"rank {member}"
        )

    def _differs(
        self, rank: int, header: Sequence[int], kind: Kind, about: object, by: str | None = None
    ) -> str:
        who, by = self._named(rank), by or self._named(self.rank)
        if header[0] == Kind.REFUSED:
            return f"{who} refused its own part of exchange {self.exchanges}; its error has the reason"
        if header[0] == kind == Kind.AGREE:
            has = f", which has {about}" if about else ""
            return f"{who} shards other tables, or with other options, than {by}{has}; pass the same on all ranks"
        if header[0] == kind == Kind.LOAD:
            return f"{who} loads a checkpoint of another step or run than {by}; load the states of one checkpoint on all ranks"
        if header[0] == Kind.SERVES:
            return (
                f"{who} serves rows, and {by} has servers={self.servers}; pass the same servers= to tacit.rows.shard on ranks and to "
                f"tacit.rows.serve or `tacit serve-rows` on row servers, which are the last ranks of the job"
            )
        verb = (
            _VERBS.get(Kind(header[0]), "?")
            if header[0] in Kind._value2member_map_
            else "does something else"
        )
        what = " of other tables" if header[0] == kind else ""
        if header[0] == kind and kind in (Kind.PUSH, Kind.PUSH_PULLED):
            what = " of other tables, or with another learning rate,"
        return (
            f"{who} {verb}{what} where {by} {_VERBS[kind]} (exchange {self.exchanges}); all ranks must look up, step and "
            f"gather in the same order, with train(), eval() and no_grad alike"
        )


def owners_of(group: dist.ProcessGroup | None, servers: int = 0, timeout: timedelta | None = None) -> Owners:
    """The ranks of `group` (default: all), over a process group of their own that nobody else uses; the last `servers` own all rows."""
    if not dist.is_available() or not dist.is_initialized():
        if (world := environment.world_size_text()).isdigit() and int(world) > 1:
            raise ConfigError(
                f"WORLD_SIZE={world}, but this process has no process group, so every rank would own all rows; call "
                f"torch.distributed.init_process_group() before shard(), or unset WORLD_SIZE"
            )
        if servers:
            raise ConfigError(
                f"servers={servers}, but there is no process group, so no rank that serves; leave servers= out"
            )
        return Owners(None)
    ranks = dist.get_process_group_ranks(group)
    if servers:
        _check_servers(servers, group, len(ranks))
    if len(ranks) == 1:
        return Owners(None)
    wire = Wire(_group_of(ranks, timeout or timeout_of(group)), uneven=True)
    if not servers:
        return Owners(wire, between=wire)
    owners = Owners(wire, servers=servers)
    made = [_group_of(ranks[:-servers], timeout_of(group), together=True) for _ in range(2)]
    if not owners.serves:  # sums may run beside a pull, in a thread: they need a group of their own
        owners.between, owners.meeting = Wire(made[0], uneven=True), made[1]
    return owners


def _check_servers(servers: int, group: dist.ProcessGroup | None, members: int) -> None:
    if not isinstance(servers, int) or isinstance(servers, bool) or servers < 0:
        raise ConfigError(f"servers={servers!r}: how many of the job's last ranks serve rows, 0 or more")
    if group is not None:
        raise ConfigError(f"servers={servers} are the last ranks of the whole job; leave group= out")
    if servers >= members:
        raise ConfigError(
            f"servers={servers} of a job of {members} ranks leave none to train; start more ranks, or fewer servers"
        )
    if dist.group.WORLD in _SERVED:
        raise ConfigError(
            f"servers={servers}, but the job's row servers keep the tables of an earlier shard(); call close() of those tables first, and "
            f"serve again"
        )


def _group_of(ranks: list[int], timeout: timedelta | None, *, together: bool = False) -> dist.ProcessGroup:
    """A group that `ranks` make, or (`together`) all ranks of the job for them.

    torch names a group that all ranks make by how many of those there were, which is the same everywhere, and one that its own ranks make by
    all groups that this process has: row servers know the former alone, and it never has an old one's name.
    """
    alone = not together and len(ranks) < dist.get_world_size()
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=alone)
    return cast(dist.ProcessGroup, made)


def timeout_of(group: Any) -> timedelta | None:
    """How long the ranks of `group` wait for each other; torch's default (None) where it has no tensors on the CPU."""
    group = group or dist.group.WORLD
    if torch.device("cpu") not in group._device_types:
        return None
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
