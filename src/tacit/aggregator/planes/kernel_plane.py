"""The kernel plane: a BPF program in the path of packets adds them, on a switch's ports or on a host's one interface.

with KernelPlane(("10.0.0.254", 4800), ["port1", "port2"], slots=1024) as plane:
    plane.add_job(job)

Packets to that address are taken out of the path wherever they come in; all others pass. Python only fills maps and reads them.
It runs in the network namespace of the interfaces, and needs root, clang and libbpf: `KernelPlane.missing()` returns which is not
there. What it does is native/bpf/plane.bpf.c; why, docs/decisions/0008-aggregator-wire.md.
"""

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from tacit.aggregator.planes import bpf
from tacit.aggregator.planes.stats import JobStats, RankStats
from tacit.aggregator.spec import Address, PlaneJob
from tacit.aggregator.wire import EVENTS, MOST_JOBS, MOST_RANKS, MOST_SLOTS, VERDICTS, LaneType
from tacit.errors import ConfigError, did_you_mean

_IP_FREEBIND = 15
_NAMES = (*VERDICTS, *EVENTS)
_DEVICE = ("unsent", "failures", "segmented")
_COUNTERS = 1 + len(_NAMES) + 2 + len(_DEVICE)  # TACIT_FINE, counts, answered_nbytes, carried, ...
_BLOCK = 64  # bytes of lanes that are added at a time
_NO_JOB = MOST_JOBS  # where packets are counted that belong to none


# ---- the structs of plane.bpf.c and slot.h


class _Terms(ctypes.Structure):
    _fields_ = (
        ("cookie", ctypes.c_uint64),
        ("first_slot", ctypes.c_uint16),
        ("slots", ctypes.c_uint16),
        ("elements", ctypes.c_uint16),
        ("data_nbytes", ctypes.c_uint16),
        ("result_nbytes", ctypes.c_uint16),
        ("world", ctypes.c_uint8),
        ("quorum", ctypes.c_uint8),
        ("lanes", ctypes.c_uint8),
        ("below", ctypes.c_uint8),
        ("upward", ctypes.c_uint8),
        ("members", ctypes.c_uint8),
        ("table", ctypes.c_uint8 * 16),
    )


class _Member(ctypes.Structure):
    _fields_ = (
        ("ip", ctypes.c_uint8 * 4),
        ("port", ctypes.c_uint8 * 2),
        ("unused_port", ctypes.c_uint16),
        ("path", ctypes.c_uint8 * 16),
        ("packets", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("last_ns", ctypes.c_uint64),
        ("newest", ctypes.c_uint64),
        ("owed", ctypes.c_uint64),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("terms", _Terms),
        ("unused", ctypes.c_uint64 * 3),
        ("pairs", ctypes.c_uint32 * 256),
        ("members", _Member * MOST_RANKS),
    )


_CELL = np.dtype(
    [
        ("lock", "<u4", 2),
        ("seen", "<u8"),
        ("chunk", "<u4"),
        ("count", "u1"),
        ("done", "u1"),
        ("rest", "u1", 2),
    ]
)


class KernelPlane:
    """Serves from when it is built until it is closed; every method may be called from any thread meanwhile.

    `listen` is the one address that ranks send to; port 0 picks a free one. `entry` "tc" suits virtual links and jumbo frames,
    "xdp" real network cards; tc is behind it then. `mtu` bounds the packets of its jobs: a slot takes twice that in the
    kernel's memory, whoever uses it. Nothing of it is left in the kernel when the process dies (before Linux 6.6: a filter).
    """

    def __init__(
        self,
        listen: Address,
        interfaces: Sequence[str],
        *,
        slots: int = 1024,
        entry: Literal["tc", "xdp"] = "tc",
        mtu: int = 9000,
    ) -> None:
        if not 1 <= slots <= MOST_SLOTS:
            raise ConfigError(f"slots={slots}: a plane has 1 to {MOST_SLOTS}")
        if entry not in ("tc", "xdp"):
            raise ConfigError(
                f"entry={entry!r}: tc for virtual links and jumbo frames, xdp for network cards"
            )
        self._most_nbytes = LaneType.U8.elements(mtu)
        if self._most_nbytes <= 0:
            raise ConfigError(f"mtu={mtu}: no lane fits; at least 64")
        ports = [_ifindex(name) for name in interfaces]
        if not ports:
            raise ConfigError("interfaces=[]: name the switch's ports, or the host's one interface")
        if reason := KernelPlane.missing():
            raise ConfigError(reason)
        self.slots = slots
        self._jobs: dict[int, tuple[PlaneJob, bpf.Map, ExitStack]] = {}
        self._gone: NDArray[np.uint64] = np.zeros(_COUNTERS, np.uint64)  # what removed jobs have counted
        self._lock = threading.Lock()
        with ExitStack() as stack:
            reserved = stack.enter_context(_reserved(listen))
            self._address: Address = reserved.getsockname()
            self._load(entry)
            self._attach(entry, ports, stack)
            self._attached = stack.pop_all()

    def _load(self, entry: str) -> None:
        host, port = self._address
        where = socket.inet_aton(host) + struct.pack("!HH", port, 0)
        cell_nbytes = -(-self._most_nbytes // _BLOCK) * _BLOCK
        settings = where + struct.pack("=II", cell_nbytes, entry == "xdp")
        programs = ("tacit_tc", "tacit_xdp") if entry == "xdp" else ("tacit_tc",)
        entries = {"cells": 2 * self.slots, "lanes": 2 * self.slots}
        self._loaded = loaded = bpf.Loaded(programs, settings, entries, {"lanes": cell_nbytes})
        self._maps = loaded.map("jobs", 4)
        self._cells = loaded.map("cells", _CELL.itemsize)
        self._counters = loaded.map("counters", 8 * _COUNTERS, bpf.cpus())

    def _attach(self, entry: str, ports: Sequence[int], stack: ExitStack) -> None:
        for ifindex in ports:
            if entry == "xdp":
                stack.enter_context(bpf.attached_xdp(self._loaded.program_fd("tacit_xdp"), ifindex))
            stack.enter_context(
                bpf.attached_tc(self._loaded.program_fd("tacit_tc"), ifindex, self._address[1])
            )

    @staticmethod
    def missing() -> str:
        """What this machine lacks for a kernel plane, in one sentence; empty if nothing."""
        if os.geteuid() != 0:
            return "the kernel plane needs root (CAP_BPF and CAP_NET_ADMIN); the user-space plane needs no privileges"
        try:
            bpf.library()
            bpf.compiled()
            bpf.check_allowed()
        except ConfigError as reason:
            return str(reason)
        return ""

    @property
    def address(self) -> Address:
        return self._address

    # ---- jobs

    def add_job(self, job: PlaneJob) -> None:
        """Its packets are summed from now on. ConfigError if its id or its slots are taken."""
        with self._lock, ExitStack() as stack:
            self._check(job)
            own = bpf.Map.create("tacit_job", ctypes.sizeof(_Job), stack)
            own.write(0, bytes(_described(job)))
            self._cells.clear_run(2 * job.slots.start, 2 * len(job.slots))
            self._maps.write(job.id, struct.pack("=I", own.fd))  # from here on, packets find it
            self._jobs[job.id] = (job, own, stack.pop_all())

    def _check(self, job: PlaneJob) -> None:
        if job.id in self._jobs:
            raise ConfigError(f"job={job.id} is there already; remove it first")
        if job.slots.stop > self.slots:
            raise ConfigError(f"slots={job.slots}: the plane has {self.slots}")
        for other, *_ in self._jobs.values():
            if job.slots.start < other.slots.stop and other.slots.start < job.slots.stop:
                raise ConfigError(f"slots={job.slots} meet those of job {other.id}, {other.slots}")
        if job.deadline_ms or job.lanes is LaneType.F32:
            raise ConfigError(
                "the kernel plane has no clock and adds no floats, which star(loss=...) needs: start the aggregator with --plane user"
            )
        if job.upstream:
            raise ConfigError(
                "the kernel plane has no parent: start the aggregators of the racks with --plane user; above them, either will do"
            )
        if job.result_nbytes > self._most_nbytes:
            raise ConfigError(
                f"elements={job.elements}: {job.lanes.name} lanes of {job.result_nbytes} bytes, and this plane was opened for "
                f"{self._most_nbytes}; open it with a larger mtu"
            )

    def remove_job(self, id: int) -> None:
        """Forgets the job and its sums: its slots are free, and its packets are answered with UNKNOWN."""
        with self._lock:
            _, _, stack = self._find(id)
            self._maps.delete(id)  # waits for packets that are being added
            del self._jobs[id]
            stack.close()
            self._gone += self._counted(id)
            self._counters.write(id, bytes(8 * _COUNTERS * bpf.cpus()))

    def jobs(self) -> list[int]:
        with self._lock:
            return sorted(self._jobs)

    def _find(self, id: int) -> tuple[PlaneJob, bpf.Map, ExitStack]:
        if id not in self._jobs:
            raise ConfigError(f"job={id}: there is no such job")
        return self._jobs[id]

    # ---- figures

    def _counted(self, index: int) -> NDArray[np.uint64]:
        rows = np.frombuffer(self._counters.read(index), np.uint64).reshape(-1, _COUNTERS)
        total: NDArray[np.uint64] = rows.sum(axis=0, dtype=np.uint64)
        return total

    def _total(self) -> NDArray[np.uint64]:
        with self._lock:
            total = self._gone.copy()
            for index in (_NO_JOB, *self._jobs):
                total += self._counted(index)
            return total

    def counts(self) -> dict[str, int]:
        """Packets by verdict, and events; of all jobs since the start, and of none."""
        return _by_name(self._total())

    def sockets(self) -> dict[str, int]:
        """`unsent`: answers to members of whom nothing has come yet, so that nobody knows where they are; `failures`: what the
        kernel would not do; `segmented`: runs of packets that a sender's UDP_SEGMENT left uncut (counted as `oversized` too); ranks
        that joined through control do not send them. `overrun` is for planes that have a receive buffer."""
        figures = self._total()[-len(_DEVICE) :]
        return {"overrun": 0, **{name: int(value) for name, value in zip(_DEVICE, figures, strict=True)}}

    def carried(self) -> int:
        """Results that waited for a packet of their rank's own, and left in it. Who completed a chunk got that one so too; others took a copy."""
        return int(self._total()[2 + len(_NAMES)])

    def stats(self, id: int) -> JobStats:
        with self._lock:
            job, own, _ = self._find(id)
            now_ns = time.monotonic_ns()
            counted = self._counted(id)
            cells = np.frombuffer(self._cells.read_run(2 * job.slots.start, 2 * len(job.slots)), _CELL)
            members = _Job.from_buffer_copy(own.read(0)).members[: len(job.members)]
        waiting = cells["seen"][(cells["seen"] != 0) & (cells["done"] == 0)]
        ranks = tuple(
            RankStats(
                member.packets,
                max(0, now_ns - member.last_ns) / 1e9 if member.packets else None,
                int(np.sum(waiting >> np.uint64(rank) & np.uint64(1) == 0)) if rank < job.world else 0,
            )
            for rank, member in enumerate(members)
        )
        return JobStats(
            time_s=now_ns / 1e9,
            counts=_by_name(counted),
            received_nbytes=sum(member.nbytes for member in members),
            answered_nbytes=int(counted[1 + len(_NAMES)]),
            unfinished=len(waiting),
            ranks=ranks,
        )

    # ---- the end

    def close(self) -> None:
        """Returns when packets pass again and the port is free. Figures stay readable."""
        self._attached.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ifindex(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError as cause:
        known = [found for _, found in socket.if_nameindex()]
        raise ConfigError(
            f"interface {name!r}: {did_you_mean(name, known)}there are {', '.join(known)} in this network namespace"
        ) from cause


def _reserved(listen: Address) -> socket.socket:
    """A socket that keeps the port from others; it receives nothing, since the program takes packets before. The address need not be of
    this machine."""
    host, port = listen
    try:
        if socket.inet_aton(host) == bytes(4):
            raise ConfigError(
                f"{host}:{port}: the kernel plane takes packets out of the path; name the one address that ranks send to"
            )
    except OSError as cause:
        raise ConfigError(f"host {host!r}: four numbers, as in 10.0.0.254") from cause
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        own.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
        own.bind(listen)
    except OSError as cause:
        own.close()
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({cause.strerror}); name another address or port"
        ) from cause
    return own


def _described(job: PlaneJob) -> _Job:
    found = _Job()
    found.terms = _Terms(
        job.cookie,
        job.slots.start,
        len(job.slots),
        job.elements,
        job.data_nbytes,
        job.result_nbytes,
        job.world,
        job.needed,
        job.lanes,
        job.below,
        0,
        len(job.members),
    )
    found.terms.table[:] = job.table
    width = 8 * job.lanes.dtype.itemsize
    if job.lanes.indexed:
        found.pairs[:] = [job.table[byte & 15] | job.table[byte >> 4] << width for byte in range(256)]
    for member, (host, port) in zip(found.members, job.members, strict=False):
        member.ip[:] = socket.inet_aton(host)
        member.port[:] = struct.pack("!H", port)
    return found


def _by_name(counted: NDArray[np.uint64]) -> dict[str, int]:
    return {name: int(count) for name, count in zip(_NAMES, counted[1:], strict=False)}
