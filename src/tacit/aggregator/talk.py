"""How control and those who ask it talk: one JSON object a line, and after the greeting every line is proved.

    control  {"tacit": 2, "nonce": N}
    rank     {"tacit": 2, "nonce": M, "proof": P, "text": "{...}"}
    control  {"proof": Q, "text": "{...}"}, and so on, both ways

A proof is an HMAC-SHA256 over sender, number and text of the line; its key is made of the secret and both nonces. So a line can
be neither forged nor repeated, left out or moved to another connection, and the secret never travels. What this holds off and
what not: docs/decisions/0009-aggregator-control.md.
"""

import hmac
import json
import secrets
from typing import Any, Literal

VERSION = 2
MOST_ASKED = 1 << 14  # bytes of a line to control
MOST_NONCE = 128  # characters
MOST_TOLD = 1 << 23  # bytes of a line from it: figures of 256 jobs of 64 ranks

Message = dict[str, Any]
Side = Literal["control", "asker"]


class ForgedError(Exception):
    """A line that is not what the other side says after this one, or not by somebody who knows the secret."""


class Talk:
    """The proofs of one connection, as one side makes and checks them. Lines are numbered, each way by itself."""

    def __init__(self, secret: str, control_nonce: str, asker_nonce: str, side: Side) -> None:
        self._key = _digest(secret.encode(), f"tacit {VERSION} {control_nonce} {asker_nonce}")
        self._side: Side = side
        self._other: Side = "asker" if side == "control" else "control"
        self._sent = self._heard = 0

    def seal(self, message: Message, **plain: object) -> bytes:
        """The next line to send."""
        text = json.dumps(message, separators=(",", ":"))
        line = {**plain, "proof": self._proof(self._side, self._sent, text), "text": text}
        self._sent += 1
        return encode(line)

    def open(self, line: Message) -> Message:
        """What the other side's next line says; ForgedError if it is not proved, and then the talk is as it was."""
        proof, text = line.get("proof"), line.get("text")
        if not isinstance(proof, str) or not isinstance(text, str) or not (proof + text).isascii():
            raise ForgedError
        if not hmac.compare_digest(proof, self._proof(self._other, self._heard, text)):
            raise ForgedError
        self._heard += 1
        return decode(text.encode())

    def masked(self, cookie: int) -> int:
        """The cookie, hidden from who does not know the secret; applied twice it is there again."""
        return cookie ^ int.from_bytes(_digest(self._key, "cookie")[:8], "little")

    def _proof(self, side: Side, number: int, text: str) -> str:
        return _digest(self._key, f"{side} {number} {text}").hex()


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


def _digest(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
