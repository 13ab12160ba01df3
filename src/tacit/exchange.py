"""Drives conversations over a transport while the backward pass runs.

Two threads a handle, each with one queue:

    training thread --job--> codec thread --request--> wire thread
                                  ^-------- answer --------'

- The wire thread alone touches the process group, and answers requests one by one. The order is the same on all
  ranks whatever their speed: all requests of the first job, then all of the second, and so on.
- The codec thread encodes the next job while the last one travels, and decodes an answer as soon as it is there.
- A failure of either thread ends every job with that error; nothing waits for an answer that cannot come.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tacit import _core, recycled
from tacit.buckets import Bucket
from tacit.errors import ConformanceError, TacitError, TransportError
from tacit.layout import Layout
from tacit.memory import MemoryStore
from tacit.requests import Codec, Context, Conversation, Reduced, Request, Sum, as_reduced, context_for
from tacit.schemes import Channel, RowRequests
from tacit.sparse import TouchedRows
from tacit.stats import Stats
from tacit.transports import Wire

_MOST_STARTED = 2  # requests under way, where the scheme does not keep the thread until the answer is here; gloo has as many threads
_FUSED = {torch.float32: (_core.mean, torch.float32), torch.bfloat16: (_core.mean_bf16, torch.uint16)}
_CLOSE_S = 2.0  # a thread inside a collective that nobody answers is left behind after this


RowsTalk = Generator[RowRequests, Any, Reduced]  # conversations of all rows of a reduce-scatter, in lock step
Gradients = Callable[[], Mapping[str, Tensor]]


@dataclass(eq=False, slots=True)
class Reduction:
    """One conversation on its way; `done` is set when `finish` has run or the exchange has failed."""

    talk: Conversation | RowsTalk
    rounds: int
    group: str
    seed: int
    finish: Callable[[Reduced], None]
    done: threading.Event = field(default_factory=threading.Event)
    request: Request | RowRequests | None = None
    asked: int = 0
    ready: torch.Event | None = None  # on an accelerator: when the input was computed, and when the result is
    finished: torch.Event | None = None


class Exchange:
    """The ordered communication of one handle. `close()` ends its threads; so does the end of the process."""

    def __init__(self, channel: Channel, codec: Codec, stats: Stats, *, device: torch.device):
        self.channel, self.wire, self.codec, self.stats = channel, channel.wire, codec, stats
        stats.losses = channel.scheme.losses
        self.most_started = (
            _MOST_STARTED  # with 1, what goes first has the wire to itself; each rank may decide for itself
        )
        self.error: TacitError | None = None
        self.on_fail: Callable[[TacitError], None] = lambda error: None
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._inbox: queue.PriorityQueue[tuple[int, int, Reduction | None, Any]] = queue.PriorityQueue()
        self._outbox: queue.SimpleQueue[tuple[Reduction, Request | RowRequests] | None] = queue.SimpleQueue()
        self._requesting: deque[Reduction] = deque()  # jobs with requests still to make, in order
        self._open: set[Reduction] = set()
        self._flags: deque[tuple[Layout, int, Tensor]] = deque()
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name=f"tacit-{name}", daemon=True)
            for name, work in (("codec", self._codec_thread), ("wire", self._wire_thread))
        ]
        channel.scheme.on_lost(self._fail)  # the wire's thread may stand in a collective until its time-out
        for thread in self._threads:
            thread.start()

    # ---- the training thread's side ----

    def reduce(
        self,
        bucket: Bucket,
        x: Tensor,
        memory: MemoryStore,
        deliver: Callable[[Tensor], None],
        *,
        seed: int,
        step: int,
        in_place: bool = False,
        elsewhere: Gradients | None = None,
    ) -> Reduction:
        """Starts the exchange of `x`; `deliver(mean)` is called in the codec thread. `x` must not change until then.

        `seed` and `step` are the handle's, the same on all ranks: what a codec draws follows from them. `in_place`: x may be overwritten, and
        `deliver` is called with x itself where the mean fits; `elsewhere` then gives this rank's gradients from where they lie as well, to
        name those that are not finite.
        """
        self._report_late(step)
        self._record(x)
        context = self._context(bucket, memory, x.device, seed, step)
        own = _Own(bucket.layout, x, elsewhere if in_place else None)
        talk = self.codec.reduce(x, context)
        if in_place and elsewhere is None and self._stream is None:
            talk = own.looked_at_first(talk)
        if in_place and getattr(self.codec, "spends", False):
            talk = _with_room(talk, x)

        def finish(reduced: Reduced) -> None:
            deliver(self._mean(reduced, own, step, x if in_place else None))

        return self.submit(talk, self.codec.traits.rounds, finish, bucket.group, context.own_seed)

    def reduce_rows(
        self,
        bucket: Bucket,
        gradients: Sequence[Tensor],
        memory: MemoryStore,
        deliver: Callable[[Sequence[Tensor]], None],
        *,
        seed: int,
        step: int,
    ) -> Reduction:
        """As `reduce`, of the sparse gradients of a bucket's tables; `deliver` receives a coalesced mean for each."""
        self._report_late(step)
        for gradient in gradients:
            self._record(gradient._indices(), gradient._values())
        context = self._context(bucket, memory, gradients[0].device, seed, step)
        touched = TouchedRows(bucket.layout, gradients)

        def finish(reduced: Reduced) -> None:
            deliver(touched.split(self._mean(reduced, _Own(touched.layout, touched.x), step)))

        talk, rounds = touched.talk(self.codec, context), 1 + self.codec.traits.rounds
        return self.submit(talk, rounds, finish, bucket.group, context.own_seed)

    def _context(
        self, bucket: Bucket, memory: MemoryStore, device: torch.device, seed: int, step: int
    ) -> Context:
        return context_for(
            memory.of(bucket.layout, device),
            seed=seed,
            step=step,
            bucket=f"{bucket.index}:{bucket.layout.key}",
            rank=self.wire.rank,
            world=self.wire.world,
        )

    def _record(self, *read: Tensor) -> None:
        """On an accelerator they are read in another stream, after this thread may have let go of them."""
        if self._stream is not None:
            for x in read:
                x.record_stream(self._stream)

    def _mean(self, reduced: Reduced, own: "_Own", step: int, room: Tensor | None = None) -> Tensor:
        """The mean, in `room` where it fits there. A pass over it that looks for what is not finite is the same one."""
        total, world = reduced.total, self.wire.world
        if room is not None and room.dtype == torch.promote_types(total.dtype, room.dtype):
            mean = room
        else:
            mean = recycled.empty_like(total) if total is own.x else total
        flat = total.device.type == "cpu" and mean.dtype == torch.float32 and mean.is_contiguous()
        if flat and total.dtype in _FUSED:
            fused, raw = _FUSED[total.dtype]
            finite = fused(total.detach().contiguous().view(raw), world, mean.detach())
        else:
            torch.div(total.to(mean.dtype), world, out=mean)
            if self._stream is not None:  # looked at one step later, when reading the flag stops nobody
                self._flags.append((own.layout, step, mean.isfinite().all()))
                return mean
            finite = bool(mean.isfinite().all())
        if not finite:
            report_nonfinite(self.stats, step, own.nonfinite(), own.layout.split(mean))
        return mean

    def ask(self, request: Request, group: str = "control") -> Any:
        """The answer to a single request, in its place in the order; blocks."""
        return self.start(request, group)()

    def start(self, request: Request, group: str = "control") -> Callable[[], Any]:
        """Sends a single request, in its place in the order; what is returned waits for the answer."""
        answers: list[Any] = []

        def talk() -> Conversation:
            answers.append((yield request))
            return Reduced(torch.empty(0))

        job = self.submit(talk(), 1, lambda reduced: None, group, 0)
        sent = [request]  # kept until it is answered: on an accelerator another stream reads it

        def answer() -> Any:
            self.wait([job])
            sent.clear()
            return answers[0]

        return answer

    def submit(
        self,
        talk: Conversation | RowsTalk,
        rounds: int,
        finish: Callable[[Reduced], None],
        group: str,
        seed: int,
        *,
        read: Sequence[Tensor] = (),
    ) -> Reduction:
        """Starts a conversation, in its place in the order. `read`: tensors of the caller's that it uses, on an accelerator in another stream."""
        self._record(*read)
        job = Reduction(talk, rounds, group, seed, finish)
        if self._stream is not None:
            job.ready = torch.accelerator.current_stream().record_event()
        with self._lock:
            if self.error is not None:
                raise self.error
            self._open.add(job)
            self._requesting.append(job)
        self._inbox.put((1, next(self._count), job, None))
        return job

    def wait(self, jobs: Iterable[Reduction]) -> None:
        """Returns when all jobs are finished; raises what ended the exchange."""
        with self.stats.timed("wait"):
            for job in jobs:
                job.done.wait()
                if job.finished is not None:
                    torch.accelerator.current_stream().wait_event(job.finished)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Ends the threads; one that waits for a lost rank is left to the process group's time-out."""
        self._fail(TransportError("the exchange was closed; attach the model again to go on"))
        self._inbox.put((0, next(self._count), None, None))
        self._outbox.put(None)
        # a thread that still frees tensors while the interpreter ends aborts the process
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
        recycled.release()

    def drop(self) -> None:
        """Ends the threads without waiting for them: for a finalizer, which may run in any thread, wherever that stands."""
        self._outbox.put(None)  # takes no lock; the wire thread ends the codec thread

    # ---- the codec thread ----

    def _codec_thread(self) -> None:
        with self._device():
            while True:
                _, _, job, answer = self._inbox.get()
                if job is None:
                    return
                try:
                    self._advance(job, answer)
                except Exception as cause:
                    self._fail(cause)
                del job, answer  # while it waits, the thread must not keep what a job holds alive: the model

    def _advance(self, job: Reduction, answer: Any) -> None:
        if self._stream is not None and job.ready is not None:
            self._stream.wait_event(job.ready)
            job.ready = None
        with self.stats.timed("decode" if job.asked == job.rounds else "encode"):
            try:
                job.request = job.talk.send(answer)
            except StopIteration as end:
                self._finish(job, as_reduced(end.value))
                return
        if job.asked == job.rounds:
            raise ConformanceError(f"{self.codec} made more than the {job.rounds} requests it declares")
        self._issue()

    def _finish(self, job: Reduction, reduced: Reduced) -> None:
        if job.asked < job.rounds:
            raise ConformanceError(f"{self.codec} made {job.asked} requests and declares {job.rounds}")
        job.finish(reduced)
        if self._stream is not None:
            job.finished = self._stream.record_event()
        with self._lock:
            self._open.discard(job)
        job.done.set()

    def _issue(self) -> None:
        """Sends what may go now: a job's first request follows the last one of the job before it."""
        while self._requesting and (job := self._requesting[0]).request is not None:
            request, job.request = job.request, None
            job.asked += 1
            if job.asked == job.rounds:
                self._requesting.popleft()
            self._outbox.put((job, request))

    def _report_late(self, step: int) -> None:
        while self._flags and self._flags[0][1] < step:
            layout, at, finite = self._flags.popleft()
            if not bool(finite):
                self.stats.found_nonfinite(layout.names, at, "one of these")

    # ---- the wire thread ----

    def _wire_thread(self) -> None:
        with self._device():
            started: deque[tuple[Reduction, str, Callable[[], Any]]] = deque()
            while True:
                try:
                    if started and (len(started) >= self.most_started or self._outbox.empty()):
                        self._end(*started.popleft())
                        continue
                    if (item := self._outbox.get()) is None:
                        break
                    started.append(self._start(*item))
                    if not self.channel.lingers(
                        item[1]
                    ):  # its answer is here: nobody should wait for the next one's
                        while started:
                            self._end(*started.popleft())
                except Exception as cause:
                    self._fail(cause)
                    break
                del item  # as in the codec thread
        self._inbox.put((0, next(self._count), None, None))

    def _start(
        self, job: Reduction, request: Request | RowRequests
    ) -> tuple[Reduction, str, Callable[[], Any]]:
        kind = type(request.requests[0] if isinstance(request, RowRequests) else request).__name__
        with counted(self.wire, self.stats, kind, job.group):
            return job, kind, self.channel.start(request, job.seed)

    def _end(self, job: Reduction, kind: str, wait: Callable[[], Any]) -> None:
        with counted(self.wire, self.stats, kind, job.group):
            answer = wait()
        self._inbox.put((0, next(self._count), job, answer))

    def _device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream

    def _fail(self, cause: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error = cause if isinstance(cause, TacitError) else _unexpected(cause)
            failed, self._open = self._open, set()
            self._requesting.clear()
            error = self.error
        for job in failed:
            job.done.set()
        self.on_fail(error)


def converse(channel: Channel, talk: Conversation, seed: int, stats: Stats, group: str) -> Reduced:
    """Drives one conversation to its end in the calling thread: for callers that wait for the answer anyway."""
    answer: Any = None
    while True:
        with stats.timed("encode" if answer is None else "decode"):
            try:
                request = talk.send(answer)
            except StopIteration as end:
                return as_reduced(end.value)
        with counted(channel.wire, stats, type(request).__name__, group):
            answer = channel.answer(request, seed)


@contextmanager
def counted(wire: Wire, stats: Stats, request: str, group: str) -> Iterator[None]:
    """Books the time and the bytes that leave through `wire` meanwhile."""
    before = wire.sent_nbytes
    with stats.timed("wire"):
        yield
    stats.sent(request, group, wire.sent_nbytes - before)


def _with_room(talk: Conversation, x: Tensor) -> Conversation:
    """The same conversation, of a codec that spends what it is given: its total may be written over `x`."""
    answer: Any = None
    while True:
        try:
            request = talk.send(answer)
        except StopIteration as end:
            return as_reduced(end.value)
        answer = yield replace(request, room=x) if isinstance(request, Sum) else request


class _Own:
    """This rank's numbers in a bucket, and which of them are not finite: found out when it is asked for, unless they will be overwritten."""

    def __init__(self, layout: Layout, x: Tensor, elsewhere: Gradients | None = None):
        self.layout, self.x = layout, x
        self._gradients = elsewhere or (lambda: layout.split(x))
        self._found: Collection[str] | None = None

    def looked_at_first(self, talk: Conversation) -> Conversation:
        self._found = [] if bool(self.x.sum().isfinite()) else self.nonfinite()
        return (yield from talk)

    def nonfinite(self) -> Collection[str]:
        return nonfinite(self._gradients()) if self._found is None else self._found


def nonfinite(parts: Mapping[str, Tensor]) -> list[str]:
    """The names of those that are not finite."""
    return [name for name, part in parts.items() if not bool(part.isfinite().all())]


def report_nonfinite(stats: Stats, step: int, own: Collection[str], mean: Mapping[str, Tensor]) -> None:
    """Counts the parameters whose mean is not finite, and warns the first time, with the rank it came from. `own`: this rank's that are not."""
    bad = nonfinite(mean)
    mine = [name for name in bad if name in own]
    if bad:
        stats.found_nonfinite(
            bad, step, f"this rank's own {mine[0]!r} was not" if mine else "another rank's was not"
        )


def _unexpected(cause: BaseException) -> TacitError:
    error = TacitError(f"the exchange stopped on {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
