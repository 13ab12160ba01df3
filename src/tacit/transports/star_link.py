"""One rank's way to the aggregator, and round it while it is gone.

Sums are numbered, alike on all ranks. As long as the aggregator answers, a sum costs the process group nothing.

**Gone.** A rank that hears nothing, or is not known there any more, says so in torch's store. A thread on every rank watches
that, since a rank may already stand in a collective that waits for one which still lacks its sum. The threads then meet, over
a process group of their own: how many sums has each rank? Request k + 1 needs everybody, so nobody is ahead by more than
one; who has the newest sum hands it to those who lack it. From the next number on, the process group adds. Sums are integers,
so these are the same bits: no step is lost, and nobody need know which way a sum took.

**Back.** Rank 0 tries control's port now and then. Every few sums it tells the others, over the process group, whether to try
the aggregator again from this number on; new jobs are joined then.

**Late.** A rank that does not come is waited for, named in a warning after a while, and in an error at the process group's
time-out, or at once if control has lost it.
"""

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tacit.aggregator.addresses import address_text
from tacit.aggregator.client import Client, Outcome
from tacit.aggregator.membership import Membership, Terms
from tacit.aggregator.spec import Address
from tacit.aggregator.wire import MOST_RANKS, LaneType
from tacit.errors import ConfigError, PairingError, TacitError, TransportError
from tacit.transports.process_group import Wire

log = logging.getLogger("tacit")

_SLICE_S = 0.25  # between two looks at what the others say, while a sum does not come
_SILENT_S = 1.0  # without any answer: gone. Training must go on within 2 s
_POLL_S = 0.2  # between two looks at the store
_JOIN_S = 5.0  # for all ranks to come, before we look whether they still want to
_TRY_S, _LONGEST_TRY_S = 0.5, 60.0  # between two knocks at control's door; doubled where it opens in vain
_EVERY = 4  # sums from one word of rank 0 to the next, while the aggregator is gone
_GOSSIP_S = 1.0  # control tells within this who is lost
_FAREWELL_S = 2.0
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Ask:
    """One vector for the aggregator: its bytes as `lanes` say, and the way to the same sum over the process group."""

    lanes: LaneType
    table: tuple[int, ...]
    data: Tensor
    numel: int
    over_the_group: Callable[[], Tensor]

    @property
    def room(self) -> Tensor:
        """Lanes for the sum, not filled."""
        return torch.empty(self.numel, dtype=_DTYPES[self.lanes.dtype.itemsize])


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in one of the aggregator's jobs."""

    client: Client
    membership: Membership

    def close(self) -> None:
        self.membership.leave()
        self.client.close()


class _GoneError(Exception):
    """The aggregator does not add for us any more; the text says why."""


class StarLink:
    """Opened by all ranks together. `sum` is for one thread, the wire's; `close` ends the watch and leaves the jobs."""

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
    ) -> None:
        self._wire, self._control, self._secret = wire, control, secret
        self._patience_s, self._mtu, self._slots = patience_s, mtu, slots
        self._timeout_s = (timeout or dist.default_pg_timeout).total_seconds()
        self._meeting = _group_beside(wire.group, timeout)
        self._run = self._agree_on_a_name()
        self._rack = self._find_rack()
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"tacit/star/{self._run}", store)
        self.through = self.round_about = 0  # sums that took either way
        self.changes = 0  # how often the aggregator went, or came back
        self.on_lost: Callable[[BaseException], None] = lambda error: None

        self._state = threading.Condition()  # guards what both threads touch, below
        self._using = True  # as all ranks have agreed
        self._down = False  # somebody says that it should not be
        self._inside = False  # the wire's thread talks to the aggregator
        self._age = 0  # grows each time the aggregator is tried again
        self._number = self._finished = 0  # of sums
        self._newest: tuple[Tensor, int] | None = None  # the last sum, and its version as torch counts
        self._waiting: Ask | None = None  # the wire's thread, for this sum
        self._given: Tensor | None = None
        self._error: TacitError | None = None
        self._seats: dict[tuple[LaneType, tuple[int, ...]], Seat] = {}
        self._why = ""
        self._there = False  # control's port answers; rank 0 knocks
        self._try_s, self._knocked = _TRY_S, time.monotonic()
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="tacit-star", daemon=True)
        self._thread.start()

    # ---- the wire's thread ----

    def sum(self, ask: Ask) -> Tensor:
        """The lanes of the sum, on the device of `ask.data`."""
        with self._state:
            self._raise()
            self._number += 1
        if not self._using and self._number % _EVERY == 0:
            self._maybe_return()
        total = self._through(ask) if self._using else None
        if total is None:
            total = ask.over_the_group()
            with self._state:
                self._finished, self._newest = self._number, None
                self.round_about += 1
        return total.to(ask.data.device)

    def _through(self, ask: Ask) -> Tensor | None:
        """The sum from the aggregator, or from a rank that has it; None if nobody has: the process group must add."""
        total = None
        with self._state:
            self._waiting, self._inside = ask, not self._down
        try:
            if self._inside:
                total = self._reduce(ask)
        except _GoneError as gone:
            if not self._down:
                self._say_down(str(gone))
        finally:
            with self._state:
                self._inside = False
                if total is not None:
                    self._finished, self._newest = self._number, (total, total._version)
                    self.through += 1
                self._state.notify_all()
        if total is not None:
            self._try_s = _TRY_S
            return total
        with self._state:
            self._state.wait_for(lambda: not self._using or self._error or self._closing)
            self._raise()
            given, self._given = self._given, None
            if given is not None:
                self._finished, self._newest = self._number, None
            return given

    def _reduce(self, ask: Ask) -> Tensor:
        seat = self._seat(ask)
        client, membership = seat.client, seat.membership
        total, before = ask.room, client.stats.sent
        data = ask.data.cpu().contiguous().view(torch.uint8).numpy()
        lanes: np.ndarray[tuple[int], np.dtype[np.uint8]] = total.view(torch.uint8).numpy()
        began = time.monotonic()
        silent_s, named = 0.0, False
        outcome = client.reduce(data, lanes, ask.numel, patience_s=_SLICE_S)
        while outcome is not Outcome.DONE:
            waited_s = time.monotonic() - began
            self._raise()
            if self._down:
                raise _GoneError("another rank lost it")
            if outcome is Outcome.UNKNOWN:
                self._wait_for_word(membership)
            if not membership.alive:
                raise self._lost_or_gone(membership)
            if outcome in (Outcome.UNKNOWN, Outcome.BEHIND):
                raise _GoneError("its plane does not know the job any more")
            silent_s = silent_s + _SLICE_S if outcome is Outcome.SILENT else 0.0
            if silent_s >= _SILENT_S:
                raise _GoneError(f"nothing has come from its plane for {silent_s:g} s")
            if waited_s > min(self._patience_s, self._timeout_s) and not named and not silent_s:
                named = True
                log.warning("%s; still waiting", self._missing(membership, waited_s))
            if waited_s > self._timeout_s:
                raise TransportError(
                    f"{self._missing(membership, waited_s)}; restart all ranks from the last checkpoint"
                )
            outcome = client.resume(patience_s=_SLICE_S)
        self._wire.sent_nbytes += (client.stats.sent - before) * membership.job.data_nbytes
        return total

    def _seat(self, ask: Ask) -> Seat:
        key = ask.lanes, ask.table
        if key not in self._seats:
            name = f"{self._run}/{self._age}/{len(self._seats)}"
            terms = Terms(
                name, len(self._rack), ask.lanes, ask.lanes.elements(self._mtu), self._slots, ask.table
            )
            client = Client()
            try:
                membership = self._join(terms, client.port)
                self._check_whole(membership)
                client.start(membership.job, self._place, membership.plane, segment=membership.segment)
            except BaseException:
                client.close()
                raise
            self._seats[key] = Seat(client, membership)
        return self._seats[key]

    def _join(self, terms: Terms, port: int) -> Membership:
        """Asks until all ranks have come: on the first step one may compile for minutes."""
        began, named = time.monotonic(), False
        while True:
            try:
                return Membership(
                    self._control,
                    self._secret,
                    terms,
                    self._place,
                    port,
                    timeout_s=min(_JOIN_S, self._timeout_s),
                )
            except TransportError as cause:
                waited_s = time.monotonic() - began
                if self._down or self._closing or not self._knock():
                    raise _GoneError(str(cause)) from cause
                if waited_s > self._timeout_s:
                    raise
                if waited_s > self._patience_s and not named:
                    named = True
                    log.warning("%s; still waiting", cause)

    def _wait_for_word(self, membership: Membership) -> None:
        """Whoever ended the job, control says why: a moment after the plane forgot it."""
        deadline = time.monotonic() + _GOSSIP_S
        while membership.alive and time.monotonic() < deadline:
            time.sleep(0.01)

    def _lost_or_gone(self, membership: Membership) -> Exception:
        if not membership.lost:
            return _GoneError(membership.why)
        return self._went_away(tuple(self._rack[place] for place in membership.lost))

    def _went_away(self, ranks: tuple[int, ...]) -> TransportError:
        return TransportError(f"{_ranks_text(ranks)} went away; restart all ranks from the last checkpoint")

    def _missing(self, membership: Membership, waited_s: float) -> str:
        text = f"rank {self._wire.rank} has waited {waited_s:.0f} s for a sum"
        try:
            missing = membership.missing()
        except TransportError as cause:
            return f"{text} ({cause})"
        if not missing:
            racks = ", ".join(map(str, membership.missing_racks))
            return f"{text} that lacks rack {racks}" if racks else text
        return f"{text} that lacks {_ranks_text(tuple(self._rack[place] for place in missing))}"

    # ---- gone, and back ----

    def _say_down(self, why: str) -> None:
        with suppress(RuntimeError):  # if the store is gone too, the meeting will say so
            self._store.set(f"down/{self._age}", why)
        with self._state:
            self._down, self._why = True, why
            self._state.notify_all()

    def _said_down(self) -> bool:
        key = f"down/{self._age}"
        try:
            if not self._using or not self._store.check([key]):
                return False
            self._why = self._why or self._store.get(key).decode()
            return True
        except RuntimeError:  # its host is rank 0's, or the launcher's: the process group notices that itself
            return False

    def _watch(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closing or (self._down and self._using), _POLL_S)
                if self._closing:
                    return
                down = self._down and self._using
            try:
                if lost := self._lost():
                    raise self._went_away(lost)
                if down or self._said_down():
                    self._meet()
                elif not self._using and self._wire.rank == 0 and not self._there:
                    self._there = time.monotonic() - self._knocked > self._try_s and self._knock()
            except Exception as cause:
                error = (
                    cause
                    if isinstance(cause, TacitError)
                    else self._wire.lost("meeting about the aggregator", cause)
                )
                with self._state:
                    self._error = error
                    self._state.notify_all()
                self.on_lost(error)
                return

    def _meet(self) -> None:
        """All ranks' watches come here. When they part, every rank has the same sums, and none uses the aggregator."""
        with self._state:
            self._down = True
            self._state.wait_for(lambda: not self._inside)
            finished, newest = self._finished, self._newest
        whole = newest is not None and newest[0]._version == newest[1]  # not if a codec wrote into it
        notes = [torch.zeros(2, dtype=torch.int64) for _ in range(self._wire.world)]
        dist.all_gather(notes, torch.tensor([finished, whole]), group=self._meeting)
        have = [int(note[0]) for note in notes]
        if min(have) < max(have):
            holders = [rank for rank, note in enumerate(notes) if have[rank] == max(have) and note[1]]
            if not holders or max(have) - min(have) > 1:
                raise TransportError(
                    f"sum {max(have)} cannot be had again; restart all ranks from the last checkpoint"
                )
            total = self._room(finished == max(have), holders[0])
            dist.broadcast(total.view(torch.uint8), group_src=holders[0], group=self._meeting)
            with self._state:
                self._given = total if finished < max(have) else None
        seats, self._seats = self._seats, {}
        with self._state:
            self._using, self._there = False, False
            self._knocked = time.monotonic()
            self._try_s = min(2 * self._try_s, _LONGEST_TRY_S)
            self.changes += 1
            self._state.notify_all()
        self._tell(
            f"the aggregator at {address_text(self._control)} is gone ({self._why}); "
            f"the process group adds from sum {max(have) + 1} on, until it is back"
        )
        for seat in seats.values():
            seat.close()

    def _room(self, finished: bool, holder: int) -> Tensor:
        """Where the newest sum is, or where it comes to."""
        if not finished:
            assert self._waiting is not None, "a sum that somebody has was asked for here"
            return self._waiting.room
        assert self._newest is not None
        return self._newest[0] if self._wire.rank == holder else torch.empty_like(self._newest[0])

    def _maybe_return(self) -> None:
        """Rank 0 says whether to try the aggregator again from this sum on."""
        word = torch.tensor([self._there], dtype=torch.uint8)
        try:
            dist.broadcast(word, group_src=0, group=self._meeting)
        except RuntimeError as cause:
            raise self._wire.lost("word about the aggregator", cause) from cause
        if not word.item():
            return
        with self._state:
            self._age += 1
            self._using, self._down, self._why = True, False, ""
            self.changes += 1
        self._tell(
            f"the aggregator at {address_text(self._control)} is back; it adds from sum {self._number} on"
        )

    def _knock(self) -> bool:
        """Whether control is there and greets: a machine whose aggregator hangs would still let us in."""
        self._knocked = time.monotonic()
        try:
            with socket.create_connection(self._control, _TRY_S) as door:
                return bool(door.recv(1))
        except OSError:
            return False

    def _tell(self, sentence: str) -> None:
        log.log(logging.WARNING if self._wire.rank == 0 else logging.INFO, sentence)

    # ---- for the wire ----

    def lost(self) -> tuple[int, ...]:
        """Ranks that control has lost; it may take a moment to say so."""
        deadline = time.monotonic() + _GOSSIP_S
        while self._seats and not self._lost() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._lost()

    def _lost(self) -> tuple[int, ...]:
        lost = {place for seat in list(self._seats.values()) for place in seat.membership.lost}
        return tuple(sorted(self._rack[place] for place in lost))

    def close(self) -> None:
        """Waits a moment for the others: one may lack the last sum, and have nobody but us to get it from."""
        if self._error is None:
            self._wait_for_the_others()
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(2.0)  # unless it stands in a meeting that nobody comes to
        seats, self._seats = self._seats, {}
        for seat in seats.values():
            seat.close()
        if dist.is_initialized():
            dist.destroy_process_group(self._meeting)

    def _wait_for_the_others(self) -> None:
        deadline = time.monotonic() + _FAREWELL_S
        with suppress(RuntimeError):  # the store may have gone with its host
            self._store.set(f"done/{self._wire.rank}", "")
            everybody = [f"done/{rank}" for rank in range(self._wire.world)]
            while not self._store.check(everybody) and self._error is None and time.monotonic() < deadline:
                time.sleep(0.01)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise TransportError("the way to the aggregator was closed; attach the model again to go on")

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

    def _agree_on_a_name(self) -> str:
        """Of this run: rank 0's choice, so that two runs with one aggregator never meet in one job."""
        name = torch.tensor(list(secrets.token_bytes(8)), dtype=torch.uint8)
        dist.broadcast(name, group_src=0, group=self._meeting)
        return bytes(name.tolist()).hex()


def _group_beside(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """The same ranks, on the CPU: what is said there waits for nothing that `group` is doing."""
    ranks = dist.get_process_group_ranks(group)
    whole = len(ranks) == dist.get_world_size()
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=not whole)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _ranks_text(ranks: tuple[int, ...]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
