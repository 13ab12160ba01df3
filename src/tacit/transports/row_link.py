"""One rank's way to all others through the aggregator, and round it while it is gone: `Wire.all_to_all` with one socket a rank.

Exchanges are numbered, alike on all ranks. As long as the aggregator answers, they cost the process group nothing.

**Gone.** Number k is over on a rank when it has everything, and everything it sent has arrived: so nobody is ahead by more than one
number, and who has finished k is needed for k by nobody. A rank that finds the aggregator gone (silent, restarted, its control
connection broken, full packets lost) reports it in torch's store. A thread on every rank watches the store, since a rank may
stand in a collective elsewhere that waits for one which still lacks rows. The threads then meet, over a process group of their
own: who has finished which number, and who has what of the oldest one that is not finished? What is missing of it is sent there. From
the next number on, the process group moves rows: the same bytes, so the same training.

**Back.** Rank 0's thread knocks at control now and then, less and less often. If it answers, all ranks' threads join a new job and
test it while training goes on. Every few numbers the ranks vote whether all of them are in; from the number at which they are, rows
take the aggregator again.

**Late.** A rank that does not come is waited for, named in a warning after a while, and in an error at the process group's time-out.

**At the start** the same holds: an aggregator that is not there, or refuses the job, is named in one warning.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import recycled
from tacit.aggregator.addresses import address_text
from tacit.aggregator.client.control_client import AbsentError, knock
from tacit.aggregator.wire import MOST_RANKS
from tacit.errors import PairingError, TransportError
from tacit.transports.aggregator_seat import GoneError, ranks_text
from tacit.transports.process_group import Wire
from tacit.transports.row_seat import RowPath, RowSeat, take_row_seat
from tacit.transports.watched_link import MOST_REASONS, STEADY_S, WatchedLink

log = logging.getLogger("tacit")

PATIENCE_S = 10.0  # with a late rank, before a warning names it
_GREETING_S = 1.0
_TRY_S, _LONGEST_TRY_S = 0.5, 60.0  # between two attempts to return; doubled with each
_ATTEMPT_S = 10.0  # by then all ranks have joined, or will not
_EVERY = 16  # numbers from one vote to the next, while the aggregator is gone
_GOSSIP_S = 1.0  # control reports within this who is lost


@dataclass(slots=True)
class RowExchange:
    """One number: what goes to each rank, and where what it has for this one comes to."""

    parts: Sequence[Tensor]
    rooms: Sequence[Tensor]
    here: list[bool] = field(default_factory=list)  # by rank, once the aggregator is gone
    handed: bool = False  # the rest has come over the process group


class RowLink(WatchedLink):
    """Opened by all ranks together. `all_to_all` is for one thread; `close` ends the watch and leaves the job."""

    _kind, _thread_name = "rows", "tacit-row-link"
    _closed = "the way to the aggregator was closed; shard the tables again to go on"

    def __init__(
        self, wire: Wire, path: RowPath, *, patience_s: float = PATIENCE_S, timeout: timedelta | None = None
    ) -> None:
        if wire.world > MOST_RANKS:
            raise PairingError(
                f"{wire.world} ranks at one aggregator: it passes rows on for at most {MOST_RANKS}; leave through= out"
            )
        super().__init__(wire, timeout)
        self._path, self._patience_s = path, patience_s
        self._waiting: RowExchange | None = None  # the caller's thread, for this one
        self._seat: RowSeat | None = None
        self._ready: tuple[int, RowSeat] | None = (
            None  # an attempt, and the place taken in it, not yet in use
        )
        self._voting = False  # the caller's thread has taken the place, and the others' votes are under way
        self._try_s, self._next_try, self._tried = _TRY_S, 0.0, 0.0
        self._open()
        self._begin_watch()

    # ---- the caller's thread ----

    def all_to_all(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """parts[r] goes to rank r; back comes what every rank had for this one, numels[r] elements from rank r."""
        with self._state:
            self._raise()
            self._number += 1
            # Not in the first one after a meeting: ranks that had begun it before do not know of a vote there.
            after = not self._using and self._number > self._group_from
        if after and self._number % _EVERY == 0:
            self._vote()
        received = self._through(parts, numels) if self._using else None
        if received is None:
            received = self._wire.all_to_all(parts, numels)
            with self._state:
                self._finished = self._number
                self.round_about += 1
        return received

    def _through(self, parts: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor] | None:
        """What the aggregator brings, or other ranks send again; None if the process group has to move all of it."""
        exchange = self._exchange(parts, numels)
        done = False
        with self._state:
            self._waiting, self._inside = exchange, not self._down
        try:
            if self._inside:
                self._move(exchange)
                done = True
        except GoneError as gone:
            if not self._down:
                self._say_down(str(gone))
        finally:
            with self._state:
                self._inside = False
                if done:
                    self._end(exchange)
                self._state.notify_all()
        with self._state:
            self._state.wait_for(lambda: done or not self._using or self._error or self._closing)
            if not done:
                self._raise()
                self.round_about += exchange.handed
            self._waiting = None
        if not done and not exchange.handed:
            return None
        device, dtype = parts[0].device, parts[0].dtype
        found = [room.view(dtype).to(device) for room in exchange.rooms]
        found[self._wire.rank] = parts[self._wire.rank]
        return found

    def _exchange(self, parts: Sequence[Tensor], numels: Sequence[int]) -> RowExchange:
        own, size, cpu = self._wire.rank, parts[0].element_size(), torch.device("cpu")
        raw = [part.cpu().contiguous().view(torch.uint8).view(-1) for part in parts]
        nbytes = [0 if rank == own else numel * size for rank, numel in enumerate(numels)]
        raw[own] = raw[own][:0]
        return RowExchange(raw, [recycled.empty(n, torch.uint8, cpu) for n in nbytes])

    def _move(self, exchange: RowExchange) -> None:
        seat, named = self._seat, False
        assert seat is not None, "the aggregator is in use"

        def late(waited_s: float) -> None:
            nonlocal named
            if waited_s <= min(self._patience_s, self._timeout_s):
                return
            sentence = (
                f"rank {self._wire.rank} has waited {waited_s:.0f} s for rows of {ranks_text(seat.lacking())}"
            )
            if waited_s > self._timeout_s:
                raise TransportError(f"{sentence}; restart all ranks from the last checkpoint")
            if not named:
                named = True
                log.warning("%s; still waiting", sentence)

        parts, rooms = ([each.numpy() for each in side] for side in (exchange.parts, exchange.rooms))
        try:
            seat.exchange(parts, rooms, check=self._check, late=late)
        finally:
            exchange.here = seat.socket.here
            self._wire.sent_nbytes += seat.count_nbytes()

    def _end(self, exchange: RowExchange) -> None:
        self._finished, self._waiting = self._number, None
        self.through += 1

    # ---- at the start ----

    def _open(self) -> None:
        """All ranks join, or none uses the aggregator."""
        why = self._try_seat(self._age)
        reasons: list[str | None] = [None] * self._wire.world
        dist.all_gather_object(reasons, why, group=self._meeting)
        failed = [f"rank {rank}: {each}" if rank else each for rank, each in enumerate(reasons) if each]
        if not failed:
            if self._ready is not None:
                self._seat, self._ready = self._ready[1], None
            return
        self._drop_ready()
        self._using, self._next_try = False, time.monotonic() + self._try_s
        self._warn(
            f"the aggregator at {self._where} does not pass rows on for this run yet ({failed[0]}); the process group moves them, and it is tried "
            f"again every {_LONGEST_TRY_S:g} s or sooner",
            failed[0],
        )

    def _try_seat(self, age: int) -> str:
        """Takes this rank's place in job `age`, not yet in use; why there is none, otherwise."""
        try:
            seat = take_row_seat(
                self._path,
                f"{self._run}/{age}",
                self._wire.rank,
                self._wire.world,
                timeout_s=self._timeout_s,
                wanted=lambda: not (self._closing or self._error),
                check=self._raise,
            )
        except Exception as cause:  # whatever it is, training is fine without the aggregator
            return str(cause) or type(cause).__name__
        with self._state:
            before, self._ready = self._ready, (age, seat)
        if before is not None:  # put back by a vote meanwhile
            before[1].close()
        return ""

    # ---- gone ----

    def _found_gone(self) -> str:
        with self._state:
            seat = self._seat if self._using else None
        return "" if seat is None or seat.membership.alive else seat.membership.why

    def _meet(self) -> None:
        """All ranks' watches come here. When they part, no rank lacks rows of a number that another has finished, and none uses the
        aggregator."""
        with self._state:
            self._down = True
            self._state.wait_for(lambda: not self._inside)
            if self._error:
                return
            finished, waiting = self._finished, self._waiting
        with suppress(RuntimeError):  # whatever brought this rank here, the others have to come too
            self._store.set(f"down/{self._age}", self._why)
        here = (waiting.here if waiting else []) or [False] * self._wire.world
        # From each to each, not round a ring: every rank has to notice one that is dead, not only its neighbours.
        own = torch.tensor([finished, *here]).repeat(self._wire.world)
        notes = torch.empty_like(own)
        dist.all_to_all_single(notes, own, group=self._meeting)
        table = notes.view(self._wire.world, -1)
        have = table[:, 0].tolist()
        if max(have) - min(have) > 1:
            raise TransportError(
                f"exchange {min(have) + 1} of rows cannot be had again; restart all ranks from the last checkpoint"
            )
        if min(have) < max(have):
            self._hand_over(waiting, [number < max(have) for number in have], table[:, 1:].bool().tolist())
        with self._state:
            seat, self._seat = self._seat, None
            self._using = False
            self._finished = self._group_from = max(have)
            self._group_from += 1
            steady = time.monotonic() - self._since > STEADY_S
            self._try_s = _TRY_S if steady else min(2 * self._try_s, _LONGEST_TRY_S)
            self._next_try = time.monotonic() + self._try_s
            self.changes += 1
            self._state.notify_all()
        if steady:
            self._warned.clear()
        self._warn(
            f"the aggregator at {self._where} is gone ({self._why}); the process group moves rows from exchange {self._group_from} on, until it is back",
            self._why,
        )
        if seat is not None:
            seat.close()

    def _hand_over(
        self, waiting: RowExchange | None, behind: Sequence[bool], here: Sequence[Sequence[bool]]
    ) -> None:
        """What ranks that are `behind` lack of the number that others have finished; here[r][s]: rank r has the part of rank s."""
        own = self._wire.rank
        sends = [behind[to] and not here[to][own] and to != own for to in range(self._wire.world)]
        if not behind[own] and any(sends):
            raise TransportError(
                f"{ranks_text([to for to, lacks in enumerate(sends) if lacks])} lacks rows that rank {own} has been told had arrived; "
                f"restart all ranks from the last checkpoint"
            )
        nothing = torch.empty(0, dtype=torch.uint8)
        parts, rooms = [nothing] * self._wire.world, [nothing] * self._wire.world
        if behind[own]:
            assert waiting is not None, "another rank has finished it, so this one has begun it"
            parts = [part if sends[to] else nothing for to, part in enumerate(waiting.parts)]
            rooms = [nothing if here[own][source] else room for source, room in enumerate(waiting.rooms)]
        nbytes = [room.numel() for room in rooms]
        received = torch.empty(sum(nbytes), dtype=torch.uint8)
        dist.all_to_all_single(
            received, torch.cat(parts), nbytes, [part.numel() for part in parts], group=self._meeting
        )
        for room, part in zip(rooms, received.split(nbytes), strict=True):
            room.copy_(part)
        if behind[own] and waiting is not None:
            self._wire.sent_nbytes += sum(part.numel() for part in parts)
            waiting.handed = True

    # ---- and back ----

    def _vote(self) -> None:
        """The aggregator moves rows from this number on if all ranks have places in the same job."""
        with self._state:
            offered, self._ready, self._voting = self._ready, None, True
            # Its own number: the watch may be in a newer attempt by now, whose place is another.
            attempt = offered[0] if offered and offered[1].membership.alive else 0
        votes = torch.tensor([attempt, -attempt])
        try:
            dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._meeting)
        except RuntimeError as cause:
            raise self._wire.lost("vote about the aggregator", cause) from cause
        agreed = bool(votes[0] and votes[0] == -votes[1])
        with self._state:
            self._voting = False
            if agreed and offered:
                self._seat, offered = offered[1], None
                self._age, self._since = attempt, time.monotonic()
                self._using, self._down, self._why = True, False, ""
                self.changes += 1
            elif (
                attempt == self._attempt > 0
                and self._ready is None
                and time.monotonic() - self._tried < _ATTEMPT_S
            ):
                self._ready, offered = offered, None  # others may still join
        if offered is not None:
            offered[1].close()
        if agreed:
            self._warn(
                f"the aggregator at {self._where} is back; it passes rows on from exchange {self._number} on",
                "it is back",
            )

    def _lead_attempt(self) -> None:
        now = time.monotonic()
        with self._state:
            ready = self._ready
            if self._using or self._voting:
                return  # the caller's thread has the place
        if now < self._next_try or (ready is not None and ready[1].membership.alive):
            return
        self._try_s = min(2 * self._try_s, _LONGEST_TRY_S)
        self._next_try = now + max(self._try_s, _ATTEMPT_S if ready else 0.0)
        try:
            knock(self._path.control, self._path.secret, _GREETING_S)
        except AbsentError:
            return
        except Exception as cause:  # whatever it is, training is fine without the aggregator
            self._warn_of_attempt(str(cause) or type(cause).__name__)
            return
        self._store.set(f"try/{self._attempt + 1}", "")  # if that fails, the number is not used up
        self._take_part(self._attempt + 1)

    def _follow(self, attempt: int) -> None:
        self._take_part(attempt)

    def _take_part(self, attempt: int) -> None:
        self._drop_ready()
        with self._state:
            self._attempt, self._tried = attempt, time.monotonic()
        if why := self._try_seat(attempt):
            self._warn_of_attempt(why)

    def _warn_of_attempt(self, why: str) -> None:
        if len(self._warned) <= MOST_REASONS:
            self._warn(
                f"the aggregator at {self._where} does not pass rows on for this run yet ({why}); the process group goes on",
                why,
            )

    def _drop_ready(self) -> None:
        with self._state:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready[1].close()

    # ---- for the wire ----

    @property
    def _where(self) -> str:
        return address_text(self._path.control)

    def lost(self) -> tuple[int, ...]:
        """Ranks that control has lost; it may take a moment to know."""
        deadline = time.monotonic() + _GOSSIP_S
        while (seat := self._seat) and not seat.membership.lost and time.monotonic() < deadline:
            time.sleep(0.02)
        return seat.membership.lost if seat else ()

    def _leave(self) -> None:
        self._drop_ready()
        seat, self._seat = self._seat, None
        if seat is not None:
            seat.close()
