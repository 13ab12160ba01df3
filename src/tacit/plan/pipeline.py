"""A step as our exchange runs it: a training thread, a codec thread and a wire that share a rank's cores.

    training thread:  segments in order; each may release jobs (their gradients are there) and wait for jobs to be done
    codec thread:     decodes before it encodes, otherwise in order; a job may have several requests, with an encoding before each
    wire:             all requests of job b before those of b + 1; up to `in_flight` at a time

Whatever runs uses CPU while it does. Where the threads that run want more cores than a rank has, all that compute slow down
alike: that is what a codec costs the backward pass on CPU nodes, and the backward pass the codec. Where ranks share cores, an exchange
also waits for ranks whose turn to compute has not come: it is held back while the training thread computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

from tacit.errors import ConfigError

_LEAST_S = 1e-12


@dataclass(frozen=True, slots=True)
class Work:
    """Something that takes `seconds` where it runs alone, and `cpu` CPU seconds of this rank a second."""

    seconds: float
    cpu: float = 0.0


NOTHING = Work(0.0)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the training thread's step: it waits for the jobs it needs, takes its time, and releases jobs."""

    work: Work
    releases: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BucketJob:
    """One bucket's exchange: an encoding before each request, and a decoding at the end. `hook` runs in the training thread first."""

    encodes: tuple[Work, ...]
    wires: tuple[Work, ...]
    decode: Work = NOTHING
    hook: Work = NOTHING

    def __post_init__(self) -> None:
        if not self.wires or len(self.encodes) != len(self.wires):
            raise ConfigError(
                f"a job has {len(self.encodes)} encodings for {len(self.wires)} requests; give one for each"
            )


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """A step played through: its end, and how long each of the three was busy."""

    step_s: float
    training_s: float
    wire_s: float
    codec_s: float


@dataclass(slots=True)
class _Running:
    """A piece of work on its way: what is left of it, and what it was for."""

    left_s: float
    cpu: float
    job: int = -1
    what: str = ""


@dataclass(slots=True)
class _Player:
    segments: Sequence[Segment]
    jobs: Sequence[BucketJob]
    in_flight: int
    together: float
    cores: float
    held: float
    now_s: float = 0.0
    training: _Running | None = None
    codec: _Running | None = None
    wire: list[_Running] = field(default_factory=list)
    turns: deque[tuple[Segment | None, int]] = field(
        default_factory=deque
    )  # of the training thread: a segment, or a job's hook
    inbox: list[tuple[int, int, int]] = field(default_factory=list)  # (answers first, order, job)
    outbox: deque[int] = field(default_factory=deque)
    asked: dict[int, int] = field(default_factory=dict)  # requests that a job has put on the wire
    ready: set[int] = field(default_factory=set)  # jobs whose next request is encoded
    first: int = 0  # the first job with requests to make
    done: set[int] = field(default_factory=set)
    order: count[int] = field(default_factory=count)
    busy_s: dict[str, float] = field(default_factory=lambda: {"training": 0.0, "codec": 0.0, "wire": 0.0})
    released: list[int] = field(default_factory=list)

    def play(self) -> PipelineTimes:
        self.turns.extend((segment, -1) for segment in self.segments)
        most = 8 * (len(self.segments) + sum(4 * len(job.wires) + 4 for job in self.jobs)) + 64
        for _ in range(most):
            self._begin()
            running = [
                r for r in (self.training, self.codec, *self.wire) if r is not None and r.left_s > _LEAST_S
            ]
            if not running:
                break
            self._advance(running)
        if self.turns or len(self.done) < len(self.released):
            raise ConfigError("the step cannot end: a segment waits for a job that nothing releases")
        return PipelineTimes(self.now_s, self.busy_s["training"], self.busy_s["wire"], self.busy_s["codec"])

    # ---- what begins ----

    def _begin(self) -> None:
        """Starts all that can; what takes no time ends at once, which may let more start."""
        moved = True
        while moved:
            moved = self._begin_training() or self._begin_codec() or self._begin_wire()

    def _begin_training(self) -> bool:
        if self.training is not None or not self.turns:
            return False
        segment, job = self.turns[0]
        if segment is not None and not self.done.issuperset(segment.needs):
            return False
        self.turns.popleft()
        work = self.jobs[job].hook if segment is None else segment.work
        self.training = _Running(work.seconds, work.cpu, job)
        if segment is not None:
            self.turns.extendleft((None, released) for released in reversed(segment.releases))
        if work.seconds <= _LEAST_S:
            self._end_training()
        return True

    def _end_training(self) -> None:
        assert self.training is not None
        job, self.training = self.training.job, None
        if job >= 0:  # its hook has run: the exchange has it
            self.released.append(job)
            heappush(self.inbox, (1, next(self.order), job))

    def _begin_codec(self) -> bool:
        if self.codec is not None or not self.inbox:
            return False
        _, _, job = heappop(self.inbox)
        asked = self.asked.setdefault(job, 0)
        last = asked == len(self.jobs[job].wires)
        work = self.jobs[job].decode if last else self.jobs[job].encodes[asked]
        self.codec = _Running(work.seconds, work.cpu, job, "decode" if last else "encode")
        if work.seconds <= _LEAST_S:
            self._end_codec()
        return True

    def _end_codec(self) -> None:
        assert self.codec is not None
        running, self.codec = self.codec, None
        if running.what == "decode":
            self.done.add(running.job)
            return
        self.ready.add(running.job)
        self._issue()

    def _issue(self) -> None:
        """A job's first request follows the last one of the job before it."""
        order = self.released
        while self.first < len(order) and order[self.first] in self.ready:
            job = order[self.first]
            self.ready.discard(job)
            self.asked[job] += 1
            if self.asked[job] == len(self.jobs[job].wires):
                self.first += 1
            self.outbox.append(job)

    def _begin_wire(self) -> bool:
        if len(self.wire) >= self.in_flight or not self.outbox:
            return False
        job = self.outbox.popleft()
        work = self.jobs[job].wires[self.asked[job] - 1]
        self.wire.append(_Running(work.seconds, work.cpu, job))
        self._end_wire()
        return True

    def _end_wire(self) -> None:
        """In order, as the wire thread waits for them."""
        while self.wire and self.wire[0].left_s <= _LEAST_S:
            heappush(self.inbox, (0, next(self.order), self.wire.pop(0).job))

    # ---- what passes ----

    def _advance(self, running: list[_Running]) -> None:
        """Time goes on to the next end of something."""
        speeds = self._speeds(running)
        step_s = min(r.left_s / speed for r, speed in zip(running, speeds, strict=True))
        self.now_s += step_s
        for name, active in (("training", self.training), ("codec", self.codec), ("wire", self.wire)):
            self.busy_s[name] += step_s if active else 0.0
        for r, speed in zip(running, speeds, strict=True):
            r.left_s -= step_s * speed
        if self.training is not None and self.training.left_s <= _LEAST_S:
            self._end_training()
        self._end_wire()
        if self.codec is not None and self.codec.left_s <= _LEAST_S:
            self._end_codec()

    def _speeds(self, running: list[_Running]) -> list[float]:
        """How fast each goes, against alone."""
        wanted = sum(r.cpu for r in running)
        slower = max(1.0, wanted / self.cores)
        alone = min(
            1.0, self.cores
        )  # a rank with less than a core is slowed by the others already where it runs alone
        speeds = []
        several = sum(r.left_s > _LEAST_S for r in self.wire) > 1
        computes = self.training is not None and self.training.left_s > _LEAST_S
        for r in running:
            share = min(1.0, r.cpu / alone)
            speed = 1.0 / (1.0 - share + share * slower)
            speed *= self.together if several and r in self.wire else 1.0
            speeds.append(speed * (1.0 - self.held if computes and r is not self.training else 1.0))
        return speeds


def play(
    segments: Sequence[Segment],
    jobs: Sequence[BucketJob],
    *,
    in_flight: int = 1,
    together: float = 0.5,
    cores: float = inf,
    held: float = 0.0,
) -> PipelineTimes:
    """The step of a training thread with these segments and jobs, in order.

    `together` is the speed of each of several operations on the wire, against one alone: 0.5 where two share what one has. `held` is the
    share of their speed, below 1, that codec and wire lose while the training thread computes.
    """
    return _Player(segments, jobs, in_flight, together, cores, held).play()
