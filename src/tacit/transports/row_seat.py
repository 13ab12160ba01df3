"""A member's place in a job of the aggregator that passes rows on: exchanges through it, and how it is found out that it is gone.

A place is tried before it is used: all members exchange one full packet each. A path that loses large packets only answers every
probe, which is 22 bytes long.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tacit.aggregator.client.host_stack import Bytes
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.client.row_stack import RowSocket, RowsOutcome
from tacit.aggregator.spec import Address
from tacit.aggregator.wire import LaneType, rows_room
from tacit.errors import TransportError
from tacit.transports.aggregator_seat import GoneError, ranks_text

_SLICE_S = 0.25  # between two looks at everything else, while an exchange does not end
_JOIN_S = 5.0  # for all members to come
_GREETING_S = 1.0  # for control's first message, which it sends unasked
_REASON_S = 1.0  # control reports within this why a job ended
_TEST_S = 2.0  # for the test: all members were granted the job in the same moment, so nobody is late
_ELEMENTS, _SLOTS = 8, 2  # as few as there may be: the job has no sums


@dataclass(frozen=True, slots=True)
class RowPath:
    """Where the aggregator is and what the way to it takes, alike on all members."""

    control: Address
    secret: str
    mtu: int
    window_nbytes: int


@dataclass(slots=True)
class RowSeat:
    """A socket that has joined. `exchange` is for one thread at a time."""

    socket: RowSocket
    membership: Membership
    mtu: int
    _counted: int = 0  # bytes

    def exchange(
        self,
        parts: Sequence[Bytes],
        rooms: Sequence[Bytes],
        *,
        check: Callable[[], None],
        late: Callable[[float], None],
    ) -> None:
        """Returns when all rooms are filled and all parts have arrived; GoneError when it is known that they will not.

        Until then `check` is called four times a second, and `late` with the seconds waited so far. Both may raise.
        """
        began = time.monotonic()
        self.socket.begin(parts, rooms)
        try:
            while (outcome := self.socket.wait(_SLICE_S)) is RowsOutcome.RUNNING:
                check()
                if not self.membership.alive:
                    raise GoneError(self.membership.why)
                late(time.monotonic() - began)
            if outcome is not RowsOutcome.DONE:
                self._fail(outcome)
        except BaseException:
            self.socket.abandon()
            raise

    def test(self, check: Callable[[], None]) -> None:
        """Returns if a full packet from each to each comes through; GoneError if not, after 2 s at most."""
        members, nbytes = len(self.membership.job.members), rows_room(self.mtu)

        def late(waited_s: float) -> None:
            if waited_s >= _TEST_S:
                raise GoneError(f"{self._narrow()}, or {ranks_text(self.lacking())} did not come")

        parts = [np.zeros(nbytes, np.uint8)] * members
        self.exchange(parts, [np.empty(nbytes, np.uint8) for _ in range(members)], check=check, late=late)

    def lacking(self) -> list[int]:
        """The members whose messages, or whose acknowledgements, have not come yet; a member that sent everything may itself lack some."""
        pairs = zip(self.socket.here, self.socket.acknowledged, strict=True)
        return [member for member, (here, acknowledged) in enumerate(pairs) if not (here and acknowledged)]

    def count_nbytes(self) -> int:
        """Payload bytes that have left since the last call, copies too."""
        before, self._counted = self._counted, self.socket.stats.sent_nbytes
        return self._counted - before

    def close(self) -> None:
        self.membership.leave()
        self.socket.close()

    def _narrow(self) -> str:
        nbytes = self.mtu
        return f"packets of {nbytes} bytes do not come through while small ones do: set mtu= to what the path takes, less than {nbytes}"

    def _fail(self, outcome: RowsOutcome) -> None:
        if outcome is RowsOutcome.MISMATCHED:
            member, length, expected = self.socket.mismatch
            raise TransportError(
                f"rank {member} sent {length} bytes of rows where rank {self.membership.rank} expects {expected}; all ranks must exchange the "
                f"same tables in the same order"
            )
        if outcome is RowsOutcome.UNKNOWN:
            self._wait_for_reason()
        if not self.membership.alive:
            raise GoneError(self.membership.why)
        if outcome is RowsOutcome.UNKNOWN:
            raise GoneError("its plane does not know the job any more")
        raise GoneError(
            self._narrow() if outcome is RowsOutcome.NARROW else "nothing has come from its plane for 2 s"
        )

    def _wait_for_reason(self) -> None:
        """Whoever ended the job, control reports why: a moment after the plane forgot it."""
        deadline = time.monotonic() + _REASON_S
        while self.membership.alive and time.monotonic() < deadline:
            time.sleep(0.01)


def take_row_seat(
    path: RowPath,
    name: str,
    own: int,
    members: int,
    *,
    timeout_s: float = _JOIN_S,
    wanted: Callable[[], bool],
    check: Callable[[], None],
) -> RowSeat:
    """A place in job `name` that is tested. GoneError, TacitError or OSError if there is none."""
    socket = RowSocket()
    membership = None
    try:
        membership = Membership(
            path.control,
            path.secret,
            Terms(name, members, LaneType.I32, _ELEMENTS, _SLOTS),
            own,
            socket.port,
            timeout_s=min(_JOIN_S, timeout_s),
            greeting_s=_GREETING_S,
            wanted=wanted,
        )
        if not membership.rows:
            raise GoneError("it passes no rows on: it is older than this tacit, or one of a tree")
        socket.start(
            membership.job,
            own,
            membership.plane,
            room_nbytes=rows_room(path.mtu),
            window_nbytes=path.window_nbytes,
            segment=membership.segment,
        )
        seat = RowSeat(socket, membership, path.mtu)
        seat.test(check)
        return seat
    except BaseException:
        if membership:
            membership.leave()
        socket.close()
        raise
