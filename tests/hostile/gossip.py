"""Attacks on ranks that gossip and on `tacit store`, all on loopback. Each sets up its own target, and asserts that it is alive and right."""

import contextlib
import json
import logging
import os
import random
import resource
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tacit.authentication import value_proof
from tacit.errors import TransportError
from tacit.gossip import frames
from tacit.gossip.frames import Connection, PeerError
from tacit.gossip.members import Members
from tacit.gossip.peers import MOST_CONNECTIONS, PeerAddress, Peers
from tacit.gossip.rendezvous import Endpoint
from tacit.gossip.replica import Replica
from tacit.gossip.store import StoreClient, StoreServer
from tacit.gossip.store_client import DeadlineClient
from tacit.schemes import Gossip
from tacit.strategy import parse_codec

SECRET, WORLD, NUMEL = "the secret of a run under attack", 2, 4000
SOON_S = 20.0
ME: dict[str, Any] = {"rank": 1, "life": "one"}

Attack = Callable[[float, int], dict[str, int]]


def soon() -> float:
    return time.monotonic() + SOON_S


@contextmanager
def rank_zero(numel: int = NUMEL) -> Iterator[Peers]:
    """Rank 0 of two: a model of ones. It knows rank 1 in the life `one`."""
    replica = Replica({"w": nn.Parameter(torch.ones(numel))})
    peers = Peers(
        replica, Gossip(), parse_codec("none"), rank=0, world=WORLD, incarnation="zero", seed=0,
        endpoint=Endpoint("127.0.0.1", "127.0.0.1"), members=lambda: {1: PeerAddress("127.0.0.1", 9, "one")}, report=lambda met: None,
        sent=lambda nbytes: None, secret=SECRET,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is refused is counted here
        try:
            yield peers
        finally:
            peers.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SOON_S)


def connect_to(port: int, secret: str = SECRET, called: str = "zero") -> Connection:
    return Connection(connected(port), 1 << 28, secret=secret, called=called)


def refused(connection: Connection, kind: int, fields: dict[str, Any]) -> bool:
    """Whether the first message of `connection` ended it, without an answer."""
    try:
        connection.send(kind, fields, soon())
        connection.receive(soon())
        return False
    except PeerError:
        return True
    finally:
        connection.close()


def call_fields(peers: Peers, **more: Any) -> dict[str, Any]:
    return ME | {"meeting": 1, "refers": None, "layers": None} | peers._about | more


def meet(peers: Peers, value: float) -> str:
    """Rank 1 calls, with a model of `value`."""
    connection = connect_to(peers.port)
    try:
        connection.send(frames.CALL, call_fields(peers), soon())
        kind = connection.receive(soon()).kind
        if kind != frames.READY:
            return "busy"
        connection.swap(torch.full((NUMEL,), value).numpy().tobytes(), soon())
        connection.expect(frames.PREPARED, soon())
        connection.send(frames.COMMIT, {}, soon())
        connection.expect(frames.DONE, soon())
        return "met"
    except PeerError:
        return "refused"
    finally:
        connection.close()


def check_well(peers: Peers) -> None:
    """Untouched, and at the service of those who know the secret."""
    assert torch.equal(peers._replica.snapshot, torch.ones(NUMEL))
    assert meet(peers, 3.0) == "met"
    assert torch.equal(peers._replica.snapshot, torch.full((NUMEL,), 2.0))


def repeated(seconds: float, once: Callable[[], int]) -> int:
    """How much `once` did in all, at least two times."""
    end, done, turns = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end or turns < 2:
        done += once()
        turns += 1
    return done


# ---- who does not know the secret


def attack_strangers(seconds: float, seed: int) -> dict[str, int]:
    """A stranger asks for the model, calls, asks how a meeting ended: with no secret, with another, for another life."""
    with rank_zero() as peers:

        def once() -> int:
            attempts = 0
            for secret, called in (("", "zero"), ("another secret of a run", "zero"), (SECRET, "one")):
                for kind, fields in ((frames.GET, ME | {"what": "now"}), (frames.CALL, call_fields(peers))):
                    assert refused(connect_to(peers.port, secret, called), kind, fields)
                    attempts += 1
            return attempts

        tried = repeated(seconds, once)
        assert peers._refusals.counts["secret"] == tried
        check_well(peers)
        return {"connections": tried, "refused": tried}


def attack_random_bytes(seconds: float, seed: int) -> dict[str, int]:
    """Bytes that mean nothing, with and without a nonce before them."""
    rng = random.Random(seed)
    with rank_zero() as peers:

        def once() -> int:
            for _ in range(8):
                with connected(peers.port) as connection, contextlib.suppress(OSError):
                    connection.recv(20)
                    connection.sendall(rng.randbytes(rng.randrange(4000)))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        raise AssertionError("an answer to noise")
            return 8

        tried = repeated(seconds, once)
        check_well(peers)
        return {"connections": tried}


class _Recorder:
    """Passes one connection on to a rank, and keeps what the caller sends."""

    def __init__(self, port: int) -> None:
        import threading

        self._port, self.sent = port, bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        import selectors

        caller, _ = self._server.accept()
        with caller, connected(self._port) as rank, selectors.DefaultSelector() as ready:
            ready.register(caller, selectors.EVENT_READ, rank)
            ready.register(rank, selectors.EVENT_READ, caller)
            while True:
                for key, _ in ready.select():
                    source: Any = key.fileobj
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is caller:
                        self.sent += data
                    key.data.sendall(data)

    def close(self) -> None:
        self._thread.join(SOON_S)
        self._server.close()


def attack_replay_and_forgery(seconds: float, seed: int) -> dict[str, int]:
    """A recorded meeting is sent again; a live one gets a bit flipped, anywhere."""
    rng = random.Random(seed)
    with rank_zero() as peers:
        with closing(_Recorder(peers.port)) as recorder:
            connection = connect_to(recorder.port)
            connection.send(frames.GET, ME | {"what": "now"}, soon())
            connection.expect(frames.MODEL, soon())
            connection.close()
        recorded = bytes(recorder.sent)

        def once() -> int:
            for _ in range(4):
                sent = bytearray(recorded)
                if rng.random() < 0.75:
                    sent[rng.randrange(len(sent))] ^= 1 << rng.randrange(8)
                with connected(peers.port) as connection, contextlib.suppress(OSError):
                    connection.recv(20)
                    connection.sendall(sent)
                    connection.shutdown(socket.SHUT_WR)
                    assert not connection.recv(1), "a recorded request was answered"
            return 4

        tried = repeated(seconds, once)
        connection = connect_to(peers.port)  # and in the middle of a connection that was proved
        connection.send(frames.CALL, call_fields(peers), soon())
        connection.expect(frames.READY, soon())
        payload = torch.full((NUMEL,), 3.0).numpy().tobytes()
        head = frames._HEAD.pack(frames.SWAP, 0, len(payload))
        connection._socket.setblocking(True)
        connection._socket.sendall(head + payload + bytes(16))
        connection._socket.setblocking(False)
        connection.expect(frames.SWAP, soon())
        with contextlib.suppress(PeerError):
            connection.receive(soon())
            raise AssertionError("a forged swap was taken")
        connection.close()
        assert peers._refusals.counts["secret"] > 0
        with peers.apart():
            pass
        check_well(peers)
        return {"connections": tried + 1}


def attack_silent_callers(seconds: float, seed: int) -> dict[str, int]:
    """Connections that send nothing, or half a message: none of them holds the meeting."""
    with rank_zero() as peers:
        held: list[socket.socket] = []
        try:
            for number in range(48):
                held.append(connected(peers.port))
                if number % 2:
                    held[-1].sendall(bytes(20))
            time.sleep(min(seconds, 2.0))
            assert peers._meeting.acquire(blocking=False)
            peers._meeting.release()
            check_well(peers)
        finally:
            for connection in held:
                connection.close()
        return {"connections": len(held)}


# ---- who knows the secret, and is broken


def attack_broken_peer(seconds: float, seed: int) -> dict[str, int]:
    """Ranks that are none, lives that nobody lives, and values of 1e30, all with the secret."""
    with rank_zero() as peers:

        def once() -> int:
            wrong: list[dict[str, Any]] = [
                {"rank": rank} for rank in (77, -1, 0, WORLD, True, "1", 1.5, None, [1], 1 << 70)
            ]
            wrong += [{"life": life} for life in ("two", "", None, 7, "x" * 5000)]
            for fields in wrong:
                for kind in (frames.CALL, frames.GET, frames.OUTCOME):
                    assert refused(
                        connect_to(peers.port), kind, call_fields(peers, **fields) | {"what": "now"}
                    )
            for value in (1e30, -1e30, 1e38, float("inf"), float("nan"), 200.0):
                assert meet(peers, value) == "refused"
            return 3 * len(wrong) + 6

        tried = repeated(seconds, once)
        counts = peers._refusals.counts
        assert counts["rank"] and counts["incarnation"] and counts["movement"]
        for table in (
            peers._timeouts,
            peers._led_meetings.committed,
            peers._replica.pairs,
            peers._replica.followed_meetings.undecided,
        ):
            assert len(table) <= WORLD
        check_well(peers)
        return {"connections": tried, "refused": tried}


# ---- limits, of a rank in a process of its own

_RANK = """
import json, resource, sys, warnings
sys.path.insert(0, sys.argv[1])
numel, files = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (files, max(files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
import threading
from hostile import gossip
from tacit.gossip import peers as served
warnings.simplefilter("ignore")
served.FRESH_S = 0.0  # each reader would have a snapshot of its own
with gossip.rank_zero(numel) as peers:
    peers._offer("now")
    print(peers.port, flush=True)
    for _ in sys.stdin:
        peers._replica.stepped()
        peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmRSS")) >> 10
        print(json.dumps({"mb": peak, "threads": threading.active_count(), **peers._refusals.counts}), flush=True)
"""


@contextmanager
def rank_process(numel: int, files: int) -> Iterator[tuple[int, Callable[[], dict[str, int]]]]:
    """Its port, and what it says of itself."""
    here = str(Path(__file__).resolve().parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, here, str(numel), str(files)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdin and process.stdout

    def figures() -> dict[str, int]:
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        found: dict[str, int] = json.loads(process.stdout.readline())
        return found

    try:
        yield int(process.stdout.readline()), figures
    finally:
        process.kill()
        process.communicate()


@contextmanager
def many_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, count if hard == resource.RLIM_INFINITY else min(hard, count))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def attack_idle_connections(seconds: float, seed: int) -> dict[str, int]:
    """1,100 connections that stay open, against a rank that may open 1,024 files."""
    held: list[socket.socket] = []
    with many_files(4096), rank_process(NUMEL, 1024) as (port, figures):
        try:
            for _ in range(1100):
                held.append(connected(port))
            connection = connect_to(port)
            connection.send(frames.GET, ME | {"what": "now"}, soon())
            assert len(connection.expect(frames.MODEL, soon()).payload) == 4 * NUMEL
            connection.close()
            found = figures()
            assert found["threads"] <= MOST_CONNECTIONS + 3, found
            assert found["cut off"] >= 1100 - MOST_CONNECTIONS, found
        finally:
            for connection in held:
                connection.close()
    return {"connections": len(held), "cut off": found["cut off"], "threads": found["threads"]}


def attack_unread_models(seconds: float, seed: int) -> dict[str, int]:
    """25 peers with the secret ask for a model of 40 MB that is trained meanwhile, and do not read it."""
    held: list[Connection] = []
    with rank_process(10_000_000, 1024) as (port, figures):
        before = figures()["mb"]
        try:
            for _ in range(25):
                held.append(connect_to(port))
                held[-1].send(frames.GET, ME | {"what": "now"}, soon())
                time.sleep(0.04)
                figures()
            grown = figures()["mb"] - before
            assert grown < 140, f"the rank has grown by {grown} MB"
        finally:
            for connection in held:
                connection.close()
        connection = connect_to(port)
        connection.send(frames.GET, ME | {"what": "now"}, soon())
        frame = connection.receive(soon())
        assert frame.kind == frames.BUSY or len(frame.payload) == 40_000_000
        connection.close()
    return {"connections": 25, "grown_mb": max(0, grown)}


# ---- the store


def attack_leases(seconds: float, seed: int) -> dict[str, int]:
    """Values in torch's store that no rank wrote, and leases that cannot be read, by somebody who knows the secret: membership goes on."""
    rng, store = random.Random(seed), dist.HashStore()

    def member(rank: int) -> Members:
        return Members(DeadlineClient(lambda: store), rank, 3, beat_s=3600.0, secret=SECRET, scope="s")

    def sealed(text: str) -> str:
        return f"{value_proof(SECRET, 's/0/2', text)} {text}"

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero, one = member(0), member(1)
        one.begin(PeerAddress("10.0.0.1", 7, "one"))
        assert set(zero.look()) == {1}
        real = store.get("0/1").decode()
        forged = [
            "", "nonsense", "[", "[1, 2]", "{}", '["a", 1, 2, 3]', "x" * 100_000, real, "\x00" * 40,
            *(sealed(text) for text in (
                "", "[", "7", "[1, 2]", '["1", "10.0.0.2", 7, "a"]', '[1, 5, 7, "a"]', '[1, "h", 70000, "a"]', "[" * 9000,
                '[1, "h", "7", "a"]', '[1, "h", -1, "a"]', '[1, "h", 7, null]', '[1, "", 7, "a"]', json.dumps([1, "h" * 9000, 7, "a"]),
            )),
        ]  # fmt: skip

        def once() -> int:
            store.set("0/2", rng.choice(forged))
            if rng.random() < 0.2:
                store.set("0/2", bytes(rng.randrange(128, 256) for _ in range(40)))
            store.set("0/merge/1/1/who", rng.choice(forged[:9]))
            assert set(zero.look()) == {1} and zero.get("merge/1/1/who") is None
            one.look()
            return 1

        tried = repeated(seconds, once)
        old = store.get("0/1").decode()
        one.look()  # a newer beat
        assert set(zero.look()) == {1}
        store.set("0/1", old)
        zero.look()
        assert zero._refusals.counts["replayed"] == 1
        one.close()
        assert not zero.look()
        store.set("0/1", old)
        assert not zero.look(), "a lease that was over came back"
        refused = sum(zero._refusals.counts.values())
        assert refused >= tried // 2
        zero.close()
    return {"values": tried, "refused": refused}


def attack_store(seconds: float, seed: int) -> dict[str, int]:
    """Noise, wrong secrets, long lines and idle connections at `tacit store`; a rank's connection goes on, and the log stays empty."""
    rng = random.Random(seed)
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    with (
        many_files(4096),
        closing(StoreServer(("127.0.0.1", 0), SECRET)) as server,
        closing(StoreClient(*server.address, SECRET)) as client,
    ):
        client.set("run", "1")
        held: list[socket.socket] = []
        logging.getLogger("asyncio").addHandler(handler)

        def once() -> int:
            before = server.counts["refused"]
            with connected(server.address[1]) as connection, contextlib.suppress(OSError):
                connection.sendall(b"x" * (1 << 18))
                while connection.recv(1 << 16):
                    pass
            assert server.counts["refused"] > before
            for _ in range(8):
                with connected(server.address[1]) as connection, contextlib.suppress(OSError):
                    connection.sendall(rng.randbytes(rng.randrange(1 << rng.randrange(4, 18))) + b"\n")
                    connection.shutdown(socket.SHUT_WR)
                    while data := connection.recv(1 << 16):
                        assert b"proof" not in data
            with contextlib.suppress(TransportError, OSError):
                with closing(StoreClient(*server.address, "another secret")) as stranger:
                    stranger.set("run", "7")
                raise AssertionError("a stranger wrote to the store")
            return 10

        try:
            held += [connected(server.address[1]) for _ in range(1100)]
            tried = repeated(seconds, once)
            assert client.get("run") == b"1"
            with closing(StoreClient(*server.address, SECRET)) as late:
                assert late.get("run") == b"1"
            assert not logged, logged[0].getMessage()
        finally:
            logging.getLogger("asyncio").removeHandler(handler)
            for connection in held:
                connection.close()
        return {"connections": tried + len(held), "refused": server.counts["refused"]}


ATTACKS: list[Attack] = [
    attack_strangers,
    attack_random_bytes,
    attack_replay_and_forgery,
    attack_silent_callers,
    attack_broken_peer,
    attack_idle_connections,
    attack_unread_models,
    attack_leases,
    attack_store,
]
