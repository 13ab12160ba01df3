"""Messages that prove a secret, without ever sending it. One implementation for the aggregator, gossip and `tacit store`.

Both sides of a connection choose a nonce. The key of the connection is an HMAC-SHA256 of the secret over its purpose and both nonces;
the proof of a message is one of that key over the sender's side, the number of the message and its bytes. So a message can be neither
forged nor changed, repeated, left out, sent back to its sender or moved to another connection. Threat model and reasons:
docs/decisions/0009-aggregator-control.md (the aggregator) and 0011-authentication.md (gossip and the store).

`SealedMessages` is one JSON object a line, every line proved after the greeting:

    server  {"tacit": 2, "nonce": N}
    client  {"tacit": 2, "nonce": M, "proof": P, "text": "{...}"}
    server  {"proof": Q, "text": "{...}"}, and so on, both ways

Bulk data (gossip/frames.py) uses `Proofs` itself, over bytes.
"""

import hmac
import ipaddress
import json
import re
import secrets
from typing import Any, Literal

from tacit import environment
from tacit.errors import ConfigError

VERSION = 2
MOST_REQUEST_NBYTES = 1 << 14  # bytes of a line to control
MOST_NONCE = 128  # characters
MOST_ANSWER_NBYTES = 1 << 23  # bytes of a line from it: figures of 256 jobs of 64 ranks

SECRET = "TACIT_SECRET"  # the run's, in the environment of all its ranks and of `tacit store`
LEAST_SECRET = 16  # characters: whoever records a greeting can try secrets at leisure
MAKE_ONE = f"export {SECRET}=$(openssl rand -hex 32)"

_PROOF = re.compile("[0-9a-f]{64}")

Message = dict[str, Any]
Side = Literal["control", "asker"]  # server and client; part of what is proved, so these texts stay


class ForgedError(Exception):
    """A message that is not what the other side sends after the last one, or not by somebody who knows the secret."""


def run_secret() -> str:
    """The secret of this run; "" where there is none, and then only loopback may be served. ConfigError for one that can be guessed."""
    found = environment.run_secret()
    if found and len(found) < LEAST_SECRET:
        raise ConfigError(
            f"{SECRET} has {len(found)} characters and can be guessed; take at least {LEAST_SECRET}: {MAKE_ONE}"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`, an address or a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Proofs:
    """The proofs of one connection, as one side makes and checks them. Messages are numbered, each way by itself."""

    def __init__(
        self, secret: str, purpose: str, server_nonce: str, client_nonce: str, side: str, other: str
    ) -> None:
        self.key = _digest(secret.encode(), f"{purpose} {server_nonce} {client_nonce}".encode())
        # copied for each message: a third of the time of a new one
        self._keyed = hmac.new(self.key, digestmod="sha256")
        self._side, self._other = side, other
        self._sent = self._received = 0

    def sending(self) -> hmac.HMAC:
        """To be updated with the bytes of the next message to send; its digest is the proof."""
        self._sent += 1
        return self._begun(self._side, self._sent - 1)

    def receiving(self) -> hmac.HMAC:
        """The same for the other side's next message."""
        return self._begun(self._other, self._received)

    def accept(self, made: hmac.HMAC, proof: bytes) -> None:
        """ForgedError unless `proof`, 16 bytes or all 32, is of what was received; then the count is as it was."""
        if len(proof) not in (16, 32) or not hmac.compare_digest(proof, made.digest()[: len(proof)]):
            raise ForgedError
        self._received += 1

    def _begun(self, side: str, number: int) -> hmac.HMAC:
        made = self._keyed.copy()
        made.update(f"{side} {number} ".encode())
        return made


class SealedMessages:
    """JSON messages of one connection, sealed and opened as one side does it."""

    def __init__(
        self,
        secret: str,
        server_nonce: str,
        client_nonce: str,
        side: Side,
        purpose: str = f"tacit {VERSION}",
    ) -> None:
        other = "asker" if side == "control" else "control"
        self._proofs = Proofs(secret, purpose, server_nonce, client_nonce, side, other)

    def seal(self, message: Message, **plain: object) -> bytes:
        """The next line to send."""
        text = json.dumps(message, separators=(",", ":"))
        made = self._proofs.sending()
        made.update(text.encode())
        return encode({**plain, "proof": made.hexdigest(), "text": text})

    def open(self, line: Message) -> Message:
        """The message on the other side's next line; ForgedError if its proof does not hold, and then the sequence numbers are as they were."""
        proof, text = line.get("proof"), line.get("text")
        if not isinstance(proof, str) or not isinstance(text, str) or not (proof + text).isascii():
            raise ForgedError
        made = self._proofs.receiving()
        made.update(text.encode())
        self._proofs.accept(made, bytes.fromhex(proof) if _PROOF.fullmatch(proof) else b"")
        return decode(text.encode())

    def masked(self, cookie: int) -> int:
        """The cookie, hidden from who does not know the secret; applied twice it is there again."""
        return cookie ^ int.from_bytes(_digest(self._proofs.key, b"cookie")[:8], "little")


def value_proof(secret: str, key: str, value: str) -> str:
    """16 bytes, in hex, which prove that somebody who knows the secret wrote `value` under `key`."""
    return _digest(secret.encode(), f"tacit value {len(key)} {key} {value}".encode())[:16].hex()


def new_nonce() -> str:
    return secrets.token_hex(32)


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The object on a line; ForgedError if it holds anything else."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as cause:
        raise ForgedError from cause
    if not isinstance(message, dict):
        raise ForgedError
    return message


def _digest(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
