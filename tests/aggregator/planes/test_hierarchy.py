"""Planes that are ranks of a plane: the rule, sentence by sentence; exact sums over two levels; parity with the specification."""

from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
from aggregator.clients import INTEGERS, exact_sums, some_job, some_payloads
from aggregator.plane_kinds import KERNEL, NATIVE, SpecPlane
from aggregator.traces import replay
from aggregator.trees import PARENT, SLOTS, Tree, rack_address, record_tree, some_tree
from hypothesis import given, settings

from tacit.aggregator.spec import Upstream
from tacit.aggregator.wire import HEADER, SATURATED, Header, LaneType, PacketKind
from tacit.errors import ConfigError

PLANES = {"spec": SpecPlane, **NATIVE}
FASTEST = list(NATIVE.values())[-1]


@pytest.fixture(params=PLANES, ids=str)
def make(request):
    return PLANES[request.param]


class Bench:
    """Rack 1 of three, with two ranks of five, and what it is sent."""

    def __init__(self, make, lanes=LaneType.U8, windows=(4, 4)):
        self.top, racks = some_tree(lanes, (2, 2, 1), windows=windows)
        self.job = racks[1]
        self.plane = make(SLOTS)
        self.plane.add_job(self.job)
        self.payloads = some_payloads(replace(self.job, upstream=None), 24, seed=1)
        self.sums = exact_sums(self.job, self.payloads)
        self.whole = some_payloads(self.top, 24, seed=2)[0]  # what the parent will say

    def send(self, rank, chunk=0, kind=PacketKind.DATA):
        payload = self.payloads[rank][chunk] if kind is PacketKind.DATA else b""
        return self.plane.receive(self.job.packet(kind, chunk, rank, payload), self.job.members[rank])

    def answer(self, chunk=0, source=PARENT, **spoil):
        packet = self.top.packet(PacketKind.DATA, chunk, 2, self.whole[chunk])
        header = Header.of(packet)._replace(kind=PacketKind.RESULT, world=5)._replace(**spoil)
        return self.plane.receive(header.bytes() + packet[HEADER.size :], source)

    def counted(self):
        return {name: count for name, count in self.plane.counted().items() if count}


# ---- the rule


@pytest.mark.parametrize("lanes", INTEGERS, ids=lambda lanes: lanes.name)
def test_a_full_cell_goes_up_and_the_parents_sum_goes_to_all(make, lanes):
    bench = Bench(make, lanes)
    assert bench.send(1) == []
    assert bench.send(0) == [(bench.top.packet(PacketKind.DATA, 0, 1, bench.sums[0]), PARENT)]
    answers = bench.answer()
    assert [to for _, to in answers] == list(bench.job.members)
    assert {packet for packet, _ in answers} == {answers[0][0]}
    header = Header.of(answers[0][0])
    assert (header.kind, header.chunk, header.rank, header.lanes) == (PacketKind.RESULT, 0, 0, lanes)
    assert (header.job, header.cookie, header.place) == (bench.job.id, bench.job.cookie, bench.job.place(0))
    assert header.world == 5  # ranks in the whole sum
    assert answers[0][0][HEADER.size :] == bench.whole[0]
    assert bench.counted() == {"wrote": 1, "added": 1, "answered": 1, "completed": 1}


def test_each_duplicate_makes_it_go_up_again_until_the_parent_has_answered(make):
    bench = Bench(make)
    bench.send(0)
    assert bench.send(0) == []  # not full: only a duplicate
    up = bench.send(1)
    assert bench.send(0) == up and bench.send(1) == up
    bench.answer()
    ((packet, to),) = bench.send(0)
    assert to == bench.job.members[0] and packet[HEADER.size :] == bench.whole[0]
    assert Header.of(packet).world == 5
    assert bench.counted() == {
        "wrote": 1,
        "added": 1,
        "duplicate": 3,
        "answered": 1,
        "completed": 1,
        "repeated": 1,
    }


def test_the_parents_sum_counts_once_and_only_for_the_chunk_that_waits_for_it(make):
    bench = Bench(make)
    assert bench.answer() == []  # nothing came yet
    bench.send(0)
    assert bench.answer() == []  # not all of ours are in
    bench.send(1)
    assert bench.answer(8) == [] and bench.answer(16) == []  # another phase of the same cell
    assert len(bench.answer()) == 2
    assert bench.answer() == []
    assert bench.counted()["late"] == 5 and bench.counted()["answered"] == 1
    bench.send(0, 8), bench.send(1, 8)
    assert bench.answer(0) == []  # of the phase before
    assert len(bench.answer(8)) == 2


def test_a_rack_of_one_rank_sends_up_what_it_gets(make):
    top, racks = some_tree(LaneType.TABLE_U8, (1, 1))
    plane = make(SLOTS)
    plane.add_job(racks[0])
    payloads = some_payloads(replace(racks[0], upstream=None), 1, seed=3)
    answers = plane.receive(racks[0].packet(PacketKind.DATA, 0, 0, payloads[0][0]), racks[0].members[0])
    assert answers == [(top.packet(PacketKind.DATA, 0, 0, exact_sums(racks[0], payloads)[0]), PARENT)]


def test_nobody_settles_what_goes_up(make):
    bench = Bench(make)
    bench.send(0)
    assert bench.send(0, kind=PacketKind.SETTLE) == []
    bench.send(1)
    assert bench.send(0, kind=PacketKind.SETTLE) == []
    assert bench.counted()["early"] == 2
    assert len(bench.answer()) == 2


def test_a_later_chunk_takes_a_full_cell_and_the_answer_to_the_earlier_one_is_late(make):
    bench = Bench(make)
    bench.send(0), bench.send(1)
    bench.send(0, 8)
    assert bench.counted()["abandoned"] == 1
    assert bench.answer(0) == []
    bench.send(1, 8)
    assert bench.answer(8)[0][0][HEADER.size :] == bench.whole[8]


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("cookie", {"cookie": 1}),
        ("source", {"source": ("10.9.0.254", 4801)}),
        ("source", {"source": ("10.0.31.1", 4000)}),
        ("world", {"world": 3}),
        ("rank", {"rank": 3}),
        ("lanes", {"lanes": LaneType.U16}),
        ("lanes", {"lanes": 0}),
        ("slot", {"place": 15}),
        ("slot", {"place": 24}),
        ("slot", {"place": 0x7FFF}),
        ("place", {"place": 17}),
        ("place", {"place": 0x8010}),
        ("truncated", {"nbytes": 41}),
        ("oversized", {"nbytes": 39}),
        ("kind", {"job": 8}),
        ("kind", {"kind": PacketKind.ECHO}),
        ("kind", {"kind": PacketKind.UNKNOWN}),
        ("kind", {"kind": PacketKind.STALE}),
    ],
)
def test_an_answer_that_is_not_the_parents_is_dropped_without_a_word(make, reason, changes):
    bench = Bench(make, windows=(4, 8))
    bench.send(0), bench.send(1)
    assert bench.answer(**changes) == []
    assert bench.counted() == {"wrote": 1, "added": 1, reason: 1}
    assert len(bench.answer()) == 2  # and left no trace


def test_an_answer_of_another_length_is_dropped_even_if_the_header_agrees(make):
    bench = Bench(make)
    bench.send(0), bench.send(1)
    for nbytes in (0, 8, 48, 8944):
        header = Header.of(bench.top.packet(PacketKind.DATA, 0, 0, bytes(nbytes)))
        header = header._replace(kind=PacketKind.RESULT, world=5)
        assert bench.plane.receive(header.bytes() + bytes(nbytes), PARENT) == []
    assert bench.counted()["length"] == 4


def test_a_lane_that_met_its_limit_in_a_rack_is_known_to_all_ranks(make):
    top, racks = some_tree(LaneType.U8, (2, 1), elements=8)
    planes = {PARENT: make(SLOTS), **{rack_address(rack): make(SLOTS) for rack in range(2)}}
    planes[PARENT].add_job(top)
    for rack, job in enumerate(racks):
        planes[rack_address(rack)].add_job(job)
    results = []
    for rack, rank, value in ((0, 0, 200), (0, 1, 100), (1, 0, 0)):
        job = racks[rack]
        packets = [
            (job.packet(PacketKind.DATA, 0, rank, bytes([value] * 8)), job.members[rank], rack_address(rack))
        ]
        while packets:
            packet, source, at = packets.pop()
            for answer, to in planes[at].receive(packet, source):
                packets.append((answer, at, to)) if to in planes else results.append(answer)
    assert len(results) == 3
    assert {Header.of(result).lanes for result in results} == {LaneType.U8 | SATURATED}
    assert {result[HEADER.size :] for result in results} == {bytes([255] * 8)}
    assert [planes[at].counted()["saturated"] for at in planes] == [0, 1, 0]  # counted where it happened


def test_int32_lanes_that_passed_their_limit_in_a_rack_and_came_back_are_exact(make):
    top, racks = some_tree(LaneType.I32, (2, 1), elements=8)
    plane, parent = make(SLOTS), make(SLOTS)
    plane.add_job(racks[0]), parent.add_job(top)
    for rank, value in enumerate((2**31 - 1, 9)):
        payload = np.full(8, value, np.int32).tobytes()
        ups = plane.receive(racks[0].packet(PacketKind.DATA, 0, rank, payload), racks[0].members[rank])
    parent.receive(ups[0][0], rack_address(0))
    back = np.full(8, -20, np.int32).tobytes()
    result = parent.receive(top.packet(PacketKind.DATA, 0, 1, back), rack_address(1))[0][0]
    ((down, _), *_) = plane.receive(result, PARENT)
    assert np.frombuffer(down[HEADER.size :], np.int32).tolist() == [2**31 - 12] * 8
    assert Header.of(down).lanes == LaneType.I32 | SATURATED


def test_ordinary_ranks_may_not_say_that_a_lane_met_its_limit(make):
    job = some_job()
    plane = make(SLOTS)
    plane.add_job(job)
    packet = Header.of(job.packet(PacketKind.DATA, 0, 0, bytes(40)))._replace(lanes=job.lanes | SATURATED)
    assert plane.receive(packet.bytes() + bytes(40), job.members[0]) == []
    assert plane.counted()["lanes"] == 1


def test_a_number_of_the_parent_belongs_to_one_job_until_it_is_removed(make):
    bench = Bench(make)
    again = replace(bench.job, id=99, slots=range(32, 36))
    with pytest.raises((ConfigError, ValueError), match="job=9 of the parent is that of job 31 already"):
        bench.plane.add_job(again)
    bench.plane.remove_job(bench.job.id)
    assert bench.answer() == [] and bench.counted() == {"kind": 1}
    bench.plane.add_job(again)


@pytest.mark.parametrize(
    ("own", "above", "words"),
    [
        ({"quorum": 2}, {}, "quorum=2: a job with a parent waits for all ranks"),
        ({}, {"rank": 3}, "rank=3 at the parent: its job has 3"),
        ({"elements": 48}, {}, "40 U8 lanes at the parent: sums here are 48 of U8"),
        ({"lanes": LaneType.U16}, {}, "sums here are 40 of U16"),
        ({"slots": range(8)}, {}, "not less than the 8 here"),
        ({"lanes": LaneType.TABLE_U8, "table": (60,) * 16}, {}, "table up to 60 from 5 ranks"),
    ],
)
def test_a_job_that_cannot_be_added_up_at_its_parent_is_refused(own, above, words):
    _, racks = some_tree(LaneType.U8, (2, 2, 1))
    assert racks[1].upstream
    with pytest.raises(ConfigError, match=words):
        replace(racks[1], upstream=replace(racks[1].upstream, **above), **own)


def test_the_core_itself_refuses_what_would_lead_it_astray():
    job = some_tree(LaneType.TABLE_U8, (2, 2, 1))[1][1]
    terms = (job.id, job.cookie, job.members, job.lanes, job.elements, 8, 4)
    good = (PARENT, 9, 1, 3, 1, 16, 4, 5, True)

    def refused(position, value, quorum=2, table=1):
        upstream = (*good[:position], value, *good[position + 1 :])
        plane = FASTEST(SLOTS)
        with pytest.raises(ValueError) as caught:
            plane._core.add_job(*terms, quorum, bytes([table] * 16), 0, upstream)
        return str(caught.value)

    assert "rank 3 of 3 at the parent" in refused(4, 3)
    assert "rank 1 of 65 at the parent" in refused(3, 65)
    assert "slots=2 at the parent" in refused(6, 2)
    assert "slots=12 at the parent" in refused(6, 12)
    assert "slots=4 at the parent" in refused(5, 2**15 - 2)
    assert "ranks=1 in the parent's sum" in refused(7, 1)
    assert "ranks=256: from 0 to 255" in refused(7, 256)
    assert "quorum=1: a job with a parent waits for all" in refused(1, 9, quorum=1)
    assert "table up to 60 from 5 ranks" in refused(1, 9, table=60)


# ---- exact sums


@pytest.mark.parametrize("loss", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("worlds", [(1,), (1, 1), (3, 1), (2, 2, 2), (1,) * 8], ids=str)
@pytest.mark.parametrize("lanes", INTEGERS, ids=lambda lanes: lanes.name)
def test_sums_over_two_levels_are_exact_whatever_the_network_does(lanes, worlds, loss):
    options = {"seed": len(worlds), "loss": loss, "repeats": loss, "first_chunk": 2**32 - 5}
    tree = Tree(lanes, worlds, make=FASTEST, **options).run()
    for client in tree.ranks:
        assert client.sums() == tree.exact and client.counts == {sum(worlds)}
    for at, written in tree.planes.items():
        counted = tree.counted(at)
        assert counted["wrote"] == counted["completed"] == 23 and "abandoned" not in counted
        assert counted.get("added", 0) == 23 * (written.job.world - 1)
    assert sum(tree.counted(rack_address(rack))["answered"] for rack in range(len(worlds))) == 23 * len(
        worlds
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_delays_without_limit_changes_nothing_over_two_levels(seed):
    tree = Tree(
        LaneType.I32, (2, 2), make=FASTEST, seed=seed, loss=0.1, repeats=0.9, chunks=40, windows=(2, 2)
    ).run()
    assert all(client.sums() == tree.exact for client in tree.ranks)
    assert sum(tree.counted(rack_address(rack)).get("late", 0) for rack in range(2)) > 0


@pytest.mark.parametrize("windows", [(2, 2), (2, 8), (4, 8)], ids=str)
def test_a_parent_may_have_more_slots(windows):
    tree = Tree(LaneType.U16, (2, 3), make=FASTEST, loss=0.1, repeats=0.1, windows=windows, chunks=40).run()
    assert all(client.sums() == tree.exact for client in tree.ranks)


def test_full_packets_of_every_mtu_are_summed_over_two_levels():
    for lanes in INTEGERS:
        for mtu in (1500, 9000):
            tree = Tree(lanes, (2, 2), make=FASTEST, loss=0.05, chunks=6, elements=lanes.elements(mtu)).run()
            assert all(client.sums() == tree.exact for client in tree.ranks)


# ---- parity


@cache
def recorded(seed):
    return record_tree(seed, loss=0.02 * seed, repeats=0.1, spoiled=0.4)


@pytest.mark.parametrize("plane", NATIVE)
@pytest.mark.parametrize("seed", range(8))
def test_every_plane_of_a_tree_does_what_the_specification_says(plane, seed):
    for trace in recorded(seed):
        replay(trace, NATIVE[plane](SLOTS))


def test_the_traces_hold_what_trees_add():
    counted = [trace.counts for seed in range(8) for trace in recorded(seed)]
    for name in (
        "answered",
        "late",
        "duplicate",
        "cookie",
        "source",
        "kind",
        "world",
        "lanes",
        "length",
        "slot",
        "place",
    ):
        assert any(counts[name] for counts in counted), name


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.2]), fit=st.booleans())
def test_any_tree_gives_the_same_answers_and_counts(seed, loss, fit):
    for trace in record_tree(seed, loss=loss, repeats=loss, spoiled=0.3, chunks=12, fit=fit):
        replay(trace, FASTEST(SLOTS))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), lanes=st.sampled_from(INTEGERS), world=st.integers(1, 3))
def test_ranks_and_parents_that_keep_no_rule_are_treated_alike(data, lanes, world):
    top, racks = some_tree(lanes, (2, world), elements=8, windows=(2, 4))
    job = racks[1]
    planes = [SpecPlane(16), *(make(16) for make in NATIVE.values())]
    for plane in planes:
        plane.add_job(job)
    steps = st.tuples(st.sampled_from([PacketKind.DATA, PacketKind.DATA, PacketKind.RESULT, PacketKind.SETTLE]), st.integers(-6, 8), st.integers(0, world - 1), st.integers(0, 255))  # fmt: skip
    for kind, chunk, rank, value in data.draw(st.lists(steps, max_size=40)):
        if kind is PacketKind.RESULT:
            packet = top.packet(kind, chunk % 2**32, rank % 2, bytes([value]) * top.result_nbytes)
            packet, source = (
                Header.of(packet)._replace(lanes=top.lanes | value & SATURATED, world=top.ranks).bytes()
                + packet[HEADER.size :],
                PARENT,
            )
        else:
            payload = bytes([value]) * job.data_nbytes if kind is PacketKind.DATA else b""
            packet, source = job.packet(kind, chunk % 2**32, rank, payload), job.members[rank]
        first, *others = [plane.receive(packet, source) for plane in planes]
        assert all(other == first for other in others), Header.of(packet)
    first, *others = [plane.counted() for plane in planes]
    assert all(other == first for other in others)


# ---- the kernel plane


@pytest.mark.parametrize("plane", KERNEL)
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_the_kernel_plane_can_be_a_parent(plane, seed):
    replay(recorded(seed)[0], KERNEL[plane](SLOTS))


def test_the_kernel_plane_has_no_parent_and_says_so():
    plane = KERNEL["kernel-tc"](SLOTS)
    with pytest.raises(ConfigError, match="the kernel plane has no parent"):
        plane.add_job(some_tree(LaneType.U8, (1, 1))[1][0])


def test_an_upstream_is_a_value():
    top, racks = some_tree(LaneType.U8, (2, 1))
    assert racks[0].upstream == Upstream(PARENT, top, 0) and hash(racks[0])
    assert (racks[0].world, racks[0].ranks) == (2, 3)
