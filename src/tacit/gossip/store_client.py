"""A client of a store in which every call has a deadline, and a connection that does not answer is abandoned for a new one.

Calls of torch's TCPStore block without a deadline when the link goes down, and another thread cannot cancel them. So each runs in a
disposable thread. One that is late is abandoned, to end when its connection does; the next call opens another.

A thread that is inside torch when Python ends aborts the process, so close() waits for it, for as long as a call may take.
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


class DeadlineClient:
    """Calls a store that `open_store` connects to, from any thread. Every call tries to reconnect where that is needed."""

    def __init__(self, open_store: Callable[[], Any], *, answer_s: float = ANSWER_S) -> None:
        self._open, self.answer_s = open_store, answer_s
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._closed = False

    def ask(self, question: Callable[[Any], T], seconds: float | None = None) -> T:
        """What `question(store)` returns; StoreError if it fails or takes longer than `seconds`."""
        with self._lock:
            if self._closed:
                raise StoreError("this rank has left the store")
            worker = self._worker = self._worker or _Worker(self._open)
        answer = worker.ask(question)
        try:
            found: T = answer.result(self.answer_s if seconds is None else seconds)
            return found
        except LateError as cause:
            self._leave(worker, only_if_open=True)
            raise StoreError("the store does not answer") from cause
        except Exception as cause:  # torch raises RuntimeError, DistStoreError or ValueError by version
            self._leave(worker)
            raise StoreError(" ".join(str(cause).split())[:120] or type(cause).__name__) from cause

    def close(self) -> None:
        """For good: later calls are refused."""
        with self._lock:
            worker, self._worker, self._closed = self._worker, None, True
        if worker is not None:
            worker.leave()
            worker.join(self.answer_s if worker.connected else 0.0)  # connecting may take a minute

    def _leave(self, worker: "_Worker", only_if_open: bool = False) -> None:
        """One that is still connecting is waited for: two would not be faster."""
        with self._lock:
            if self._worker is worker and not (only_if_open and not worker.connected):
                self._worker = None
                worker.leave()


class _Worker:
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
