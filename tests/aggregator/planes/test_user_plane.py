"""The user-space plane on real sockets: ranks in threads, exact sums, figures while it runs, a clean end."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from aggregator.clients import INTEGERS, Client, exact_sums, some_job, some_payloads

from tacit.aggregator import Header, LaneType, PacketKind, PlaneJob, UserPlane
from tacit.aggregator.spec import Upstream
from tacit.aggregator.wire import HEADER, VERDICTS
from tacit.errors import ConfigError

HERE = ("127.0.0.1", 0)


class Ranks:
    """A job whose members are sockets on this machine; `run` drives them in threads until all have their sums."""

    def __init__(
        self, plane: UserPlane, job: PlaneJob, chunks: int, seed: int = 0, first_chunk: int = 0
    ) -> None:
        self.sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in job.members]
        for each in self.sockets:
            each.bind(HERE)
        self.plane = plane
        self.job = replace(job, members=tuple(each.getsockname() for each in self.sockets))
        payloads = some_payloads(self.job, chunks, seed)
        self.exact = exact_sums(self.job, payloads)
        self.clients = [Client(self.job, rank, own, first_chunk) for rank, own in enumerate(payloads)]
        plane.add_job(self.job)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.sockets:
            each.close()

    def send(self, rank: int, packet: bytes) -> None:
        self.sockets[rank].sendto(packet, self.plane.address)

    def hear(self, rank: int) -> Header:
        """The next packet's header, which is on its way."""
        self.sockets[rank].settimeout(30)
        return Header.of(self.sockets[rank].recv(65536))

    def drive(self, rank: int, loss: float) -> None:
        client, random = self.clients[rank], Random(rank)
        self.sockets[rank].settimeout(0.05)
        sending = client.start()
        while not client.done:
            for packet in sending:
                if random.random() >= loss:
                    self.send(rank, packet)
            try:
                sending = client.receive(self.sockets[rank].recv(65536))
            except TimeoutError:
                sending = client.resend()

    def run(self, loss: float = 0.0) -> None:
        threads = [threading.Thread(target=self.drive, args=(rank, loss)) for rank in range(self.job.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(client.done for client in self.clients), self.plane.counts()
        assert all(client.sums() == self.exact for client in self.clients)


def becomes(value: object, read: Callable[[], object]) -> bool:
    """Whether `read` gives `value`, now or within 30 s."""
    deadline = time.monotonic() + 30
    while (found := read()) != value:
        assert time.monotonic() < deadline, f"{found}, not {value}"
        time.sleep(0.002)
    return True


def seen(plane: UserPlane, **counts: int) -> bool:
    """Whether the plane counts this, now or soon."""
    return becomes(counts, lambda: {name: plane.counts()[name] for name in counts})


def plane_threads() -> int:
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it may just have ended
            names.append((task / "comm").read_text())
    return names.count("tacit-plane\n")


@pytest.mark.parametrize("lanes", INTEGERS, ids=lambda lanes: lanes.name)
def test_four_ranks_get_exact_sums(lanes):
    with (
        UserPlane(HERE, slots=16) as plane,
        Ranks(plane, some_job(lanes=lanes, elements=lanes.elements(1500)), 40) as ranks,
    ):
        ranks.run()
        stats = plane.stats(ranks.job.id)
    assert stats.counts["completed"] == 40 and stats.counts["wrote"] == 40 and stats.counts["added"] == 120
    assert stats.unfinished == 0 and stats.waiting_for == ()
    assert sum(plane.counts()[name] for name in VERDICTS) == sum(rank.packets for rank in stats.ranks)


def test_sums_are_exact_under_loss_with_two_threads_and_jumbo_packets():
    lanes = LaneType.I32
    with (
        UserPlane(HERE, slots=16, threads=2) as plane,
        Ranks(
            plane, some_job(lanes=lanes, elements=lanes.elements(9000)), 40, first_chunk=2**32 - 7
        ) as ranks,
    ):
        ranks.run(loss=0.05)
        counts = plane.counts()
    assert counts["wrote"] == counts["completed"] == 40 and counts["repeated"] + counts["duplicate"] > 0


def test_many_results_at_once_for_one_rank_come_as_packets_of_their_own():
    """The plane hands them to the kernel in one message, to be cut."""
    with (
        UserPlane(HERE, slots=128) as plane,
        Ranks(plane, some_job(world=1, first_slot=64, slots=64, elements=1448), 640) as ranks,
    ):
        ranks.run()
        assert plane.sockets()["unsent"] == 0


def test_two_jobs_run_at_once_while_others_come_and_go():
    with ExitStack() as stack:
        plane = stack.enter_context(UserPlane(HERE, slots=32, threads=2))
        jobs = [some_job(1, 3, LaneType.TABLE_U8, 1448, 0, 8), some_job(2, 2, LaneType.U16, 720, 8, 4)]
        both = [stack.enter_context(Ranks(plane, job, 60, seed=job.id)) for job in jobs]
        threads = [threading.Thread(target=ranks.run) for ranks in both]
        for thread in threads:
            thread.start()
        for _ in range(50):
            plane.add_job(some_job(3, first_slot=16, slots=16))
            assert plane.jobs() == [1, 2, 3]
            plane.stats(1), plane.stats(3)
            plane.remove_job(3)
        for thread in threads:
            thread.join(60)
        for ranks in both:
            assert all(client.sums() == ranks.exact for client in ranks.clients)
            assert plane.stats(ranks.job.id).counts["completed"] == 60


def test_a_wrong_key_is_refused_counted_and_told_so():
    with UserPlane(HERE, slots=16) as plane, Ranks(plane, some_job(), 1) as ranks:
        thief = replace(ranks.job, cookie=ranks.job.cookie + 1)
        ranks.send(0, thief.packet(PacketKind.DATA, 0, 0, bytes(40)))
        assert ranks.hear(0).kind == PacketKind.UNKNOWN
        assert seen(plane, cookie=1, wrote=0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as elsewhere:
            elsewhere.sendto(ranks.job.packet(PacketKind.DATA, 0, 0, bytes(40)), plane.address)
            assert seen(plane, source=1, wrote=0)
        ranks.run()


def test_packets_of_any_size_are_counted_and_none_stops_it():
    with UserPlane(HERE, slots=16) as plane, Ranks(plane, some_job(), 1) as ranks:
        for nbytes in (0, 1, 21, 22, 1500, 8966, 8967, 20_000, 65_507):
            ranks.send(0, bytes(nbytes))
        good = ranks.job.packet(PacketKind.DATA, 0, 0, bytes(40))
        ranks.send(0, good + bytes(60_000))
        assert seen(plane, short=3, magic=3, oversized=4)  # beyond MOST_PAYLOAD nobody looks what it is
        ranks.run()


def test_a_straggler_is_named():
    with UserPlane(HERE, slots=16) as plane, Ranks(plane, some_job(), 4) as ranks:
        before = plane.stats(ranks.job.id)
        assert [rank.idle_s for rank in before.ranks] == [None] * 4
        for rank in (0, 1, 3):
            for packet in ranks.clients[rank].start():
                ranks.send(rank, packet)
        ranks.send(2, ranks.clients[2].start()[0])
        assert seen(plane, wrote=4, added=9, completed=1)
        stats = plane.stats(ranks.job.id)
        assert stats.unfinished == 3 and stats.waiting_for == (2,)
        assert [rank.missing for rank in stats.ranks] == [0, 0, 3, 0]
        assert [rank.packets for rank in stats.ranks] == [4, 4, 1, 4]
        assert all(rank.idle_s is not None and 0 <= rank.idle_s < 60 for rank in stats.ranks)
        assert stats.received_nbytes == 13 * (22 + 40) and stats.answered_nbytes == 4 * (22 + 40)
        rates = stats.rates(before)
        assert rates.chunks_per_s > 0 and rates.received_bps / rates.answered_bps == pytest.approx(13 / 4)


def test_it_answers_probes():
    with UserPlane(HERE, slots=16) as plane, Ranks(plane, some_job(), 1) as ranks:
        ranks.send(2, ranks.job.packet(PacketKind.PROBE, 123, 2))
        header = ranks.hear(2)
        assert (header.kind, header.chunk) == (PacketKind.ECHO, 123)


def test_closing_ends_the_threads_frees_the_port_and_keeps_the_figures():
    plane = UserPlane(HERE, slots=16, threads=2)
    with Ranks(plane, some_job(), 1) as ranks:
        assert becomes(2, plane_threads)
        ranks.run()
    plane.close()
    plane.close()
    assert becomes(0, plane_threads)
    assert plane.counts()["completed"] == 1 and plane.sockets()["overrun"] == 0
    with UserPlane(plane.address, slots=16) as again:
        assert again.address == plane.address


def test_a_plane_that_is_closed_under_fire_ends_at_once():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        plane = UserPlane(HERE, slots=16)
        ended = threading.Event()

        def fire() -> None:
            while not ended.is_set():
                sender.sendto(b"nonsense", plane.address)

        thread = threading.Thread(target=fire)
        thread.start()
        while plane.counts()["short"] < 100:
            time.sleep(0.001)
        plane.close()
        ended.set()
        thread.join()


def test_what_cannot_be_done_is_said_in_one_sentence():
    with UserPlane(HERE, slots=16) as plane:
        with pytest.raises(ConfigError, match=r"127.0.0.1:\d+ cannot be listened on \(.*in use"):
            UserPlane(plane.address)
        with pytest.raises(ConfigError, match="host 'localhost': four numbers"):
            UserPlane(("localhost", 0))
        with pytest.raises(ConfigError, match="slots=40000: a plane has 1 to 32768"):
            UserPlane(HERE, slots=40000)
        with pytest.raises(ConfigError, match="threads=0: from 1 to 64"):
            UserPlane(HERE, threads=0)
        with pytest.raises(ConfigError, match="job=9: there is no such job"):
            plane.remove_job(9)
        with pytest.raises(ConfigError, match="job=9: there is no such job"):
            plane.stats(9)
        with pytest.raises(ConfigError, match="the plane has 16"):
            plane.add_job(some_job(first_slot=14))


@pytest.mark.parametrize("segment", [True, False], ids=["a user plane", "a kernel plane"])
def test_sums_go_up_in_runs_only_to_a_parent_that_takes_them(segment):
    """The parent is a socket that gets runs as the kernel plane does, uncut."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as parent, UserPlane(HERE, slots=64) as plane:
        parent.bind(HERE)
        parent.settimeout(30)
        parent.setsockopt(socket.IPPROTO_UDP, 104, 1)  # UDP_GRO
        own = some_job(world=1, lanes=LaneType.I32, first_slot=0, slots=64)
        above = PlaneJob(9, 77, (plane.address,), LaneType.I32, own.elements, range(64), below=1)
        job = replace(own, upstream=Upstream(parent.getsockname(), above, 0, segment))
        with Ranks(plane, job, chunks=64) as ranks:
            run = b"".join(ranks.clients[0].start())
            ranks.sockets[0].setsockopt(socket.IPPROTO_UDP, 103, len(run) // 64)  # they arrive at once
            ranks.sockets[0].sendto(run, plane.address)
            messages, total = [], 0
            while total < 64 * (HEADER.size + above.data_nbytes):
                messages.append(parent.recv(65536))
                total += len(messages[-1])
    longest = max(map(len, messages))
    assert (longest > HEADER.size + above.data_nbytes) == segment
    assert segment or len(messages) == 64
