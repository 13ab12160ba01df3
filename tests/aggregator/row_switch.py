"""The specification of a plane on a real socket, as bad as the test likes: it loses, repeats and reorders packets by seed, or falls silent."""

import select
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random

import numpy as np
from aggregator.clients import some_job
from aggregator.relay import HERE

from tacit.aggregator.client.row_stack import Bytes, RowSocket, RowsOutcome
from tacit.aggregator.spec import Address, Plane, PlaneJob
from tacit.aggregator.wire import ROWS_ACK, Header, PacketKind, RowsHeader, rows_room

LONG_S = 60.0  # where a few are enough


class RowSwitch:
    """`loss` and `repeats` are chances; `reorders` is the chance that a packet is held back until two others have passed.
    `most_nbytes`: longer packets are lost. `most_on_the_way` are packets from a sender to a
    receiver that had not acknowledged them, as seen here, if packets are numbered from 0."""

    def __init__(
        self,
        job: PlaneJob,
        *,
        seed: int = 0,
        loss: float = 0.0,
        repeats: float = 0.0,
        reorders: float = 0.0,
    ) -> None:
        self.plane = Plane(slots=64)
        self.plane.add_job(job)
        self.loss, self.repeats, self.reorders = loss, repeats, reorders
        self.cut, self.most_nbytes = False, 1 << 16
        self.dropped = self.passed = 0
        self.most_on_the_way: Counter[tuple[int, int]] = Counter()
        self._acknowledged: dict[tuple[int, int], int] = {}
        self._random = Random(seed)
        self._held: list[tuple[bytes, Address]] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self._socket.bind(HERE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def address(self) -> Address:
        found: Address = self._socket.getsockname()
        return found

    def __enter__(self) -> "RowSwitch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._stop.is_set():
            if poll.poll(5):
                packet, source = self._socket.recvfrom(65536)
                self._take(packet, source)
            else:
                self._release(0)

    def _take(self, packet: bytes, source: Address) -> None:
        if self.cut or len(packet) > self.most_nbytes or self._random.random() < self.loss:
            self.dropped += 1
            return
        if Header.of(packet).kind == PacketKind.ROWS:
            self._note(Header.of(packet), RowsHeader.of(packet))
        for answer, to in self.plane.receive(packet, source):
            if self._random.random() < self.reorders:
                self._held.append((answer, to))
                continue
            for _ in range(1 + (self._random.random() < self.repeats)):
                self._pass(answer, to)
            self._release(2)

    def _note(self, header: Header, rows: RowsHeader) -> None:
        """What is on its way between two acknowledgements."""
        way, back = (header.rank, header.world), (header.world, header.rank)
        self._acknowledged[back] = max(self._acknowledged.get(back, rows.next), rows.next)
        if not header.lanes & ROWS_ACK:
            on_the_way = header.chunk + 1 - self._acknowledged.get(way, 0)
            self.most_on_the_way[way] = max(self.most_on_the_way[way], on_the_way)

    def _release(self, left: int) -> None:
        while len(self._held) > left:
            self._pass(*self._held.pop(0))

    def _pass(self, packet: bytes, to: Address) -> None:
        self.passed += 1
        self._socket.sendto(packet, to)


class Members:
    """The ends of one job, in this process."""

    def __init__(self, sockets: Sequence[RowSocket], seed: int) -> None:
        self.sockets, self._random = sockets, np.random.default_rng(seed)

    def messages(self, nbytes: int, *, even: bool = True) -> list[list[Bytes]]:
        """From each to each; of any length up to `nbytes` if not `even`."""
        world = len(self.sockets)
        size = (lambda: nbytes) if even else lambda: int(self._random.integers(0, nbytes + 1))
        return [[self._random.integers(0, 256, size(), np.uint8) for _ in range(world)] for _ in range(world)]

    def rooms(self, sent: list[list[Bytes]], own: int) -> list[Bytes]:
        return [np.full(len(parts[own]), 0xEE, np.uint8) for parts in sent]

    def exchange(self, sent: list[list[Bytes]], order: Sequence[int] = ()) -> list[list[Bytes]]:
        """What each has received when all are done; `order` is in which they begin."""
        got = [self.rooms(sent, own) for own in range(len(self.sockets))]
        for own in order or range(len(self.sockets)):
            self.sockets[own].begin(sent[own], got[own])
        for own, each in enumerate(self.sockets):
            assert (outcome := each.wait(LONG_S)) is RowsOutcome.DONE, (
                own,
                outcome,
                each.here,
                each.acknowledged,
            )
        return got


def same(sent: list[list[Bytes]], got: list[list[Bytes]]) -> bool:
    """Whether everybody has what all others had for it."""
    world = range(len(sent))
    return all(np.array_equal(sent[a][b], got[b][a]) for a in world for b in world if a != b)


@contextmanager
def members(
    world: int,
    *,
    mtu: int = 1500,
    window_nbytes: int = 1 << 18,
    first: int = 0,
    seed: int = 0,
    **switch: float,
) -> Iterator[tuple[Members, RowSwitch]]:
    with ExitStack() as opened:
        sockets = [RowSocket(HERE) for _ in range(world)]
        for each in sockets:
            opened.callback(each.close)
        job = replace(some_job(world=world), members=tuple(("127.0.0.1", each.port) for each in sockets))
        path = opened.enter_context(RowSwitch(job, seed=seed, **switch))
        for own, each in enumerate(sockets):
            each.start(
                job, own, path.address, room_nbytes=rows_room(mtu), window_nbytes=window_nbytes, first=first
            )
        yield Members(sockets, seed), path
