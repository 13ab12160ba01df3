"""The store in which ranks that gossip find one another: a small key-value server whose clients prove the run's secret, and its client.

    server  {"store": 1, "nonce": N}
    client  {"store": 1, "nonce": M, "proof": ..., "text": "{do, key, ...}"}
    server  {"proof": ..., "text": "{values}" or "{error}"}, and so on

The messages are those of authentication.py. torch's own TCPStore answers whoever reaches it, so it cannot be used here. All is in memory; one
thread serves, with limits on connections, bytes of a message, keys and bytes in total. Keys and values are text.
"""

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tacit.authentication import (
    MAKE_ONE,
    MOST_ANSWER_NBYTES,
    MOST_NONCE,
    SECRET,
    ForgedError,
    Message,
    SealedMessages,
    decode,
    encode,
    is_loopback,
    new_nonce,
)
from tacit.errors import ConfigError, TransportError
from tacit.gossip.frames import close_in_children

VERSION = 1
PURPOSE = f"tacit store {VERSION}"
MOST_CONNECTIONS = (
    4096  # and fewer where the process may open fewer files; one more, and the longest idle is cut off
)
MOST_STRANGERS = 64  # that have proved nothing yet; one more, and the oldest is cut off
SPARE_FILES = 64
GREETING_S = 5.0  # to prove the secret
IDLE_S = 300.0  # ranks ask twice a second
SEND_S = 10.0  # for a client to read its answer
MOST_REQUEST = 1 << 16  # bytes of a message
MOST_KEY, MOST_VALUE = 256, 1 << 14  # characters
MOST_KEYS = 1 << 18
MOST_NBYTES = 64 << 20  # of keys and values in total
ASKED_AT_ONCE = 128  # keys
ANSWER_S = 3.0


class StoreServer:
    """Serves from when it is built until it is closed. Without a secret it serves loopback only: ConfigError otherwise."""

    def __init__(self, listen: tuple[str, int], secret: str) -> None:
        host, port = listen
        if not secret and not is_loopback(host):
            raise ConfigError(
                f"{host or 'any address'} can be reached by others, and there is no secret; set {SECRET} here and for all ranks "
                f"({MAKE_ONE}), or serve this machine only, at 127.0.0.1:{port}"
            )
        self._secret = secret
        self._values: dict[str, str] = {}
        self._nbytes = 0
        self.counts: Counter[str] = Counter()  # connections, and what was refused
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(1, min(MOST_CONNECTIONS, files - SPARE_FILES))
        self._connections: dict[asyncio.Task[Any], None] = {}  # the longest idle first
        self._strangers: dict[asyncio.Task[Any], None] = {}  # the oldest first
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as cause:
            raise ConfigError(
                f"TCP {host}:{port} cannot be listened on ({cause.strerror or cause}); name another address or port"
            ) from cause
        close_in_children(self._socket)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tacit store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the port is free. Again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._attend, sock=self._socket, limit=MOST_REQUEST)
        await self._stop.wait()
        server.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self.counts["connections"] += 1
        self._connections[task] = self._strangers[task] = None
        if len(self._strangers) > MOST_STRANGERS:
            self._cut_off(next(iter(self._strangers)))
        elif len(self._connections) > self._most:
            self._cut_off(next(iter(self._connections)))
        try:
            await self._answer(reader, writer, task)
        except (ForgedError, ValueError, asyncio.LimitOverrunError):
            self.counts["refused"] += 1
        except TimeoutError:
            self.counts["silent"] += 1
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.pop(task, None)
            self._strangers.pop(task, None)
            writer.transport.abort()

    def _cut_off(self, task: asyncio.Task[Any]) -> None:
        self.counts["cut off"] += 1
        self._connections.pop(task, None)
        self._strangers.pop(task, None)
        task.cancel()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[Any]
    ) -> None:
        nonce = new_nonce()
        writer.write(encode({"store": VERSION, "nonce": nonce}))
        async with asyncio.timeout(GREETING_S):
            line = decode(await reader.readuntil(b"\n"))
        own = line.get("nonce")
        if (
            line.get("store") != VERSION
            or not isinstance(own, str)
            or not own.isascii()
            or len(own) > MOST_NONCE
        ):
            raise ForgedError
        sealed = SealedMessages(self._secret, nonce, own, "control", PURPOSE)
        try:
            message = sealed.open(line)
        except ForgedError:
            self.counts["refused"] += 1
            why = f"the secret is not that of this store; give it and all ranks the same {SECRET}"
            writer.write(encode({"refused": why}))
            await asyncio.wait_for(writer.drain(), SEND_S)
            writer.write_eof()
            with contextlib.suppress(TimeoutError):  # closing first could destroy the answer on its way
                await asyncio.wait_for(reader.read(1), 1.0)
            return
        self._strangers.pop(task, None)
        while True:
            writer.write(sealed.seal(self._done(message)))
            await asyncio.wait_for(writer.drain(), SEND_S)
            self._connections.pop(task, None)
            self._connections[task] = None  # active just now
            async with asyncio.timeout(IDLE_S):
                message = sealed.open(decode(await reader.readuntil(b"\n")))

    def _done(self, message: Message) -> Message:
        """The answer to a request; nothing has changed where it is an error."""
        do, key, value = message.get("do"), message.get("key"), message.get("value", "")
        if do == "get":
            keys = message.get("keys")
            if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys):
                return {"error": "keys are a list of text"}
            if len(keys) > ASKED_AT_ONCE:
                return {"error": f"a request is for at most {ASKED_AT_ONCE} keys"}
            return {"values": [self._values.get(k) for k in keys]}
        if not isinstance(key, str) or len(key) > MOST_KEY:
            return {"error": f"a key is text of at most {MOST_KEY} characters"}
        held = self._values.get(key)
        if do == "add":
            try:
                value = str(int(held or 0) + int(value))
            except (TypeError, ValueError, OverflowError):
                return {"error": "only numbers can be added"}
        elif do == "compare_set":
            if (held or "") != message.get("expected"):
                return {"values": [held or ""]}
        elif do != "set":
            return {"error": f"there is no operation {do!s:.20}"}
        return self._put(key, value)

    def _put(self, key: str, value: object) -> Message:
        if not isinstance(value, str) or len(value) > MOST_VALUE:
            return {"error": f"a value is text of at most {MOST_VALUE} characters"}
        held = self._values.get(key)
        grown = len(value) - len(held) if held is not None else len(key) + len(value)
        if self._nbytes + grown > MOST_NBYTES or (held is None and len(self._values) >= MOST_KEYS):
            self.counts["full"] += 1
            return {
                "error": f"the store is full ({len(self._values)} keys, {self._nbytes} bytes); start a new one"
            }
        self._nbytes += grown
        self._values[key] = value
        return {"values": [value]}


class StoreClient:
    """What ranks use of it, as torch's stores name it; keys get `prefix`. One thread's. OSError or TransportError where it fails."""

    def __init__(
        self, host: str, port: int, secret: str, *, prefix: str = "", start_s: float = ANSWER_S
    ) -> None:
        """Waits for the server until `start_s` have passed."""
        self._prefix, self._name = prefix, f"{host}:{port}"
        deadline = time.monotonic() + start_s
        while True:
            try:
                self._socket = socket.create_connection((host, port), timeout=ANSWER_S)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)  # polled, within the deadline
        close_in_children(self._socket)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._socket.makefile("rb")
        self._plain: dict[str, object] = {}
        try:
            hello = self._line()
            nonce, own = hello.get("nonce"), new_nonce()
            if hello.get("store") != VERSION or not isinstance(nonce, str) or not nonce.isascii():
                raise TransportError(
                    f"{self._name} is no store of this version of tacit; start one there with `tacit store`"
                )
        except BaseException:
            self.close()
            raise
        self._sealed = SealedMessages(secret, nonce, own, "asker", PURPOSE)
        self._plain = {"store": VERSION, "nonce": own}

    def set(self, key: str, value: str) -> None:
        self._ask({"do": "set", "key": self._prefix + key, "value": value})

    def get(self, key: str) -> bytes:
        """KeyError where there is none: it does not wait, as torch's do."""
        found = self.get_all([key])[0]
        if found is None:
            raise KeyError(key)
        return found

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for at in range(0, len(keys), ASKED_AT_ONCE):
            asked = [self._prefix + key for key in keys[at : at + ASKED_AT_ONCE]]
            values = self._ask({"do": "get", "keys": asked})
            found += [None if value is None else value.encode() for value in values]
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self.get_all(keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask({"do": "add", "key": self._prefix + key, "value": amount})[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """The value after it: `desired` if it was `expected`, which is "" where there was none."""
        asked = {"do": "compare_set", "key": self._prefix + key, "expected": expected, "value": desired}
        return str(self._ask(asked)[0]).encode()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _ask(self, message: Message) -> list[Any]:
        plain, self._plain = self._plain, {}
        self._socket.sendall(self._sealed.seal(message, **plain))
        line = self._line()
        if "refused" in line:  # without a proof: it may not know our secret
            raise TransportError(f"the store at {self._name} refused this rank: {str(line['refused'])[:200]}")
        try:
            answer = self._sealed.open(line)
        except ForgedError:
            raise TransportError(f"the store at {self._name} does not know this run's {SECRET}") from None
        if "error" in answer:
            raise TransportError(f"the store at {self._name}: {str(answer['error'])[:200]}")
        values: list[Any] = answer["values"]
        return values

    def _line(self) -> Message:
        line = self._lines.readline(MOST_ANSWER_NBYTES)
        if not line.endswith(b"\n"):
            raise ConnectionResetError(f"the store at {self._name} closed the connection")
        try:
            return decode(line)
        except ForgedError:
            raise TransportError(f"{self._name} is no store of tacit's") from None
