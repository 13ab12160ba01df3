"""The ranks that own rows, as one of them sees the others: one all-to-all of headers, one of keys, one of rows, for all tables together.

    pull    header ->   keys ->                 <- rows
    push    header ->   keys ->   gradients ->

Every header has the kind of exchange, its number, what it is about, and how many keys of each table follow for this receiver. So a rank that
does something else than the others, or has refused its batch, ends the exchange on all ranks with one sentence, and nobody waits for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import environment
from tacit.errors import ConfigError
from tacit.requests import seed_of
from tacit.rows.traffic import RowTraffic
from tacit.transports.process_group import Wire
from tacit.transports.row_link import RowLink

_FIXED = 3  # numbers of a header before those of the tables


class Kind(IntEnum):
    """What an exchange is for."""

    PULL = 1  # rows to read
    PULL_TO_TRAIN = 2  # and whose gradients follow
    PUSH = 3  # gradients, with their keys
    PUSH_PULLED = 4  # gradients of what was pulled: owners know the keys
    GATHER = 5
    AGREE = 6  # on tables and options
    HOT = 7  # agreement on hot rows, and rows that become hot
    REFUSED = 9


_VERBS = {
    Kind.PULL: "looks rows up without training",
    Kind.PULL_TO_TRAIN: "looks rows up to train them",
    Kind.PUSH: "pushes gradients of several look-ups",
    Kind.PUSH_PULLED: "pushes gradients of one look-up",
    Kind.GATHER: "gathers",
    Kind.AGREE: "shards tables",
    Kind.HOT: "agrees on hot rows",
}


@dataclass(slots=True)
class Owners:
    """The ranks of one process group, each of which owns a part of all rows; used by one thread at a time."""

    wire: Wire | None  # None: a world of one
    traffic: RowTraffic = field(default_factory=RowTraffic)
    link: RowLink | None = None  # through an aggregator; None: rows take the process group
    exchanges: int = 0
    numbers: int = (
        0  # of a header, beside the fixed ones: the same in every exchange, so that a stray one is understood
    )

    @property
    def rank(self) -> int:
        return self.wire.rank if self.wire else 0

    @property
    def world(self) -> int:
        return self.wire.world if self.wire else 1

    def announce(self, kind: Kind, about: object, numbers: Sequence[Sequence[int]]) -> list[list[int]]:
        """numbers[r] goes to rank r; back comes what each rank has for this one. Raises ConfigError unless all ranks do the same."""
        self.exchanges += 1
        own = [int(kind), self.exchanges, seed_of(about) >> 1]
        parts = [self._header([*own, *each]) for each in numbers]
        received = [
            part.tolist() for part in self._moved(parts, [len(parts[0])] * self.world, "header_nbytes")
        ]
        for rank, header in enumerate(received):
            if header[:_FIXED] != own:
                raise ConfigError(self._differs(rank, header, kind, about))
        return [header[_FIXED:] for header in received]

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Around what this rank checks before an exchange: if it refuses, the others end too."""
        try:
            yield
        except ConfigError:
            self.refuse()
            raise

    def close(self) -> None:
        """Frees the process group; safe to call twice."""
        if self.link is not None:
            self.link.close()
            self.link = None
        if self.wire is not None:
            dist.destroy_process_group(self.wire.group)
            self.wire = None

    def refuse(self) -> None:
        """Takes the place of an exchange on a rank that cannot take part: the others end with one sentence instead of waiting."""
        self.exchanges += 1
        header = self._header([Kind.REFUSED, self.exchanges])
        self._moved([header] * self.world, [len(header)] * self.world, "header_nbytes")

    def _header(self, numbers: Sequence[int]) -> Tensor:
        header = torch.zeros(_FIXED + self.numbers, dtype=torch.int64)
        header[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return header

    def send_keys(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """parts[r] goes to rank r, numels[r] keys come from there."""
        return self._moved(parts, numels, "key_nbytes")

    def send_rows(self, parts: Sequence[Tensor], nbytes: Sequence[int]) -> list[Tensor]:
        """Rows that were asked for, as bytes."""
        return self._moved(parts, nbytes, "row_nbytes")

    def send_gradients(self, parts: Sequence[Tensor], nbytes: Sequence[int]) -> list[Tensor]:
        """Rows of gradients, as bytes."""
        return self._moved(parts, nbytes, "gradient_nbytes")

    def send_hot(self, own: Tensor, numels: Sequence[int]) -> list[Tensor]:
        """The same to all: counts, and rows that become hot."""
        return self._moved([own] * self.world, numels, "agreement_nbytes")

    def _moved(self, parts: Sequence[Tensor], numels: Sequence[int], counter: str) -> list[Tensor]:
        if self.wire is None:
            return list(parts)
        before = self.wire.sent_nbytes
        with self.wire.purpose("transfer of rows"):
            received = (self.link or self.wire).all_to_all(parts, numels)
        sent = self.wire.sent_nbytes - before
        setattr(self.traffic, counter, getattr(self.traffic, counter) + sent)
        return received

    def _differs(self, rank: int, header: Sequence[int], kind: Kind, about: object) -> str:
        if header[0] == Kind.REFUSED:
            return f"rank {rank} refused its own part of exchange {self.exchanges}; its error has the reason"
        if header[0] == kind == Kind.AGREE:
            return f"rank {rank} shards other tables, or with other options, than rank {self.rank}, which has {about}; pass the same on all ranks"
        verb = (
            _VERBS.get(Kind(header[0]), "?")
            if header[0] in Kind._value2member_map_
            else "does something else"
        )
        what = " of other tables" if header[0] == kind else ""
        return (
            f"rank {rank} {verb}{what} where rank {self.rank} {_VERBS[kind]} (exchange {self.exchanges}); all ranks must look up, step and "
            f"gather in the same order, with train(), eval() and no_grad alike"
        )


def owners_of(group: dist.ProcessGroup | None) -> Owners:
    """The ranks of `group` (default: all), over a process group of their own that nobody else uses."""
    if not dist.is_available() or not dist.is_initialized():
        if (world := environment.world_size_text()).isdigit() and int(world) > 1:
            raise ConfigError(
                f"WORLD_SIZE={world}, but this process has no process group, so every rank would own all rows; call "
                f"torch.distributed.init_process_group() before shard(), or unset WORLD_SIZE"
            )
        return Owners(None)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return Owners(None)
    whole = len(ranks) == dist.get_world_size()
    made = dist.new_group(
        ranks, timeout=timeout_of(group), backend="gloo", use_local_synchronization=not whole
    )
    assert isinstance(made, dist.ProcessGroup)
    return Owners(Wire(made))


def timeout_of(group: Any) -> timedelta | None:
    """How long the ranks of `group` wait for each other; torch's default (None) where it has no tensors on the CPU."""
    group = group or dist.group.WORLD
    if torch.device("cpu") not in group._device_types:
        return None
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found
