"""A rank's place in a job of the aggregator: asked for, held by a TCP connection, given up.

    terms = Terms("run 7", world=4, lanes=LaneType.I32, elements=360, slots=256)
    with Membership(("10.0.0.1", 4800), secret, terms, rank=0, own_port=client.port) as membership:
        client.start(membership.job, 0, membership.plane, segment=membership.segment)

The connection is the lease: a thread renews it every second, and is notified at once of ranks that are lost.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from tacit.aggregator.addresses import address_text
from tacit.aggregator.client.control_client import ControlClient, RefusedError
from tacit.aggregator.lossy import LEAST_LOSSY_SLOTS
from tacit.aggregator.naming import members_text
from tacit.aggregator.spec import NO_TABLE, NOBODY, Address, PlaneJob
from tacit.aggregator.wire import MOST_RANKS, LaneType
from tacit.authentication import Message
from tacit.errors import ConfigError, TransportError

MOST_NAME = 200  # characters
_AGAIN_S = 0.1  # until we ask again for what is taken now
_GRACE_S = 2.0  # control reports who is missing a little after the time is over
_PARTING_S = 0.5
_LOOK_S = 0.1  # between two looks whether we are still wanted


class LateError(TransportError):
    """Not all ranks came in time: to ask again is to wait for them."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks of a job ask for alike. `slots` is a wish: the grant is a power of two, and may be smaller.

    `relayed`: they are aggregators, each for the ranks below it. `shards` are members behind the ranks, with the numbers from
    `world` on: they are in no sum, and send and receive rows only. `deadline_ms`: the job is lossy (aggregator/lossy.py).
    """

    name: str
    world: int
    lanes: LaneType
    elements: int
    slots: int
    table: tuple[int, ...] = NO_TABLE
    quorum: int = 0
    relayed: bool = False
    shards: int = 0
    deadline_ms: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= MOST_NAME or not self.name.isprintable():
            raise ConfigError(
                f"name={self.name!r:.80}: a job's name is 1 to {MOST_NAME} printable characters"
            )
        if not 1 <= self.world <= MOST_RANKS:
            raise ConfigError(f"world={self.world}: a job has 1 to {MOST_RANKS} ranks")
        if self.slots < 2:
            raise ConfigError(f"slots={self.slots}: a job needs at least 2")
        if not 0 <= self.shards <= MOST_RANKS - self.world:
            raise ConfigError(
                f"shards={self.shards}: a job has at most {MOST_RANKS} members, and {self.world} of them are ranks; start fewer shards"
            )
        if self.shards and self.relayed:
            raise ConfigError(
                f"shards={self.shards}: rows go through one aggregator, and the ranks of this job are aggregators; let the shards be "
                "on the ranks"
            )
        least = LEAST_LOSSY_SLOTS if self.deadline_ms else 2
        self.granted(0, 0, (NOBODY,) * self.members, range(least))  # refuses whatever no plane would take

    @property
    def members(self) -> int:
        """Ranks and shards."""
        return self.world + self.shards

    def granted(
        self, id: int, cookie: int, members: tuple[Address, ...], slots: range, ranks: int = 0
    ) -> PlaneJob:
        """The job that a plane gets to know; `ranks` are below its members, if those are aggregators."""
        return PlaneJob(
            id,
            cookie,
            members,
            self.lanes,
            self.elements,
            slots,
            self.table,
            self.quorum,
            ranks if self.relayed else 0,
            shards=self.shards,
            deadline_ms=self.deadline_ms,
        )

    def as_message(self) -> Message:
        return asdict(self)

    @staticmethod
    def of(message: Any) -> "Terms":
        """The terms that a message holds; ConfigError for anything else."""
        try:
            numbers = [message[name] for name in ("world", "elements", "slots", "quorum")]
            numbers += [message.get("shards", 0), message.get("deadline_ms", 0)]
            table, relayed = tuple(message["table"]), message.get("relayed", False)
            if not isinstance(message["name"], str) or not all(type(n) is int for n in (*numbers, *table)):
                raise TypeError
            if type(relayed) is not bool:
                raise TypeError
            world, elements, slots, quorum, shards, deadline_ms = numbers
            lanes = LaneType(message["lanes"])
            return Terms(
                message["name"], world, lanes, elements, slots, table, quorum, relayed, shards, deadline_ms
            )
        except (KeyError, TypeError, ValueError) as cause:
            raise ConfigError(
                "these are no terms of a job; install the same tacit on ranks and aggregator"
            ) from cause


class Membership:
    """Held from when it is built until `leave`. All of it may be used from any thread.

    `job` is what was granted, `plane` where its packets go. Building it takes until all ranks have come, at most `timeout_s`.
    `job_ranks` are in a whole sum, which are more than the job's if the aggregator has one above it. LateError if others did not
    come, TransportError if control did not answer (within `greeting_s`, if that is less), ConfigError for what somebody has to correct.

    An aggregator that joins for the `ranks` below it names its plane's host (`own_host`), may stop being `wanted` while it
    waits, and is called (`changed`) from a thread of ours when there is news.
    """

    def __init__(
        self,
        control: Address,
        secret: str,
        terms: Terms,
        rank: int,
        own_port: int,
        *,
        timeout_s: float = 10.0,
        greeting_s: float = math.inf,
        own_host: str = "",
        ranks: int = 1,
        wanted: Callable[[], bool] | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0 <= rank < terms.members:
            noun = "members" if terms.shards else "ranks"
            raise ConfigError(f"rank={rank}: the {noun} of job {terms.name!r} are 0 to {terms.members - 1}")
        if not 1 <= own_port <= 65535:
            raise ConfigError(f"own_port={own_port}: bind the rank's UDP socket before it joins")
        self.terms, self.rank = terms, rank
        wish = {"say": "join", "rank": rank, "port": own_port, "ranks": ranks, "terms": terms.as_message()}
        self._client, grant = _join(control, secret, wish, timeout_s, greeting_s, own_host, wanted)
        self._changed = changed
        self.job_ranks: int = grant.get("ranks", terms.world)
        members = tuple((str(host), int(port)) for host, port in grant["members"])
        first, count = grant["slots"]
        self.job: PlaneJob = terms.granted(
            grant["id"],
            self._client.unmasked(grant["cookie"]),
            members,
            range(first, first + count),
            self.job_ranks,
        )
        host, port = grant["plane"]
        self.plane: Address = (self._client.peer[0] if host == "0.0.0.0" else host, port)
        # whether the plane takes runs of packets (UDP_SEGMENT); a control that does not report it may have a kernel plane
        self.segment: bool = grant.get("plane_kind") == "user"
        # whether rows reach all members of the job; they do not in a tree, nor through an older aggregator
        self.rows: bool = grant.get("rows") is True
        if terms.shards and not self.rows:
            self._client.close()
            raise ConfigError(
                f"the aggregator at {self._where} does not pass on rows, and job {terms.name!r} has {terms.shards} shards; install the "
                "same tacit there and here"
            )
        self.lease_s: float = grant["lease_s"]
        self._why, self._well = "", False
        self._lost: tuple[int, ...] = ()
        self._left: tuple[int, ...] = ()
        self._missing: tuple[int, dict[int, int]] = (0, {})  # number of the question, and the answer
        self._missing_racks: dict[int, int] = {}
        self._asked = 0
        self._news = threading.Condition()
        self._thread = threading.Thread(
            target=self._watch, name=f"tacit membership {terms.name}", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the job goes on, as far as is known here; never blocks."""
        return not self._why

    @property
    def why(self) -> str:
        """Why it does not, in one sentence; empty as long as it does."""
        return self._why

    @property
    def well(self) -> bool:
        """Whether it does not because all of its ranks have left: what a shard waits for."""
        return self._well

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks and shards that vanished."""
        return self._lost

    @property
    def left(self) -> tuple[int, ...]:
        """Ranks and shards that have finished and left. Sums to which they contributed can still be requested."""
        return self._left

    def missing(self, timeout_s: float = 1.0) -> dict[int, int]:
        """Unfinished chunks that wait for each rank; ranks that nobody waits for are left out. TransportError if control does not answer."""
        with self._news:
            self._asked += 1
            asked = self._asked
        with contextlib.suppress(OSError):  # the watching thread sees it too, and keeps the reason
            self._client.send({"say": "missing", "number": asked})
        with self._news:
            self._news.wait_for(lambda: self._missing[0] >= asked or not self.alive, timeout_s)
            if self._missing[0] >= asked:
                return dict(self._missing[1])
        raise TransportError(
            self._why or f"control at {self._where} did not report within {timeout_s:.3g} s who is missing"
        )

    @property
    def missing_racks(self) -> dict[int, int]:
        """As of the last `missing`: chunks that all ranks here are in and that wait for ranks of other racks."""
        return dict(self._missing_racks)

    def leave(self, failure: str = "") -> None:
        """Notifies control that we are done, or (`failure`) why we cannot go on, which ends the job. Also to be called after the job ended;
        again does nothing."""
        with self._news:
            if not self._why:
                try:  # before `_why` is set: the thread hangs up as soon as it sees that
                    with contextlib.suppress(OSError):
                        self._client.send({"say": "fail", "why": failure} if failure else {"say": "leave"})
                finally:
                    own = members_text([self.rank], self.terms.world)
                    self._why = f"{own} has left job {self.terms.name!r}"
            self._news.notify_all()
        self._client.hang_up()
        if threading.current_thread() is not self._thread:
            self._thread.join(
                _PARTING_S
            )  # longer only if control is silent, and then it need not be waited for

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    @property
    def _where(self) -> str:
        return address_text(self._client.control)

    def _watch(self) -> None:
        keep_s = min(1.0, self.lease_s / 4)
        last_message = time.monotonic()
        try:
            while self.alive:
                with contextlib.suppress(
                    OSError
                ):  # `receive` raises with the reason, after the messages that did arrive
                    self._client.send({"say": "keep"})
                due = time.monotonic() + keep_s
                while self.alive and (left_s := due - time.monotonic()) > 0:
                    if message := self._client.receive(left_s):
                        last_message = time.monotonic()
                        self._take(message)
                if time.monotonic() - last_message > self.lease_s:
                    raise TimeoutError(f"silent for {self.lease_s:g} s")
        except (OSError, RefusedError, KeyError, TypeError, ValueError, AttributeError) as cause:
            self._end(f"the aggregator at {self._where} is gone from job {self.terms.name!r} ({cause})")
        finally:
            self._client.hang_up()
            self._client.close(linger_s=_PARTING_S)

    def _take(self, message: Message) -> None:
        kind = message.get("say")
        with self._news:
            if kind == "gone":
                self._lost, self._left = tuple(message["lost"]), tuple(message["left"])
            elif kind == "missing":
                self._missing = (
                    message["number"],
                    {int(rank): chunks for rank, chunks in message["ranks"].items()},
                )
                self._missing_racks = {int(rack): chunks for rack, chunks in message.get("racks", {}).items()}
            self._news.notify_all()
        if kind == "ended":
            self._well = message.get("well") is True
            self._end(message["why"])

    def _end(self, why: str) -> None:
        with self._news:
            self._why = self._why or why
            self._news.notify_all()
        self._changed()


def _join(
    control: Address,
    secret: str,
    wish: Message,
    timeout_s: float,
    greeting_s: float,
    own_host: str,
    wanted: Callable[[], bool] | None,
) -> tuple[ControlClient, Message]:
    """A connection on which control has granted the job; asks again while an earlier job of this name is still there."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        wait_s = max(left_s, _AGAIN_S)
        try:
            client = ControlClient(
                control, secret, wish | {"patience_s": left_s}, min(wait_s, greeting_s), own_host
            )
            return client, _granted(client, wish["terms"]["name"], wait_s, wanted)
        except RefusedError as refusal:
            over = time.monotonic() + _AGAIN_S > deadline
            if over and isinstance(
                refusal.error, TransportError
            ):  # control has waited for the others with us
                raise LateError(str(refusal)) from None
            if over or not refusal.again:
                raise refusal.error from None
        time.sleep(_AGAIN_S)


def _granted(
    client: ControlClient, name: str, timeout_s: float, wanted: Callable[[], bool] | None
) -> Message:
    """What control grants once all have come; closes the client if it does not."""
    try:
        grant = _first_message(client, timeout_s + _GRACE_S, wanted)
        if grant is None:
            raise TransportError(
                f"the aggregator at {address_text(client.control)} has not answered within {timeout_s:.3g} s; is it alive?"
            )
        if grant.get("say") != "granted":
            raise TransportError(f"job {name!r} was not granted: {grant.get('why')}")
        return grant
    except OSError as cause:
        client.close()
        client.lost(cause)
    except BaseException:
        client.close()
        raise


def _first_message(
    client: ControlClient, timeout_s: float, wanted: Callable[[], bool] | None
) -> Message | None:
    if wanted is None:
        return client.receive(timeout_s)
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if not wanted():
            raise TransportError("nobody waits for it any more")
        if message := client.receive(min(left_s, _LOOK_S)):
            return message
    return None
