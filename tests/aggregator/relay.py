"""A network in the path of real sockets: a thread that passes datagrams on and loses, repeats and reorders some, by seed."""

import select
import socket
import threading
from contextlib import suppress
from random import Random

from tacit.aggregator import Address, Header
from tacit.aggregator.wire import HEADER, ROWS_HEADER, PacketKind

HERE = ("127.0.0.1", 0)
_UDP_GRO = 104
_IP_UDP_NBYTES = 28


class Relay:
    """One way in for each rank, and one way out to the plane, whose members are `members`: give them to the job.

    `loss` and `repeats` are chances, each way; `reorders` is the chance that a datagram is held back until the next one of
    its way has passed. While `cut` is set, nothing passes. `whole`: it sees runs of packets before the kernel has cut them, and
    drops them, as a plane in the kernel does behind a virtual link. `largest`: IP packets above so many bytes, on the way up and
    down, are lost while the path is `narrow`.
    """

    def __init__(
        self,
        plane: Address,
        world: int,
        *,
        seed: int = 0,
        loss: float = 0.0,
        repeats: float = 0.0,
        reorders: float = 0.0,
        whole: bool = False,
        largest: tuple[int, int] | None = None,
    ) -> None:
        self.loss, self.repeats, self.reorders = loss, repeats, reorders
        self.cut = threading.Event()
        self.largest, self.narrow = largest, lambda: True
        self.passed = self.dropped = self.runs = 0
        self._random = Random(seed)
        self._inside = [_bound() for _ in range(world)]
        self._outside = [_bound() for _ in range(world)]
        for each in self._outside:
            each.connect(plane)
        for each in self._inside if whole else []:
            each.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)
        self._clients: list[Address | None] = [None] * world
        self._held: dict[int, bytes] = {}  # by socket
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def members(self) -> tuple[Address, ...]:
        """Where the plane finds the ranks."""
        return tuple(each.getsockname() for each in self._outside)

    def entrance(self, rank: int) -> Address:
        """Where the rank finds the plane."""
        address: Address = self._inside[rank].getsockname()
        return address

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for each in self._inside + self._outside:
            each.close()

    def _run(self) -> None:
        poll = select.poll()
        ways = {}
        for rank, (inside, outside) in enumerate(zip(self._inside, self._outside, strict=True)):
            ways[inside.fileno()] = (rank, inside, outside, True)
            ways[outside.fileno()] = (rank, outside, inside, False)
            poll.register(inside, select.POLLIN)
            poll.register(outside, select.POLLIN)
        while not self._stop.is_set():
            ready = poll.poll(20)
            if not ready:
                for fd in list(self._held):  # what was held back goes when all is quiet
                    self._pass(*ways[fd][::2], self._held.pop(fd), ways[fd][3])
            for fd, _ in ready:
                rank, source, to, up = ways[fd]
                with suppress(BlockingIOError, ConnectionRefusedError):
                    for _ in range(64):
                        packet, client = source.recvfrom(65536)
                        if up:
                            self._clients[rank] = client
                        self._meet(fd, rank, to, packet, up)

    def _meet(self, fd: int, rank: int, to: socket.socket, packet: bytes, up: bool) -> None:
        header = Header.of(packet)
        extra = ROWS_HEADER.size if header.kind == PacketKind.ROWS else 0
        if len(packet) > HEADER.size + extra + header.nbytes:
            self.runs += 1
            return
        if self.largest and len(packet) + _IP_UDP_NBYTES > self.largest[not up] and self.narrow():
            self.dropped += 1
            return
        if self.cut.is_set() or self._random.random() < self.loss:
            self.dropped += 1
            return
        if fd not in self._held and self._random.random() < self.reorders:
            self._held[fd] = packet
            return
        for _ in range(1 + (self._random.random() < self.repeats)):
            self._pass(rank, to, packet, up)
        if (held := self._held.pop(fd, None)) is not None:
            self._pass(rank, to, held, up)

    def _pass(self, rank: int, to: socket.socket, packet: bytes, up: bool) -> None:
        self.passed += 1
        client = self._clients[rank]
        with suppress(BlockingIOError, ConnectionRefusedError):
            if up:
                to.send(packet)
            elif client is not None:
                to.sendto(packet, client)


def _bound() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    made.bind(HERE)
    made.setblocking(False)
    return made
