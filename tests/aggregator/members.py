"""Ranks of jobs under control, on this machine: real connections and real sockets, all closed at the end."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from aggregator.clients import Client, exact_sums, some_payloads

from tacit.aggregator import LaneType, PlaneJob, UserPlane
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.spec import Address
from tacit.aggregator.wire import PacketKind, RowsHeader
from tacit.errors import ConfigError

HERE: Address = ("127.0.0.1", 0)
SECRET = "correct horse battery staple"


def some_terms(
    name: str = "run", world: int = 3, slots: int = 8, quorum: int = 0, elements: int = 40, shards: int = 0
) -> Terms:
    return Terms(name, world, LaneType.I32, elements, slots, quorum=quorum, shards=shards)


def until(holds: Callable[[], object], seconds: float = 30) -> None:
    """Returns when it holds; AssertionError if it does not in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not after {seconds} s"
        time.sleep(0.005)


@contextmanager
def aggregator(
    slots: int = 32,
    jobs: int = 4,
    keys: Sequence[str] = (SECRET,),
    lease_s: float = 30.0,
    port: int = 0,
    **more,
) -> Iterator[ControlServer]:
    with ExitStack() as opened:
        for attempt in range(20):
            plane = opened.enter_context(UserPlane(("127.0.0.1", port), slots=slots))
            at = ("127.0.0.1", plane.address[1])
            try:
                control = opened.enter_context(
                    ControlServer(plane, at, keys, jobs=jobs, lease_s=lease_s, **more)
                )
                break
            except ConfigError:  # a port that is free for UDP may be somebody's for TCP
                if port or attempt == 19:
                    raise
        control.plane = plane  # type: ignore[attr-defined]
        yield control


@dataclass
class Rank:
    membership: Membership
    socket: socket.socket

    @property
    def job(self) -> PlaneJob:
        return self.membership.job

    def send(self, chunk: int, kind: PacketKind = PacketKind.DATA) -> None:
        payload = bytes(self.job.data_nbytes) if kind is PacketKind.DATA else b""
        self.socket.sendto(self.job.packet(kind, chunk, self.membership.rank, payload), self.membership.plane)

    def send_rows(self, receiver: int, payload: bytes = b"rows", message: int = 0) -> bytes:
        rows = RowsHeader(len(payload), 0, 0, 0)
        packet = self.job.rows(self.membership.rank, receiver, 0, message, rows, payload)
        self.socket.sendto(packet, self.membership.plane)
        return packet


@contextmanager
def joined(
    control: Address, terms: Terms, secret: str = SECRET, timeout_s: float = 30, host: str = "127.0.0.1"
) -> Iterator[list[Rank]]:
    """All ranks of a job, and its shards behind them; they leave at the end, if they have not yet."""
    with ExitStack() as opened:
        sockets = [
            opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            for _ in range(terms.members)
        ]
        found: dict[int, Membership] = {}
        errors: list[BaseException] = []

        def join(rank: int) -> None:
            try:
                found[rank] = Membership(
                    control, secret, terms, rank, sockets[rank].getsockname()[1], timeout_s=timeout_s
                )
            except BaseException as error:
                errors.append(error)

        for own in sockets:
            own.bind((host, 0))
            own.settimeout(30)
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(terms.members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for membership in found.values():
            opened.callback(membership.leave)
        if errors:
            raise errors[0]
        yield [Rank(found[rank], sockets[rank]) for rank in range(terms.members)]


def sum_exactly(ranks: list[Rank], chunks: int, seed: int, first_chunk: int = 0) -> None:
    """Every rank ends with the exact sum of every chunk."""
    job = ranks[0].job
    payloads = some_payloads(job, chunks, seed)
    clients = [Client(job, rank, own, first_chunk) for rank, own in enumerate(payloads)]

    def drive(rank: Rank, client: Client) -> None:
        sending = client.start()
        while not client.done:
            for packet in sending:
                rank.socket.sendto(packet, rank.membership.plane)
            try:
                sending = client.receive(rank.socket.recv(65536))
            except TimeoutError:
                sending = client.resend()

    threads = []
    for rank, client in zip(ranks, clients, strict=True):
        rank.socket.settimeout(0.2)
        threads.append(threading.Thread(target=drive, args=(rank, client)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(client.done and client.sums() == exact_sums(job, payloads) for client in clients)
