"""The kernel plane: it does what the specification says, among real ports and sockets, and leaves nothing behind."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from aggregator.clients import (
    INTEGERS,
    Network,
    Switchboard,
    exact_sums,
    saying_more,
    some_job,
    some_payloads,
)
from aggregator.clients import Client as Rank
from aggregator.kernel import (
    PLANE,
    REDIRECT,
    SHOT,
    UNSPEC,
    HandedPlane,
    Switch,
    WiredPlane,
    bad_checksums,
    compute_checksums,
    frame_of,
    in_new_network,
    make_link,
    run_by_hand,
    served,
)
from aggregator.plane_kinds import SpecPlane, kernel_plane_missing
from aggregator.traces import record, replay
from hypothesis import given, settings

from tacit.aggregator import UserPlane
from tacit.aggregator.client.host_stack import Client, SumOutcome
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.planes import bpf
from tacit.aggregator.planes.kernel_plane import KernelPlane
from tacit.aggregator.spec import PlaneJob
from tacit.aggregator.wire import HEADER, Header, LaneType, PacketKind
from tacit.errors import ConfigError

needs_kernel = pytest.mark.skipif(bool(kernel_plane_missing()), reason=kernel_plane_missing() or "it runs")
entries = pytest.mark.parametrize("entry", ["tc", "xdp"])
SEEDS = range(12)


@cache
def recorded(seed):
    return record(seed, loss=0.02 * seed)  # those of test_parity.py


# ---- as the specification says


@needs_kernel
@entries
@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_over_a_link_gives_the_same_answers_and_counts(entry, seed):
    plane = WiredPlane(32, entry)
    replay(recorded(seed), plane)
    assert plane.plane.sockets() == {"overrun": 0, "unsent": 0, "failures": 0, "segmented": 0}


@needs_kernel
@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_handed_to_the_program_gives_the_same_answers_and_counts(seed):
    in_new_network(lambda: replay(recorded(seed), HandedPlane(32)))


@needs_kernel
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.01, 0.2]), entry=st.sampled_from(["tc", "xdp"])
)
def test_any_trace_gives_the_same_answers_and_counts(seed, loss, entry):
    replay(record(seed, loss=loss, repeats=loss, chunks=12), WiredPlane(32, entry))


@needs_kernel
@entries
def test_full_packets_of_every_lane_type_and_mtu_are_summed_exactly(entry):
    """Those of 9000 bytes are too long for XDP's buffer, and go on to tc."""
    for lanes in INTEGERS:
        for mtu in (1500, 3500, 9000):
            job = some_job(world=4, lanes=lanes, elements=lanes.elements(mtu), slots=2)
            plane = WiredPlane(16, entry)
            plane.add_job(job)
            payloads = some_payloads(job, 4, seed=mtu)
            ranks = [Rank(job, rank, own, first_chunk=2**32 - 2) for rank, own in enumerate(payloads)]
            Switchboard(plane, ranks, Network(Random(mtu), loss=0.05, repeats=0.1)).run()
            assert all(rank.sums() == exact_sums(job, payloads) for rank in ranks)


@needs_kernel
@pytest.mark.parametrize("elements", [8, 16, 56, 64, 72, 120, 128, 136])
def test_blocks_of_lanes_and_what_is_left_of_them_meet(elements):
    for lanes in INTEGERS:
        job = some_job(world=3, lanes=lanes, elements=elements, slots=1)
        plane = WiredPlane(16, "tc")
        plane.add_job(job)
        payloads = some_payloads(job, 1, seed=elements)
        *_, answers = [
            plane.receive(job.packet(PacketKind.DATA, 0, rank, payloads[rank][0]), job.members[rank])
            for rank in range(3)
        ]
        assert [answer[HEADER.size :] for answer, _ in answers] == exact_sums(job, payloads) * 3


@needs_kernel
@pytest.mark.parametrize("lanes", [LaneType.U8, LaneType.U16, LaneType.I32], ids=lambda lanes: lanes.name)
def test_full_packets_whose_lanes_meet_their_limits_are_as_the_specification_says(lanes):
    job = some_job(world=4, lanes=lanes, elements=lanes.elements(9000), slots=1)
    payloads = some_payloads(job, 1, seed=7, fit=False)
    planes = WiredPlane(16, "tc"), SpecPlane(16)
    for plane in planes:
        plane.add_job(job)
    for rank, member in enumerate(job.members):
        packet = job.packet(PacketKind.DATA, 0, rank, payloads[rank][0])
        found, expected = (plane.receive(packet, member) for plane in planes)
        assert found == expected
    assert len(found) == 4 and planes[0].counted()["saturated"] == planes[1].counted()["saturated"] > 0


# ---- among other traffic


@needs_kernel
def test_what_is_not_for_the_plane_passes():
    def run() -> None:
        plane = HandedPlane(16)
        try_frame = partial(run_by_hand, plane.wire.program, ifindex=plane.wire.ifindex)
        good = frame_of(b"x" * 22, ("10.0.0.1", 5))
        assert try_frame(good)[0] == SHOT
        changes = {
            "another protocol": (12, b"\x86\xdd"),
            "options": (14, b"\x46"),
            "the first part of a packet": (20, b"\x20\x00"),
            "a later part": (20, b"\x00\x10"),
            "TCP": (23, b"\x06"),
            "another address": (30, b"\x0a\x00\x00\x01"),
            "another port": (36, b"\x12\xc1"),
        }
        for what, (at, value) in changes.items():
            frame = good[:at] + value + good[at + len(value) :]
            assert try_frame(frame) == (UNSPEC, frame), what
        assert try_frame(good[:41])[0] == UNSPEC
        assert plane.counted()["magic"] == 1
        longer = good[:38] + struct.pack("!H", 31) + good[40:]  # says one byte more than it has
        assert try_frame(longer)[0] == SHOT and plane.counted()["truncated"] == 1
        assert try_frame(good[:38] + struct.pack("!H", 29) + good[40:])[0] == SHOT
        assert plane.counted()["short"] == 1

    in_new_network(run)


@needs_kernel
def test_what_follows_a_packet_in_its_frame_is_cut_off():
    def run() -> None:
        plane = HandedPlane(16)
        job = some_job(world=1)
        plane.add_job(job)
        packet = job.packet(PacketKind.DATA, 0, 0, bytes(range(40)))
        returned, frame = run_by_hand(
            plane.wire.program, frame_of(packet, job.members[0]) + b"trailer", plane.wire.ifindex
        )
        assert returned == REDIRECT and frame[64:] == bytes(range(40))

    in_new_network(run)


# ---- ranks behind the ports of a switch


class Ranks:
    """Sockets of the C++ client, in the namespaces of a switch."""

    def __init__(self, switch: Switch, job: PlaneJob, plane: KernelPlane, segment: bool = False) -> None:
        self.clients = [
            switch.at(rank, lambda host=host: Client((host, 0)))
            for rank, host in enumerate(switch.hosts[: job.world])
        ]
        members = tuple((host, client.port) for host, client in zip(switch.hosts, self.clients, strict=False))
        self.job = PlaneJob(
            job.id, job.cookie, members, job.lanes, job.elements, job.slots, job.table, job.quorum
        )
        plane.add_job(self.job)
        for rank, client in enumerate(self.clients):
            client.start(self.job, rank, plane.address, segment=segment)

    def reduce(self, numel: int, seed: int = 0) -> None:
        """Every rank must get the exact sum."""
        lanes = self.job.lanes
        rng = np.random.default_rng(seed)
        own = rng.integers(0, 256, (self.job.world, numel // 2), np.uint8)
        values = np.array(self.job.table)[np.stack([own & 15, own >> 4], axis=2).reshape(self.job.world, -1)]
        if not lanes.indexed:
            values = rng.integers(0, 100, (self.job.world, numel)) // self.job.world
            own = values.astype(lanes.dtype).view(np.uint8)
        out = np.zeros((self.job.world, lanes.result_nbytes(numel)), np.uint8)
        outcomes: dict[int, SumOutcome] = {}

        def run(rank: int) -> None:
            client = self.clients[rank]
            outcomes[rank] = client.reduce(own[rank], out[rank], numel, patience_s=30)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.job.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(outcomes.values()) == {SumOutcome.DONE}
        exact = values.sum(axis=0).astype(lanes.dtype)
        assert all((row.view(lanes.dtype) == exact).all() for row in out)

    def close(self) -> None:
        for client in self.clients:
            client.close()


@needs_kernel
@entries
@pytest.mark.parametrize("lanes", INTEGERS, ids=lambda lanes: lanes.name)
def test_ranks_behind_the_ports_of_a_switch_get_exact_sums(entry, lanes):
    with served(4, entry=entry) as (switch, plane):
        ranks = Ranks(
            switch, some_job(lanes=lanes, elements=lanes.elements(1500), first_slot=0, slots=8), plane
        )
        for step in range(3):
            ranks.reduce(50 * ranks.job.elements + 8, seed=step)
        stats = plane.stats(ranks.job.id)
        assert stats.counts["completed"] == stats.counts["wrote"] == 153 and stats.counts["added"] == 3 * 153
        assert stats.unfinished == 0 and [rank.packets >= 153 for rank in stats.ranks] == [True] * 4
        assert plane.sockets()["failures"] == plane.sockets()["unsent"] == 0
        ranks.close()


@needs_kernel
def test_jumbo_frames_sixteen_ports_and_two_jobs_at_once():
    with served(16, mtu=9000) as (switch, plane):
        indices = some_job(1, 16, LaneType.TABLE_U16, 4472, first_slot=0, slots=16)
        words = some_job(2, 16, LaneType.I32, 2232, first_slot=32, slots=4)
        both = [Ranks(switch, job, plane) for job in (indices, words)]
        threads = [threading.Thread(target=each.reduce, args=(20 * each.job.elements,)) for each in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [plane.stats(id).counts["completed"] for id in (1, 2)] == [20, 20]
        for each in both:
            each.close()


@needs_kernel
def test_a_device_that_finishes_checksums_finishes_them_right():
    """Answers inherit from packets of virtual links that the last device is to do it; here the port must, before it sends."""

    with served(2) as (switch, plane):
        for port in switch.ports:
            switch.inside(partial(compute_checksums, port))
        ranks = Ranks(switch, some_job(world=2, first_slot=0), plane)
        ranks.reduce(400)
        assert [switch.at(rank, bad_checksums) for rank in range(2)] == [0, 0]
        ranks.close()


@needs_kernel
@entries
def test_packets_that_a_sender_left_joined_are_told_from_others(entry):
    """With XDP on a virtual link the kernel cuts them before they come; tc must refuse them."""
    with served(1, entry=entry) as (switch, plane):
        own = switch.at(0, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        with own:
            own.bind((switch.hosts[0], 0))
            own.settimeout(30)
            job = some_job(world=1, first_slot=0)
            job = PlaneJob(job.id, job.cookie, (own.getsockname(),), job.lanes, job.elements, job.slots)
            plane.add_job(job)
            own.setsockopt(17, 103, HEADER.size + 40)  # UDP_SEGMENT
            packets = [job.packet(PacketKind.DATA, chunk, 0, bytes(40)) for chunk in range(3)]
            own.sendto(b"".join(packets), plane.address)
            own.setsockopt(17, 103, 0)
            own.sendto(job.packet(PacketKind.PROBE, 9, 0), plane.address)
            while Header.of(own.recv(65535)).kind != PacketKind.ECHO:
                pass
        joined = entry == "tc"
        assert plane.sockets()["segmented"] == joined and plane.counts()["oversized"] == joined
        assert plane.counts()["wrote"] == (0 if joined else 3)


@needs_kernel
@pytest.mark.parametrize("kind", ["kernel", "user"])
@pytest.mark.parametrize(
    ("world", "rate_bps"), [(8, 64e6), (4, 200e6)], ids=["8 at 64 Mbit", "4 at 200 Mbit"]
)
def test_ranks_hand_over_runs_to_the_user_plane_and_none_to_the_kernel_plane(world, rate_bps, kind):
    """4-bit indices at MTU 1500, on shaped virtual links that cut long runs and leave short ones whole: handing over runs, ranks
    waited 5 to 50 times as long for a vector."""
    lanes, numel = LaneType.TABLE_U8, 100_000
    terms = Terms("run", world, lanes, lanes.elements(1500), 64, tuple(range(0, 32, 2)))
    data = np.random.default_rng(0).integers(0, 256, (world, numel // 2), np.uint8)
    values = np.array(terms.table, np.uint8)[np.stack([data & 15, data >> 4], axis=2).reshape(world, -1)]
    with Switch(world, 1500, rate_bps) as switch, ExitStack() as stack:

        def serve():
            where = (switch.host, 0)
            plane = KernelPlane(where, switch.ports, mtu=1500) if kind == "kernel" else UserPlane(where)
            return plane, ControlServer(plane, where, ["secret"], kind=kind)

        plane, control = map(stack.enter_context, switch.inside(serve))

        def sum_up(rank):
            out = np.zeros(numel, np.uint8)
            with (
                Client((switch.hosts[rank], 0)) as client,
                Membership(control.address, "secret", terms, rank, client.port, timeout_s=60) as membership,
            ):
                client.start(membership.job, rank, membership.plane, segment=membership.segment)
                assert client.reduce(data[rank], out, numel, patience_s=60) is SumOutcome.DONE
            assert membership.segment == (kind == "user")
            assert (out == values.sum(axis=0, dtype=np.uint8)).all()

        with ThreadPoolExecutor(world) as pool:
            list(pool.map(lambda rank: switch.at(rank, partial(sum_up, rank)), range(world)))
        assert plane.sockets().get("segmented", 0) == plane.counts()["oversized"] == 0


@needs_kernel
def test_other_traffic_crosses_the_switch_meanwhile():
    with served(2) as (switch, plane), ExitStack() as stack:
        ends = []
        for rank, host in enumerate(switch.hosts):
            end = stack.enter_context(
                switch.at(rank, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            )
            end.bind((host, plane.address[1]))  # the plane's port, but not its address
            end.settimeout(30)
            ends.append(end)
        ends[0].sendto(b"hello", ends[1].getsockname())
        assert ends[1].recvfrom(100) == (b"hello", ends[0].getsockname())
        assert sum(plane.counts().values()) == 0


# ---- figures


@needs_kernel
def test_a_straggler_is_named():
    plane = WiredPlane(16, "tc")
    job = some_job()
    plane.plane.add_job(job)
    before = plane.plane.stats(job.id)
    assert [rank.idle_s for rank in before.ranks] == [None] * 4 and before.answered_nbytes == 0
    for rank in (0, 1, 3, 2):
        for chunk in range(1 if rank == 2 else 4):
            plane.receive(job.packet(PacketKind.DATA, chunk, rank, bytes(40)), job.members[rank])
    stats = plane.plane.stats(job.id)
    assert stats.unfinished == 3 and stats.waiting_for == (2,)
    assert [rank.missing for rank in stats.ranks] == [0, 0, 3, 0]
    assert [rank.packets for rank in stats.ranks] == [4, 4, 1, 4]
    assert all(rank.idle_s is not None and 0 <= rank.idle_s < 60 for rank in stats.ranks)
    assert stats.received_nbytes == 13 * (22 + 40) and stats.answered_nbytes == 4 * (22 + 40)
    rates = stats.rates(before)
    assert rates.chunks_per_s > 0 and rates.received_bps / rates.answered_bps == pytest.approx(13 / 4)


@needs_kernel
@entries
def test_a_member_of_whom_nothing_came_gets_its_result_when_it_asks(entry):
    plane = WiredPlane(16, entry)
    job = some_job(world=3, quorum=2)
    unsent = plane.plane.sockets()["unsent"]
    plane.plane.add_job(job)  # and nobody says where they are
    for rank in (0, 2):
        plane.receive(job.packet(PacketKind.DATA, 0, rank, bytes(40)), job.members[rank])
    answers = plane.receive(job.packet(PacketKind.SETTLE, 0, 0), job.members[0])
    assert [to for _, to in answers] == [job.members[0], job.members[2]]
    assert plane.plane.sockets()["unsent"] == unsent + 1
    ((late, to),) = plane.receive(job.packet(PacketKind.DATA, 0, 1, bytes(40)), job.members[1])
    assert to == job.members[1] and Header.of(late).world == 2


@needs_kernel
def test_figures_of_a_removed_job_stay_in_the_total_and_its_successor_starts_at_nothing():
    plane = WiredPlane(16, "tc")
    job = some_job(world=1)
    for completed in (1, 2):
        plane.add_job(job)
        plane.receive(job.packet(PacketKind.DATA, 0, 0, bytes(40)), job.members[0])
        assert plane.counted()["completed"] == completed
        assert plane.counted_of(job.id)["completed"] == 1
        assert plane.plane.stats(job.id).ranks[0].packets == 2  # with the word it said first
        plane.remove_job(job.id)
    assert plane.counted()["completed"] == 2 and plane.plane.jobs() == []


# ---- results that wait for a packet


class Talk:
    """Two ranks and sixteen slots; `say` returns which chunks' results it calls up, by rank, once they are checked."""

    def __init__(self, entry: str, lanes: LaneType = LaneType.U8) -> None:
        self.plane = WiredPlane(16, entry)
        self.job = some_job(world=2, lanes=lanes, first_slot=0, slots=16)
        self.plane.add_job(self.job)
        self.payloads = some_payloads(self.job, 40, seed=2)
        self.sums = exact_sums(self.job, self.payloads)

    def say(self, rank: int, chunk: int, *, more: bool = False) -> dict[int, list[int]]:
        packet = self.job.packet(PacketKind.DATA, chunk, rank, self.payloads[rank][chunk])
        packet = saying_more(packet) if more else packet
        found: dict[int, list[int]] = {0: [], 1: []}
        for answer, to in self.plane.receive(packet, self.job.members[rank]):
            header = Header.of(answer)
            assert (header.kind, header.world, header.lanes) == (PacketKind.RESULT, 2, self.job.lanes)
            assert header.place == self.job.place(header.chunk)
            assert answer[HEADER.size :] == self.sums[header.chunk]
            found[self.job.members.index(to)].append(header.chunk)
        return found


@needs_kernel
@entries
def test_who_has_more_to_send_gets_results_in_its_own_packets(entry):
    talk, nothing = Talk(entry), {0: [], 1: []}
    carried = talk.plane.plane.carried()
    assert [talk.say(0, chunk, more=True) for chunk in (0, 1, 2)] == [nothing] * 3
    assert talk.say(1, 0) == {0: [], 1: [0]}  # which rank 0 is owed
    assert talk.say(1, 1) == {0: [], 1: [1]}
    assert talk.say(1, 2) == {0: [0], 1: [2]}  # three are too many: the oldest leaves in a copy
    assert talk.say(0, 3, more=True) == {0: [1], 1: []}
    assert talk.say(1, 3) == {0: [], 1: [3]}
    assert talk.say(1, 4) == nothing
    assert talk.say(0, 4, more=True) == {0: [2, 4], 1: [4]}  # its packet is needed for 4: 2 comes in a copy
    assert talk.say(0, 5) == {0: [3], 1: []}  # it has no more
    assert talk.say(1, 5) == {0: [5], 1: [5]}
    assert talk.plane.plane.carried() - carried == 2  # chunks 1 and 3
    assert talk.plane.plane.sockets()["failures"] == 0


@needs_kernel
@entries
def test_who_is_a_window_ahead_does_not_wait_for_its_result(entry):
    """It has nothing more to send until it gets some."""
    talk = Talk(entry)
    for chunk in range(12):
        talk.say(0, chunk, more=True)
    assert [talk.say(1, chunk)[0] for chunk in range(4)] == [[0], [], [], [1]]  # 11 ahead, 10, 9, 8


@needs_kernel
@entries
def test_who_has_no_more_to_send_gets_what_it_is_owed_before_what_is_new(entry):
    talk = Talk(entry)
    for chunk in range(3):
        talk.say(0, chunk, more=True)
    assert [talk.say(1, chunk)[0] for chunk in (0, 1)] == [[], []]
    assert talk.say(1, 3) == talk.say(1, 4) == {0: [], 1: []}
    assert talk.say(0, 4) == {0: [0, 4], 1: [4]}  # and no more; 1 is still owed
    assert talk.say(1, 2) == {0: [1, 2], 1: [2]}


@needs_kernel
@entries
@pytest.mark.parametrize("slots", [4, 8, 16])
@pytest.mark.parametrize("chunks", [8, 9, 17, 40])
def test_nobody_waits_for_ever_for_what_it_is_owed(entry, slots, chunks):
    """Nothing is lost, and nobody resends: not at the end of a vector, nor where chunks begin again at 0."""
    plane = WiredPlane(16, entry)
    job = some_job(world=3, first_slot=0, slots=slots)
    plane.add_job(job)
    first = 2**32 - 20
    for vector in range(2):
        payloads = some_payloads(job, chunks, seed=vector)
        ranks = [
            Rank(job, rank, payloads[rank], (first + vector * chunks) % 2**32, says_more=True)
            for rank in range(3)
        ]
        assert Switchboard(plane, ranks, Network(Random(vector), reorders=False)).run() == 0
        assert all(rank.sums() == exact_sums(job, payloads) for rank in ranks)


@needs_kernel
@entries
def test_what_is_owed_survives_loss_repeats_and_another_order(entry):
    plane = WiredPlane(16, entry)
    job = some_job(world=3, first_slot=0, slots=16)
    plane.add_job(job)
    payloads = some_payloads(job, 60, seed=3)
    ranks = [Rank(job, rank, payloads[rank], says_more=True) for rank in range(3)]
    Switchboard(plane, ranks, Network(Random(3), loss=0.05, repeats=0.1)).run()
    assert all(rank.sums() == exact_sums(job, payloads) for rank in ranks)


@needs_kernel
@entries
def test_indices_are_too_short_to_carry_a_result(entry):
    talk = Talk(entry, LaneType.TABLE_U8)
    talk.say(0, 0, more=True)
    assert talk.say(1, 0) == {0: [0], 1: [0]}


@needs_kernel
@entries
def test_a_result_that_was_owed_and_asked_for_is_not_sent_once_its_cell_holds_another(entry):
    talk, nothing = Talk(entry), {0: [], 1: []}
    talk.say(0, 0, more=True)
    assert talk.say(1, 0) == {0: [], 1: [0]}
    assert talk.say(0, 0, more=True) == {0: [0], 1: []}  # asked for; and still owed
    assert talk.say(0, 32, more=True) == nothing
    assert talk.plane.plane.sockets()["failures"] == 0
    assert talk.say(1, 32) == {0: [], 1: [32]}


@needs_kernel
def test_ranks_on_slow_links_get_results_in_their_own_packets():
    with Switch(4, 1500, 50e6) as switch:
        where = (switch.host, 0)
        with switch.inside(lambda: KernelPlane(where, switch.ports, slots=64)) as plane:
            job = some_job(lanes=LaneType.I32, elements=LaneType.I32.elements(1500), first_slot=0, slots=32)
            ranks = Ranks(switch, job, plane)
            ranks.reduce(400 * ranks.job.elements)
            assert plane.stats(job.id).counts["completed"] == 400
            assert plane.carried() > 0
            ranks.close()


# ---- what is left behind


def attached(name: str) -> tuple[int, int]:
    """How many programs of tc and of XDP there are, as the kernel says."""
    count, ids, flags, xdp = ctypes.c_uint32(8), (ctypes.c_uint32 * 8)(), ctypes.c_uint32(), ctypes.c_uint32()
    native, ifindex, tcx_ingress = bpf.library(), socket.if_nametoindex(name), 46
    query = (ifindex, tcx_ingress, 0, ctypes.byref(flags), ids, ctypes.byref(count))
    assert native.bpf_prog_query(*query) == 0 and native.bpf_xdp_query_id(ifindex, 0, ctypes.byref(xdp)) == 0
    return count.value, int(xdp.value != 0)


def becomes(value, read) -> bool:
    deadline = time.monotonic() + 30
    while (found := read()) != value:
        assert time.monotonic() < deadline, f"{found}, not {value}"
        time.sleep(0.005)
    return True


@needs_kernel
def test_closing_detaches_frees_the_port_and_keeps_the_figures():
    def run() -> None:
        make_link(("port", "ranks"))
        plane = KernelPlane(PLANE, ["port", "ranks"], slots=4, mtu=500)
        plane.add_job(some_job(slots=2, first_slot=0))
        assert attached("port") == attached("ranks") == (1, 0)
        with pytest.raises(ConfigError, match=r"10.0.0.254:4800 cannot be listened on \(.*in use"):
            KernelPlane(PLANE, ["port"], slots=4, mtu=500)
        with KernelPlane(
            (PLANE[0], 0), ["port"], slots=4, mtu=500
        ) as second:  # another port: both are served
            assert second.address[1] not in (0, PLANE[1]) and attached("port") == (2, 0)
        plane.close()
        plane.close()
        assert attached("port") == attached("ranks") == (0, 0)
        assert plane.counts()["wrote"] == plane.stats(3).unfinished == 0
        KernelPlane(PLANE, ["port"], slots=4, mtu=500).close()

    in_new_network(run)


@needs_kernel
def test_an_interface_that_is_taken_is_refused_and_nothing_is_left_of_the_attempt():
    def run() -> None:
        make_link(("port", "ranks"), mtu=1500)
        with KernelPlane(PLANE, ["port"], slots=4, mtu=500, entry="xdp"):
            assert attached("port") == (1, 1)
            with pytest.raises(
                ConfigError, match="attaching to XDP: the kernel said 'Device or resource busy'"
            ):
                KernelPlane((PLANE[0], 0), ["ranks", "port"], slots=4, mtu=500, entry="xdp")
            assert attached("ranks") == (0, 0)
        assert attached("port") == (0, 0)

    in_new_network(run)


SERVES = """
import sys, time
from tacit.aggregator.planes.kernel_plane import KernelPlane
plane = KernelPlane(("10.0.0.254", 4800), ["port"], slots=4, mtu=500, entry="xdp")
print("serves", flush=True)
sys.stdin.read()
"""


@needs_kernel
def test_the_kernel_removes_what_a_killed_process_had_attached():
    def run() -> None:
        make_link(("port", "ranks"), mtu=1500)
        command = [sys.executable, "-c", SERVES]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "serves\n"
            assert attached("port") == (1, 1)
            os.kill(process.pid, signal.SIGKILL)
        assert becomes((0, 0), lambda: attached("port"))

    in_new_network(run)


@needs_kernel
def test_without_links_a_filter_takes_the_place_of_what_was_left_and_goes_with_the_plane():
    def filters() -> list[int]:
        from pyroute2 import IPRoute

        with IPRoute() as routes:
            found = routes.get_filters(index=socket.if_nametoindex("port"), parent=0xFFFFFFF2)
        return [each["handle"] for each in found if each["handle"]]

    def run() -> None:
        make_link(("port", "ranks"))
        left = ExitStack()
        with KernelPlane(PLANE, ["ranks"], slots=4, mtu=500) as plane:
            attach = partial(
                bpf.attached_tc, plane._loaded.program_fd("tacit_tc"), socket.if_nametoindex("port")
            )
            left.enter_context(attach(handle=PLANE[1], links=False))
            assert filters() == [PLANE[1]] and attached("port") == (0, 0)
            with attach(handle=PLANE[1], links=False), attach(handle=5000, links=False):
                assert sorted(filters()) == [PLANE[1], 5000]
            assert filters() == []
            left.close()

    in_new_network(run)


# ---- refusals


@needs_kernel
def test_what_cannot_be_done_is_said_in_one_sentence():
    def run() -> None:
        make_link(("port", "ranks"))
        build = partial(KernelPlane, PLANE, ["port"], slots=4, mtu=500)
        with pytest.raises(
            ConfigError, match="interface 'prot': did you mean 'port'\\? there are lo, ranks, port"
        ):
            KernelPlane(PLANE, ["prot"])
        with pytest.raises(ConfigError, match=r"interfaces=\[\]: name the switch's ports"):
            KernelPlane(PLANE, [])
        with pytest.raises(ConfigError, match="0.0.0.0:4800: .* name the one address that ranks send to"):
            KernelPlane(("0.0.0.0", 4800), ["port"])
        with pytest.raises(ConfigError, match="host 'here': four numbers"):
            KernelPlane(("here", 4800), ["port"])
        with pytest.raises(ConfigError, match="slots=0: a plane has 1 to 32768"):
            build(slots=0)
        with pytest.raises(ConfigError, match="mtu=50: no lane fits"):
            build(mtu=50)
        with pytest.raises(ConfigError, match="entry='dpdk': tc for virtual links"):
            build(entry="dpdk")
        with build() as plane:
            with pytest.raises(ConfigError, match="U8 lanes of 512 bytes, .* opened for 448; .* larger mtu"):
                plane.add_job(some_job(elements=512, first_slot=0))
            with pytest.raises(ConfigError, match="job=9: there is no such job"):
                plane.remove_job(9)
            with pytest.raises(ConfigError, match="job=9: there is no such job"):
                plane.stats(9)

    in_new_network(run)


def test_what_is_missing_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in KernelPlane.missing()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(bpf, "library", lambda: None)
    monkeypatch.setattr(bpf.shutil, "which", lambda name: None)
    monkeypatch.setattr(bpf, "compiled", bpf.compiled.__wrapped__)
    assert "needs clang" in KernelPlane.missing()
