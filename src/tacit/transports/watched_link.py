"""What links to an aggregator have in common: reports in torch's store that it is gone, the thread that watches for them, and the end.

A rank may stand in a collective elsewhere that waits for one which still lacks something from the aggregator, so a thread of each rank watches
the store. When it is gone, all ranks' threads meet, over a process group of their own (`_meet`); while it is, they try to return
(`_lead_attempt` on rank 0, `_follow` on the others). What is lost, what a meeting hands over and what a place at the aggregator is differ:
aggregator_link.py has sums, row_link.py has rows.
"""

import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from tacit.errors import TacitError, TransportError
from tacit.transports.aggregator_seat import GoneError
from tacit.transports.beside import group_beside, name_for
from tacit.transports.process_group import Wire

log = logging.getLogger("tacit")

_POLL_S = 0.2  # between two looks at the store
_FAREWELL_S = 2.0
STEADY_S = 60.0  # in use for so long: the next attempt to return is early again
MOST_REASONS = (
    8  # of attempts that fail, warned of until it is steady again: a stranger on its port may invent them
)


class WatchedLink(ABC):
    """Opened by all ranks together. One thread, the caller's, uses it; `close` ends the watch and leaves the aggregator."""

    _kind: ClassVar[str]  # in the store
    _thread_name: ClassVar[str]
    _closed: ClassVar[str]  # the error of those who use it after that

    def __init__(
        self, wire: Wire, timeout: timedelta | None, meeting: dist.ProcessGroup | None = None
    ) -> None:
        self._wire = wire
        self._timeout_s = (timeout or dist.default_pg_timeout).total_seconds()
        self._meeting = meeting or group_beside(wire.group, timeout)
        self._run = name_for(self._meeting)
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.distributed_c10d.PrefixStore(f"tacit/{self._kind}/{self._run}", store)
        self.through = self.round_about = 0  # sums or exchanges that took either way
        self.changes = 0  # how often the aggregator went, or came back
        self.on_lost: Callable[[BaseException], None] = lambda error: None

        self._state = threading.Condition()  # guards what both threads touch, below
        self._using = True  # as all ranks have agreed
        self._down = False  # somebody reported that it should not be
        self._inside = False  # the caller's thread talks to the aggregator
        self._age = 0  # the attempt to return that succeeded last
        self._attempt = 0  # the newest that this rank knows of
        self._number = self._finished = 0  # of sums or exchanges
        self._group_from = 0  # the first that the process group does, as the last meeting has found
        self._error: TacitError | None = None
        self._why = ""
        self._since = time.monotonic()  # the aggregator is in use
        self._warned: set[str] = set()  # of these reasons, since it was last steady
        self._closing = False

    def _begin_watch(self) -> None:
        self._thread = threading.Thread(target=self._watch, name=self._thread_name, daemon=True)
        self._thread.start()

    # ---- what differs

    @abstractmethod
    def _found_gone(self) -> str:
        """Why the aggregator is gone, as the watch sees before the caller's thread does; "" if it is not. May raise what ends training."""

    @abstractmethod
    def _meet(self) -> None:
        """All ranks' watches come here. When they part, none uses the aggregator, and none lacks what another has."""

    @abstractmethod
    def _lead_attempt(self) -> None:
        """Rank 0's, while the aggregator is gone: now and then an attempt to return."""

    @abstractmethod
    def _follow(self, attempt: int) -> None:
        """The other ranks', when rank 0 has begun one."""

    @abstractmethod
    def _leave(self) -> None:
        """Gives up all places at the aggregator."""

    # ---- reports

    def _say_down(self, why: str) -> None:
        with suppress(RuntimeError):  # if the store is gone too, the meeting will show it
            self._store.set(f"down/{self._age}", why)
        with self._state:
            self._down, self._why = True, why
            self._state.notify_all()

    def _said_down(self) -> bool:
        with self._state:  # together: the key of an age that is over is void for this one
            using, key = self._using, f"down/{self._age}"
        try:
            if not using or not self._store.check([key]):
                return False
            self._why = self._why or self._store.get(key).decode()
            return True
        except RuntimeError:  # its host is rank 0's, or the launcher's: the process group notices that itself
            return False

    def _check(self) -> None:
        self._raise()
        if self._down:
            raise GoneError("another rank lost it")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise TransportError(self._closed)

    # ---- the watch

    def _watch(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: self._closing or self._error or (self._down and self._using), _POLL_S
                )
                if self._closing or self._error:
                    return
                down = self._down and self._using
            try:
                why = self._found_gone()
                if why and not down:
                    self._say_down(why)
                    down = True
                if down or self._said_down():
                    self._meet()
                elif not self._using:
                    self._seek_return()
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

    def _seek_return(self) -> None:
        """Training goes on meanwhile."""
        with suppress(RuntimeError):  # of the store: if its host is gone, the process group notices that
            if self._wire.rank == 0:
                self._lead_attempt()
            else:
                self._follow_attempt()

    def _follow_attempt(self) -> None:
        newest = self._attempt
        while self._store.check([f"try/{newest + 1}"]):  # more than one, if this rank was not there for long
            newest += 1
        if newest > self._attempt:
            self._follow(newest)

    def _warn(self, sentence: str, reason: str) -> None:
        """A warning of rank 0; INFO on the others, and for a reason that was warned of since the aggregator was last steady."""
        new = _alike(reason) not in self._warned
        self._warned.add(_alike(reason))
        log.log(logging.WARNING if new and self._wire.rank == 0 else logging.INFO, sentence)

    # ---- the end

    def close(self) -> None:
        """Waits a moment for the others: one may lack what it can have from nobody but us."""
        if self._error is None:
            self._wait_for_the_others()
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(2.0)  # unless it stands in a meeting that nobody comes to
        self._leave()
        if dist.is_initialized():
            dist.destroy_process_group(self._meeting)

    def _wait_for_the_others(self) -> None:
        deadline = time.monotonic() + _FAREWELL_S
        with suppress(RuntimeError):  # the store may have gone with its host
            self._store.set(f"done/{self._wire.rank}", "")
            everybody = [f"done/{rank}" for rank in range(self._wire.world)]
            while not self._store.check(everybody) and self._error is None and time.monotonic() < deadline:
                time.sleep(0.01)


def _alike(why: str) -> str:
    """The same text for reasons that differ in numbers only."""
    return re.sub(r"\d+", "#", why)
