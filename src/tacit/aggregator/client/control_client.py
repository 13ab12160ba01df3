"""The client end of the control protocol, for a rank or for whoever asks for status. The server end: control/protocol.py."""

import contextlib
import select
import socket
import threading
import time
from typing import Never

from tacit.aggregator.addresses import address_text
from tacit.aggregator.spec import Address
from tacit.authentication import (
    MOST_ANSWER_NBYTES,
    VERSION,
    ForgedError,
    Message,
    SealedMessages,
    decode,
    new_nonce,
)
from tacit.errors import ConfigError, TacitError, TransportError, one_line

_SEND_S = 5.0  # control reads at once; if not, it is gone
_MOST_HELLO = 1 << 12  # bytes of the first message, from somebody who has proved nothing
_MOST_WHY = 400  # characters of a refusal


class AbsentError(TransportError):
    """Nothing accepts connections at the address."""


class RefusedError(Exception):
    """Control refused the request. `again`: it may grant it later."""

    def __init__(self, message: Message) -> None:
        why = one_line(str(message.get("why")), _MOST_WHY)  # of whoever listens there: it has proved nothing
        super().__init__(why)
        self.again = bool(message.get("again"))
        self.error: TacitError = (ConfigError if message.get("config") else TransportError)(why)


class ControlClient:
    """Open when built. `send` may be called from any thread, `receive` from one. `peer` is control's address, in numbers."""

    def __init__(
        self, control: Address, secret: str, first: Message, timeout_s: float, own_host: str = ""
    ) -> None:
        """Sends `first`, with the proof that we know the secret. TransportError or ConfigError where no aggregator receives it."""
        self.control = control
        self._buffer = bytearray()
        self._lock = threading.Lock()
        self._socket, self.peer = _connected(control, timeout_s, own_host)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        try:
            self._greet(secret, first, timeout_s)
        except BaseException:
            self._socket.close()
            raise

    def send(self, message: Message) -> None:
        """OSError if control is gone."""
        with self._lock:
            self._socket.sendall(self._sealed.seal(message))

    def receive(self, timeout_s: float) -> Message | None:
        """Control's next message; None if none arrives in time. OSError if it closed the connection, RefusedError if it refuses us."""
        line = self._next(timeout_s)
        if line is None:
            return None
        if line.get("say") == "refused":  # without a proof: it may not know our secret
            raise RefusedError(line)
        try:
            return self._sealed.open(line)
        except ForgedError as cause:
            raise ConnectionAbortedError("it does not know the secret") from cause

    def unmasked(self, cookie: int) -> int:
        return self._sealed.masked(cookie)

    def hang_up(self) -> None:
        """Sends nothing more; control then closes its side too, which ends a blocked `receive`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, linger_s: float = 0.0) -> None:
        """Waits up to `linger_s` for control to close first: closing before it could discard our last message in flight."""
        deadline = time.monotonic() + linger_s
        with contextlib.suppress(OSError):
            while (left_s := deadline - time.monotonic()) > 0 and self._poll.poll(1000 * left_s):
                if not self._socket.recv(1 << 16):
                    break
        self._socket.close()

    def _greet(self, secret: str, first: Message, timeout_s: float) -> None:
        try:
            hello = self._next(timeout_s, _MOST_HELLO)
            if hello is None:
                raise TransportError(
                    f"{address_text(self.control)} accepts connections and does not greet within {timeout_s:.3g} s; is it an aggregator?"
                )
            if hello.get("say") == "refused":
                raise RefusedError(hello)
            nonce = hello.get("nonce")
            if hello.get("tacit") != VERSION or not isinstance(nonce, str) or not nonce.isascii():
                raise ConfigError(
                    f"the aggregator at {address_text(self.control)} has version {hello.get('tacit')!r:.20}, "
                    f"this rank has {VERSION}; install the same tacit on both"
                )
            own = new_nonce()
            self._sealed = SealedMessages(secret, nonce, own, "asker")
            self._socket.sendall(self._sealed.seal(first, tacit=VERSION, nonce=own))
        except ConnectionAbortedError as cause:
            raise TransportError(
                f"{address_text(self.control)} is another service, no aggregator: {cause}; compare the port with `tacit aggregate --listen`"
            ) from cause
        except OSError as cause:
            self.lost(cause)

    def lost(self, cause: OSError) -> Never:
        raise TransportError(
            f"the aggregator at {address_text(self.control)} hung up ({cause}); `tacit aggregate status` there may say why"
        ) from cause

    def _next(self, timeout_s: float, most: int = MOST_ANSWER_NBYTES) -> Message | None:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not self._poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                return None
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._buffer += data
            if len(self._buffer) > most:
                raise ConnectionAbortedError(f"it sent a message of more than {most} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return decode(bytes(line))
        except ForgedError as cause:
            raise ConnectionAbortedError("it does not answer like an aggregator") from cause


def knock(control: Address, secret: str, timeout_s: float) -> None:
    """Returns if control is at the address and knows the secret. AbsentError if nothing accepts the connection, else the TacitError with
    the reason for the refusal."""
    try:
        with contextlib.closing(ControlClient(control, secret, {"say": "status"}, timeout_s)) as client:
            try:
                answer = client.receive(timeout_s)
            except OSError as cause:
                client.lost(cause)
    except RefusedError as refusal:
        raise refusal.error from None
    if answer is None:
        raise TransportError(
            f"{address_text(control)} greets and does not answer within {timeout_s:.3g} s; is it an aggregator?"
        )


def _connected(control: Address, timeout_s: float, own_host: str) -> tuple[socket.socket, Address]:
    text = address_text(control)
    try:
        connection = socket.create_connection(control, timeout_s, *([(own_host, 0)] if own_host else []))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_S)
        host, port = connection.getpeername()[:2]  # of four, with IPv6
        return connection, (host, port)
    except ConnectionRefusedError as cause:
        raise AbsentError(
            f"no aggregator listens at {text}; start one there with `tacit aggregate`"
        ) from cause
    except socket.gaierror as cause:
        raise ConfigError(
            f"{control[0]!r} is no known host; name the aggregator by its address, such as 10.0.0.1:{control[1]}"
        ) from cause
    except TimeoutError as cause:
        raise AbsentError(
            f"{text} does not answer within {timeout_s:.3g} s; check address and firewall (TCP)"
        ) from cause
    except OSError as cause:
        raise AbsentError(
            f"the aggregator at {text} cannot be reached ({cause.strerror}); check address and routes"
        ) from cause
