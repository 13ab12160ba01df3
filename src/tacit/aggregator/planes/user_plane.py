"""The user-space plane: any Linux machine, no privileges. Threads of the C++ core receive, add and send; Python only watches.

with UserPlane(("0.0.0.0", 4800), slots=1024) as plane:
    plane.add_job(job)
"""

from types import TracebackType
from typing import Self

from tacit import _core
from tacit.aggregator.addresses import opening
from tacit.aggregator.planes.stats import JobStats, RankStats
from tacit.aggregator.spec import Address, PlaneJob
from tacit.errors import ConfigError

_BUFFER_NBYTES = (
    8 << 20
)  # 3,500 full packets of 1500 bytes as the kernel counts them; it grants half if we are not root


_Above = tuple[Address, int, int, int, int, int, int, int, bool]


class UserPlane:
    """Serves from when it is built until it is closed; every method may be called from any thread meanwhile.

    Port 0 picks a free one. More `threads` pay where there are cores to spare beside the network's own work.
    """

    def __init__(
        self,
        listen: Address = ("0.0.0.0", 0),
        *,
        slots: int = 1024,
        threads: int = 1,
        buffer_nbytes: int = _BUFFER_NBYTES,
    ) -> None:
        with opening(listen, "listened on"):
            self._core = _core.UdpPlane(listen, slots, threads, buffer_nbytes)
        self.slots = slots
        self._core.start()

    @property
    def address(self) -> Address:
        return self._core.address()

    def add_job(self, job: PlaneJob) -> None:
        """Its packets are summed from now on. ConfigError if its id or its slots are taken."""
        try:
            self._core.add_job(
                job.id,
                job.cookie,
                job.members,
                job.lanes,
                job.elements,
                job.slots.start,
                len(job.slots),
                job.needed,
                bytes(job.table),
                job.below,
                upstream_of(job),
                job.shards,
                job.deadline_ms * 1_000_000,
            )
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause

    def remove_job(self, id: int) -> None:
        """Forgets the job and its sums: its slots are free, and its packets are answered with UNKNOWN."""
        try:
            self._core.remove_job(id)
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause

    def jobs(self) -> list[int]:
        return self._core.jobs()

    def counts(self) -> dict[str, int]:
        """Packets by verdict, and events; of all jobs since the start, and of none."""
        return self._core.counts()

    def sockets(self) -> dict[str, int]:
        """`overrun`: packets that found the receive buffer full; `unsent`, `failures`: what the kernel would not do."""
        return self._core.sockets()

    def stats(self, id: int) -> JobStats:
        try:
            found = self._core.stats(id)
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause
        now_ns = self._core.now_ns()
        ranks = tuple(
            RankStats(packets, max(0, now_ns - last_ns) / 1e9 if last_ns else None, missing, left_out)
            for packets, last_ns, missing, left_out in found.pop("ranks")
        )
        return JobStats(time_s=now_ns / 1e9, ranks=ranks, **found)

    def close(self) -> None:
        """Returns when the threads have ended and the port is free. Figures stay readable."""
        self._core.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def upstream_of(job: PlaneJob) -> _Above | None:
    """The job's upstream, as the C++ core has it."""
    if (up := job.upstream) is None:
        return None
    first, slots = up.job.slots.start, len(up.job.slots)
    return (
        up.parent,
        up.job.id,
        up.job.cookie,
        up.job.world,
        up.rank,
        first,
        slots,
        up.job.ranks,
        up.segment,
    )
