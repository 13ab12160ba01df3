"""Messages between two peers: a kind, a few words as JSON, and bytes, over TCP with a deadline for each move.

A frame that is cut, too long or damaged ends the conversation: `PeerError`, and nothing of it is used. So does silence: a peer whose
link is down says nothing more, and a large model on a slow link still moves.
"""

import json
import math
import select
import socket
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tacit.errors import TransportError

_HEAD = struct.Struct("<4sBIQI")  # magic, kind, bytes of words, bytes of payload, their checksum
_MAGIC = b"tgs2"
MOST_WORDS = 1 << 16
SILENCE_S = 10.0  # not a byte moved, either way
MOST_SILENCE_S = 60.0  # where much may be computed in between
CALL, READY, BUSY, SWAP, PREPARED, COMMIT, DONE, OUTCOME, GET, MODEL = range(10)


class PeerError(TransportError):
    """A peer is gone, late, or says something else than was agreed."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    words: dict[str, Any]
    payload: bytes | bytearray = b""


class Talk:
    """One connection. Every call takes a deadline, in time.monotonic() seconds; `sent_nbytes` counts payloads."""

    def __init__(self, connection: socket.socket, most_payload: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._most = connection, most_payload
        self.sent_nbytes = 0
        self.silence_s = SILENCE_S

    def allow(self, patience_s: float) -> None:
        """A meeting of large models, which may take this long, may be silent for longer: both compute before they speak."""
        self.silence_s = max(SILENCE_S, min(MOST_SILENCE_S, patience_s / 4))

    def send(self, kind: int, words: dict[str, Any], deadline: float, payload: Any = b"") -> None:
        self._move(_packed(kind, words, payload), 0, deadline)
        self.sent_nbytes += len(payload)

    def receive(self, deadline: float) -> Frame:
        return self._frame(self._move(b"", _HEAD.size, deadline), deadline)

    def expect(self, kind: int, deadline: float) -> Frame:
        frame = self.receive(deadline)
        if frame.kind != kind:
            raise PeerError(f"a peer said {frame.kind} where {kind} was due")
        return frame

    def swap(self, payload: Any, deadline: float) -> bytearray:
        """Both send their payload at the same time, of the same length."""
        told = self._move(_packed(SWAP, {}, payload), _HEAD.size + 2 + len(payload), deadline)
        kind, words, length, crc = _read_head(told[: _HEAD.size])
        body = told[_HEAD.size :]
        if (kind, words, length) != (SWAP, 2, len(payload)) or zlib.crc32(body) != crc:
            raise PeerError("a peer's part of a swap is of another length, or damaged")
        self.sent_nbytes += len(payload)
        return body[2:]

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits, and tells the peer
        self._socket.close()

    def _frame(self, head: bytearray, deadline: float) -> Frame:
        kind, words, length, crc = _read_head(head)
        if words > MOST_WORDS or length > self._most:
            raise PeerError(f"a peer's message of {words} + {length} bytes is too long")
        body = self._move(b"", words + length, deadline)
        if zlib.crc32(body) != crc:
            raise PeerError("a peer's message was damaged on its way")
        try:
            said = json.loads(bytes(body[:words]) or b"{}")
        except ValueError as cause:
            raise PeerError("a peer's words cannot be read") from cause
        if not isinstance(said, dict):
            raise PeerError("a peer's words cannot be read")
        return Frame(kind, said, body[words:])

    def _move(self, out: Any, wanted: int, deadline: float) -> bytearray:
        """Sends all of `out` and receives `wanted` bytes, whichever goes first."""
        left, got = memoryview(out), bytearray(wanted)
        room, filled = memoryview(got), 0
        while left or filled < wanted:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PeerError("a peer did not answer in time")
            try:
                told = self._wait(filled < wanted, bool(left), min(left_s, self.silence_s))
                if not told and left_s > self.silence_s:
                    raise PeerError(f"a peer has said nothing for {self.silence_s:g} s")
                if left and told & ~select.POLLIN:
                    left = left[self._socket.send(left) :]
                if filled < wanted and told & ~select.POLLOUT:
                    count = self._socket.recv_into(room[filled:])
                    if not count:
                        raise PeerError("a peer closed the connection")
                    filled += count
            except (BlockingIOError, InterruptedError):
                continue
            except (OSError, ValueError) as cause:
                raise PeerError(f"a peer was lost ({cause})") from cause
        return got

    def _wait(self, reading: bool, writing: bool, seconds: float) -> int:
        """What the socket is ready for, with whatever is wrong with it; 0: nothing, for so long. (`select` knows 1,024 files only.)"""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN * reading | select.POLLOUT * writing)
        return sum(events for _, events in poll.poll(math.ceil(1000 * seconds)))


def _packed(kind: int, words: dict[str, Any], payload: Any) -> bytes:
    said = json.dumps(words).encode()
    body = said + bytes(payload)
    return _HEAD.pack(_MAGIC, kind, len(said), len(payload), zlib.crc32(body)) + body


def _read_head(head: bytearray) -> tuple[int, int, int, int]:
    magic, kind, words, length, crc = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise PeerError("this is no peer of tacit's")
    return kind, words, length, crc
