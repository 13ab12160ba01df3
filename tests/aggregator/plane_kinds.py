"""Every plane behind one face, for the tests that all of them must pass. A new plane adds a line to PLANES."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import pytest
from aggregator import kernel

from tacit import _core
from tacit.aggregator import spec
from tacit.aggregator.planes.kernel_plane import KernelPlane
from tacit.aggregator.planes.user_plane import upstream_of
from tacit.aggregator.spec import Address, Answers, PlaneJob
from tacit.aggregator.wire import EVENTS, VERDICTS


class AnyPlane(Protocol):
    def add_job(self, job: PlaneJob) -> None: ...
    def remove_job(self, id: int) -> None: ...
    def receive(self, packet: bytes, source: Address) -> Answers: ...
    def counted(self) -> dict[str, int]: ...
    def counted_of(self, job: int) -> dict[str, int]: ...


class SpecPlane(spec.Plane):
    def counted(self) -> dict[str, int]:
        return {name: self.counts[name] for name in VERDICTS + EVENTS}

    def counted_of(self, job: int) -> dict[str, int]:
        return {name: self.job_counts[job][name] for name in VERDICTS + EVENTS}


class NativePlane:
    """The C++ plane without its sockets."""

    def __init__(self, slots: int, simd: str) -> None:
        with using_simd(simd):  # a plane keeps what it was built with
            self._core = _core.Plane(slots)

    def add_job(self, job: PlaneJob) -> None:
        terms = (job.lanes, job.elements, job.slots.start, len(job.slots), job.needed, bytes(job.table))
        deadline_ns = job.deadline_ms * 1_000_000
        self._core.add_job(
            job.id, job.cookie, job.members, *terms, job.below, upstream_of(job), job.shards, deadline_ns
        )

    def remove_job(self, id: int) -> None:
        self._core.remove_job(id)

    def receive(self, packet: bytes, source: Address, now_ns: int = 0) -> Answers:
        return self._core.receive(packet, source, now_ns)

    def expire(self, now_ns: int) -> Answers:
        return self._core.expire(now_ns)

    def counted(self) -> dict[str, int]:
        return self._core.counts()

    def counted_of(self, job: int) -> dict[str, int]:
        return self._core.stats(job)["counts"]

    def stats(self, job: int) -> dict[str, object]:
        return self._core.stats(job)


@contextmanager
def using_simd(name: str):
    before = _core.simd()
    _core.use_simd(name)
    try:
        yield
    finally:
        _core.use_simd(before)


def _native(simd: str) -> Callable[[int], AnyPlane]:
    return lambda slots: NativePlane(slots, simd)


NATIVE: dict[str, Callable[[int], AnyPlane]] = {
    f"native-{simd}": _native(simd) for simd in _core.simd_variants()
}


def _kernel(entry: kernel.Entry) -> Callable[[int], AnyPlane]:
    def make(slots: int) -> AnyPlane:
        if reason := kernel_plane_missing():
            pytest.skip(reason)
        return kernel.WiredPlane(slots, entry)

    return make


kernel_plane_missing = cache(KernelPlane.missing)  # why it cannot run here; empty if it can
KERNEL: dict[str, Callable[[int], AnyPlane]] = {f"kernel-{entry}": _kernel(entry) for entry in ("tc", "xdp")}
PLANES: dict[str, Callable[[int], AnyPlane]] = {"spec": SpecPlane, **NATIVE, **KERNEL}
