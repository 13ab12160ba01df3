"""Sockets between the ranks of a group and one rank outside of it, which adds for them (schemes/dedicated.py)."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.errors import TransportError


class ServerLink:
    """Sockets between some ranks of the job and the server, used by nobody else.

    Not a torch process group: the names of those depend on how many a process has made before, and the server has made
    fewer than the workers.
    """

    _opened: ClassVar[Counter[tuple[int, ...]]] = Counter()

    def __init__(
        self, workers: Sequence[int], server: int, timeout: timedelta | None, *, leads: bool = False
    ):
        members = sorted([*workers, server])
        ServerLink._opened[tuple(members)] += 1
        name = f"tacit/server/{server}/{'-'.join(map(str, members))}/{ServerLink._opened[tuple(members)]}"
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        own = members.index(dist.get_rank())
        self.server = members.index(server)
        self.workers = [place for place in range(len(members)) if place != self.server]
        self.leads = leads  # announces to the server, for all workers, what comes
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

    def _wait(self, works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as cause:
            raise TransportError(
                f"{self._who} lost the dedicated server or one of its workers: it ended or stalled beyond the time-out; "
                f"restart all ranks from the last checkpoint ({' '.join(str(cause).split())[:300]})"
            ) from cause
