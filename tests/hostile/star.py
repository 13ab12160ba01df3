"""Attacks on ranks that train through `star`: their aggregator is killed, and somebody hostile serves on its TCP port.

Ranks must train on over the process group, in the usual time, to the bits of `sharded`.
"""

import hashlib
import json
import logging
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from schemes.aggregators import Aggregator, attached, link_of
from toys import flat, train

WORLD, CODEC, MOST_STEPS, MOST_STEP_S, SOON_S = 2, "thc", 20_000, 10.0, 90.0
MOST_WARNINGS = 1 + 8  # that it is gone, and reasons why it is not back

Serve = Callable[[socket.socket, Random], None]


def _train(rank: int, world: int, at: str, folder: str) -> dict[str, Any]:
    """Trains until it is told to end; what it holds, and what the attack did to it."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tacit").addHandler(handler)
    model, optimizer, handle = attached(CODEC, at)
    longest_s, step = 0.0, 0
    with handle:
        for step in range(MOST_STEPS):
            began = time.monotonic()
            train(model, optimizer, rank, range(step, step + 1))
            longest_s = max(longest_s, time.monotonic() - began)
            if rank == 0 and step == 5:
                Path(folder, "trained").touch()
            end = torch.tensor([Path(folder, "end").exists()])
            dist.broadcast(end, 0)
            if end:
                break
            time.sleep(0.05)
        using = link_of(handle)._using
    return {
        "digest": _digest(model),
        "steps": step + 1,
        "longest_s": longest_s,
        "warnings": warnings,
        "using": using,
    }


def _expected(rank: int, world: int, steps: int) -> str:
    model, optimizer, handle = attached(CODEC, None)
    with handle:
        train(model, optimizer, rank, range(steps))
        return _digest(model)


def _digest(model: Any) -> str:
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


class Stranger:
    """Serves everybody who connects to a port, each in a thread; `served` counts them."""

    def __init__(self, port: int, serve: Serve, seed: int) -> None:
        self.served, self._serve, self._seed, self._ended = 0, serve, seed, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._ended.is_set():
                connection, _ = self._listener.accept()
                self.served += 1
                threading.Thread(target=self._attend, args=(connection, self.served), daemon=True).start()

    def _attend(self, connection: socket.socket, number: int) -> None:
        with connection, suppress(OSError):
            connection.settimeout(5.0)
            self._serve(connection, Random(1000 * self._seed + number))

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)


@contextmanager
def _training(ranks: Ranks, folder: str) -> Iterator[Aggregator]:
    aggregator = Aggregator()
    try:
        ranks.start(WORLD, _train, aggregator.at, folder)
        _wait_for(Path(folder, "trained").exists)
        yield aggregator
    finally:
        aggregator.close()


def _wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _attacked_by(serve: Serve, seconds: float, seed: int, named: str = "") -> dict[str, int]:
    """`named` is in exactly one warning, once rank 0 has tried twice."""
    ranks = Ranks()
    try:
        with tempfile.TemporaryDirectory(prefix="tacit-hostile-") as folder:
            with _training(ranks, folder) as aggregator:
                aggregator.process.kill()
                aggregator.process.wait()
                stranger = Stranger(aggregator.port, serve, seed)
                try:
                    time.sleep(seconds)
                    _wait_for(lambda: stranger.served >= (2 if named else 1))
                    Path(folder, "end").touch()
                    found = ranks.results(WORLD)
                finally:
                    stranger.close()
            for kind, value in found:
                assert kind == "ok", value
                assert value["longest_s"] < MOST_STEP_S and not value["using"]
            steps, warnings = found[0][1]["steps"], found[0][1]["warnings"]
            assert 1 <= len(warnings) <= MOST_WARNINGS and not found[1][1]["warnings"], warnings
            assert not named or sum(named in text for text in warnings) == 1, warnings
            assert all(text.isprintable() and len(text) < 1000 for text in warnings), warnings
            expected = ranks.run(WORLD, _expected, steps)
            assert [value["digest"] for _, value in found] == expected
            return {"connections": stranger.served, "steps": steps, "warnings": len(warnings)}
    finally:
        ranks.close()


# ---- the attacks


def _hello() -> bytes:
    return json.dumps({"tacit": 2, "nonce": "ab" * 32}).encode() + b"\n"


def attack_garbage(seconds: float, seed: int) -> dict[str, int]:
    """Random bytes, as many as are taken."""

    def serve(connection: socket.socket, random: Random) -> None:
        for _ in range(1000):
            connection.sendall(random.randbytes(random.randrange(1, 1 << 14)))

    return _attacked_by(serve, seconds, seed)


def attack_endless_message(seconds: float, seed: int) -> dict[str, int]:
    """A first message that does not end: 64 MB, if somebody reads them."""

    def serve(connection: socket.socket, random: Random) -> None:
        connection.sendall(b'{"tacit": 2, "nonce": "')
        for _ in range(1000):
            connection.sendall(b"a" * (1 << 16))

    return _attacked_by(serve, seconds, seed)


def attack_dripping(seconds: float, seed: int) -> dict[str, int]:
    """The right first message, a byte at a time."""

    def serve(connection: socket.socket, random: Random) -> None:
        for byte in _hello():
            connection.sendall(bytes([byte]))
            time.sleep(0.2)

    return _attacked_by(serve, seconds, seed)


def attack_silence(seconds: float, seed: int) -> dict[str, int]:
    """Takes the connection and sends nothing."""

    def serve(connection: socket.socket, random: Random) -> None:
        while connection.recv(1 << 12):
            pass

    return _attacked_by(serve, seconds, seed, "accepts connections and does not greet")


def attack_forged_answers(seconds: float, seed: int) -> dict[str, int]:
    """Speaks the protocol without the secret: refusals with control characters, grants without a proof, nonsense, resets."""

    def serve(connection: socket.socket, random: Random) -> None:
        connection.sendall(_hello())
        connection.recv(1 << 14)
        why = "".join(chr(random.randrange(0x300)) for _ in range(random.randrange(20_000)))
        answers: list[Any] = [
            {"say": "refused", "why": why, "again": random.random() < 0.5, "config": random.random() < 0.5},
            {"say": "refused", "why": {"deep": [why]}, "again": 7},
            {"proof": "00" * 32, "text": json.dumps({"say": "granted", "slots": [0, 64]})},
            {"proof": why, "text": why},
            [[[]]],
        ]
        connection.sendall(json.dumps(random.choice(answers)).encode() + b"\n")
        if random.random() < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return _attacked_by(serve, seconds, seed)


ATTACKS = [
    attack_garbage,
    attack_endless_message,
    attack_dripping,
    attack_silence,
    attack_forged_answers,
]
