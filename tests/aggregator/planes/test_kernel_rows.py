"""ROWS through the kernel plane among real packets: between ports of a switch, with checksums, from members that it has yet to find."""

import socket
import struct
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from aggregator.clients import some_job
from aggregator.kernel import (
    REDIRECT,
    HandedPlane,
    bad_checksums,
    checksum,
    compute_checksums,
    frame_of,
    in_new_network,
    run_by_hand,
    served,
)
from aggregator.plane_kinds import kernel_plane_missing

from tacit.aggregator.spec import PlaneJob
from tacit.aggregator.wire import MOST_ROWS, Header, PacketKind, RowsHeader, rows_room

pytestmark = pytest.mark.skipif(bool(kernel_plane_missing()), reason=kernel_plane_missing() or "-")
entries = pytest.mark.parametrize("entry", ["tc", "xdp"])
SOME = RowsHeader(4000, 1424, 7, 5)


class Members:
    """Sockets behind the ports of a switch, all but the last one ranks."""

    def __init__(self, switch, plane, stack):
        self.plane = plane
        self.sockets = []
        for number, host in enumerate(switch.hosts):
            own = switch.at(
                number, lambda: stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            )
            own.bind((host, 0))
            own.settimeout(30)
            self.sockets.append(own)
        some = some_job(first_slot=0)
        addresses = tuple(own.getsockname() for own in self.sockets)
        self.job = PlaneJob(some.id, some.cookie, addresses, some.lanes, some.elements, some.slots, shards=1)
        plane.add_job(self.job)

    def probe(self, member):
        self.sockets[member].sendto(self.job.packet(PacketKind.PROBE, 0, member), self.plane.address)
        assert Header.of(self.sockets[member].recv(65535)).kind == PacketKind.ECHO

    def send(self, sender, receiver, payload=b"row" * 5):
        packet = self.job.rows(sender, receiver, 1, 2, SOME, payload)
        self.sockets[sender].sendto(packet, self.plane.address)
        return packet

    def counted(self):
        return {name: count for name, count in self.plane.stats(self.job.id).counts.items() if count}


@contextmanager
def members(count, **options):
    with ExitStack() as stack:
        switch, plane = stack.enter_context(served(count, **options))
        yield switch, Members(switch, plane, stack)


@entries
@pytest.mark.parametrize("mtu", [1500, 9000])
def test_rows_arrive_between_all_ports_of_a_switch(entry, mtu):
    with members(3, entry=entry, mtu=mtu) as (switch, found):
        for member in range(3):
            found.probe(member)
        sizes = (0, 1, rows_room(mtu) - 1, rows_room(mtu))
        for nbytes in sizes:
            for sender, receiver in ((0, 1), (1, 2), (2, 0)):
                packet = found.send(sender, receiver, bytes(number % 251 for number in range(nbytes)))
                assert found.sockets[receiver].recvfrom(65535) == (packet, found.plane.address)
        assert found.counted() == {"echoed": 3, "forwarded": 3 * len(sizes)}
        stats = found.plane.stats(found.job.id)
        assert stats.answered_nbytes == 3 * (22 + sum(38 + nbytes for nbytes in sizes))
        assert stats.received_nbytes == stats.answered_nbytes
        assert [rank.packets for rank in stats.ranks] == [1 + len(sizes)] * 3
        assert found.plane.sockets() == {"overrun": 0, "unsent": 0, "failures": 0, "segmented": 0}
        assert [switch.at(member, bad_checksums) for member in range(3)] == [0, 0, 0]


def test_a_device_that_finishes_checksums_finishes_those_of_rows_right():
    with members(2) as (switch, found):
        for port in switch.ports:
            switch.inside(partial(compute_checksums, port))
        found.probe(0), found.probe(1)
        packet = found.send(0, 1)
        assert found.sockets[1].recv(65535) == packet
        assert [switch.at(member, bad_checksums) for member in range(2)] == [0, 0]


def test_a_checksum_that_the_sender_has_computed_is_that_of_the_forwarded_packet():
    with members(2) as (switch, found):
        for member in range(2):
            switch.at(member, partial(compute_checksums, "link"))
        found.probe(0), found.probe(1)
        for nbytes in range(40):
            packet = found.send(0, 1, bytes([nbytes]) * nbytes)
            assert found.sockets[1].recv(65535) == packet
        assert [switch.at(member, bad_checksums) for member in range(2)] == [0, 0]


def test_damage_on_the_way_to_the_plane_is_seen_by_the_receiver():
    """Nobody in between computes the sum anew."""

    def summed(frame):
        segment, hosts = frame[34:], frame[26:34]
        pseudo = hosts + struct.pack("!HH", 17, len(segment))
        return checksum(pseudo + segment + b"\0" * (len(segment) % 2))

    def run():
        plane = HandedPlane(16)
        job = some_job(world=2)
        plane.add_job(job)
        for payload in (b"whole", b"\xff" * 40, bytes(40)):
            frame = bytearray(frame_of(job.rows(0, 1, 1, 2, SOME, payload), job.members[0]))
            frame[40:42] = struct.pack("!H", summed(frame) or 0xFFFF)
            assert summed(frame) in (0, 0xFFFF)
            returned, passed = run_by_hand(plane.wire.program, bytes(frame), plane.wire.ifindex)
            assert returned == REDIRECT and passed[42:] == frame[42:] and summed(passed) in (0, 0xFFFF)
            frame[-1] ^= 4
            returned, passed = run_by_hand(plane.wire.program, bytes(frame), plane.wire.ifindex)
            assert returned == REDIRECT and summed(passed) not in (0, 0xFFFF)

    in_new_network(run)


def test_what_follows_rows_in_their_frame_is_cut_off():
    def run():
        plane = HandedPlane(16)
        job = some_job(world=2)
        plane.add_job(job)
        frame = frame_of(job.rows(0, 1, 1, 2, SOME, b"rows"), job.members[0])
        returned, passed = run_by_hand(plane.wire.program, frame + b"trailer", plane.wire.ifindex)
        assert returned == REDIRECT and passed[42:] == frame[42:]

    in_new_network(run)


@entries
def test_a_member_of_whom_nothing_has_come_is_not_reached_until_something_has(entry):
    with members(2, entry=entry) as (_, found):
        found.send(0, 1)
        found.probe(0)  # so that the first packet has been judged
        assert found.counted() == {"unreached": 1, "echoed": 1}
        found.probe(1)
        packet = found.send(0, 1)
        assert found.sockets[1].recv(65535) == packet
        assert found.counted() == {"unreached": 1, "echoed": 2, "forwarded": 1}


def test_a_forged_mark_of_xdp_passes_nothing_on():
    with members(2, entry="xdp", mtu=9000) as (_, found):
        found.probe(0), found.probe(1)
        packet = bytearray(
            found.job.rows(0, 1, 1, 2, SOME, bytes(MOST_ROWS))
        )  # too long for XDP's buffer: tc gets it
        packet[1] |= 0x80
        found.sockets[0].sendto(packet, found.plane.address)
        found.probe(0)
        assert "forwarded" not in found.counted()
        assert found.plane.counts()["oversized"] == 1  # as any kind that has no rows
