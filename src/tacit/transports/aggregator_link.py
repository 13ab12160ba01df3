"""One rank's way to the aggregator, and round it while it is gone.

Sums are numbered, alike on all ranks. As long as the aggregator answers, a sum costs the process group nothing.

**Gone.** A rank that gets no answer, is not known there any more, or whose large packets are lost reports it in torch's store. So
does one whose control connection broke, or that control has lost: whether a rank is dead is for the process group and its time-out
to decide, as in every other scheme. A thread on every rank watches the store, since a rank may already stand in a collective that
waits for one which still lacks its sum. The threads then meet, over a process group of their own: how many sums has each rank?
Request k + 1 needs everybody, so nobody is ahead by more than one; who has the newest sum hands it to those who lack it. From the
next number on, the process group adds. Sums are integers, so these are the same bits: no step is lost, and nobody need know which
way a sum took.

**Back.** Rank 0's thread asks control now and then, less and less often, whether it is there and knows the secret. If so, it calls
a trial: the threads of all ranks join new jobs and test the path, while training goes on over the process group. Only when all have
reported that they are in does rank 0 announce, in a broadcast every few sums, that the aggregator adds from this number on. Whatever
goes wrong before that (no slots, another secret, another service on the port) is named in one warning, and tried again later: a
run that is fine without the aggregator never ends, and never waits, because of it.

**Late.** A rank that does not come is waited for, named in a warning after a while, and in an error at the process group's
time-out. Not in lossy jobs (aggregator/lossy.py): there it may be many sums behind, so each rank keeps the last ones for a meeting.

**Errors.** What only the user can correct (a wrong secret or host name, aggregators of racks without one above them) is a ConfigError
at the very first join, and a warning ever after.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.aggregator.addresses import address_text
from tacit.aggregator.client.control_client import AbsentError, knock
from tacit.aggregator.client.host_stack import Client
from tacit.aggregator.client.membership import LateError, Membership, Terms
from tacit.aggregator.spec import Address
from tacit.aggregator.wire import MOST_RANKS, LaneType
from tacit.errors import ConfigError, PairingError, TransportError
from tacit.transports import Wire
from tacit.transports.aggregator_seat import GoneError, Seat, ranks_text
from tacit.transports.watched_link import MOST_REASONS, STEADY_S, WatchedLink

log = logging.getLogger("tacit")

_GREETING_S = 1.0  # for control's first message, which it sends unasked
_JOIN_S = 5.0  # for all ranks to come, before we look whether they still want to
_TRY_S, _LONGEST_TRY_S = 0.5, 30.0  # between two attempts to return; doubled with each that fails
_LONGEST_PAUSE_S = 600.0  # doubled up to this with each return that did not last so long
_REPORT_S = 20.0  # for all ranks to report how their part of an attempt went
_EVERY = 4  # sums from one announcement of rank 0 to the next, while the aggregator is gone
_GOSSIP_S = 1.0  # control reports within this who is lost
_GONE = "gone"  # in the store, where the failure of the very first join would be
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_SUMS = (*_DTYPES.values(), torch.float32)
_MOST_LAG_SLOTS = 1 << 14  # of a lossy job: how far a rank may lag; it takes what the aggregator gives


Kind = tuple[LaneType, tuple[int, ...]]  # of sums; each has a job of its own


@dataclass(frozen=True, slots=True)
class SumRequest:
    """One vector for the aggregator: its bytes in the type of `lanes`, and the way to the same sum over the process group."""

    lanes: LaneType
    table: tuple[int, ...]
    data: Tensor
    numel: int
    over_the_group: Callable[[], Tensor]

    @property
    def kind(self) -> Kind:
        return self.lanes, self.table

    @property
    def room(self) -> Tensor:
        """Lanes for the sum, not filled."""
        floats = self.lanes is LaneType.F32
        return torch.empty(self.numel, dtype=torch.float32 if floats else _DTYPES[self.lanes.dtype.itemsize])


class AggregatorLink(WatchedLink):
    """Opened by all ranks together. `sum` is for one thread, the wire's; `close` ends the watch and leaves the jobs. `meeting`: the ranks of
    the wire in a group of their own, where the wire's has others too. `deadline_ms`: its jobs are lossy (aggregator/lossy.py)."""

    _kind, _thread_name = "star", "tacit-star"
    _closed = "the way to the aggregator was closed; attach the model again to go on"

    def __init__(
        self,
        wire: Wire,
        control: Address,
        secret: str,
        *,
        patience_s: float,
        mtu: int,
        slots: int,
        timeout: timedelta | None,
        meeting: dist.ProcessGroup | None = None,
        deadline_ms: int = 0,
    ) -> None:
        super().__init__(wire, timeout, meeting)
        self._control, self._secret, self._deadline_ms = control, secret, deadline_ms
        self._patience_s, self._mtu, self._slots = patience_s, mtu, slots
        self._rack = self._find_rack()
        # the last sums: number, and version as torch counts
        self._kept: deque[tuple[int, Tensor, int]] = deque()
        self._lag = 0  # elements that a rank may be behind by: 0 where nobody is by more than a sum
        self._given: dict[int, Tensor] = {}  # sums that others have had before us, by number
        self._kinds: list[Kind] = []  # in the order of their first sums
        self._seats: dict[Kind, Seat] = {}
        self._ready: dict[Kind, Seat] | None = None  # places that it has taken, not yet in use
        self._there = 0  # rank 0: the attempt in which all ranks have taken theirs
        self._try_s, self._next_try = _TRY_S, 0.0
        self._begin_watch()

    # ---- the wire's thread ----

    def sum(self, request: SumRequest) -> Tensor:
        """The lanes of the sum, on the device of `request.data`."""
        with self._state:
            self._raise()
            self._number += 1
            if request.kind not in self._kinds:
                self._kinds.append(request.kind)
            # Not in the first sum after a meeting: ranks that had begun it before do not know of an announcement there.
            after = not self._using and self._number > self._group_from
        if after and self._number % _EVERY == 0:
            self._maybe_return()
        total = self._through(request) if self._using else self._taken()
        if total is None:
            total = request.over_the_group()
            with self._state:
                self._finished = self._number
                self._kept.clear()
                self.round_about += 1
        return total.to(request.data.device)

    def _through(self, request: SumRequest) -> Tensor | None:
        """The sum from the aggregator, or from a rank that has it; None if nobody has: the process group must add."""
        total = None
        with self._state:
            self._inside = not self._down
        try:
            if self._inside:
                total = self._reduce(request)
        except GoneError as gone:
            if not self._down:
                self._say_down(str(gone))
        finally:
            with self._state:
                self._inside = False
                if total is not None:
                    self._finished = self._number
                    self._keep(total)
                    self.through += 1
                self._state.notify_all()
        if total is not None:
            return total
        with self._state:
            self._state.wait_for(lambda: not self._using or self._error or self._closing)
            self._raise()
        return self._taken()

    def _taken(self) -> Tensor | None:
        """This sum, if the others have had it before us and handed it over."""
        with self._state:
            given = self._given.pop(self._number, None)
            if given is not None:
                self._finished = self._number
            return given

    def _keep(self, total: Tensor) -> None:
        """The newest sums, as many as a rank may lack."""
        self._kept.append((self._number, total, total._version))
        later = sum(kept.numel() for _, kept, _ in self._kept)
        while len(self._kept) > 1 and (later := later - self._kept[0][1].numel()) >= self._lag:
            self._kept.popleft()

    def _reduce(self, request: SumRequest) -> Tensor:
        seat = self._seat(request.kind)
        total, named = request.room, False

        def late(waited_s: float) -> None:
            nonlocal named
            if waited_s > min(self._patience_s, self._timeout_s) and not named:
                named = True
                log.warning("%s; still waiting", self._missing(seat.membership, waited_s))
            if waited_s > self._timeout_s:
                raise TransportError(
                    f"{self._missing(seat.membership, waited_s)}; restart all ranks from the last checkpoint"
                )

        data = request.data.cpu().contiguous().view(torch.uint8).numpy()
        seat.reduce(data, total.view(torch.uint8).numpy(), request.numel, check=self._check, late=late)
        self._wire.sent_nbytes += seat.count_nbytes()
        return total

    def _seat(self, kind: Kind) -> Seat:
        """This rank's place for such sums. The first one of all may fail for good, others are only gone."""
        if kind not in self._seats:
            try:
                self._seats[kind] = self._take_seat(kind, self._age, self._join_with_all, self._check)
            except ConfigError as cause:
                if self.changes or self._seats or not self._fail(cause):
                    raise GoneError(str(cause)) from cause
                raise
        return self._seats[kind]

    def _take_seat(
        self, kind: Kind, age: int, join: Callable[[Terms, int], Membership], check: Callable[[], None]
    ) -> Seat:
        """A place that is tested. GoneError, TacitError or OSError if there is none."""
        lanes, table = kind
        name = f"{self._run}/{age}/{self._kinds.index(kind)}"
        slots = _MOST_LAG_SLOTS if self._deadline_ms else self._slots
        terms = Terms(
            name,
            len(self._rack),
            lanes,
            lanes.elements(self._mtu),
            slots,
            table,
            deadline_ms=self._deadline_ms,
        )
        client = Client()
        membership = None
        try:
            membership = join(terms, client.port)
            self._check_whole(membership)
            client.start(
                membership.job,
                self._place,
                membership.plane,
                segment=membership.segment,
                window=self._slots,
            )
            if self._deadline_ms:
                self._lag = 2 * len(membership.job.slots) * membership.job.elements
            seat = Seat(client, membership, self._mtu, self._rack)
            seat.test(check)
            return seat
        except BaseException:
            if membership:
                membership.leave()
            client.close()
            raise

    def _join(self, terms: Terms, port: int) -> Membership:
        return Membership(
            self._control,
            self._secret,
            terms,
            self._place,
            port,
            timeout_s=min(_JOIN_S, self._timeout_s),
            greeting_s=_GREETING_S,
            wanted=lambda: not (self._closing or self._error or (self._using and self._down)),
        )

    def _join_with_all(self, terms: Terms, port: int) -> Membership:
        """Asks until all ranks have come: on the first step one may compile for minutes."""
        began, named = time.monotonic(), False
        while True:
            try:
                return self._join(terms, port)
            except LateError as cause:
                waited_s = time.monotonic() - began
                self._check()
                if waited_s > self._timeout_s:
                    raise
                if waited_s > self._patience_s and not named:
                    named = True
                    log.warning("%s; still waiting", cause)
            except (TransportError, OSError) as cause:
                self._check()
                raise GoneError(str(cause)) from cause

    def _fail(self, error: ConfigError) -> bool:
        """What only the user can correct: an error on all ranks, since the others would wait for this one. Not if one of them has
        found the aggregator gone before: it waits for this rank in a meeting."""
        if self._settle(f"rank {self._wire.rank}: {error}") == _GONE:
            return False
        with self._state:
            self._error = error
            self._state.notify_all()
        return True

    def _settle(self, finding: str) -> str:
        """What the first rank has found that could not join; this one, if it is the first."""
        try:
            return str(self._store.compare_set("failed", "", finding).decode())
        except RuntimeError:
            return finding

    def _raise_failure(self) -> None:
        """What another rank found before anybody had joined."""
        failure = ""
        with suppress(RuntimeError):
            if not self.changes and not self._seats and self._store.check(["failed"]):
                failure = self._store.get("failed").decode()
        if failure and failure != _GONE:
            raise ConfigError(failure)

    def _missing(self, membership: Membership, waited_s: float) -> str:
        text = f"rank {self._wire.rank} has waited {waited_s:.0f} s for a sum"
        try:
            missing = membership.missing()
        except TransportError as cause:
            return f"{text} ({cause})"
        if not missing:
            racks = ", ".join(map(str, membership.missing_racks))
            return f"{text} that lacks rack {racks}" if racks else text
        return f"{text} that lacks {ranks_text(tuple(self._rack[place] for place in missing))}"

    # ---- gone, and back ----

    def _found_gone(self) -> str:
        """Why a job is over in which control has lost a rank. If that rank is dead, the meeting finds out: in a ring of the process
        group only its neighbours would."""
        self._raise_failure()
        seats = [seat for seat in list(self._seats.values()) if seat.membership.lost] if self._using else []
        return next((seat.membership.why for seat in seats if not seat.membership.alive), "")

    def _meet(self) -> None:
        """All ranks' watches come here. When they part, every rank has the same sums, and none uses the aggregator."""
        with self._state:
            self._down = True
            self._state.wait_for(lambda: not self._inside)
            if self._error:
                return
            finished, kept = self._finished, dict[int, Tensor]()
            for number, total, version in reversed(self._kept):
                if total._version != version:  # a codec wrote into it
                    break
                kept[number] = total
        with suppress(RuntimeError):  # whatever brought this rank here, the others have to come too
            self._store.set(f"down/{self._age}", self._why)
        if not self.changes:
            self._settle(_GONE)
            self._raise_failure()  # of a rank that will not come
        notes = torch.empty(self._wire.world, 2, dtype=torch.int64)
        # From each to each, not round a ring: every rank has to notice one that is dead, not only its neighbours.
        own = torch.tensor([finished, min(kept, default=finished + 1)]).repeat(self._wire.world, 1)
        dist.all_to_all_single(notes, own, group=self._meeting)
        have = notes[:, 0].tolist()
        for number in range(min(have) + 1, max(have) + 1):
            holders = [r for r, (last, first) in enumerate(notes.tolist()) if first <= number <= last]
            if not holders:
                raise TransportError(
                    f"sum {number} cannot be had again; restart all ranks from the last checkpoint"
                )
            total = self._handed_out(kept.get(number), holders[0])
            if finished < number:
                with self._state:
                    self._given[number] = total
        seats, self._seats = self._seats, {}
        with self._state:
            self._using, self._there = False, 0
            self._group_from = max(have) + 1
            steady = time.monotonic() - self._since > STEADY_S
            self._try_s = _TRY_S if steady else min(2 * self._try_s, _LONGEST_PAUSE_S)
            self._next_try = time.monotonic() + self._try_s
            self.changes += 1
            self._state.notify_all()
        if steady:
            self._warned.clear()
        self._warn(
            f"the aggregator at {address_text(self._control)} is gone ({self._why}); "
            f"the process group adds from sum {self._group_from} on, until it is back",
            self._why,
        )
        _close(seats)

    def _handed_out(self, own: Tensor | None, holder: int) -> Tensor:
        """A sum that the rank `holder` has, on all ranks."""
        mine = own if self._wire.rank == holder else None
        shape = torch.zeros(2, dtype=torch.int64)
        if mine is not None:
            shape = torch.tensor([mine.numel(), _SUMS.index(mine.dtype)])
        dist.broadcast(shape, group_src=holder, group=self._meeting)
        numel, kind = shape.tolist()
        total = torch.empty(numel, dtype=_SUMS[kind]) if mine is None else mine
        dist.broadcast(total.view(torch.uint8), group_src=holder, group=self._meeting)
        return total

    def _maybe_return(self) -> None:
        """Rank 0 announces whether the aggregator adds from this sum on: it does if all ranks have taken their places."""
        with self._state:
            attempt, self._there = self._there, 0
        announced = torch.tensor([attempt])
        try:
            dist.broadcast(announced, group_src=0, group=self._meeting)
        except RuntimeError as cause:
            raise self._wire.lost("announcement about the aggregator", cause) from cause
        if not announced.item():
            return
        with self._state:
            assert self._ready is not None, "this rank has reported that it is in"
            self._seats, self._ready = self._ready, None
            self._age, self._since = int(announced), time.monotonic()
            self._using, self._down, self._why = True, False, ""
            self.changes += 1
        self._warn(
            f"the aggregator at {address_text(self._control)} is back; it adds from sum {self._number} on",
            "it is back",
        )

    # ---- attempts to return, by the watches; training goes on meanwhile ----

    def _lead_attempt(self) -> None:
        with self._state:
            seats = self._ready
            waits = seats is not None and self._there
            if self._using or (seats is not None and not waits):
                return  # the wire's thread is taking them
            dead = [seat.membership.why for seat in (seats or {}).values() if not seat.membership.alive]
            if waits and not dead:
                return
            self._there = 0
        if dead:
            self._fail_attempt(dead[0])
        elif time.monotonic() >= self._next_try:
            try:
                why = self._make_attempt()
            except RuntimeError:
                why = "the store does not answer"
            if why is None:
                self._there = self._attempt
            else:
                self._fail_attempt(why)

    def _make_attempt(self) -> str | None:
        """None if all ranks are in; otherwise why not. Empty: nobody is there, which is known."""
        try:
            knock(self._control, self._secret, _GREETING_S)
        except AbsentError:
            return ""
        except Exception as cause:  # whatever it is, training is fine without the aggregator
            return str(cause) or type(cause).__name__
        self._store.set(f"try/{self._attempt + 1}", "")  # if that fails, the number is not used up
        self._attempt += 1
        own, late = self._take_part(self._attempt)
        if own and not late:
            return own
        return self._reported_by_all(self._attempt)

    def _follow(self, attempt: int) -> None:
        self._drop_ready()  # the last attempt has failed
        self._attempt = attempt
        self._take_part(attempt)

    def _take_part(self, attempt: int) -> tuple[str, bool]:
        """Takes this rank's places, and reports to rank 0: why not, and whether only because others did not come."""
        seats: dict[Kind, Seat] = {}
        why, late = "", False
        try:
            for kind in list(self._kinds):
                seats[kind] = self._take_seat(kind, attempt, self._join, self._raise)
            with self._state:
                self._raise()
                self._ready = seats
        except Exception as cause:  # whatever it is, training is fine without the aggregator
            why, late = str(cause) or type(cause).__name__, isinstance(cause, LateError)
            _close(seats)
        self._store.set(f"tried/{self._wire.rank}", f"{attempt} {late:d} {why}")
        return why, late

    def _reported_by_all(self, attempt: int) -> str | None:
        """None if all ranks are in; otherwise why not, and that others did not come only if no rank has a better reason."""
        deadline = time.monotonic() + _REPORT_S
        waiting = set(range(self._wire.world))
        lateness = ""
        while waiting:
            for rank in sorted(waiting):
                if not self._store.check([f"tried/{rank}"]):
                    continue
                number, late, why = self._store.get(f"tried/{rank}").decode().split(" ", 2)
                if int(number) < attempt:
                    continue
                waiting.discard(rank)
                if why and late == "0":
                    return f"rank {rank}: {why}" if rank else why
                lateness = lateness or why
            if self._closing or time.monotonic() > deadline:
                return (
                    lateness or f"{ranks_text(tuple(sorted(waiting)))} did not report within {_REPORT_S:g} s"
                )
            time.sleep(0.05 if waiting else 0.0)
        return lateness or None

    def _fail_attempt(self, why: str) -> None:
        """One warning a reason; the next attempt comes no sooner than this one did."""
        self._drop_ready()
        self._try_s = max(self._try_s, min(2 * self._try_s, _LONGEST_TRY_S))
        self._next_try = time.monotonic() + self._try_s
        if why and not self._closing and len(self._warned) <= MOST_REASONS:
            longest_s = max(self._try_s, _LONGEST_TRY_S)
            self._warn(
                f"the aggregator at {address_text(self._control)} does not add for this run yet ({why}); "
                f"the process group goes on, and it is tried again every {longest_s:g} s or sooner",
                why,
            )

    def _drop_ready(self) -> None:
        with self._state:
            seats, self._ready = self._ready or {}, None
        _close(seats)

    @property
    def ahead(self) -> int:
        """Between two sums: packets that the others of a lossy job have closed without this rank, from its next one on."""
        if not self._using or self._down or not self._deadline_ms:
            return 0
        return max((seat.client.ahead for seat in self._seats.values()), default=0)

    # ---- for the wire ----

    def lost(self) -> tuple[int, ...]:
        """Ranks that control has lost; it may take a moment to know."""
        deadline = time.monotonic() + _GOSSIP_S
        while self._seats and not self._lost() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._lost()

    def _lost(self) -> tuple[int, ...]:
        lost = {place for seat in list(self._seats.values()) for place in seat.membership.lost}
        return tuple(sorted(self._rack[place] for place in lost))

    def _leave(self) -> None:
        self._drop_ready()
        seats, self._seats = self._seats, {}
        _close(seats)

    @property
    def _place(self) -> int:
        """This rank's number at its aggregator."""
        return self._rack.index(self._wire.rank)

    def _find_rack(self) -> list[int]:
        """The ranks that have the same aggregator as this one: all of them, or a rack of a tree."""
        where: list[Address | None] = [None] * self._wire.world
        dist.all_gather_object(where, self._control, group=self._meeting)
        rack = [rank for rank, address in enumerate(where) if address == self._control]
        if len(rack) > MOST_RANKS:
            raise PairingError(
                f"{len(rack)} ranks at one aggregator: it adds for at most {MOST_RANKS}; give it children, a rack each"
            )
        return rack

    def _check_whole(self, membership: Membership) -> None:
        if membership.job_ranks != self._wire.world:
            membership.leave()
            raise ConfigError(
                f"the aggregator of this rank adds for {membership.job_ranks} of {self._wire.world} ranks: start the racks' "
                f"aggregators with --parent and --rack, below one that adds their sums"
            )


def _close(seats: dict[Kind, Seat]) -> None:
    for seat in seats.values():
        seat.close()
