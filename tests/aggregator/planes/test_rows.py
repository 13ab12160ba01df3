"""ROWS, for every plane: what one member sends to another arrives as it was sent; all else is dropped, and counted by its reason."""

import pytest
from aggregator.clients import some_job
from aggregator.plane_kinds import KERNEL, NATIVE, SpecPlane

from tacit.aggregator.spec import NOBODY
from tacit.aggregator.wire import (
    HEADER,
    MOST_ROWS,
    ROWS_ACK,
    SATURATED,
    Header,
    LaneType,
    PacketKind,
    RowsHeader,
)
from tacit.errors import ConfigError

PLANES = {
    "spec": SpecPlane,
    "native": next(iter(NATIVE.values())),
    **KERNEL,
}  # rows are added by no instruction set
RANKS, MEMBERS, ABSENT = 3, 5, 5  # three ranks, two shards, and a third one that has not joined
STRANGER = ("192.0.2.7", 9999)
SOME = RowsHeader(length=4000, offset=1424, next=7, also=0b101)
ROWS = bytes(range(256)) * 5


class Bench:
    """A plane with a job of ranks and shards, and another job beside it."""

    def __init__(self, make):
        self.job = some_job(world=RANKS, shards=3, absent=1)
        self.other = some_job(id=9, world=2, first_slot=32)
        self.plane = make(64)
        for job in (self.job, self.other):
            self.plane.add_job(job)

    def packet(self, sender=0, receiver=1, payload=ROWS, flags=0, **spoil):
        packet = self.job.rows(sender, receiver, 77, 2**16 + 5, SOME, payload, flags)
        return Header.of(packet)._replace(**spoil).bytes() + packet[HEADER.size :]

    def send(self, packet, source=None):
        return self.plane.receive(packet, source or self.job.members[Header.of(packet).rank])

    def counted(self):
        return {name: count for name, count in self.plane.counted().items() if count}


@pytest.fixture(params=PLANES, ids=str)
def bench(request):
    return Bench(PLANES[request.param])


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 1279, 1424, MOST_ROWS])
def test_rows_arrive_as_they_were_sent_at_their_receiver_alone(bench, nbytes):
    packet = bench.packet(payload=(ROWS * 7)[:nbytes])
    assert bench.send(packet) == [(packet, bench.job.members[1])]
    assert bench.counted() == {"forwarded": 1}


def test_every_member_reaches_every_other(bench):
    pairs = [(a, b) for a in range(MEMBERS) for b in range(MEMBERS) if a != b]
    for sender, receiver in pairs:
        packet = bench.packet(sender, receiver)
        assert bench.send(packet) == [(packet, bench.job.members[receiver])]
    assert bench.counted() == {"forwarded": len(pairs)}
    assert bench.plane.counted_of(bench.job.id)["forwarded"] == len(pairs)


def test_an_acknowledgement_alone_has_no_payload(bench):
    packet = bench.packet(payload=b"", flags=ROWS_ACK)
    assert bench.send(packet) == [(packet, bench.job.members[1])] and len(packet) == 38
    assert bench.send(bench.packet(payload=bytes(16), flags=ROWS_ACK)) == []
    assert bench.counted() == {"forwarded": 1, "length": 1}


@pytest.mark.parametrize("sender", [0, MEMBERS - 1], ids=["rank", "shard"])
def test_a_receiver_that_has_not_joined_gets_nothing(bench, sender):
    assert bench.send(bench.packet(sender, ABSENT)) == []
    assert bench.counted() == {"unreached": 1}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("world", {"receiver": ABSENT + 1}),
        ("world", {"receiver": 64}),
        ("world", {"receiver": 255}),
        ("world", {"receiver": 0}),  # itself
        ("world", {"sender": 4, "receiver": 4}),
        ("rank", {"rank": ABSENT + 1}),
        ("rank", {"rank": 255}),
        ("lanes", {"flags": 2}),
        ("lanes", {"flags": ROWS_ACK | SATURATED}),
        ("lanes", {"flags": LaneType.U8 | 0x40}),
        ("magic", {"magic": 0xB1}),
        ("layout", {"magic": 0xA2}),
        ("truncated", {"nbytes": len(ROWS) + 1}),
        ("truncated", {"nbytes": 0xFFFF}),
        ("oversized", {"nbytes": len(ROWS) - 1}),
        ("oversized", {"nbytes": len(ROWS) - 16}),
        ("length", {"payload": bytes(MOST_ROWS + 1)}),
        ("length", {"payload": bytes(60_000)}),
    ],
)
def test_rows_that_do_not_fit_are_dropped_by_this_reason(bench, reason, changes):
    packet = bench.packet(**changes)
    assert bench.send(packet, bench.job.members[changes.get("sender", 0)]) == []
    assert bench.counted() == {reason: 1}


def test_rows_that_are_too_short_are_dropped(bench):
    for nbytes in (0, 21):
        assert bench.plane.receive(bench.packet()[:nbytes], bench.job.members[0]) == []
    for nbytes in (22, 37, 38, 38 + len(ROWS) - 1):
        assert bench.plane.receive(bench.packet()[:nbytes], bench.job.members[0]) == []
    for nbytes in (22, 37):  # and say that they have none
        assert bench.plane.receive(bench.packet(payload=b"")[:nbytes], bench.job.members[0]) == []
    assert bench.counted() == {"short": 2, "truncated": 6}


def test_a_sender_is_believed_from_its_own_address_alone(bench):
    host, port = bench.job.members[0]
    elsewhere = [STRANGER, (host, port + 1), ("10.0.3.9", port), bench.job.members[1], bench.job.members[4]]
    for source in elsewhere:
        assert bench.send(bench.packet(), source) == []
    assert bench.counted() == {"source": len(elsewhere)}


def test_a_member_of_another_job_is_a_stranger(bench):
    mine, theirs = bench.job, bench.other
    assert bench.send(bench.packet(), theirs.members[0]) == []  # it knows our cookie
    ((packet, to),) = bench.send(bench.packet(cookie=theirs.cookie), theirs.members[0])  # it does not
    assert (Header.of(packet).kind, len(packet), to) == (PacketKind.UNKNOWN, HEADER.size, theirs.members[0])
    packet = bench.packet(job=theirs.id, cookie=theirs.cookie)
    assert bench.send(packet, theirs.members[0]) == [(packet, theirs.members[1])]  # in its own job it may
    assert bench.send(bench.packet(2, 1, job=theirs.id, cookie=theirs.cookie), mine.members[2]) == []
    assert bench.counted() == {"source": 1, "cookie": 1, "forwarded": 1, "rank": 1}
    assert bench.plane.counted_of(mine.id)["forwarded"] == 0


def test_rows_of_no_job_are_answered_with_less_than_came(bench):
    ((packet, to),) = bench.send(bench.packet(job=4), STRANGER)
    assert (Header.of(packet).kind, len(packet), to) == (PacketKind.UNKNOWN, HEADER.size, STRANGER)
    assert bench.counted() == {"job": 1}


def test_nothing_comes_from_a_member_that_has_not_joined(bench):
    assert bench.send(bench.packet(ABSENT, 0), STRANGER) == []
    assert bench.counted() == {"source": 1}


def test_nothing_comes_from_an_address_of_zeros():
    for name in ("spec", "native"):  # the network of the others has no such sender
        bench = Bench(PLANES[name])
        assert bench.send(bench.packet(ABSENT, 0), NOBODY) == []
        assert bench.counted() == {"source": 1}


def test_a_shard_may_ask_whether_the_plane_is_there_and_is_in_no_sum(bench):
    job = bench.job
    ((echo, to),) = bench.plane.receive(job.packet(PacketKind.PROBE, 5, 4), job.members[4])
    assert (Header.of(echo).kind, Header.of(echo).rank, to) == (PacketKind.ECHO, 4, job.members[4])
    for kind, nbytes in ((PacketKind.DATA, job.data_nbytes), (PacketKind.SETTLE, 0)):
        assert bench.plane.receive(job.packet(kind, 0, 4, bytes(nbytes)), job.members[4]) == []
    for rank in range(RANKS):
        packet = job.packet(PacketKind.DATA, 0, rank, bytes(job.data_nbytes))
        answers = bench.plane.receive(packet, job.members[rank])
    assert [to for _, to in answers] == list(job.members[:RANKS])
    assert {Header.of(packet).world for packet, _ in answers} == {RANKS}
    assert bench.counted() == {"echoed": 1, "rank": 2, "wrote": 1, "added": 2, "completed": 1}


def test_a_job_has_members_within_its_limits():
    for world, shards, words in (
        (60, 5, "60 ranks and 5 shards: .* 64 members"),
        (1, 64, "1 ranks and 64 shards"),
        (0, 2, "0 ranks and 2 shards"),
        (2, -1, "shards=-1"),
    ):
        with pytest.raises(ConfigError, match=words):
            some_job(world=world, shards=shards)
    assert len(some_job(world=40, shards=24).members) == 64
