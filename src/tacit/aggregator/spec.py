"""What an aggregator does, in Python: the specification that every plane is held to. Slow, and meant to be read.

    plane = Plane(slots=64)
    plane.add_job(job)
    for answer, destination in plane.receive(packet, source): ...

A job owns S slots, each with two versions. Chunk k belongs in slot k mod S, version (k / S) mod 2. The first packet of a chunk
writes its lanes, the next ones add theirs, each rank once; the last one calls up the result for all ranks, and a rank that
asks again gets it alone. A rank sends chunk k + S when it has the result of chunk k. native/slot.h is the same in C.

A plane may itself be a rank at another one, its parent. A cell whose ranks are all in is then full, not done: its sum goes up as
data, and again with each duplicate. The parent's result replaces the sum, completes the cell and goes to all ranks.

A lossy job has a deadline: its chunks are closed without ranks whose packets are lost or late, and all ranks get what was closed. When,
lossy.py specifies. It needs a clock: `receive` takes the time, and `expire` is called now and then.

ROWS are passed on as they are, from one member of a job to another: no slot, no sum, nothing longer than what came.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tacit.aggregator.lossy import LEAST_LOSSY_SLOTS, MOST_DEADLINE_MS, Lossy
from tacit.aggregator.wire import (
    HEADER,
    MAGIC,
    MORE,
    MOST_JOBS,
    MOST_PAYLOAD,
    MOST_RANKS,
    MOST_ROWS,
    MOST_SLOTS,
    ROWS_ACK,
    ROWS_HEADER,
    SATURATED,
    VERSION,
    Header,
    LaneType,
    PacketKind,
    RowsHeader,
    after,
)
from tacit.errors import ConfigError

Address = tuple[str, int]  # IPv4 in dots, and a UDP port
Answers = list[tuple[bytes, Address]]
NO_TABLE = (0,) * 16
NOBODY: Address = ("0.0.0.0", 0)  # where a member is that has not joined
MOST_COUNTED = 255  # ranks in a result: `world` has 8 bits


@dataclass(frozen=True, slots=True)
class PlaneJob:
    """What control sends to a plane. Built only if it is consistent; whether its slots are free, the plane checks.

    Every packet holds `elements`; the last one of a vector is filled up with zeros. A rank may have a chunk settled once
    `quorum` ranks are in it; by default that is all of them. `below`: its members are planes, which have so many ranks below
    them, and may report that a lane met its limit there. `upstream`: its sums are added to those of other planes. `shards`: so
    many members behind the ranks are in no sum; all members may send each other ROWS. `deadline_ms`: the job is lossy, and its
    chunks wait no longer for a rank that is late; half of the ranks must be in.
    """

    id: int
    cookie: int
    members: tuple[Address, ...]  # the ranks, then the shards; NOBODY has not joined
    lanes: LaneType
    elements: int
    slots: range
    table: tuple[int, ...] = NO_TABLE
    quorum: int = 0
    below: int = 0
    upstream: "Upstream | None" = None
    shards: int = 0
    deadline_ms: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.id < MOST_JOBS:
            raise ConfigError(f"id={self.id}: a job's number is from 0 to {MOST_JOBS - 1}")
        if not 0 <= self.cookie < 2**64:
            raise ConfigError(f"cookie={self.cookie}: 64 bits, best from secrets.randbits(64)")
        if not 0 <= self.shards <= MOST_RANKS:
            raise ConfigError(f"shards={self.shards}: 0 to {MOST_RANKS - 1} behind the ranks of a job")
        if self.shards and not 1 <= self.world <= len(self.members) <= MOST_RANKS:
            raise ConfigError(
                f"{self.world} ranks and {self.shards} shards: a job has 1 to {MOST_RANKS} members in all; start fewer shards"
            )
        if not 1 <= self.world <= MOST_RANKS:
            raise ConfigError(
                f"{self.world} members: a slot knows 1 to {MOST_RANKS} ranks; split the world into a tree of stars"
            )
        if self.shards and (self.below or self.upstream):
            raise ConfigError(
                f"shards={self.shards}: rows go through one aggregator, and this one has others above or below it; let the shards "
                "be on the ranks"
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
        if self.lanes.indexed and self.ranks * max(self.table) > self.lanes.largest:
            raise ConfigError(
                f"table up to {max(self.table)} from {self.ranks} ranks: {self.lanes.name} lanes hold {self.lanes.largest}; "
                f"use wider lanes, a smaller granularity or fewer ranks a job"
            )
        if self.below and (not self.world <= self.below <= MOST_COUNTED or self.quorum):
            raise ConfigError(
                f"{self.below} ranks below {self.world} planes, quorum={self.quorum}: not less ranks than planes, at most "
                f"{MOST_COUNTED}, which a result can count, and all planes are waited for"
            )
        if not 0 <= self.deadline_ms <= MOST_DEADLINE_MS:
            raise ConfigError(
                f"deadline_ms={self.deadline_ms}: 1 to {MOST_DEADLINE_MS} until a chunk goes without a late rank; 0 to wait for all"
            )
        if self.deadline_ms and (self.quorum or self.below or self.upstream):
            raise ConfigError(
                f"deadline_ms={self.deadline_ms}: a lossy job has no quorum, and one aggregator with none above or below it; leave one out"
            )
        if self.deadline_ms and len(self.slots) < LEAST_LOSSY_SLOTS:
            raise ConfigError(
                f"slots={len(self.slots)}: a lossy job needs {LEAST_LOSSY_SLOTS}, where ranks that are late find what they missed"
            )
        if self.upstream:
            self.upstream.check(self)

    @property
    def world(self) -> int:
        """Ranks, which are in its sums."""
        return len(self.members) - self.shards

    @property
    def ranks(self) -> int:
        """In a whole sum: those of all planes under the same parent."""
        return self.upstream.job.ranks if self.upstream else self.below or self.world

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

    def rows(
        self,
        sender: int,
        receiver: int,
        chunk: int,
        message: int,
        rows: RowsHeader,
        payload: bytes = b"",
        flags: int = 0,
    ) -> bytes:
        """A packet of ROWS that one member sends to another: number `chunk` of that flow, part of its message number `message`."""
        identity = (self.cookie, self.id, receiver, sender, flags, message % 2**16)
        return Header(MAGIC, PacketKind.ROWS, chunk, *identity, len(payload)).bytes() + rows.bytes() + payload

    def packet(self, kind: PacketKind, chunk: int, rank: int, payload: bytes = b"") -> bytes:
        """What `rank` sends: DATA with its lanes or indices, PROBE or SETTLE with none."""
        place = 0 if kind == PacketKind.PROBE else self.place(chunk)
        identity = (self.cookie, self.id, self.world, rank, self.lanes)
        return Header(MAGIC, kind, chunk, *identity, place, len(payload)).bytes() + payload


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where the parent is, its job, this plane's rank in it, and whether its plane takes runs of packets (UDP_SEGMENT)."""

    parent: Address
    job: PlaneJob
    rank: int
    segment: bool = False

    def check(self, own: PlaneJob) -> None:
        """ConfigError if `own` cannot be added up there."""
        if own.quorum or self.job.quorum:
            raise ConfigError(
                f"quorum={own.quorum or self.job.quorum}: a job with a parent waits for all ranks; leave the quorum out"
            )
        if not 0 <= self.rank < self.job.world:
            raise ConfigError(f"rank={self.rank} at the parent: its job has {self.job.world}")
        if self.job.ranks < own.world:
            raise ConfigError(
                f"ranks={self.job.ranks} in the parent's sums: not less than the {own.world} here"
            )
        if (self.job.lanes, self.job.elements) != (own.lanes.above, own.elements):
            raise ConfigError(
                f"{self.job.elements} {self.job.lanes.name} lanes at the parent: sums here are {own.elements} of {own.lanes.above.name}"
            )
        if len(self.job.slots) < len(own.slots):
            raise ConfigError(
                f"slots={self.job.slots} at the parent: not less than the {len(own.slots)} here"
            )


@dataclass(slots=True)
class SlotVersion:
    """One version of one slot."""

    chunk: int | None = None  # never used
    seen: set[int] = field(default_factory=set)
    done: bool = False
    full: bool = False  # all of ours are in, the parent's sum is not
    saturated: bool = False
    total: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.int64))
    since_ns: int = 0  # when the chunk's first packet came; in lossy jobs

    def precedes(self, chunk: int) -> bool:
        return self.chunk is None or after(chunk, self.chunk)

    def close(self, job: PlaneJob) -> None:
        """Done or full, if all are in."""
        whole = len(self.seen) == job.world
        self.done, self.full = whole and not job.upstream, whole and job.upstream is not None


class Plane:
    """Packets in, packets out; `counts` by verdict and event, of all jobs and, in `job_counts`, of each."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.jobs: dict[int, PlaneJob] = {}
        self.cells: dict[int, list[SlotVersion]] = {}  # of each job: version 0 of its slots, then version 1
        self.counts: Counter[str] = Counter()
        self.job_counts: dict[int, Counter[str]] = {}
        self.lossy: dict[int, Lossy] = {}  # of the jobs that are

    def add_job(self, job: PlaneJob) -> None:
        if job.id in self.jobs:
            raise ConfigError(f"job {job.id} is there already; remove it first")
        if job.slots.stop > self.slots:
            raise ConfigError(f"slots={job.slots}: the plane has {self.slots}")
        for other in self.jobs.values():
            if job.slots.start < other.slots.stop and other.slots.start < job.slots.stop:
                raise ConfigError(f"slots={job.slots} meet those of job {other.id}, {other.slots}")
            if job.upstream and other.upstream and job.upstream.job.id == other.upstream.job.id:
                raise ConfigError(
                    f"job={job.upstream.job.id} of the parent is that of job {other.id} already"
                )
        self.jobs[job.id] = job
        self.cells[job.id] = [SlotVersion() for _ in range(2 * len(job.slots))]
        self.job_counts[job.id] = Counter()
        if job.deadline_ms:
            self.lossy[job.id] = Lossy(job.world, len(job.slots), job.deadline_ms * 1_000_000)

    def remove_job(self, id: int) -> None:
        del self.jobs[id], self.cells[id], self.job_counts[id]
        self.lossy.pop(id, None)

    def receive(self, packet: bytes, source: Address, now_ns: int = 0) -> Answers:
        """What the plane sends because of this packet, and where to."""
        verdict, answers = self._judge(packet, source, now_ns)
        self.counts[verdict] += 1
        return answers

    def expire(self, now_ns: int) -> Answers:
        """What the plane sends because deadlines of lossy jobs are over."""
        answers: Answers = []
        for id, lossy in self.lossy.items():
            cells = [cell for cell in self.cells[id] if cell.seen and not cell.done]
            for cell in cells:
                if cell.chunk is not None and lossy.is_over(cell.since_ns, now_ns):
                    lossy.late(cell.chunk, cell.seen)
            for cell in cells:
                answers += self._close_unless_it_waits(self.jobs[id], lossy, cell, 0)
        return answers

    def _judge(self, packet: bytes, source: Address, now_ns: int) -> tuple[str, Answers]:
        if len(packet) < HEADER.size:
            return "short", []
        header, payload = Header.of(packet), packet[HEADER.size :]
        if fault := _packet_fault(header, len(payload)):
            if fault == "kind" and header.kind == PacketKind.RESULT and (below := self._below(header.job)):
                verdict, answers = self._judge_result(below, header, payload, source)
                self.job_counts[below.id][verdict] += 1
                return verdict, answers
            return fault, []
        if (job := self.jobs.get(header.job)) is None:
            return "job", [(_reply(header, PacketKind.UNKNOWN), source)]
        verdict, answers = self._judge_member(job, header, payload, source, now_ns)
        self.job_counts[job.id][verdict] += 1
        return verdict, answers

    def _judge_member(
        self, job: PlaneJob, header: Header, payload: bytes, source: Address, now_ns: int
    ) -> tuple[str, Answers]:
        if header.cookie != job.cookie:
            return "cookie", [(_reply(header, PacketKind.UNKNOWN), source)]
        if fault := _member_fault(job, header, source):
            return fault, []
        if header.kind == PacketKind.PROBE:
            return "echoed", [(_reply(header, PacketKind.ECHO), source)]
        if header.kind == PacketKind.ROWS:
            receiver = job.members[header.world]
            return (
                ("unreached", [])
                if receiver == NOBODY
                else ("forwarded", [(header.bytes() + payload, receiver)])
            )
        if lossy := self.lossy.get(job.id):
            return self._judge_lossy(job, lossy, header, payload, now_ns)
        cell = self._cell(job, header.chunk)
        if header.kind == PacketKind.DATA:
            verdict = self._take(job, cell, header, payload)
        else:
            verdict = _settle(job, cell, header)
        if job.upstream and cell.full and verdict in ("wrote", "added", "duplicate"):
            return verdict, [(_upward(job, job.upstream, cell), job.upstream.parent)]
        completed = verdict == "settled" or (verdict in ("wrote", "added") and cell.done)
        if completed:
            self._event(job, "completed")
            return verdict, [(_result(job, cell, header), member) for member in job.members[: job.world]]
        if verdict == "repeated":
            return verdict, [(_result(job, cell, header), source)]
        return verdict, [(_reply(header, PacketKind.STALE), source)] if verdict == "stale" else []

    def _judge_lossy(
        self, job: PlaneJob, lossy: Lossy, header: Header, payload: bytes, now_ns: int
    ) -> tuple[str, Answers]:
        cell = self._cell(job, header.chunk)
        answers: Answers = []
        later, data = cell.precedes(header.chunk), header.kind == PacketKind.DATA
        if later and lossy.holds(header.chunk):
            return "held", []
        verdict = "passed"
        if data:
            verdict = self._take(job, cell, header, payload)
        elif not later and header.chunk != cell.chunk:
            verdict = "stale"
        elif not later and cell.done:
            verdict = "repeated"
        if verdict == "stale":
            return verdict, [(_reply(header, PacketKind.STALE), job.members[header.rank])]
        if verdict == "wrote":
            cell.since_ns = now_ns
        if data and not lossy.is_over(cell.since_ns, now_ns):
            lossy.absent.discard(header.rank)
        if verdict == "repeated":
            answers.append((_result(job, cell, header), job.members[header.rank]))
        elif cell.done and verdict != "passed":
            answers += self._close(job, lossy, cell, header.rank)
        gone = (lossy.sent if data else lossy.reported)(header.rank, header.chunk)
        for chunk in [*gone, *([header.chunk] if data else [])]:
            if (found := self._cell(job, chunk)).chunk == chunk:
                answers += self._close_unless_it_waits(job, lossy, found, header.rank)
        return verdict, answers

    def _close_unless_it_waits(self, job: PlaneJob, lossy: Lossy, cell: SlotVersion, rank: int) -> Answers:
        if cell.chunk is None or cell.done or lossy.waits(cell.chunk, cell.seen):
            return []
        return self._close(job, lossy, cell, rank)

    def _close(self, job: PlaneJob, lossy: Lossy, cell: SlotVersion, rank: int) -> Answers:
        """Its sum goes to all, as if `rank` had called it up."""
        assert cell.chunk is not None
        cell.done = True
        self._event(job, "completed")
        if len(cell.seen) < job.world:
            self._event(job, "partial")
            lossy.close(cell.seen)
        header = Header.of(job.packet(PacketKind.SETTLE, cell.chunk, rank))
        return [(_result(job, cell, header), member) for member in job.members[: job.world]]

    def _cell(self, job: PlaneJob, chunk: int) -> SlotVersion:
        return self.cells[job.id][chunk % (2 * len(job.slots))]

    def _below(self, id: int) -> PlaneJob | None:
        """The job that is number `id` at its parent."""
        return next((job for job in self.jobs.values() if job.upstream and job.upstream.job.id == id), None)

    def _judge_result(
        self, job: PlaneJob, header: Header, payload: bytes, source: Address
    ) -> tuple[str, Answers]:
        """A packet whose header claims the parent as its source. Invalid ones are not answered: two planes must not answer each other for ever."""
        assert job.upstream
        if fault := _result_fault(job, job.upstream, header, source):
            return fault, []
        cell = self._cell(job, header.chunk)
        if not cell.full or cell.chunk != header.chunk:
            return "late", []
        cell.full, cell.done = False, True
        cell.saturated = cell.saturated or bool(header.lanes & SATURATED)
        cell.total = np.frombuffer(payload, job.lanes.dtype)
        self._event(job, "completed")
        down = header._replace(cookie=job.cookie, job=job.id, rank=0, place=job.place(header.chunk))
        return "answered", [(_result(job, cell, down), member) for member in job.members]

    def _take(self, job: PlaneJob, cell: SlotVersion, header: Header, payload: bytes) -> str:
        lanes = _lanes(job, payload)
        if cell.precedes(header.chunk):
            if cell.seen and not cell.done:
                self._event(job, "abandoned")
            cell.chunk, cell.seen = header.chunk, {header.rank}
            cell.saturated, cell.total = bool(header.lanes & SATURATED), lanes
            cell.close(job)
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
        cell.saturated = cell.saturated or bool(header.lanes & SATURATED)  # at a plane below
        cell.seen.add(header.rank)
        cell.close(job)
        return "added"

    def _event(self, job: PlaneJob, name: str) -> None:
        self.counts[name] += 1
        self.job_counts[job.id][name] += 1


def _packet_fault(header: Header, payload_nbytes: int) -> str:
    """Why a packet is refused, whoever sent it; the first reason counts. Empty: it is not."""
    nbytes = header.nbytes + (ROWS_HEADER.size if header.kind == PacketKind.ROWS else 0)
    refused = {
        "magic": header.magic & 0xF0 != MAGIC & 0xF0,
        "layout": header.magic & 0x0F != MAGIC & 0x0F,
        "truncated": nbytes > payload_nbytes,
        "oversized": nbytes < payload_nbytes,
        "kind": header.kind not in (PacketKind.DATA, PacketKind.PROBE, PacketKind.SETTLE, PacketKind.ROWS),
    }
    return next((reason for reason, holds in refused.items() if holds), "")


def _member_fault(job: PlaneJob, header: Header, source: Address) -> str:
    """Why a packet with the right key is refused."""
    rows = header.kind == PacketKind.ROWS
    if rows and (header.world >= len(job.members) or header.world == header.rank):
        return "world"  # its receiver
    if not rows and header.world != job.world:
        return "world"
    if header.rank >= (len(job.members) if rows or header.kind == PacketKind.PROBE else job.world):
        return "rank"
    if source != job.members[header.rank] or source == NOBODY:
        return "source"
    if rows:
        return _rows_fault(header)
    flags = MORE | (SATURATED if job.below else 0)
    if (header.lanes & ~flags if header.kind == PacketKind.DATA else header.lanes) != job.lanes:
        return "lanes"
    if header.nbytes != (job.data_nbytes if header.kind == PacketKind.DATA else 0):
        return "length"
    if header.kind == PacketKind.PROBE:
        return ""  # it has no place, and its chunk is what the sender likes to see again
    if header.slot not in job.slots:
        return "slot"
    return "" if header.place == job.place(header.chunk) else "place"


def _rows_fault(header: Header) -> str:
    if header.lanes not in (0, ROWS_ACK):
        return "lanes"
    return "length" if header.nbytes > (0 if header.lanes == ROWS_ACK else MOST_ROWS) else ""


def _result_fault(job: PlaneJob, upstream: Upstream, header: Header, source: Address) -> str:
    """Why a result for a job of the parent is refused."""
    refused = {
        "cookie": header.cookie != upstream.job.cookie,
        "source": source != upstream.parent,
        "world": header.world != upstream.job.ranks,
        "rank": header.rank >= upstream.job.world,
        "lanes": header.lanes & ~SATURATED != upstream.job.lanes,
        "length": header.nbytes != job.result_nbytes,
        "slot": header.slot not in upstream.job.slots,
        "place": header.place != upstream.job.place(header.chunk),
    }
    return next((reason for reason, holds in refused.items() if holds), "")


def _settle(job: PlaneJob, cell: SlotVersion, header: Header) -> str:
    if cell.precedes(header.chunk):
        return "early"
    if header.chunk != cell.chunk:
        return "stale"
    if cell.done:
        return "repeated"
    if len(cell.seen) < job.needed or job.upstream:
        return "early"
    cell.done = True
    return "settled"


def _lanes(job: PlaneJob, payload: bytes) -> NDArray[Any]:
    """The numbers that a rank adds: integers, or float32."""
    if not job.lanes.indexed:
        own = np.frombuffer(payload, job.lanes.dtype)
        return own.copy() if job.lanes is LaneType.F32 else own.astype(np.int64)
    packed = np.frombuffer(payload, np.uint8)
    return np.array(job.table, np.int64)[np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)]


def _add(lanes: LaneType, total: NDArray[Any], own: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """The sum as `lanes` hold it, and whether one of them met its limit: int32 wraps, float32 has none, the others stop there."""
    if lanes is LaneType.F32:
        return total + own, False
    exact = total + own
    held = exact.astype(np.int32).astype(np.int64) if lanes is LaneType.I32 else exact.clip(max=lanes.largest)
    return held, bool((held != exact).any())


def _upward(job: PlaneJob, upstream: Upstream, cell: SlotVersion) -> bytes:
    """The sum of a full cell, on its way to the parent."""
    assert cell.chunk is not None
    payload = cell.total.astype(job.lanes.dtype).tobytes()
    packet = upstream.job.packet(PacketKind.DATA, cell.chunk, upstream.rank, payload)
    header = Header.of(packet)
    return header._replace(lanes=header.lanes | (SATURATED if cell.saturated else 0)).bytes() + payload


def _result(job: PlaneJob, cell: SlotVersion, header: Header) -> bytes:
    lanes = job.lanes | (SATURATED if cell.saturated else 0)
    world = job.ranks if len(cell.seen) == job.world else len(cell.seen)
    header = header._replace(kind=PacketKind.RESULT, world=world, lanes=lanes, nbytes=job.result_nbytes)
    return header.bytes() + cell.total.astype(job.lanes.dtype).tobytes()


def _reply(header: Header, kind: PacketKind) -> bytes:
    return header._replace(kind=kind, nbytes=0).bytes()
