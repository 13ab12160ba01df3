"""Messages between two peers: a kind, a few header fields as JSON, and a payload, over TCP, each authenticated, with a deadline for each transfer.

    called -> caller   magic, nonce               as soon as it accepts
    caller -> called   nonce, message, proof      its first message, of at most 16 kB
    both               message, proof             and so on

The proofs are those of authentication.py, cut to 16 bytes; they come last, so that a model is hashed while it travels. The key is also of
the incarnation that is called: a connection that somebody redirects to another rank fails. Nothing of a message is used before
its proof holds, and no memory is set aside for a caller's payload before its first proof does.

A message that is cut, too long, forged or damaged ends the connection: `PeerError`. So does silence: a peer whose link is down sends
nothing more, and a large model on a slow link still moves.
"""

import json
import math
import os
import secrets
import select
import socket
import struct
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tacit.authentication import SECRET, ForgedError, Proofs
from tacit.errors import TransportError

_MAGIC = b"tgs3"
_NONCE = 16
_HEAD = struct.Struct("<BHQ")  # kind, bytes of fields, bytes of payload
_PROOF = 16
_PIECE = 1 << 18  # bytes that are hashed and sent at a time
MOST_FIELDS = (1 << 16) - 1  # bytes, as JSON
MOST_FIRST_FIELDS = 1 << 14  # before anything is proved; then there is no payload either
SILENCE_S = 10.0  # not a byte moved, either way
MOST_SILENCE_S = 60.0  # where much may be computed in between
CALL, READY, BUSY, SWAP, PREPARED, COMMIT, DONE, OUTCOME, GET, MODEL = range(10)


class PeerError(TransportError):
    """A peer is gone, late, or sends something else than was agreed. `reason` is for the counts of what was refused; "": not counted."""

    def __init__(self, sentence: str, reason: str = "") -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PeerFrame:
    kind: int
    fields: dict[str, Any]
    payload: memoryview


class Connection:
    """One connection. Every call takes a deadline, in time.monotonic() seconds; `sent_nbytes` counts payloads.

    `called` is the incarnation of the rank that was called; `serving` is that rank's side.
    """

    def __init__(
        self, sock: socket.socket, most_payload: int, *, secret: str, called: str, serving: bool = False
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._most = sock, most_payload
        self._secret, self._called, self._serving = secret, called, serving
        self._nonce = secrets.token_bytes(_NONCE)
        self._proofs: Proofs | None = None
        self.proved = False  # whether the other side has shown that it knows the secret
        self.sent_nbytes = 0
        self.silence_s = SILENCE_S
        close_in_children(sock)
        if serving:
            with suppress(OSError):  # it has gone already, as the first read will find
                sock.send(_MAGIC + self._nonce)

    def allow(self, timeout_s: float) -> None:
        """A meeting of large models, which may take this long, may be silent for longer: both compute before they send."""
        self.silence_s = max(SILENCE_S, min(MOST_SILENCE_S, timeout_s / 4))

    def send(self, kind: int, fields: dict[str, Any], deadline: float, *payload: Any) -> None:
        """`payload` are buffers of bytes, sent one after another; none is copied."""
        views = [memoryview(part) for part in payload if len(part)]
        nbytes = sum(len(view) for view in views)
        opening, proofs = self._opened(deadline)
        text = json.dumps(fields, separators=(",", ":")).encode() if fields else b""
        if len(text) > MOST_FIELDS:
            raise PeerError(f"a message with {len(text)} bytes of fields is too long")
        head, made = _HEAD.pack(kind, len(text), nbytes) + text, proofs.sending()
        made.update(head)
        out, held = [memoryview(opening + head)], 0
        for view in views:
            for at in range(0, len(view), _PIECE):
                piece = view[at : at + _PIECE]
                made.update(piece)
                out.append(piece)
                held += len(piece)
                if held >= _PIECE:
                    self._move(out, _NOTHING, deadline)
                    out, held = [], 0
        self._move([*out, memoryview(made.digest()[:_PROOF])], _NOTHING, deadline)
        self.sent_nbytes += nbytes

    def receive(self, deadline: float) -> PeerFrame:
        opening = 0 if self._proofs else _NONCE
        if opening and not self._serving:
            self._opened(deadline)
            opening = 0
        head = self._take(opening + _HEAD.size, deadline)
        if opening:
            self._proofs = self._keyed(self._nonce, bytes(head[:opening]))
        assert self._proofs is not None
        made, head = self._proofs.receiving(), head[opening:]
        kind, fields_nbytes, nbytes = _HEAD.unpack(head)
        stranger = self._serving and not self.proved
        most_fields, most_nbytes = (MOST_FIRST_FIELDS, 0) if stranger else (MOST_FIELDS, self._most)
        if fields_nbytes > most_fields or nbytes > most_nbytes:
            raise PeerError(f"a peer's message of {fields_nbytes} + {nbytes} bytes is too long", "long")
        made.update(head)
        body = memoryview(bytearray(fields_nbytes + nbytes))
        for at in range(0, len(body), _PIECE):
            piece = body[at : at + _PIECE]
            self._move([], piece, deadline)
            made.update(piece)
        self._accept(made, deadline)
        try:
            fields = json.loads(bytes(body[:fields_nbytes]) or b"{}")
        except (ValueError, RecursionError) as cause:
            raise PeerError("a peer's fields cannot be read", "malformed") from cause
        if not isinstance(fields, dict):
            raise PeerError("a peer's fields cannot be read", "malformed")
        return PeerFrame(kind, fields, body[fields_nbytes:])

    def expect(self, kind: int, deadline: float) -> PeerFrame:
        frame = self.receive(deadline)
        if frame.kind != kind:
            raise PeerError(f"a peer sent {frame.kind} where {kind} was due")
        return frame

    def swap(self, payload: Any, deadline: float) -> memoryview:
        """Both send their payload at the same time, of the same length."""
        _, proofs = self._opened(deadline)
        head, view = _HEAD.pack(SWAP, 0, len(payload)), memoryview(payload)
        ours, theirs = proofs.sending(), proofs.receiving()
        for part in (head, view):
            ours.update(part)
        received = memoryview(bytearray(_HEAD.size + len(view)))
        self._move([memoryview(head), view, memoryview(ours.digest()[:_PROOF])], received, deadline)
        if received[: _HEAD.size] != head:
            raise PeerError("a peer's part of a swap is of another length", "malformed")
        theirs.update(received)
        self._accept(theirs, deadline)
        self.sent_nbytes += len(view)
        return received[_HEAD.size :]

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits, and notifies the peer
        self._socket.close()

    def _opened(self, deadline: float) -> tuple[bytes, Proofs]:
        """What goes before the first message of a caller, and the proofs."""
        if self._proofs is not None:
            return b"", self._proofs
        if self._serving:
            raise PeerError("a peer has asked for nothing yet")
        greeting = bytes(self._take(len(_MAGIC) + _NONCE, deadline))
        if not greeting.startswith(_MAGIC):
            raise PeerError("this is no peer of tacit's, or of another version")
        self._proofs = self._keyed(greeting[len(_MAGIC) :], self._nonce)
        return self._nonce, self._proofs

    def _keyed(self, called_nonce: bytes, caller_nonce: bytes) -> Proofs:
        sides = ("called", "caller") if self._serving else ("caller", "called")
        purpose = f"tacit gossip 3 {self._called}"
        return Proofs(self._secret, purpose, called_nonce.hex(), caller_nonce.hex(), *sides)

    def _accept(self, made: Any, deadline: float) -> None:
        assert self._proofs is not None
        try:
            self._proofs.accept(made, bytes(self._take(_PROOF, deadline)))
        except ForgedError:
            raise PeerError(
                f"a peer does not prove this run's {SECRET}, or its message was changed", "secret"
            ) from None
        self.proved = True

    def _take(self, nbytes: int, deadline: float) -> memoryview:
        room = memoryview(bytearray(nbytes))
        self._move([], room, deadline)
        return room

    def _move(self, out: list[memoryview], room: memoryview, deadline: float) -> None:
        """Sends all of `out` and fills `room`, whichever goes first."""
        filled = 0
        while out or filled < len(room):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PeerError("a peer did not answer in time")
            try:
                ready = self._wait(filled < len(room), bool(out), min(left_s, self.silence_s))
                if not ready and left_s > self.silence_s:
                    raise PeerError(f"a peer has sent nothing for {self.silence_s:g} s")
                if out and ready & ~select.POLLIN:
                    out = _after(out, self._socket.sendmsg(out[:_MOST_PARTS]))
                if filled < len(room) and ready & ~select.POLLOUT:
                    count = self._socket.recv_into(room[filled:])
                    if not count:
                        raise PeerError("a peer closed the connection" + ("" if self.proved else _MAYBE))
                    filled += count
            except (BlockingIOError, InterruptedError):
                continue
            except (OSError, ValueError) as cause:
                raise PeerError(f"a peer was lost ({cause})") from cause

    def _wait(self, reading: bool, writing: bool, seconds: float) -> int:
        """What the socket is ready for, with whatever is wrong with it; 0: nothing, for so long. (`select` knows 1,024 files only.)"""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN * reading | select.POLLOUT * writing)
        return sum(events for _, events in poll.poll(math.ceil(1000 * seconds)))


_NOTHING = memoryview(b"")
_MOST_PARTS = 64  # of one call to the kernel, which takes 1,024
_MAYBE = f" before it proved anything (do all ranks have the same {SECRET}?)"


def _after(out: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of `out` when `sent` bytes have gone."""
    for number, part in enumerate(out):
        if sent < len(part):
            return [part[sent:], *out[number + 1 :]]
        sent -= len(part)
    return []


# ---- processes that are forked beside a rank, such as a DataLoader's workers


def close_in_children(sock: socket.socket) -> None:
    """A forked process must not keep a rank's sockets open: its peers would wait for an end that does not come."""
    _OPEN.add(sock)


def _forked() -> None:
    for sock in list(_OPEN):
        sock.close()  # without shutdown(): the connection is the parent's


_OPEN: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_forked)
