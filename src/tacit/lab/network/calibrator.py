"""What each host runs while its network is timed: sockets and a clock, no torch.

Hosts form a ring, each with one connection to the next. One after another each sends its messages to the next, which reports
how long they were under way (one clock: it is one machine). Then all send at once, stage by stage, as a ring all-reduce does.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

from tacit import environment

PORT = 5077
START_S = 60.0
PAUSE_S = 0.01  # an idle link: token buckets refill, queues drain
WARM_UP_NBYTES = 2_000_000
_STAMP = struct.Struct("!q")


def main() -> None:
    """Prints one line: the one-way times of this host's messages, and when its rings began and ended."""
    spec = json.loads(sys.argv[1])
    rank, addresses = environment.rank(), spec["addresses"]
    sizes = [(int(nbytes), int(n)) for nbytes, n in spec["sizes"]]
    ring_nbytes, ring_repeats = spec["ring"]
    with socket.create_server((addresses[rank], PORT)) as server:
        after = _connect(addresses[(rank + 1) % len(addresses)])
        before, _ = server.accept()
    with after, before:
        before.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if rank > 0:
            _receive_timed(before, sizes)
        one_way = _send_timed(after, sizes)
        if rank == 0:
            _receive_timed(before, sizes)
        starts, ends = [], []
        for _ in range(ring_repeats):
            _barrier(after, before, rank)
            starts.append(time.monotonic_ns())
            _ring(after, before, len(addresses), ring_nbytes)
            ends.append(time.monotonic_ns())
        print(json.dumps({"one_way": one_way, "ring_start_ns": starts, "ring_end_ns": ends}), flush=True)
        _barrier(after, before, rank)  # no host closes before the others' last bytes have arrived


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + START_S
    while True:
        try:
            link = socket.create_connection((address, PORT), timeout=START_S)
        except ConnectionRefusedError:  # it has not started yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
            continue
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return link


def _messages(sizes: Sequence[tuple[int, int]]) -> list[int]:
    return [WARM_UP_NBYTES, *(nbytes for nbytes, n in sizes for _ in range(n))]


def _send_timed(link: socket.socket, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, list[float]]]:
    found: dict[int, list[float]] = {nbytes: [] for nbytes, _ in sizes}
    for nbytes in _messages(sizes):
        body = bytearray(nbytes)
        time.sleep(PAUSE_S)
        _STAMP.pack_into(body, 0, time.monotonic_ns())
        link.sendall(body)
        (took_ns,) = _STAMP.unpack(_receive(link, _STAMP.size))
        if nbytes in found:
            found[nbytes].append(took_ns * 1e-9)
    return list(found.items())


def _receive_timed(link: socket.socket, sizes: Sequence[tuple[int, int]]) -> None:
    for nbytes in _messages(sizes):
        body = _receive(link, nbytes)
        now = time.monotonic_ns()
        (sent,) = _STAMP.unpack_from(body)
        link.sendall(_STAMP.pack(now - sent))


def _ring(after: socket.socket, before: socket.socket, world: int, nbytes: int) -> None:
    chunk = bytes(nbytes // world)
    for _ in range(2 * (world - 1)):
        sending = threading.Thread(target=after.sendall, args=(chunk,))
        sending.start()
        _receive(before, len(chunk))
        sending.join()


def _barrier(after: socket.socket, before: socket.socket, rank: int) -> None:
    """Returns on every host at about the same time: a byte goes round twice."""
    for _ in range(2):
        if rank == 0:
            after.sendall(b"x")
        _receive(before, 1)
        if rank != 0:
            after.sendall(b"x")


def _receive(link: socket.socket, nbytes: int) -> bytearray:
    body = bytearray(nbytes)
    view = memoryview(body)
    while view:
        got = link.recv_into(view)
        if got == 0:
            raise ConnectionError("the other host hung up")
        view = view[got:]
    return body


if __name__ == "__main__":
    main()
