"""A line to torch's store that never hangs: every question has a deadline, and a client that does not answer is left for a new one.

A client of torch's waits for its answer for ever when the link goes down, and another thread cannot make it stop. So questions are asked
by a thread of their own. One that is late is left behind, to end when its connection does; the next question opens another.

A thread that is inside torch when Python ends aborts the process, so close() waits for it, for as long as a question may take.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import Any, TypeVar

from tacit.errors import TransportError
from tacit.gossip.store import StoreClient

ANSWER_S = 3.0

T = TypeVar("T")
Question = Callable[[Any], Any]


class StoreError(TransportError):
    """The store did not answer, or not in time."""


class Line:
    """Asks a store that `open_store` connects to; any thread may. Opening again is tried with every question."""

    def __init__(self, open_store: Callable[[], Any], *, answer_s: float = ANSWER_S) -> None:
        self._open, self.answer_s = open_store, answer_s
        self._lock = threading.Lock()
        self._clerk: _Clerk | None = None
        self._closed = False

    def ask(self, question: Callable[[Any], T], seconds: float | None = None) -> T:
        """What `question(store)` returns; StoreError if it fails or takes longer than `seconds`."""
        with self._lock:
            if self._closed:
                raise StoreError("this rank has left the store")
            clerk = self._clerk = self._clerk or _Clerk(self._open)
        answer = clerk.ask(question)
        try:
            found: T = answer.result(self.answer_s if seconds is None else seconds)
            return found
        except LateError as cause:
            self._leave(clerk, only_if_open=True)
            raise StoreError("the store does not answer") from cause
        except Exception as cause:  # torch raises RuntimeError, DistStoreError or ValueError by version
            self._leave(clerk)
            raise StoreError(" ".join(str(cause).split())[:120] or type(cause).__name__) from cause

    def close(self) -> None:
        """For good: later questions are refused."""
        with self._lock:
            clerk, self._clerk, self._closed = self._clerk, None, True
        if clerk is not None:
            clerk.leave()
            clerk.join(self.answer_s if clerk.connected else 0.0)  # connecting may take a minute

    def _leave(self, clerk: "_Clerk", only_if_open: bool = False) -> None:
        """One that is still connecting is waited for: two would not be faster."""
        with self._lock:
            if self._clerk is clerk and not (only_if_open and not clerk.connected):
                self._clerk = None
                clerk.leave()


class _Clerk:
    """A thread with a store of its own."""

    def __init__(self, open_store: Callable[[], Any]) -> None:
        self.connected = False
        self._questions: queue.SimpleQueue[tuple[Question, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, args=(open_store,), name="tacit-gossip-store", daemon=True
        )
        self._thread.start()

    def ask(self, question: Question) -> Future[Any]:
        answer: Future[Any] = Future()
        self._questions.put((question, answer))
        return answer

    def leave(self) -> None:
        self._questions.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _work(self, open_store: Callable[[], Any]) -> None:
        store: Any = None
        failure: Exception | None = None
        try:
            store = open_store()
            self.connected = True
        except Exception as cause:
            failure = cause
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            if failure is not None:
                answer.set_exception(failure)
                continue
            try:
                answer.set_result(question(store))
            except Exception as cause:
                answer.set_exception(cause)
        if isinstance(store, StoreClient):
            store.close()
