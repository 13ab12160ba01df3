"""Calls that run beside their caller, one after another."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """A thread that runs one call after another; it never keeps a process from ending."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (found := self._calls.get()) is not None:
            future, call = found
            try:
                future.set_result(call())
            except BaseException as error:  # whoever waits for it gets it
                future.set_exception(error)
