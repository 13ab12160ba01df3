"""The slot rule and its refusals, sentence by sentence, for every plane: the specification and the C++ one on every simd."""

from dataclasses import replace

import numpy as np
import pytest
from aggregator.clients import INTEGERS, exact_sums, some_job, some_payloads
from aggregator.plane_kinds import PLANES

from tacit.aggregator.wire import HEADER, MORE, SATURATED, VERDICTS, Header, LaneType, PacketKind
from tacit.errors import ConfigError

STRANGER = ("192.0.2.7", 9999)


class Bench:
    """A plane with one job, and payloads to send."""

    def __init__(self, make, **options):
        self.job = some_job(**options)
        self.plane = make(64)
        self.plane.add_job(self.job)
        self.payloads = some_payloads(self.job, 12, seed=1)
        self.sums = exact_sums(self.job, self.payloads)

    def send(self, rank, chunk=0, kind=PacketKind.DATA, source=None, spoil=None):
        """The answers to a packet, whose header `spoil` may change."""
        payload = self.payloads[rank][chunk % 12] if kind is PacketKind.DATA else b""
        packet = self.job.packet(kind, chunk, rank, payload)
        if spoil:
            packet = Header.of(packet)._replace(**spoil).bytes() + payload
        return self.plane.receive(packet, source or self.job.members[rank])

    def counted(self):
        return {name: count for name, count in self.plane.counted().items() if count}

    def everybody(self, chunk):
        return [self.send(rank, chunk) for rank in range(self.job.world)][-1]


@pytest.fixture(params=PLANES, ids=str)
def make(request):
    return PLANES[request.param]


@pytest.mark.parametrize("lanes", INTEGERS, ids=lambda lanes: lanes.name)
def test_the_last_rank_calls_up_the_sum_for_all(make, lanes):
    bench = Bench(make, lanes=lanes)
    for rank in (2, 0, 3):
        assert bench.send(rank) == []
    answers = bench.send(1)
    assert [to for _, to in answers] == list(bench.job.members)
    assert {packet for packet, _ in answers} == {answers[0][0]}
    header = Header.of(answers[0][0])
    assert (
        header.kind == PacketKind.RESULT and header.world == 4 and header.lanes == lanes and header.rank == 1
    )
    assert answers[0][0][HEADER.size :] == bench.sums[0]
    assert bench.counted() == {"wrote": 1, "added": 3, "completed": 1}


def test_a_world_of_one_gets_its_own_lanes_back(make):
    bench = Bench(make, world=1, lanes=LaneType.TABLE_U16)
    ((packet, to),) = bench.send(0)
    assert to == bench.job.members[0] and packet[HEADER.size :] == bench.sums[0]
    assert bench.counted() == {"wrote": 1, "completed": 1}


def test_64_ranks_are_64_different_ranks(make):
    bench = Bench(make, world=64, lanes=LaneType.TABLE_U16)
    answers = bench.everybody(0)
    assert len(answers) == 64 and answers[63][0][HEADER.size :] == bench.sums[0]
    assert Header.of(answers[0][0]).world == 64


def test_a_duplicate_is_dropped_before_completion_and_answered_alone_after_it(make):
    bench = Bench(make)
    bench.send(0)
    assert bench.send(0) == []
    for rank in (1, 2):
        bench.send(rank)
    result = bench.send(3)[0][0]
    ((repeat, to),) = bench.send(2)
    assert to == bench.job.members[2]
    assert repeat == Header.of(result)._replace(rank=2).bytes() + result[HEADER.size :]
    assert bench.counted() == {"wrote": 1, "added": 3, "duplicate": 1, "completed": 1, "repeated": 1}


def test_both_versions_of_a_slot_are_in_use_at_once(make):
    bench = Bench(make)
    first = bench.everybody(0)
    second = [bench.send(rank, 4) for rank in (0, 1, 2)]  # rank 3 has not seen the first result yet
    assert second == [[], [], []]
    assert bench.send(3, 0)[0][0][HEADER.size :] == bench.sums[0] == first[0][0][HEADER.size :]
    assert bench.send(3, 4)[0][0][HEADER.size :] == bench.sums[4]


def test_the_next_chunk_but_one_takes_the_cell_and_what_comes_late_is_told_so(make):
    bench = Bench(make)
    for chunk in (0, 4):
        bench.everybody(chunk)
    bench.send(0, 8)
    ((packet, to),) = bench.send(1, 0)  # a copy that was long on its way
    assert to == bench.job.members[1] and len(packet) == HEADER.size
    assert Header.of(packet).kind == PacketKind.STALE and Header.of(packet).chunk == 0
    bench.send(1, 8), bench.send(2, 8)
    assert bench.send(3, 8)[0][0][HEADER.size :] == bench.sums[8]
    assert bench.counted()["stale"] == 1


def test_a_late_copy_is_no_second_contribution_even_where_the_version_has_come_round(make):
    """With one bit of version alone, rank 1's late copy of chunk 0 would be added to chunk 8."""
    bench = Bench(make)
    for chunk in (0, 4):
        bench.everybody(chunk)
    bench.send(0, 8)
    bench.send(1, 0)
    for rank in (1, 2):
        assert bench.send(rank, 8) == []
    assert bench.send(3, 8)[0][0][HEADER.size :] == bench.sums[8]


def test_chunks_wrap_and_stay_in_order(make):
    bench = Bench(make)
    for chunk in (2**32 - 8, 2**32 - 4, 0, 4):
        assert bench.everybody(chunk)[0][0][HEADER.size :] == bench.sums[chunk % 12]
    assert Header.of(bench.send(2, 2**32 - 4)[0][0]).kind == PacketKind.STALE


def test_ranks_that_gave_up_a_round_may_go_on_and_the_lost_sum_is_counted(make):
    bench = Bench(make)
    bench.send(0, 0), bench.send(1, 0)
    assert bench.everybody(8)[0][0][HEADER.size :] == bench.sums[8]
    assert bench.counted()["abandoned"] == 1


def test_lanes_of_8_and_16_bits_stop_at_their_limit_and_the_result_says_so(make):
    for lanes in (LaneType.U8, LaneType.U16):
        bench = Bench(make, lanes=lanes, world=3)
        top = np.iinfo(lanes.dtype).max
        own = np.full((3, bench.job.elements), 1, lanes.dtype)
        own[:, 5] = (top - 2, 3, 1)  # passes it with the second, and stays
        own[:, 6] = (top - 2, 1, 1)  # reaches it exactly
        bench.payloads = [[row.tobytes()] * 12 for row in own]
        packet = bench.everybody(0)[0][0]
        total = np.frombuffer(packet[HEADER.size :], lanes.dtype)
        assert total[5] == total[6] == top and total[0] == 3
        assert Header.of(packet).lanes == lanes | SATURATED
        assert bench.counted()["saturated"] == 2
        assert Header.of(bench.send(0)[0][0]).lanes == lanes | SATURATED  # the stored one says it too
        bench.payloads = [[bytes(len(row.tobytes()))] * 12 for row in own]
        bench.everybody(4)
        assert Header.of(bench.everybody(8)[0][0]).lanes == lanes  # the cell's next chunk starts clean


def test_int32_lanes_wrap_so_that_a_sum_that_fits_is_exact_and_say_that_they_did(make):
    bench = Bench(make, lanes=LaneType.I32, world=3)
    own = np.zeros((3, bench.job.elements), np.int32)
    own[:, 0] = (2**31 - 1, 2, -5)  # over and back
    own[:, 1] = (-(2**31), -1, 0)  # over, and stays there
    own[:, 2] = (-1, 1, 7)  # signs differ: no limit met
    bench.payloads = [[row.tobytes()] * 12 for row in own]
    packet = bench.everybody(0)[0][0]
    total = np.frombuffer(packet[HEADER.size :], np.int32)
    assert total[:4].tolist() == [2**31 - 4, 2**31 - 1, 7, 0]
    assert Header.of(packet).lanes == LaneType.I32 | SATURATED
    assert bench.counted()["saturated"] == 2  # once over, once back


def test_a_quorum_may_be_settled_and_who_comes_later_gets_the_same_sum(make):
    bench = Bench(make, quorum=3)
    bench.send(0), bench.send(2)
    assert bench.send(0, kind=PacketKind.SETTLE) == []  # two of three
    bench.send(3)
    answers = bench.send(0, kind=PacketKind.SETTLE)
    assert [to for _, to in answers] == list(bench.job.members)
    expected = exact_sums(bench.job, [bench.payloads[rank] for rank in (0, 2, 3)])[0]
    assert answers[0][0][HEADER.size :] == expected and Header.of(answers[0][0]).world == 3
    ((late, to),) = bench.send(1)
    assert to == bench.job.members[1] and late[HEADER.size :] == expected and Header.of(late).world == 3
    ((again, to),) = bench.send(2, kind=PacketKind.SETTLE)
    assert to == bench.job.members[2] and again[HEADER.size :] == expected
    summed = {"wrote": 1, "added": 2, "settled": 1, "completed": 1}
    assert bench.counted() == {**summed, "early": 1, "repeated": 2}


def test_nothing_is_settled_without_a_quorum_or_before_anything_came(make):
    bench = Bench(make)
    assert bench.send(0, kind=PacketKind.SETTLE) == []
    for rank in (0, 1, 2):
        bench.send(rank)
    assert bench.send(0, kind=PacketKind.SETTLE) == []
    assert bench.counted()["early"] == 2
    for chunk in (4, 8):
        bench.everybody(chunk)
    assert Header.of(bench.send(0, kind=PacketKind.SETTLE)[0][0]).kind == PacketKind.STALE


def test_a_probe_comes_back(make):
    bench = Bench(make)
    ((packet, to),) = bench.send(1, chunk=77, kind=PacketKind.PROBE)
    assert to == bench.job.members[1]
    assert packet == bench.job.packet(PacketKind.PROBE, 77, 1).replace(b"\xa1\x03", b"\xa1\x04", 1)
    assert bench.counted() == {"echoed": 1}


def test_an_unknown_job_and_a_wrong_cookie_are_asked_the_same_question(make):
    bench = Bench(make)
    for changes in ({"job": 4}, {"cookie": 1}):
        for kind in (PacketKind.DATA, PacketKind.PROBE):
            ((packet, to),) = bench.send(0, kind=kind, source=STRANGER, spoil=changes)
            assert to == STRANGER and len(packet) == HEADER.size
            assert Header.of(packet).kind == PacketKind.UNKNOWN
            assert Header.of(packet).cookie == changes.get("cookie", bench.job.cookie)
    assert bench.counted() == {"job": 2, "cookie": 2}
    assert bench.plane.counted_of(bench.job.id)["cookie"] == 2


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("magic", {"magic": 0xB1}),
        ("layout", {"magic": 0xA2}),
        ("truncated", {"nbytes": 41}),
        ("oversized", {"nbytes": 39}),
        ("kind", {"kind": PacketKind.RESULT}),
        ("kind", {"kind": PacketKind.ECHO}),
        ("kind", {"kind": PacketKind.UNKNOWN}),
        ("kind", {"kind": PacketKind.STALE}),
        ("kind", {"kind": 0}),
        ("kind", {"kind": 255}),
        ("world", {"world": 5}),
        ("rank", {"rank": 4}),
        ("rank", {"rank": 255}),
        ("lanes", {"lanes": LaneType.TABLE_U8}),
        ("lanes", {"lanes": LaneType.U8 | SATURATED}),
        ("lanes", {"lanes": LaneType.U8 | MORE, "kind": PacketKind.PROBE, "nbytes": 40}),
        ("lanes", {"lanes": LaneType.U8 | MORE, "kind": PacketKind.SETTLE, "nbytes": 40}),
        ("lanes", {"lanes": 0}),
        ("slot", {"place": 7}),
        ("slot", {"place": 12}),
        ("slot", {"place": 0x7FFF}),
        ("slot", {"place": 0xFFFF}),
        ("place", {"place": 9}),
        ("place", {"place": 0x8008}),
        ("place", {"chunk": 1}),
        ("place", {"chunk": 4}),
        ("length", {"kind": PacketKind.PROBE}),
        ("length", {"kind": PacketKind.SETTLE}),
        ("source", {"rank": 1}),
    ],
)
def test_a_packet_that_does_not_fit_is_dropped_by_this_reason(make, reason, changes):
    bench = Bench(make)
    assert bench.send(0, spoil=changes) == []
    assert bench.counted() == {reason: 1}
    bench.everybody(0)
    assert bench.counted() == {reason: 1, "wrote": 1, "added": 3, "completed": 1}  # and left no trace


def test_a_rank_may_say_that_it_has_more_and_the_result_does_not_repeat_it(make):
    bench = Bench(make)  # of so few slots that nothing waits for a rank's next packet
    *others, answers = [bench.send(rank, spoil={"lanes": LaneType.U8 | MORE}) for rank in range(4)]
    assert others == [[], [], []] and [to for _, to in answers] == list(bench.job.members)
    assert {packet[HEADER.size :] for packet, _ in answers} == {bench.sums[0]}
    assert {Header.of(packet).lanes for packet, _ in answers} == {LaneType.U8}


def test_short_long_and_empty_packets_are_dropped(make):
    bench = Bench(make)
    packet = bench.job.packet(PacketKind.DATA, 0, 0, bench.payloads[0][0])
    source = bench.job.members[0]
    for nbytes in (0, 1, 21):
        assert bench.plane.receive(packet[:nbytes], source) == []
    for nbytes in (22, 23, len(packet) - 1):
        assert bench.plane.receive(packet[:nbytes], source) == []
    for more in (b"\0", bytes(60_000)):
        assert bench.plane.receive(packet + more, source) == []
    assert bench.counted() == {"short": 3, "truncated": 3, "oversized": 2}


def test_a_payload_of_another_length_is_dropped_even_if_the_header_agrees(make):
    bench = Bench(make)
    for nbytes in (0, 8, 39, 41, 48, 8944, 60_000):
        packet = bench.job.packet(PacketKind.DATA, 0, 0, bytes(nbytes))
        assert bench.plane.receive(packet, bench.job.members[0]) == []
    assert bench.counted() == {"length": 7}


def test_a_member_that_sends_from_elsewhere_is_not_believed(make):
    bench = Bench(make)
    host, port = bench.job.members[0]
    for source in (STRANGER, (host, port + 1), ("10.0.3.2", port), bench.job.members[1]):
        assert bench.send(0, source=source) == []
    assert bench.counted() == {"source": 4}


def test_jobs_do_not_touch_each_other(make):
    bench = Bench(make)
    other = some_job(id=9, first_slot=32, slots=8, world=2, lanes=LaneType.I32)
    bench.plane.add_job(other)
    payloads = some_payloads(other, 1, seed=5)
    assert bench.plane.receive(other.packet(PacketKind.DATA, 0, 0, payloads[0][0]), other.members[0]) == []
    assert bench.everybody(0)[0][0][HEADER.size :] == bench.sums[0]
    answers = bench.plane.receive(other.packet(PacketKind.DATA, 0, 1, payloads[1][0]), other.members[1])
    assert [to for _, to in answers] == list(other.members)
    assert answers[0][0][HEADER.size :] == exact_sums(other, payloads)[0]
    assert bench.plane.counted_of(9)["completed"] == bench.plane.counted_of(3)["completed"] == 1
    assert bench.plane.counted_of(9)["wrote"] == 1 and bench.plane.counted()["wrote"] == 2


def test_a_removed_job_is_unknown_and_its_slots_and_id_are_free_and_clean(make):
    bench = Bench(make)
    bench.send(0), bench.send(1)
    bench.plane.remove_job(bench.job.id)
    assert Header.of(bench.send(2)[0][0]).kind == PacketKind.UNKNOWN
    bench.plane.add_job(bench.job)
    assert bench.everybody(0)[0][0][HEADER.size :] == bench.sums[0]


def test_slots_and_ids_belong_to_one_job_at_a_time(make):
    bench = Bench(make)  # has 8 to 11
    for first_slot, slots in ((8, 4), (10, 2), (0, 16), (11, 1), (4, 8)):
        with pytest.raises((ConfigError, ValueError), match="meet those of job 3"):
            bench.plane.add_job(some_job(id=4, first_slot=first_slot, slots=slots))
    with pytest.raises((ConfigError, ValueError), match="is there already"):
        bench.plane.add_job(some_job(first_slot=32))
    with pytest.raises((ConfigError, ValueError), match="the plane has 64"):
        bench.plane.add_job(some_job(id=4, first_slot=62))
    bench.plane.add_job(some_job(id=4, first_slot=12))
    bench.plane.add_job(some_job(id=5, first_slot=7, slots=1))


def test_every_packet_is_counted_under_one_verdict(make):
    bench = Bench(make)
    for chunk in (0, 0, 4):
        bench.everybody(chunk)
    bench.send(0, source=STRANGER), bench.send(0, spoil={"job": 7}), bench.plane.receive(b"", STRANGER)
    assert sum(bench.plane.counted()[name] for name in VERDICTS) == 15


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": 256}, "id=256: .* from 0 to 255"),
        ({"cookie": 2**64}, "64 bits"),
        ({"members": ()}, "0 members: a slot knows 1 to 64 ranks"),
        ({"members": (("10.0.0.1", 1),) * 65}, "65 members: .* tree of stars"),
        ({"quorum": 5}, "quorum=5: from 1 to the 4 ranks"),
        ({"slots": range(8, 11)}, "a power of two"),
        ({"slots": range(8, 8)}, "a power of two"),
        ({"slots": range(8, 16, 2)}, "a power of two"),
        ({"slots": range(32767, 32769)}, "from 0 to 32767"),
        ({"elements": 0}, "elements=0: a multiple of 8"),
        ({"elements": 12}, "elements=12: a multiple of 8"),
        ({"elements": 8952}, "elements=8952: .* up to 8944 bytes"),
        ({"lanes": LaneType.I32, "elements": 2240}, "elements=2240: .* up to 8944 bytes"),
        ({"table": (1,) * 15}, "16 values from 0 to 255"),
        ({"table": (256,) * 16}, "16 values from 0 to 255"),
        ({"lanes": LaneType.TABLE_U8, "table": (64,) * 16}, "up to 64 from 4 ranks: .* hold 255"),
    ],
)
def test_a_job_that_contradicts_itself_is_refused_when_it_is_built(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(some_job(), **changes)
