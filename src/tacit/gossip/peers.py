"""Meetings over sockets: a thread answers peers, another calls them, and training goes on meanwhile.

    caller -> called   CALL      which meeting this is, of which layers, and what the caller thinks both refer to
    called -> caller   READY, or BUSY: one meeting at a time, and none before the first step
    both   <-> both    SWAP      payload for payload, until the codec's conversation ends
    called -> caller   PREPARED  it has computed all, and holds it
    caller -> called   COMMIT    the caller has moved; now the called one does
    called -> caller   DONE

This is a two-phase commit (protocol.py). Until COMMIT is sent neither has moved; from then on both will. If the connection ends after
PREPARED, the called side goes on training and queries the outcome as soon as the caller can be reached (OUTCOME); a caller that is
queried before it committed aborts. If the caller has died, its model is gone and the meeting is aborted. So of those that live both
move or none does.

Every message is proved (frames.py). Whoever calls names its rank and incarnation, which must be those of a lease in the store. No layer moves by more
than MOST_TIMES what the threshold explains in one meeting. Connections, threads and models that are read at once are limited.
"""

import itertools
import math
import queue
import socket
import threading
import time
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tacit.codecs import CODECS
from tacit.gossip import frames
from tacit.gossip.frames import Connection, PeerError, PeerFrame
from tacit.gossip.layers import Chosen
from tacit.gossip.meeting import MeetingResult, answer_pair, keeps_reference, meeting_side
from tacit.gossip.protocol import CommitState, LedMeetings
from tacit.gossip.refusals import Refusals
from tacit.gossip.rendezvous import Endpoint, listening
from tacit.gossip.replica import Prepared, Replica
from tacit.gossip.timeouts import FIRST_S, Timeouts
from tacit.gossip.untrained import raw_bytes, raw_view
from tacit.requests import Codec, Gather, LocalMemory, Max, Merge, Request, Sum, TableSum, seed_of
from tacit.rounds.rules import Wish
from tacit.schemes import Gossip

GREETING_S = 5.0  # for whoever connects to send its first message, proved
MOST_CONNECTIONS = 128  # at a time, and threads that answer them
MOST_STRANGERS = 64  # of them, those that have proved nothing yet; one more, and the oldest is cut off
MOST_SNAPSHOTS = 2  # of this rank's model that readers hold; who would need another is asked to come again
MOST_READERS = 8  # of this rank's model at a time; the next waits for WAIT_READER_S, and asks again
WAIT_READER_S = 2.0
FRESH_S = 2.0  # readers that come within it share a snapshot
LEAST_HELD_S, MOST_HELD_S = (
    2.0,
    10.0,
)  # for a caller that stops in the middle of a meeting, whatever the timeouts
COMPUTED_IN_1_S = 100e6  # bytes of a model; callers of a large one may stop for so much longer
CLOSE_S = 5.0  # for threads to end
MOST_NAME = 64  # characters of an incarnation
# No layer moves by more than MOST_TIMES its threshold, which counts as LEAST_THETA at least: ranks that come late or were cut off have parted by
# more. Measured: 0.02 of that limit in ordinary training, 0.17 at ten times its learning rate (docs/decisions/0011-authentication.md).
MOST_TIMES = 32
LEAST_THETA = 1 / 8
LEAST_ELEMENTS = (
    1024  # of a layer, when its length is compared with the model's: one scalar is a poor measure of itself
)
_CONNECT_S = 3.0
_KEPT = 8  # own calls of a peer that came to an end, of which it may still ask; it can be in doubt of the last only
SHOWN_S = 1800.0  # for a model to be taken by one that asks for it; silence ends it sooner
_TRIES = 8  # while peers are busy
_WAIT_S = 0.05
_NO_PEER = (
    PeerError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
    ArithmeticError,
)  # gone, or sends what no peer of ours sends


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a rank can be called, and which life of it this is."""

    host: str
    port: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Met:
    """How a call ended, for the record; `peer` None: nobody could be called. `layers`: those that were exchanged, or would have been."""

    peer: int | None
    why: str
    layers: Chosen
    outcome: str
    seconds: float = 0.0
    sent_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Shown:
    """What a peer has sent of itself: `fields` hold its steps, its merges, its largest learning rate and the checksum of what is frozen."""

    model: Tensor | None  # None: it has none to show
    buffers: Sequence[Tensor]
    fields: Mapping[str, Any]


@dataclass(slots=True)
class _Snapshot:
    """A model that is being read, by one or more."""

    since: float
    fields: dict[str, Any]
    payload: list[memoryview]
    readers: int = 0


class Peers:
    """This rank's place among its peers. `members()` are the others that live, by rank; `report` receives the end of every call."""

    def __init__(
        self,
        replica: Replica,
        who: Gossip,
        codec: Codec,
        *,
        rank: int,
        world: int,
        incarnation: str,
        seed: int,
        endpoint: Endpoint,
        members: Callable[[], Mapping[int, PeerAddress]],
        report: Callable[[Met], None],
        sent: Callable[[int], None],
        knows: Callable[[int, str], bool] | None = None,
        secret: str = "",
        theta: float = LEAST_THETA,
        refusals: Refusals | None = None,
    ) -> None:
        """`knows`: whether a rank has this incarnation, by its lease. `theta`: by how much of its length a layer may have parted."""
        self._replica, self._who, self._codec = replica, who, codec
        self._rank, self._world, self._seed, self.incarnation = rank, world, seed, incarnation
        self._members, self._report, self._sent = members, report, sent
        self._knows = knows or self._is_member
        self._secret, self.most_move = secret, MOST_TIMES * max(theta, LEAST_THETA)
        self._refusals = refusals or Refusals(rank)
        self._held = Timeouts()  # how long meetings take that others lead
        self._meeting = threading.Lock()  # one at a time, as caller or called
        self._timeouts: defaultdict[int, Timeouts] = defaultdict(Timeouts)
        self._led_meetings = LedMeetings(_KEPT)  # guarded by the replica's lock
        self._keeps = keeps_reference(codec)
        self._own = {"rank": rank, "life": incarnation}  # which this rank names when it calls
        # What has to be the same on all ranks.
        self._about = {"says": str(codec), "layout": replica.layers.crc}
        self._calls, self._meetings = itertools.count(), itertools.count(1)
        self._wishes: queue.SimpleQueue[Wish | None] = queue.SimpleQueue()
        self.followed = 0  # meetings to which this rank was called
        self._idle = threading.Event()
        self._idle.set()
        self._closed = threading.Event()
        self._most = 8 * replica.numel + replica.untrained.nbytes + (1 << 16)
        self._connections: set[Connection] = set()
        self._gate = threading.Lock()  # of the three below
        self._strangers: dict[Connection, None] = {}  # that have proved nothing yet, the oldest first
        self._shown: _Snapshot | None = None
        self._snapshots = 0  # that are being read
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._readers = threading.BoundedSemaphore(MOST_READERS)
        self._threads: set[threading.Thread] = set()
        self._starting = threading.Lock()
        self.away = False  # as long as this model may still be replaced, by a checkpoint's: it meets nobody
        self._server = listening(endpoint)
        self.port: int = self._server.getsockname()[1]
        self._start("answer", self._accept)
        self._start("call", self._call_all)

    # ---- the training thread's side

    @property
    def calling(self) -> bool:
        return not self._idle.is_set()

    def wish(self, wish: Wish) -> None:
        """A meeting is wanted; returns at once."""
        self._idle.clear()
        self._wishes.put(wish)

    def wait(self, seconds: float | None = None) -> bool:
        """Until the last wish came true or failed, which is bounded by the timeouts of the peers."""
        return self._idle.wait(seconds)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Nobody is met meanwhile. A meeting that goes on is waited for, as long as it may take."""
        if not self._meeting.acquire(timeout=self._slowest_s + 1):
            raise PeerError("a meeting does not come to an end")
        try:
            yield
        finally:
            self._meeting.release()

    @property
    def timeout_s(self) -> float:
        """The longest that a call may take, as things stand."""
        return min(FIRST_S, self._slowest_s) + _TRIES * _WAIT_S

    @property
    def _slowest_s(self) -> float:
        """For all of a model, in full."""
        nbytes = 4 * self._replica.numel
        return max(
            (timeouts.timeout_s(nbytes) for timeouts in list(self._timeouts.values())), default=FIRST_S
        )

    def close(self) -> None:
        """Ends all connections and threads. A thread of torch's that still runs when Python ends would abort the process."""
        self._closed.set()
        self._wishes.put(None)
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        deadline = time.monotonic() + CLOSE_S
        with self._starting:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, name: str, work: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                work(*args)
            finally:
                with self._starting:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"tacit-gossip-{name}", daemon=True)
        with self._starting:  # close() joins only threads that have started
            thread.start()  # raises RuntimeError where the machine has no thread left
            self._threads.add(thread)

    # ---- calling

    def _call_all(self) -> None:
        while (wish := self._wishes.get()) is not None:
            try:
                met = self._call_one(wish)
                if not self._closed.is_set():
                    self._report(met)
            except (
                Exception
            ) as cause:  # such as a record that cannot be written: the next call may well succeed
                with suppress(Warning):  # where warnings are errors, they must not end this thread
                    warnings.warn(f"rank {self._rank}: a call came to nothing ({cause})", stacklevel=2)
            finally:
                if self._wishes.empty():
                    self._idle.set()

    def _call_one(self, wish: Wish) -> Met:
        """Calls one peer after another until one has time. Who is called meanwhile looks again after its next step whether that was enough.

        Who finds a peer busy waits a little before the next call, each for another time: ranks that all call at the same time
        would find everybody calling.
        """
        last, met = Met(None, wish.why, wish.layers, "nobody to call"), self._replica.met
        for attempt in range(_TRIES):
            now, members = time.monotonic(), self._members()
            live = [r for r in members if self._timeouts[r].retry_at <= now]
            number = next(self._calls)
            peer = self._who.partner(self._rank, self._world, number, [*live, self._rank], self._seed)
            if peer is None or self._closed.is_set():
                return last
            last = self._call(peer, members[peer], wish)
            if last.outcome != "busy":
                return last
            share = seed_of(self._seed, self._rank, number, "wait") % 1000 / 1000
            mean_s = self._timeouts[peer].mean_s(self._nbytes(wish.layers))
            self._closed.wait(share * (1 + attempt) * min(_WAIT_S, mean_s))
            if self._replica.met != met:
                return Met(None, wish.why, wish.layers, "was called")
        return last

    def _call(self, peer: int, address: PeerAddress, wish: Wish) -> Met:
        """Others may call this rank until the peer has been reached."""
        timeouts, began, sent = self._timeouts[peer], time.monotonic(), 0
        nbytes = self._nbytes(wish.layers)
        timeout_s = timeouts.timeout_s(nbytes)
        try:
            self._settle(peer, address, began + timeout_s)
            connection = self._connect(address, began + timeout_s)
            connection.allow(timeout_s)
            try:
                outcome, layers = self._lead(connection, peer, wish.layers, timeout_s)
            finally:
                sent = connection.sent_nbytes
                self._leave(connection)
        except _NO_PEER as cause:
            self._refused(cause, f"rank {peer}", peer)
            timeouts.failed(time.monotonic(), max(nbytes, sent))
            return Met(peer, wish.why, wish.layers, str(cause), time.monotonic() - began, sent)
        finally:
            self._sent(sent)
        seconds = time.monotonic() - began
        if outcome == "met":
            timeouts.took(seconds, sent)
        return Met(peer, wish.why, layers, outcome, seconds, sent)

    def _lead(
        self, connection: Connection, peer: int, layers: Chosen, timeout_s: float
    ) -> tuple[str, Chosen]:
        if not self._meeting.acquire(timeout=min(GREETING_S / 2, timeout_s)):  # the peer waits for a message
            return "busy", layers
        try:
            return self._led(connection, peer, layers, time.monotonic() + timeout_s)
        finally:
            self._meeting.release()

    def _led(self, connection: Connection, peer: int, layers: Chosen, deadline: float) -> tuple[str, Chosen]:
        # It called meanwhile and disconnected: their common reference is open until that meeting is decided.
        if peer in self._replica.followed_meetings.undecided:
            return "busy", layers
        pair, number = self._replica.pair(peer), next(self._meetings)
        meeting = _name(self._rank, self.incarnation, number)
        with self._replica.lock:
            transaction = self._led_meetings.begin(meeting)
        version = pair.version if pair else None
        fields = self._own | {"meeting": number, "refers": version}
        fields |= self._about | {"layers": self._replica.layers.encode(layers)}
        connection.send(frames.CALL, fields, deadline)
        answer = connection.receive(deadline)
        if answer.kind == frames.BUSY:
            return "busy", layers
        if answer.kind != frames.READY:
            raise PeerError("a peer answered a call with something else")
        known = pair is not None and answer.fields.get("refers") == version
        layers, deadline = self._agreed(peer, layers, known, deadline)
        result = self._converse(connection, peer, meeting, layers, known, 0, deadline)
        prepared = connection.expect(frames.PREPARED, deadline)
        if prepared.fields.get("middle") != _digest(result.middle):
            self._replica.forget_reference(peer, meeting)
            raise PeerError("the two sides of a meeting came to different ends")
        delta = result.delta if self._who.mode != "push" else None
        with self._replica.lock:
            if transaction.state is CommitState.ABORTED:
                raise PeerError("a peer has given the meeting up")
            self._replica.conclude(
                peer, meeting, layers, delta, result.middle, keep=self._keeps, led=True, known=known
            )
            self._led_meetings.commit(peer, transaction)
        with suppress(PeerError):  # the peer queries the outcome, if it does not receive this
            connection.send(frames.COMMIT, {}, deadline)
            connection.expect(frames.DONE, deadline)
        return "met", layers

    # ---- answering

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._server.accept()
                connection = Connection(
                    sock, self._most, secret=self._secret, called=self.incarnation, serving=True
                )
            except OSError:  # closed; or too many open files
                self._cut_off(0)
                self._closed.wait(_WAIT_S)
                continue
            self._cut_off(MOST_STRANGERS - 1)
            self._connections.add(connection)
            with self._gate:
                self._strangers[connection] = None
            while not self._room.acquire(timeout=_WAIT_S):  # those that were cut off are ending
                self._cut_off(MOST_STRANGERS // 2)
                if self._closed.is_set():
                    break
            try:
                self._start("peer", self._answer, connection, str(address[0]))
            except RuntimeError:
                with self._gate:
                    self._strangers.pop(connection, None)
                self._leave(connection)
                self._room.release()

    def _cut_off(self, most: int) -> None:
        """Of those that have proved nothing yet, the oldest, until so many are left."""
        with self._gate:
            oldest = list(self._strangers)[: max(0, len(self._strangers) - most)]
            for connection in oldest:
                del self._strangers[connection]
        for connection in oldest:
            connection.close()
            self._refusals.counts["cut off"] += 1

    def _answer(self, connection: Connection, host: str) -> None:
        """One request a connection."""
        try:
            frame = connection.receive(time.monotonic() + GREETING_S)
            with self._gate:
                self._strangers.pop(connection, None)
            peer = self._identified(frame)
            if frame.kind == frames.CALL:
                self._follow(connection, peer, frame)
            elif frame.kind == frames.OUTCOME:
                self._remember(connection, peer, frame)
            elif frame.kind == frames.GET:
                self._show(connection, frame)
            else:
                raise PeerError(f"a first message of kind {frame.kind}", "malformed")
        except _NO_PEER as cause:
            self._refused(cause, host, host)
        finally:
            with self._gate:
                self._strangers.pop(connection, None)
            self._leave(connection)
            with suppress(ValueError):  # closing, without room
                self._room.release()

    def _identified(self, first: PeerFrame) -> int:
        """The caller's rank. PeerError unless it is another of this world, in the life that the store knows."""
        rank, incarnation = first.fields.get("rank"), first.fields.get("life")
        if type(rank) is not int or not 0 <= rank < self._world or rank == self._rank:
            raise PeerError(
                f"a caller claims to be rank {rank!r:.20}; this is rank {self._rank} of {self._world}",
                "rank",
            )
        if (
            not isinstance(incarnation, str)
            or len(incarnation) > MOST_NAME
            or not self._knows(rank, incarnation)
        ):
            raise PeerError(f"rank {rank} calls in a life that the store does not know", "incarnation")
        return rank

    def _is_member(self, rank: int, incarnation: str) -> bool:
        known = self._members().get(rank)
        return known is not None and known.incarnation == incarnation

    def _refused(self, cause: Exception, name: str, who: object) -> None:
        """Counts what nobody who keeps to the protocol sends; a peer that is gone or late is none of it."""
        with suppress(Warning):  # as above
            if isinstance(cause, PeerError) and cause.reason and not self._closed.is_set():
                self._refusals.add(cause.reason, f"{name}: {cause}", who)
            elif not isinstance(cause, PeerError):
                self._refusals.add(
                    "malformed", f"{name}: a message that cannot be meant ({cause!s:.80})", who
                )

    def _remember(self, connection: Connection, peer: int, query: PeerFrame) -> None:
        """How a meeting ended that this rank led. One that has not ended yet will not happen: the other side has given it up."""
        meeting = query.fields.get("meeting")
        with self._replica.lock:
            happened = self._led_meetings.query(peer, meeting)
        connection.send(frames.OUTCOME, {"happened": happened}, time.monotonic() + FIRST_S)

    def _follow(self, connection: Connection, peer: int, call: PeerFrame) -> None:
        fields = call.fields
        meeting = _name(peer, fields["life"], int(fields["meeting"]))
        if any(fields[key] != value for key, value in self._about.items()):
            raise PeerError(
                f"rank {peer} exchanges {fields['says']!s:.80}, or its model has other layers",
                "model",
            )
        layers, timeouts = self._replica.layers.decode(fields["layers"]), self._timeouts[peer]
        timeout_s = timeouts.timeout_s(self._nbytes(layers))
        began = time.monotonic()
        deadline = began + timeout_s
        connection.silence_s = self._silence_s(layers)
        with self._replica.lock:
            self._replica.followed_meetings.expire(peer, fields["life"])
        if self.away or not self._meeting.acquire(blocking=False):
            connection.send(frames.BUSY, {}, deadline)
            return
        before = connection.sent_nbytes
        try:
            if peer in self._replica.followed_meetings.undecided:
                connection.send(frames.BUSY, {}, deadline)
                return
            pair = self._replica.pair(peer)
            version = pair.version if pair else None
            connection.send(frames.READY, {"refers": version}, deadline)
            known = pair is not None and version == fields["refers"]
            layers, deadline = self._agreed(peer, layers, known, deadline)
            connection.silence_s = self._silence_s(layers)
            result = self._converse(connection, peer, meeting, layers, known, 1, deadline)
            moves = self._who.mode != "pull" and not self._replica.holds
            delta = result.delta if moves else None
            prepared = Prepared(
                meeting, peer, fields["life"], layers=layers, delta=delta, middle=result.middle, known=known
            )
            with self._replica.lock:
                self._replica.followed_meetings.prepare(prepared)
            try:
                connection.send(frames.PREPARED, {"middle": _digest(result.middle)}, deadline)
                connection.expect(frames.COMMIT, deadline)
            except BaseException:
                with self._replica.lock:
                    self._replica.followed_meetings.disconnect(prepared)
                raise
            self._decide(prepared, True)
            timeouts.answered()
            self._held.took(time.monotonic() - began, connection.sent_nbytes)
            with suppress(PeerError):
                connection.send(frames.DONE, {}, deadline)
        finally:
            self._meeting.release()
            self._sent(connection.sent_nbytes - before)

    def _silence_s(self, layers: Chosen) -> float:
        """How long a caller may stop, by how long good meetings took: failures do not count, or who stops would be given ever more time."""
        most = min(frames.MOST_SILENCE_S, MOST_HELD_S + 4 * self._replica.numel / COMPUTED_IN_1_S)
        return min(most, max(LEAST_HELD_S, self._held.timeout_s(self._nbytes(layers))))

    def _show(self, connection: Connection, query: PeerFrame) -> None:
        """The start, for those that begin; the model as it is; or what is brought to a merge; with its buffers. Nothing where there is none.

        It is sent from where it lies, in pieces: a reader that does not read costs no memory.
        """
        if not self._readers.acquire(timeout=WAIT_READER_S):
            connection.send(frames.BUSY, {}, time.monotonic() + FIRST_S)
            return
        before = connection.sent_nbytes
        try:
            with self._offered(query.fields.get("what")) as offered:
                if offered is None:
                    connection.send(frames.BUSY, {}, time.monotonic() + FIRST_S)
                    return
                fields, payload = offered
                connection.send(frames.MODEL, fields, time.monotonic() + SHOWN_S, *payload)
        finally:
            self._readers.release()
            self._sent(connection.sent_nbytes - before)

    @contextmanager
    def _offered(self, what: object) -> Iterator[tuple[dict[str, Any], list[memoryview]] | None]:
        """What is sent. Readers of the model as it is share a snapshot, if they come within FRESH_S and the first still reads.

        None where others hold as many older ones as may be.
        """
        if what != "now":
            yield self._offer(what)
            return
        with self._gate:
            shown = self._shown
            if shown is None or time.monotonic() - shown.since > FRESH_S:
                shown = None
                if self._snapshots < MOST_SNAPSHOTS:
                    shown = self._shown = _Snapshot(time.monotonic(), *self._offer(what))
                    self._snapshots += 1
            if shown is not None:
                shown.readers += 1
        if shown is None:
            yield None
            return
        try:
            yield shown.fields, shown.payload
        finally:
            with self._gate:
                shown.readers -= 1
                if not shown.readers:
                    self._snapshots -= 1
                    self._shown = None if self._shown is shown else self._shown

    def _offer(self, what: object) -> tuple[dict[str, Any], list[memoryview]]:
        replica = self._replica
        with replica.lock:
            fields = {"step": replica.step, "merges": replica.merges, "top_lr": replica.top_lr}
            chosen = {"start": replica.start, "now": replica.snapshot, "merge": replica.offered}.get(
                str(what)
            )
        if what == "frozen":
            return fields | {"there": True}, [raw_view(tensor) for tensor in replica.untrained.frozen]
        if chosen is None:
            return fields | {"there": False}, []
        fields |= {"there": True, "frozen": replica.untrained.crc}
        return fields, [raw_view(chosen), memoryview(replica.untrained.encode())]

    # ---- what was left open

    def settle(self) -> None:
        """Asks those that left a meeting open how it ended, where they can be reached."""
        members = self._members()
        for peer in list(self._replica.followed_meetings.undecided):
            if peer in members:
                with suppress(PeerError):
                    timeout_s = self._timeouts[peer].timeout_s(0)
                    self._settle(peer, members[peer], time.monotonic() + timeout_s)

    def _settle(self, peer: int, address: PeerAddress, deadline: float) -> None:
        with self._replica.lock:
            self._replica.followed_meetings.expire(peer, address.incarnation)
            prepared = self._replica.followed_meetings.undecided.get(peer)
        if prepared is None:
            return
        connection = self._connect(address, deadline)
        try:
            connection.send(frames.OUTCOME, self._own | {"meeting": prepared.meeting}, deadline)
            self._decide(prepared, bool(connection.expect(frames.OUTCOME, deadline).fields.get("happened")))
        finally:
            self._leave(connection)

    def _decide(self, meeting: Prepared, committed: bool) -> None:
        with self._replica.lock:
            if self._replica.followed_meetings.decide(meeting, committed):
                self._replica.conclude(
                    meeting.caller, meeting.meeting, meeting.layers, meeting.delta, meeting.middle,
                    keep=self._keeps, led=False, known=meeting.known,
                )  # fmt: skip
                self.followed += 1

    # ---- both sides

    def _converse(
        self,
        connection: Connection,
        peer: int,
        meeting: str,
        layers: Chosen,
        known: bool,
        side: int,
        deadline: float,
    ) -> MeetingResult:
        """The codec's conversation, about the difference to what both know; in full where they do not agree on that."""
        w, pair = self._replica.seen(layers), self._replica.pair(peer)
        if known and pair is not None:
            codec, reference = self._codec, self._replica.layers.pick(pair.reference, layers)
        else:
            codec, reference = CODECS["none"](), torch.zeros_like(w)
        number = zlib.crc32(meeting.encode())
        conversation = meeting_side(
            codec, w, reference, side=side, memory=LocalMemory(w), seed=self._seed, number=number
        )
        result = _drive(conversation, side, lambda own: _swapped(connection, own, deadline))
        if not bool(result.middle.isfinite().all()):
            raise PeerError("a model is not finite, and stays alone")
        self._check_movement(peer, layers, w, result.delta)
        return result

    def _check_movement(self, peer: int, layers: Chosen, w: Tensor, delta: Tensor) -> None:
        """PeerError where a layer would move by more than MOST_TIMES what its threshold explains: neither side moves then."""
        replica = self._replica
        numbers, split = replica.layers.numbers(layers), replica.layers.parts
        norm = torch.linalg.vector_norm
        lengths = torch.stack([norm(part) for part in split(w, layers)]).tolist()
        moves = torch.stack([norm(part) for part in split(delta, layers)]).tolist()
        of_model = math.sqrt(math.fsum(replica.lengths)) if layers is not None else math.hypot(*lengths)
        for layer, length, move in zip(numbers, lengths, moves, strict=True):
            elements = min(replica.numel, max(LEAST_ELEMENTS, replica.layers.sizes[layer]))
            most = self.most_move * max(length, math.sqrt(elements / replica.numel) * of_model)
            if not move <= most < math.inf:
                raise PeerError(
                    f"a meeting with rank {peer} would move layer {layer} by {move:.3g}, of at most {most:.3g}; "
                    f"its model or this one is broken",
                    "movement",
                )

    def _agreed(self, peer: int, layers: Chosen, known: bool, deadline: float) -> tuple[Chosen, float]:
        """What a meeting is about, and until when. Two that need a common reference and have none yet exchange all layers."""
        if known or not self._keeps:
            return layers, deadline
        return None, max(deadline, time.monotonic() + self._timeouts[peer].timeout_s(4 * self._replica.numel))

    def _nbytes(self, layers: Chosen) -> int:
        """What a rank sends of these layers."""
        sizes = self._replica.layers.sizes
        return self._codec.nbytes(sum(sizes if layers is None else (sizes[layer] for layer in layers)))

    def fetch(self, address: PeerAddress, what: str, deadline: float) -> Shown:
        """A peer's `start`, its model as it is (`now`) or what it brings to a `merge`."""
        frame = self._get(address, what, deadline)
        if not frame.fields.get("there"):
            return Shown(None, [], frame.fields)
        model, buffers = frame.payload[: 4 * self._replica.numel], frame.payload[4 * self._replica.numel :]
        if len(model) != 4 * self._replica.numel:
            raise PeerError("a peer's model has another size")
        flat = torch.frombuffer(model, dtype=torch.float32).to(self._replica.device)
        return Shown(flat, self._replica.untrained.decode(buffers), frame.fields)

    def take_frozen(self, address: PeerAddress, deadline: float) -> None:
        """A peer's frozen parameters."""
        self._replica.untrained.take_frozen(self._get(address, "frozen", deadline).payload)

    def _get(self, address: PeerAddress, what: str, deadline: float) -> PeerFrame:
        while True:
            connection = self._connect(address, deadline)
            try:
                connection.send(frames.GET, self._own | {"what": what}, deadline)
                frame = connection.receive(deadline)
            finally:
                self._leave(connection)
            if frame.kind == frames.MODEL:
                return frame
            if frame.kind != frames.BUSY:
                raise PeerError("a peer answered a request for its model with something else")
            self._closed.wait(_WAIT_S)  # as many read it as may; polled, within the deadline
            if self._closed.is_set():
                raise PeerError("this rank is closing")

    def _connect(self, address: PeerAddress, deadline: float) -> Connection:
        try:
            left = min(_CONNECT_S, max(0.01, deadline - time.monotonic()))
            sock = socket.create_connection((address.host, address.port), timeout=left)
            connection = Connection(sock, self._most, secret=self._secret, called=address.incarnation)
        except OSError as cause:
            raise PeerError(f"a peer cannot be reached ({cause})") from cause
        self._connections.add(connection)
        if self._closed.is_set():  # close() may have looked before it was there
            self._leave(connection)
        return connection

    def _leave(self, connection: Connection) -> None:
        self._connections.discard(connection)
        connection.close()


def _drive(
    conversation: Generator[Request, Any, MeetingResult], side: int, swap: Callable[[Tensor], Tensor]
) -> MeetingResult:
    answer: Any = None
    while True:
        try:
            own = conversation.send(answer)
        except StopIteration as end:
            result: MeetingResult = end.value
            return result
        other = _with_tensor(own, swap(_tensor_of(own)))
        answer = answer_pair(*((own, other) if side == 0 else (other, own)))[side]


def _tensor_of(request: Request) -> Tensor:
    if isinstance(request, Sum):
        return request.payload.data
    return request.index if isinstance(request, TableSum) else request.value


def _with_tensor(request: Request, tensor: Tensor) -> Request:
    if isinstance(request, Sum):
        return replace(request, payload=replace(request.payload, data=tensor))
    if isinstance(request, TableSum):
        return replace(request, index=tensor)
    if isinstance(request, Merge):
        return replace(request, value=tensor)
    return Max(tensor) if isinstance(request, Max) else Gather(tensor)


def _swapped(connection: Connection, own: Tensor, deadline: float) -> Tensor:
    other = connection.swap(raw_bytes(own), deadline)
    return (
        torch.frombuffer(other, dtype=own.dtype).view(own.shape).to(own.device)
        if own.numel()
        else own.clone()
    )


def _name(rank: int, incarnation: str, number: int) -> str:
    """What both sides call a meeting that `rank` leads."""
    return f"{rank}-{incarnation}-{number}"


def _digest(tensor: Tensor) -> int:
    return zlib.crc32(raw_bytes(tensor))
