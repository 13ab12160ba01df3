"""The two-phase commit of a meeting, as one state machine per side: no sockets, no clocks, no tensors.

    prepared   the result is computed and held; nothing has been applied
    in doubt   called side only: the connection ended after PREPARED, and only the caller knows the decision
    committed  the result is applied
    aborted    the result is dropped

The caller decides: it commits once the called side has prepared, unless that side has queried the outcome before, which aborts. The called side
commits on COMMIT or on a query that reports a commit, and aborts on one that does not or when the caller's incarnation is over.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar


class CommitState(Enum):
    PREPARED = "prepared"
    IN_DOUBT = "in doubt"
    COMMITTED = "committed"
    ABORTED = "aborted"


class CommitEvent(Enum):
    COMMIT = "commit"
    ABORT = "abort"
    DISCONNECT = "disconnect"


TRANSITIONS = {
    (CommitState.PREPARED, CommitEvent.COMMIT): CommitState.COMMITTED,
    (CommitState.PREPARED, CommitEvent.ABORT): CommitState.ABORTED,
    (CommitState.PREPARED, CommitEvent.DISCONNECT): CommitState.IN_DOUBT,
    (CommitState.IN_DOUBT, CommitEvent.COMMIT): CommitState.COMMITTED,
    (CommitState.IN_DOUBT, CommitEvent.ABORT): CommitState.ABORTED,
}


class TransitionError(RuntimeError):
    """An event that the state does not allow: a bug of this rank's, or a decision that was made twice."""


@dataclass(slots=True)
class Transaction:
    """One side of one meeting; the caller holds a lock."""

    meeting: str
    state: CommitState = CommitState.PREPARED

    @property
    def decided(self) -> bool:
        return self.state in (CommitState.COMMITTED, CommitState.ABORTED)

    def apply(self, event: CommitEvent) -> None:
        """Raises TransitionError, and changes nothing, where the state does not allow `event`."""
        if (after := TRANSITIONS.get((self.state, event))) is None:
            raise TransitionError(
                f"meeting {self.meeting} is {self.state.value}: {event.value} is not allowed"
            )
        self.state = after


@dataclass(slots=True)
class LedMeetings:
    """The caller's decisions: the meeting that it leads now, and the last `kept` committed ones of each peer; the caller holds a lock."""

    kept: int
    current: Transaction | None = None
    committed: dict[int, deque[str]] = field(default_factory=dict)

    def begin(self, meeting: str) -> Transaction:
        self.current = Transaction(meeting)
        return self.current

    def commit(self, peer: int, transaction: Transaction) -> None:
        transaction.apply(CommitEvent.COMMIT)
        self.committed.setdefault(peer, deque(maxlen=self.kept)).append(transaction.meeting)

    def query(self, peer: int, meeting: object) -> bool:
        """Whether `meeting` was committed with `peer`. A query of the current meeting before its decision aborts it."""
        if meeting in self.committed.get(peer, ()):
            return True
        current = self.current
        if current is not None and current.meeting == meeting and not current.decided:
            current.apply(CommitEvent.ABORT)
        return False


@dataclass(slots=True, eq=False)
class FollowedMeeting:
    """The called side of a meeting: who leads it, and in which incarnation. Subclasses hold the result that a commit applies."""

    meeting: str
    caller: int
    incarnation: str
    transaction: Transaction = field(init=False)

    def __post_init__(self) -> None:
        self.transaction = Transaction(self.meeting)


F = TypeVar("F", bound=FollowedMeeting)


@dataclass(slots=True)
class FollowedMeetings(Generic[F]):
    """The called side's meetings that are not decided yet, at most one of each caller; the user of this class holds a lock."""

    undecided: dict[int, F] = field(default_factory=dict)

    def prepare(self, meeting: F) -> None:
        """Raises TransitionError where another meeting of the same caller is undecided: it must be decided first."""
        if (open := self.undecided.get(meeting.caller)) is not None:
            raise TransitionError(
                f"meeting {open.meeting} of rank {open.caller} is {open.transaction.state.value}"
            )
        self.undecided[meeting.caller] = meeting

    def disconnect(self, meeting: F) -> None:
        """The connection ended before the decision arrived."""
        if not meeting.transaction.decided:
            meeting.transaction.apply(CommitEvent.DISCONNECT)

    def decide(self, meeting: F, committed: bool) -> bool:
        """Whether the result is to be applied, by this call: False for an abort, and for a meeting that was decided or dropped before."""
        if self.undecided.get(meeting.caller) is not meeting:
            return False
        meeting.transaction.apply(CommitEvent.COMMIT if committed else CommitEvent.ABORT)
        del self.undecided[meeting.caller]
        return committed

    def expire(self, caller: int, incarnation: str) -> None:
        """Aborts a meeting that an earlier incarnation of `caller` left undecided: nobody else knows the decision, and its model is gone."""
        meeting = self.undecided.get(caller)
        if meeting is not None and meeting.incarnation != incarnation:
            self.decide(meeting, False)
