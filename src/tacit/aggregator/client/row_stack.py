"""A member's way to all others through the aggregator: numbered exchanges of byte messages, over one UDP socket.

    socket = RowSocket()                                # its port is known before the job is
    socket.start(job, rank, plane, room_nbytes=rows_room(mtu), window_nbytes=1 << 18, segment=membership.segment)
    socket.begin(parts, rooms)                          # parts[m] goes to member m, rooms[m] gets what m has for us
    while (outcome := socket.wait(0.25)) is RowsOutcome.RUNNING: ...

How a flow is kept whole, and how it shares the receiver with others: native/row_flows.h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tacit import _core
from tacit.aggregator.addresses import opening
from tacit.aggregator.client.host_stack import Bytes
from tacit.aggregator.spec import Address, PlaneJob
from tacit.errors import ConfigError

_BUFFER_NBYTES = 8 << 20


class RowsOutcome(StrEnum):
    """How an exchange stands. After all but RUNNING and DONE it has to be abandoned."""

    RUNNING = "running"
    DONE = "done"  # everything has come, and everything sent is acknowledged
    SILENT = "silent"  # nothing at all came for 2 s, although the plane was probed
    UNKNOWN = "unknown"  # the plane does not know the job: it was restarted, or control ended the job
    NARROW = "narrow"  # a member answers, but full packets do not reach it
    MISMATCHED = "mismatched"  # a message has another length than is expected here


@dataclass(frozen=True, slots=True)
class RowsStats:
    """Figures since the socket was opened; `sent` counts packets of messages, copies too."""

    exchanges: int  # finished
    sent: int
    sent_nbytes: int  # of messages, copies too
    repaired: int  # of those sent: again, because later ones had arrived
    timeouts: int  # of those sent: again, because nothing came
    acks: int  # acknowledgements alone
    probes: int
    received: int  # packets of this job
    received_nbytes: int  # of messages, each byte once
    repeated: int  # of those received: here already
    early: int  # of those received: before this member had begun their exchange
    foreign: int  # packets of another job, or that contradict themselves
    refused: int  # times that the plane's host answered: port unreachable
    unsent: int  # packets that the kernel would not take
    wakes: int  # of the thread
    round_trip_s: float  # smoothed, of the slowest flow


class RowSocket:
    """One UDP socket and one thread in C++, which go on acknowledging between exchanges."""

    def __init__(self, bind: Address = ("0.0.0.0", 0), *, buffer_nbytes: int = _BUFFER_NBYTES) -> None:
        with opening(bind):
            self._core = _core.RowFlows(bind, buffer_nbytes)
        self.port = self._core.address()[1]
        self._held: tuple[Sequence[Bytes], Sequence[Bytes]] | None = None  # the core reads and writes them

    def start(
        self,
        job: PlaneJob,
        own: int,
        plane: Address,
        *,
        room_nbytes: int,
        window_nbytes: int,
        first: int = 0,
        segment: bool = False,
    ) -> None:
        """Is member `own` of `job` from now on: once. All members pass the same sizes.

        `room_nbytes` of a message go in one packet; `window_nbytes` are on their way to one member, from all others. Packets are
        numbered from `first` on, exchanges from the one behind it. `segment`:
        hand over runs of packets that the kernel cuts (UDP_SEGMENT), to a plane that takes them (`Membership.segment`).
        """
        members = len(job.members)
        identity = (job.id, job.cookie, job.world, job.lanes, members, own)
        try:
            self._core.start(*identity, plane, room_nbytes, window_nbytes, first, segment)
        except OSError as cause:
            raise ConfigError(f"plane={plane}: there is no way to it ({cause.strerror})") from cause
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause

    def begin(self, parts: Sequence[Bytes], rooms: Sequence[Bytes]) -> None:
        """The next exchange. parts[m] goes to member m, rooms[m] gets its message; the place of this member is not looked at."""
        try:
            self._core.begin(list(parts), list(rooms))
        except ValueError as cause:
            raise ConfigError(str(cause)) from cause
        self._held = parts, rooms

    def wait(self, slice_s: float) -> RowsOutcome:
        """How the exchange stands, after `slice_s` at most; the GIL is free meanwhile."""
        outcome = RowsOutcome(self._core.wait(slice_s))
        if outcome is RowsOutcome.DONE:
            self._held = None
        return outcome

    def abandon(self) -> None:
        """Gives the exchange up, and all later ones: what is left is `here` and `close`."""
        self._core.abandon()
        self._held = None

    @property
    def here(self) -> list[bool]:
        """By member, whether its message of the current exchange has come whole; of oneself, True."""
        return self._core.here()

    @property
    def acknowledged(self) -> list[bool]:
        """By member, whether it has acknowledged all of ours."""
        return self._core.acknowledged()

    @property
    def mismatch(self) -> tuple[int, int, int]:
        """Whose message has another length than is expected here, that length, and the expected one."""
        return self._core.mismatch()

    @property
    def stats(self) -> RowsStats:
        return RowsStats(**self._core.stats())

    def close(self) -> None:
        """Ends the thread and frees the port. A second call does nothing."""
        self._core.close()
        self._held = None
