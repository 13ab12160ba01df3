"""Lossy jobs: who is left out and when, on the specification and on the C++ plane alike."""

from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from aggregator.clients import some_job
from aggregator.plane_kinds import NATIVE, SpecPlane, kernel_plane_missing
from hypothesis import given, settings

from tacit.aggregator import KernelPlane
from tacit.aggregator.spec import Address, Answers, PlaneJob, Upstream
from tacit.aggregator.wire import Header, LaneType, PacketKind
from tacit.errors import ConfigError

MS = 1_000_000
PLANES = {"spec": SpecPlane, **NATIVE}


def lossy_job(world: int = 4, slots: int = 8, deadline_ms: int = 20) -> PlaneJob:
    return some_job(
        world=world,
        lanes=LaneType.F32,
        elements=8,
        first_slot=0,
        slots=slots,
        deadline_ms=deadline_ms,
    )


class Bench:
    """A plane with one lossy job, whose rank r sends 2^r in every lane."""

    def __init__(self, make, **terms: int) -> None:
        self.job, self.plane = lossy_job(**terms), make(64)
        self.plane.add_job(self.job)

    def data(self, rank: int, chunk: int, at_ms: float = 0.0) -> Answers:
        payload = np.full(8, 2.0**rank, np.float32).tobytes()
        packet = self.job.packet(PacketKind.DATA, chunk, rank, payload)
        return self.plane.receive(packet, self.job.members[rank], round(at_ms * MS))

    def settle(self, rank: int, chunk: int, at_ms: float = 0.0) -> Answers:
        packet = self.job.packet(PacketKind.SETTLE, chunk, rank)
        return self.plane.receive(packet, self.job.members[rank], round(at_ms * MS))

    def expire(self, at_ms: float) -> Answers:
        return self.plane.expire(round(at_ms * MS))

    def all(self, ranks: Sequence[int], chunks: Sequence[int], at_ms: float = 0.0) -> Answers:
        return [answer for chunk in chunks for rank in ranks for answer in self.data(rank, chunk, at_ms)]

    def counted(self, *names: str) -> list[int]:
        return [self.plane.counted()[name] for name in names]


def sums(answers: Answers) -> dict[int, dict[Address, tuple[int, float]]]:
    """By chunk and receiver: ranks in the sum, and the first lane of it."""
    found: dict[int, dict[Address, tuple[int, float]]] = {}
    for packet, to in answers:
        header = Header.of(packet)
        assert header.kind == PacketKind.RESULT
        lane = float(np.frombuffer(packet[22:], np.float32)[0])
        found.setdefault(header.chunk, {})[to] = header.world, lane
    return found


@pytest.fixture(params=PLANES, ids=str)
def make(request):
    return PLANES[request.param]


def test_all_ranks_get_the_whole_sum_while_nothing_is_lost(make):
    bench = Bench(make)
    found = sums(bench.all(range(4), range(6)))
    assert all(found[chunk] == dict.fromkeys(bench.job.members, (4, 15.0)) for chunk in range(6))
    assert bench.counted("completed", "partial") == [6, 0]


def test_a_lost_packet_shows_in_four_later_ones_of_its_rank(make):
    bench = Bench(make)
    assert bench.all((0, 1, 2), [0]) == []  # of rank 3 it is lost
    for later in (1, 2, 3):
        assert set(sums(bench.all(range(4), [later]))) == {later}
    bench.all((0, 1, 2), [4])
    found = sums(bench.data(3, 4))
    assert found[0] == dict.fromkeys(bench.job.members, (3, 7.0))  # all get the same, the loser too
    assert found[4] == dict.fromkeys(bench.job.members, (4, 15.0))
    assert bench.counted("completed", "partial") == [5, 1]


def test_a_settle_says_that_nothing_more_comes(make):
    bench = Bench(make)
    bench.all((0, 1, 2), [0, 1])
    found = sums(bench.settle(3, 1))
    assert found == {chunk: dict.fromkeys(bench.job.members, (3, 7.0)) for chunk in (0, 1)}
    assert bench.counted("passed", "partial") == [1, 2]


def test_a_late_packet_gets_the_closed_sum_and_changes_nothing(make):
    bench = Bench(make)
    bench.all((0, 1, 2), [0])
    bench.settle(3, 0)
    late = bench.job.members[3]
    assert sums(bench.data(3, 0)) == {0: {late: (3, 7.0)}}
    assert sums(bench.settle(3, 0)) == {0: {late: (3, 7.0)}}  # a settle asks for what is closed
    assert bench.counted("repeated") == [2]


def test_the_deadline_closes_what_a_rank_is_late_for_and_then_nobody_waits_for_it(make):
    bench = Bench(make)
    bench.all((0, 1, 2), [0], at_ms=100)
    assert bench.expire(119.9) == []
    assert sums(bench.expire(120)) == {0: dict.fromkeys(bench.job.members, (3, 7.0))}
    found = sums(bench.all((0, 1, 2), [1, 2, 3], at_ms=121))
    assert set(found) == {1, 2, 3}  # at once


def test_a_rank_is_waited_for_again_once_it_comes_in_time(make):
    bench = Bench(make)
    bench.all((0, 1, 2), [0], at_ms=100)
    bench.expire(120)
    bench.all((0, 1, 2), [1], at_ms=121)
    bench.data(3, 0, at_ms=125)  # too late by 5 ms: it is as far behind as it was
    assert set(sums(bench.all((0, 1, 2), [2], at_ms=126))) == {2}
    bench.data(3, 1, at_ms=130)  # closed, but no older than the deadline
    assert bench.all((0, 1, 2), [3], at_ms=131) == []
    assert sums(bench.data(3, 3, at_ms=132))[3] == dict.fromkeys(bench.job.members, (4, 15.0))


def test_less_than_half_of_the_ranks_are_no_sum(make):
    bench = Bench(make, world=5)
    bench.all((0, 1), [0])
    for rank in (2, 3, 4):
        assert bench.settle(rank, 0) == []
    assert bench.expire(1000) == []
    assert sums(bench.data(4, 0, at_ms=1001))[0] == dict.fromkeys(bench.job.members, (3, 19.0))


def test_a_chunk_is_held_back_while_the_last_rank_may_need_what_its_cell_has(make):
    bench = Bench(make, slots=8)  # ranks reach 4 chunks ahead; a rank may lag by 12
    bench.all((0, 1, 2), [0])
    bench.expire(20)
    bench.all((0, 1, 2), range(1, 12), at_ms=21)
    assert bench.counted("completed", "held") == [12, 0]
    assert bench.all((0, 1, 2), [12], at_ms=22) == []
    assert bench.counted("held") == [3]
    late = bench.job.members[3]
    assert sums(bench.data(3, 0, at_ms=200)) == {0: {late: (3, 7.0)}}  # still there
    assert set(sums(bench.all((0, 1, 2), [12], at_ms=201))) == {12}
    assert bench.counted("stale", "abandoned") == [0, 0]


def test_who_was_left_out_is_counted():
    bench = Bench(list(NATIVE.values())[-1])
    bench.all((0, 1, 2), [0, 1])
    bench.settle(3, 1)
    bench.all((0, 2, 3), [2])
    bench.settle(1, 2)
    assert [rank[3] for rank in bench.plane.stats(bench.job.id)["ranks"]] == [0, 1, 0, 2]


@st.composite
def events(draw, world: int):
    """A packet of anybody, or the clock: from ranks that keep no rule."""
    kind = draw(st.sampled_from([PacketKind.DATA, PacketKind.DATA, PacketKind.DATA, PacketKind.SETTLE, None]))
    chunk = draw(st.integers(-2, 30)) % 2**32
    return kind, chunk, draw(st.integers(0, world - 1)), draw(st.integers(0, 12)), draw(st.integers(0, 9))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), world=st.integers(1, 5), slots=st.sampled_from([8, 16]))
def test_the_planes_do_what_the_specification_says(data, world, slots):
    job = lossy_job(world, slots)
    planes = [SpecPlane(64), *(make(64) for make in NATIVE.values())]
    for plane in planes:
        plane.add_job(job)
    now_ns = 0
    for kind, chunk, rank, later_ms, seed in data.draw(st.lists(events(world), max_size=60)):
        now_ns += later_ms * MS
        if kind is None:
            answers = [sorted(plane.expire(now_ns)) for plane in planes]
        else:
            payload = np.full(8, 0.1 + seed, np.float32).tobytes() if kind is PacketKind.DATA else b""
            packet = job.packet(kind, chunk, rank, payload)
            answers = [sorted(plane.receive(packet, job.members[rank], now_ns)) for plane in planes]
        assert all(other == answers[0] for other in answers)
    first, *others = [plane.counted() for plane in planes]
    assert all(other == first for other in others)


def test_what_no_lossy_job_can_be_is_refused():
    with pytest.raises(ConfigError, match=r"deadline_ms=60001: 1 to 60000"):
        lossy_job(deadline_ms=60_001)
    with pytest.raises(ConfigError, match=r"slots=4: a lossy job needs 8"):
        lossy_job(slots=4)
    with pytest.raises(ConfigError, match=r"no quorum, and one aggregator"):
        some_job(lanes=LaneType.F32, slots=8, quorum=2, deadline_ms=5)
    parent = lossy_job(deadline_ms=0)
    with pytest.raises(ConfigError, match=r"none above or below"):
        PlaneJob(
            1,
            1,
            parent.members,
            LaneType.F32,
            8,
            range(8),
            upstream=Upstream(("10.0.0.1", 1), parent, 0),
            deadline_ms=5,
        )
    core = next(iter(NATIVE.values()))(64)._core  # which checks for itself
    with pytest.raises(ValueError, match="8 slots or more"):
        core.add_job(1, 1, parent.members, LaneType.F32, 8, 0, 4, 4, bytes(16), 0, None, 0, MS)


@pytest.mark.skipif(bool(kernel_plane_missing()), reason=kernel_plane_missing())
def test_the_kernel_plane_refuses_it_in_one_sentence():
    with (
        KernelPlane(("127.0.0.1", 0), ["lo"], slots=16) as plane,
        pytest.raises(ConfigError, match=r"no clock and adds no floats.*--plane user"),
    ):
        plane.add_job(lossy_job())
