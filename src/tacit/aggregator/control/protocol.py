"""The server end of the control protocol: one connection of a client, its messages bounded and authenticated. The client end: client/control_client.py."""

import asyncio
import contextlib
from collections.abc import Sequence

from tacit.authentication import (
    MOST_NONCE,
    VERSION,
    ForgedError,
    Message,
    SealedMessages,
    decode,
    encode,
    new_nonce,
)
from tacit.errors import one_line

REASONS = {  # why admissions are refused
    "secret": "the secret was wrong",
    "version": "another version of tacit asked",
    "malformed": "that was not an aggregator's language",
    "silent": "nothing was asked for in time",
    "terms": "ranks disagreed about their job, or asked for what no plane can do",
    "running": "a job of that name was running",
    "taken": "two asked for the same place in a job",
    "full": "no slots were free",
    "late": "not all ranks came in time",
    "plane": "the plane would not have the job",
    "parent": "the aggregator above would not have the job, or not all racks came in time",
    "busy": "there were too many connections",
}
MOST_WHY = 400  # characters
_LINGER_S = 1.0  # for the other side to read the last message and close


class Refusal(Exception):  # noqa: N818  (an answer, not a fault)
    """Why a client is not served: counted by `reason`, sent as one sentence.

    `again`: it may be granted later. `config`: never, until somebody corrects a value.
    """

    def __init__(self, reason: str, why: str, *, again: bool = False, config: bool = False) -> None:
        assert reason in REASONS
        why = one_line(why, MOST_WHY)  # it may quote what was asked for
        super().__init__(why)
        self.reason = reason
        self.message: Message = {"say": "refused", "why": why, "again": again, "config": config}


class ControlConnection:
    """Sends never wait; what is not read at the other end holds up `receive`, and so nobody else."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        peer = writer.get_extra_info("peername")  # None: it has hung up already
        self.host: str = peer[0] if peer else "somebody"

    async def prove(self, keys: Sequence[str]) -> tuple[int, Message]:
        """Which of the keys the client knows, and its request. Refusal if it knows none."""
        nonce = new_nonce()
        self._writer.write(encode({"tacit": VERSION, "nonce": nonce}))
        try:
            line = decode(await self._line())
        except ForgedError:
            raise Refusal(
                "malformed", "this is an aggregator's control port, and that was not its language"
            ) from None
        if line.get("tacit") != VERSION:
            why = f"the aggregator has version {VERSION}, not {line.get('tacit')!s:.20}; install the same tacit on both"
            raise Refusal("version", why, config=True)
        own = line.get("nonce")
        if isinstance(own, str) and own.isascii() and len(own) <= MOST_NONCE:
            for number, key in enumerate(keys):
                self._sealed = SealedMessages(key, nonce, own, "control")
                with contextlib.suppress(ForgedError):
                    return number, self._sealed.open(line)
        why = "the secret is not one that this aggregator was started with; compare TACIT_AGGREGATOR_SECRET or the key files here and there"
        raise Refusal("secret", why, config=True)

    async def receive(self) -> Message:
        """The client's next message. OSError when it closed the connection, ForgedError when the proof does not hold."""
        await self._writer.drain()
        return self._sealed.open(decode(await self._line()))

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._sealed.seal(message))

    def masked(self, cookie: int) -> int:
        return self._sealed.masked(cookie)

    def dismiss(self, last: Message | None = None, *, refusal: Refusal | None = None) -> None:
        """Sends the last message. Then we only wait for the client to close: closing first could discard that message in flight."""
        if last:
            self.send(last)
        with contextlib.suppress(OSError, RuntimeError):
            if refusal:
                self._writer.write(encode(refusal.message))
            self._writer.write_eof()

    async def wait_for_end(self) -> None:
        """Returns when the other side has hung up, or after a second."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while await self._reader.read(1 << 12):
                    pass

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readline()
        except ValueError as cause:  # longer than the reader's limit
            raise ForgedError from cause
        if not line.endswith(b"\n"):
            raise ConnectionResetError("it hung up")
        return line
