"""What an aggregator does, in Python: the specification that every plane is held to. Slow, and meant to be read.

    plane = Plane(slots=64)
    plane.add_job(job)
    for answer, destination in plane.receive(packet, source): ...

A job owns S slots, each with two versions. Chunk k belongs in slot k mod S, version (k / S) mod 2. The first packet of a chunk
writes its lanes, the next ones add theirs, each rank once; the last one calls up the result for all ranks, and a rank that
asks again gets it alone. A rank sends chunk k + S when it has the result of chunk k. native/slot.h says the same in C.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tacit.aggregator.wire import (
    HEADER,
    MAGIC,
    MOST_JOBS,
    MOST_PAYLOAD,
    MOST_RANKS,
    MOST_SLOTS,
    SATURATED,
    VERSION,
    Header,
    Kind,
    LaneType,
    after,
)
from tacit.errors import ConfigError

Address = tuple[str, int]  # IPv4 in dots, and a UDP port
Answers = list[tuple[bytes, Address]]
NO_TABLE = (0,) * 16


@dataclass(frozen=True, slots=True)
class Job:
    """What control tells a plane. Built only if it is consistent; whether its slots are free, the plane says.

    Every packet holds `elements`; the last one of a vector is filled up with zeros. A rank may have a chunk settled once
    `quorum` ranks are in it; by default that is all of them.
    """

    id: int
    cookie: int
    members: tuple[Address, ...]  # by rank
    lanes: LaneType
    elements: int
    slots: range
    table: tuple[int, ...] = NO_TABLE
    quorum: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.id < MOST_JOBS:
            raise ConfigError(f"id={self.id}: a job's number is from 0 to {MOST_JOBS - 1}")
        if not 0 <= self.cookie < 2**64:
            raise ConfigError(f"cookie={self.cookie}: 64 bits, best from secrets.randbits(64)")
        if not 1 <= self.world <= MOST_RANKS:
            raise ConfigError(
                f"{self.world} members: a slot knows 1 to {MOST_RANKS} ranks; split the world into a tree of stars"
            )
        if not 0 <= self.quorum <= self.world:
            raise ConfigError(f"quorum={self.quorum}: from 1 to the {self.world} ranks; 0 for all")
        if self.slots.step != 1 or len(self.slots) & (len(self.slots) - 1) or not self.slots:
            raise ConfigError(
                f"slots={self.slots}: a run of a power of two, lest chunks lose their place when they wrap"
            )
        if self.slots.start < 0 or self.slots.stop > MOST_SLOTS:
            raise ConfigError(f"slots={self.slots}: from 0 to {MOST_SLOTS - 1}")
        if self.elements < 8 or self.elements % 8 or self.lanes.result_nbytes(self.elements) > MOST_PAYLOAD:
            raise ConfigError(
                f"elements={self.elements}: a multiple of 8 whose {self.lanes.name} lanes take up to {MOST_PAYLOAD} "
                f"bytes; LaneType.elements(mtu) gives the most for a path"
            )
        if len(self.table) != 16 or not all(0 <= value <= 255 for value in self.table):
            raise ConfigError(f"table={self.table}: 16 values from 0 to 255; fill it up with zeros")
        if self.lanes.indexed and self.world * max(self.table) > self.lanes.largest:
            raise ConfigError(
                f"table up to {max(self.table)} from {self.world} ranks: {self.lanes.name} lanes hold {self.lanes.largest}; "
                f"use wider lanes, a smaller granularity or fewer ranks a job"
            )

    @property
    def world(self) -> int:
        return len(self.members)

    @property
    def needed(self) -> int:
        """Ranks that a settle needs."""
        return self.quorum or self.world

    @property
    def data_nbytes(self) -> int:
        return self.lanes.data_nbytes(self.elements)

    @property
    def result_nbytes(self) -> int:
        return self.lanes.result_nbytes(self.elements)

    def place(self, chunk: int) -> int:
        """The chunk's slot and version, as they go to the wire."""
        window = len(self.slots)
        return self.slots.start + chunk % window + (VERSION if chunk // window % 2 else 0)

    def packet(self, kind: Kind, chunk: int, rank: int, payload: bytes = b"") -> bytes:
        """What `rank` sends: DATA with its lanes or indices, PROBE or SETTLE with none."""
        place = 0 if kind == Kind.PROBE else self.place(chunk)
        identity = (self.cookie, self.id, self.world, rank, self.lanes)
        return Header(MAGIC, kind, chunk, *identity, place, len(payload)).bytes() + payload


@dataclass(slots=True)
class Cell:
    """One version of one slot."""

    chunk: int | None = None  # never used
    seen: set[int] = field(default_factory=set)
    done: bool = False
    saturated: bool = False
    total: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def precedes(self, chunk: int) -> bool:
        return self.chunk is None or after(chunk, self.chunk)


class Plane:
    """Packets in, packets out; `counts` by verdict and event, of all jobs and, in `job_counts`, of each."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.jobs: dict[int, Job] = {}
        self.cells: dict[int, list[Cell]] = {}  # of each job: version 0 of its slots, then version 1
        self.counts: Counter[str] = Counter()
        self.job_counts: dict[int, Counter[str]] = {}

    def add_job(self, job: Job) -> None:
        if job.id in self.jobs:
            raise ConfigError(f"job {job.id} is there already; remove it first")
        if job.slots.stop > self.slots:
            raise ConfigError(f"slots={job.slots}: the plane has {self.slots}")
        for other in self.jobs.values():
            if job.slots.start < other.slots.stop and other.slots.start < job.slots.stop:
                raise ConfigError(f"slots={job.slots} meet those of job {other.id}, {other.slots}")
        self.jobs[job.id] = job
        self.cells[job.id] = [Cell() for _ in range(2 * len(job.slots))]
        self.job_counts[job.id] = Counter()

    def remove_job(self, id: int) -> None:
        del self.jobs[id], self.cells[id], self.job_counts[id]

    def receive(self, packet: bytes, source: Address) -> Answers:
        """What the plane sends because of this packet, and where to."""
        verdict, answers = self._judge(packet, source)
        self.counts[verdict] += 1
        return answers

    def _judge(self, packet: bytes, source: Address) -> tuple[str, Answers]:
        if len(packet) < HEADER.size:
            return "short", []
        header, payload = Header.of(packet), packet[HEADER.size :]
        if fault := _packet_fault(header, len(payload)):
            return fault, []
        if (job := self.jobs.get(header.job)) is None:
            return "job", [(_reply(header, Kind.UNKNOWN), source)]
        verdict, answers = self._judge_member(job, header, payload, source)
        self.job_counts[job.id][verdict] += 1
        return verdict, answers

    def _judge_member(self, job: Job, header: Header, payload: bytes, source: Address) -> tuple[str, Answers]:
        if header.cookie != job.cookie:
            return "cookie", [(_reply(header, Kind.UNKNOWN), source)]
        if fault := _member_fault(job, header, source):
            return fault, []
        if header.kind == Kind.PROBE:
            return "echoed", [(_reply(header, Kind.ECHO), source)]
        cell = self.cells[job.id][header.chunk % (2 * len(job.slots))]
        if header.kind == Kind.DATA:
            verdict = self._take(job, cell, header, payload)
        else:
            verdict = _settle(job, cell, header)
        completed = verdict == "settled" or (verdict in ("wrote", "added") and cell.done)
        if completed:
            self._event(job, "completed")
            return verdict, [(_result(job, cell, header), member) for member in job.members]
        if verdict == "repeated":
            return verdict, [(_result(job, cell, header), source)]
        return verdict, [(_reply(header, Kind.STALE), source)] if verdict == "stale" else []

    def _take(self, job: Job, cell: Cell, header: Header, payload: bytes) -> str:
        lanes = _lanes(job, payload)
        if cell.precedes(header.chunk):
            if cell.seen and not cell.done:
                self._event(job, "abandoned")
            cell.chunk, cell.seen, cell.done = header.chunk, {header.rank}, job.world == 1
            cell.saturated, cell.total = False, lanes
            return "wrote"
        if header.chunk != cell.chunk:
            return "stale"
        if cell.done:
            return "repeated"
        if header.rank in cell.seen:
            return "duplicate"
        cell.total, over = _add(job.lanes, cell.total, lanes)
        if over:
            cell.saturated = True
            self._event(job, "saturated")
        cell.seen.add(header.rank)
        cell.done = len(cell.seen) == job.world
        return "added"

    def _event(self, job: Job, name: str) -> None:
        self.counts[name] += 1
        self.job_counts[job.id][name] += 1


def _packet_fault(header: Header, payload_nbytes: int) -> str:
    """Why a packet is refused, whoever sent it; the first reason counts. Empty: it is not."""
    refused = {
        "magic": header.magic & 0xF0 != MAGIC & 0xF0,
        "layout": header.magic & 0x0F != MAGIC & 0x0F,
        "truncated": header.nbytes > payload_nbytes,
        "oversized": header.nbytes < payload_nbytes,
        "kind": header.kind not in (Kind.DATA, Kind.PROBE, Kind.SETTLE),
    }
    return next((reason for reason, holds in refused.items() if holds), "")


def _member_fault(job: Job, header: Header, source: Address) -> str:
    """Why a packet with the right key is refused."""
    if header.world != job.world:
        return "world"
    if header.rank >= job.world:
        return "rank"
    if source != job.members[header.rank]:
        return "source"
    if header.lanes != job.lanes:
        return "lanes"
    if header.nbytes != (job.data_nbytes if header.kind == Kind.DATA else 0):
        return "length"
    if header.kind == Kind.PROBE:
        return ""  # it has no place, and its chunk is what the sender likes to see again
    if header.slot not in job.slots:
        return "slot"
    return "" if header.place == job.place(header.chunk) else "place"


def _settle(job: Job, cell: Cell, header: Header) -> str:
    if cell.precedes(header.chunk):
        return "early"
    if header.chunk != cell.chunk:
        return "stale"
    if cell.done:
        return "repeated"
    if len(cell.seen) < job.needed:
        return "early"
    cell.done = True
    return "settled"


def _lanes(job: Job, payload: bytes) -> NDArray[np.int64]:
    """The numbers that a rank adds."""
    if not job.lanes.indexed:
        return np.frombuffer(payload, job.lanes.dtype).astype(np.int64)
    packed = np.frombuffer(payload, np.uint8)
    return np.array(job.table, np.int64)[np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)]


def _add(lanes: LaneType, total: NDArray[np.int64], own: NDArray[np.int64]) -> tuple[NDArray[np.int64], bool]:
    """The sum as `lanes` hold it, and whether one of them met its limit: int32 wraps, the others stop there."""
    exact = total + own
    held = exact.astype(np.int32).astype(np.int64) if lanes is LaneType.I32 else exact.clip(max=lanes.largest)
    return held, bool((held != exact).any())


def _result(job: Job, cell: Cell, header: Header) -> bytes:
    lanes = job.lanes | (SATURATED if cell.saturated else 0)
    header = header._replace(kind=Kind.RESULT, world=len(cell.seen), lanes=lanes, nbytes=job.result_nbytes)
    return header.bytes() + cell.total.astype(job.lanes.dtype).tobytes()


def _reply(header: Header, kind: Kind) -> bytes:
    return header._replace(kind=kind, nbytes=0).bytes()
