"""Attacks on an aggregator: its packets, its control port, its metrics and its log. Jobs beside them get exact sums all the time."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random

from aggregator.members import HERE, SECRET, Rank, aggregator, joined, some_terms, sum_exactly, until
from aggregator.serving import UNWRITABLE, serving, unwritable

from tacit.aggregator.client.membership import Membership
from tacit.aggregator.control.metrics import MOST_READERS
from tacit.aggregator.control.server import MOST_STRANGERS, ControlServer
from tacit.aggregator.control.status import StatusClient
from tacit.aggregator.spec import Address, PlaneJob
from tacit.aggregator.wire import HEADER, ROWS_ACK, Header, PacketKind, RowsHeader
from tacit.authentication import MOST_REQUEST_NBYTES, VERSION, SealedMessages, encode
from tacit.errors import TacitError

CHUNKS = 16  # of each job beside an attack
NASTY = "\x1b[2J\x1b]0;owned\x07\n\r\x00\x9b\u202e\u2028\ud800"


@contextmanager
def attackers(attack: Callable[[int], None], number: int = 1) -> Iterator[None]:
    """Threads that call `attack(i)` with i = 0, 1, ... until the block ends; what one raises is raised here."""
    stop, failures = threading.Event(), list[BaseException]()

    def work(first: int) -> None:
        try:
            turn = first
            while not stop.is_set():
                attack(turn)
                turn += number
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    if failures:
        raise failures[0]


def sum_for(seconds: float, control: ControlServer, seed: int) -> int:
    """How many chunks were summed, in one job after another; each of them exactly."""
    ends_s, jobs = time.monotonic() + seconds, 0
    while jobs == 0 or time.monotonic() < ends_s:
        with joined(control.address, some_terms(f"job {jobs}")) as ranks:
            sum_exactly(ranks, CHUNKS, seed + jobs)
        jobs += 1
    return jobs * CHUNKS


def survived(control: ControlServer) -> None:
    """All jobs are over, and none of their ranks was lost."""
    until(lambda: not control.status().jobs)
    now = control.status()
    assert now.lost_ranks == 0 and now.free_slots == now.slots


# ---- packets


def attack_packets(seconds: float, seed: int) -> dict[str, int]:
    """Malformed, foreign, replayed and mutated packets, from addresses that are no member's, beside one job that sums on and on."""
    sent = 0
    with (
        aggregator() as control,
        joined(control.address, some_terms("run", slots=8)) as ranks,
        socket.socket(type=socket.SOCK_DGRAM) as attacker,
    ):
        random = Random(seed)

        def attack(turn: int) -> None:
            nonlocal sent
            with suppress(OSError):
                attacker.sendto(_packet(random, ranks), ranks[0].membership.plane)
                sent += 1

        first, ends_s, chunks = ranks[0].job, time.monotonic() + seconds, 0
        with attackers(attack):
            while chunks == 0 or time.monotonic() < ends_s:
                sum_exactly(ranks, CHUNKS, seed + chunks, first_chunk=chunks)
                chunks += CHUNKS
        stats = control.plane.stats(first.id)  # type: ignore[attr-defined]
        assert stats.counts["completed"] == stats.counts["wrote"] == chunks and not stats.counts["saturated"]
        assert stats.counts["added"] == 2 * chunks and not stats.counts["abandoned"]
        refused = sum(
            count
            for reason, count in control.status().counts.items()
            if reason not in ("wrote", "added", "repeated", "duplicate", "stale", "completed")
        )
        assert all(rank.membership.alive for rank in ranks)
    return {"packets": sent, "refused": refused, "exact_chunks": chunks}


def attack_rows(seconds: float, seed: int) -> dict[str, int]:
    """Rows among ranks and a shard, beside packets like theirs from strangers and from a member of another job that has
    stolen their cookie: every member receives what members sent to it, and nothing else."""
    sent, rounds = 0, 0
    with (
        aggregator() as control,
        joined(control.address, some_terms("run", world=2, shards=1)) as members,
        joined(control.address, some_terms("another", world=2)) as others,
        socket.socket(type=socket.SOCK_DGRAM) as stranger,
    ):
        random = Random(seed)

        def attack(turn: int) -> None:
            nonlocal sent
            with suppress(OSError):
                attacker = random.choice([stranger, others[0].socket])
                attacker.sendto(_packet(random, members), members[0].membership.plane)
                sent += 1

        with attackers(attack):
            ends_s = time.monotonic() + seconds
            while rounds == 0 or time.monotonic() < ends_s:
                _exchange_rows(members, rounds)
                rounds += 1
        stats = control.plane.stats(members[0].job.id)  # type: ignore[attr-defined]
        counts = stats.counts
        assert counts["forwarded"] >= 6 * rounds and not counts["wrote"] and not counts["unreached"]
        assert counts["forwarded"] == sum(own.packets for own in stats.ranks)
        assert all(member.membership.alive for member in members)
    return {"packets": sent, "refused": counts["source"] + counts["cookie"], "rows": counts["forwarded"]}


def _exchange_rows(members: list[Rank], message: int) -> None:
    """Every member sends to every other, again and again until all have come: whatever comes was sent to whom it comes."""
    numbers = range(len(members))
    waiting = {(a, b) for a in numbers for b in numbers if a != b}
    sent: dict[int, set[bytes]] = {receiver: set() for receiver in numbers}
    ends_s = time.monotonic() + 30
    while waiting:
        assert time.monotonic() < ends_s, waiting
        for sender, receiver in waiting:
            payload = bytes([sender, receiver, message % 256]) * 400
            sent[receiver].add(members[sender].send_rows(receiver, payload, message))
        for receiver, member in enumerate(members):
            member.socket.settimeout(0.2)
            with suppress(TimeoutError):
                while any(pair[1] == receiver for pair in waiting):
                    packet = member.socket.recv(65536)
                    header = Header.of(packet)
                    assert (
                        packet in sent[receiver] or header.place < message % 65536
                    )  # a copy of an earlier round
                    if packet in sent[receiver]:
                        waiting.discard((header.rank, receiver))


def _packet(random: Random, ranks: list[Rank]) -> bytes:
    """As the job's own, with something wrong: where nothing else is, its source."""
    job = ranks[0].job
    good = random.choice([_data, _rows])(random, job)
    match random.randrange(6):
        case 0:
            return random.randbytes(random.randrange(0, 1500))
        case 1:
            return good[: random.randrange(len(good))]
        case 2:
            return good + random.randbytes(random.randrange(1, 9000))
        case 3:  # any field of the header
            fields = {name: random.getrandbits(64) for name in random.sample(Header._fields, 2)}
            sizes = dict(zip(Header._fields, (8, 8, 32, 64, 8, 8, 8, 8, 16, 16), strict=True))
            whole = Header.of(good)._replace(
                **{name: value % (1 << sizes[name]) for name, value in fields.items()}
            )
            return whole.bytes() + good[HEADER.size :]
        case 4:  # any bit
            flipped = bytearray(good)
            for _ in range(random.randrange(1, 8)):
                flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
            return bytes(flipped)
        case _:
            return good


def _data(random: Random, job: PlaneJob) -> bytes:
    chunk, rank = random.randrange(64), random.randrange(job.world)
    return job.packet(PacketKind.DATA, chunk, rank, random.randbytes(job.data_nbytes))


def _rows(random: Random, job: PlaneJob) -> bytes:
    sender, receiver = random.randrange(len(job.members)), random.randrange(len(job.members) + 1)
    fields = RowsHeader(*(random.getrandbits(32) for _ in range(4)))
    payload, flags = random.randbytes(random.randrange(1424)), random.choice([0, 0, ROWS_ACK])
    return job.rows(sender, receiver, random.getrandbits(32), random.getrandbits(16), fields, payload, flags)


# ---- the control port


def attack_control_with_garbage(seconds: float, seed: int) -> dict[str, int]:
    """What no rank would say: random bytes, endless lines, deep JSON, other protocols, wrong secrets, replayed proofs."""
    with aggregator() as control:

        def attack(turn: int) -> None:
            with suppress(OSError), socket.create_connection(control.address, 10) as connection:
                connection.sendall(_garbage(Random(seed + turn)))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        with attackers(attack, 4):
            chunks = sum_for(seconds, control, seed)
        survived(control)
        refused = control.status().refused
        assert refused["malformed"] and refused["secret"]
    return {"refused": sum(refused.values()), "exact_chunks": chunks}


def _garbage(random: Random) -> bytes:
    wish = {"say": "join", "rank": 0, "port": 4000, "patience_s": 1.0, "terms": some_terms().as_message()}
    good = SealedMessages("a wrong secret", "n", "m", "asker").seal(wish, tacit=VERSION, nonce="m")
    return random.choice(
        [
            lambda: random.randbytes(random.randrange(1, 300)) + b"\n",
            lambda: b"GET / HTTP/1.1\r\n\r\n",
            lambda: b"[" * random.randrange(1, MOST_REQUEST_NBYTES) + b"\n",
            lambda: b"x" * (2 * MOST_REQUEST_NBYTES),
            lambda: b'{"tacit":' + b"9" * random.choice([1, 5000]) + b"}\n",
            lambda: bytes(b if random.random() > 0.05 else random.randrange(256) for b in good) + b"\n",
            lambda: random.choice(
                [b"null\n", b"{}\n", b'{"tacit":2,"nonce":"\\ud800"}\n', b'"', b"\n", good]
            ),
        ]
    )()


def attack_control_with_idle_connections(seconds: float, seed: int) -> dict[str, int]:
    """Hundreds of connections that say nothing, opened again and again: the oldest make room, and ranks join all the time."""
    opened = 0
    with aggregator() as control:

        def attack(turn: int) -> None:
            nonlocal opened
            with ExitStack() as held, suppress(OSError):
                for _ in range(200):
                    held.enter_context(socket.create_connection(control.address, 10))
                    opened += 1

        with attackers(attack):
            chunks = sum_for(seconds, control, seed)
        survived(control)
        until(lambda: len(control._connections) <= MOST_STRANGERS)
    return {"connections": opened, "exact_chunks": chunks}


def attack_control_with_control_characters(seconds: float, seed: int) -> dict[str, int]:
    """Escape sequences, line ends and bidi marks where names, versions and reasons stand: nothing of it reaches log or metrics."""
    told, refused = list[str](), 0
    with aggregator(metrics=HERE, log=told.append) as control:
        ends_s = time.monotonic() + seconds
        while refused == 0 or time.monotonic() < ends_s:
            for line in ({"tacit": NASTY}, {"tacit": VERSION, "nonce": NASTY}, {NASTY: NASTY}):
                with socket.create_connection(control.address, 30) as stranger, suppress(ConnectionError):
                    stranger.sendall(encode(line))
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 16):
                        pass
                refused += 1
            for name in (NASTY, f"run {NASTY}"):
                terms = some_terms()
                object.__setattr__(terms, "name", name)  # as a rank does that checks nothing
                with suppress(TacitError):
                    Membership(control.address, SECRET, terms, 0, 4000, timeout_s=30)
                refused += 1
            with joined(control.address, some_terms(f"run {refused}")) as ranks:
                sum_exactly(ranks, CHUNKS, seed)
                ranks[0].membership.leave(NASTY)
                until(lambda ranks=ranks: not ranks[1].membership.alive)  # type: ignore[misc]
                assert ranks[1].membership.why.isprintable()
            assert control.metrics_address
            assert all(line.isprintable() for line in _get(control.metrics_address, "/metrics").split("\n"))
            with StatusClient(control.address, SECRET) as status:
                assert all(job.why.isprintable() for job in status.read().ended)
        assert sum(control.status().refused.values()) >= refused
    assert told and all(sentence.isprintable() for sentence in told)
    return {"refused": refused, "log_sentences": len(told)}


# ---- metrics and the log


def attack_metrics_with_slow_readers(seconds: float, seed: int) -> dict[str, int]:
    """Readers that say nothing, ask byte by byte or never read, many more than are served at a time: /health and /metrics answer."""
    answers, opened = 0, 0
    with (
        aggregator(metrics=HERE) as control,
        ExitStack() as held,
        joined(control.address, some_terms()) as ranks,
    ):
        address = control.metrics_address
        assert address
        random, slow = Random(seed), list[socket.socket]()
        ends_s = time.monotonic() + seconds
        while answers == 0 or time.monotonic() < ends_s:
            for _ in range(MOST_READERS + 32):
                slow.append(held.enter_context(socket.create_connection(address, 10)))
                opened += 1
                with suppress(OSError):
                    slow[-1].sendall(random.choice([b"", b"G", b"GET /metrics HTTP/1.1\r\n\r\n"]))
            for path in ("/health", "/metrics"):
                assert _get(address, path)
                answers += 1
            while len(slow) > 200:
                slow.pop(0).close()
        sum_exactly(ranks, CHUNKS, seed)
        assert all(rank.membership.alive for rank in ranks)
    return {"connections": opened, "answers": answers, "exact_chunks": CHUNKS}


def _get(address: Address, path: str) -> str:
    with socket.create_connection(address, 30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK"), head
    if path == "/health":
        assert json.loads(body)["status"] == "ok"
    return body


def attack_log(seconds: float, seed: int) -> dict[str, int]:
    """A standard error that takes nothing (a full disk, a closed or unread pipe, none), and strangers who give reason to write there."""
    counts: Counter[str] = Counter()
    for how in UNWRITABLE:
        with unwritable(how) as stderr, serving(stderr=stderr) as served:
            ends_s, jobs = time.monotonic() + seconds / len(UNWRITABLE), 0
            while jobs == 0 or time.monotonic() < ends_s:
                for line in (b"?\n", encode({"tacit": 1})):
                    with suppress(OSError), socket.create_connection(served.address, 10) as stranger:
                        stranger.sendall(line)
                with joined(served.address, some_terms(f"job {jobs}"), "") as ranks:
                    sum_exactly(ranks, CHUNKS, seed + jobs)
                jobs += 1
            with StatusClient(served.address, "") as status:
                now = status.read()
            assert (now.admitted, now.lost_ranks) == (jobs, 0)
            served.process.terminate()
            assert served.process.wait(60) == 0
            counts.update(jobs=jobs, exact_chunks=jobs * CHUNKS, lost_sentences=now.lost_notices)
    return dict(counts)


ATTACKS = [
    attack_packets,
    attack_rows,
    attack_control_with_garbage,
    attack_control_with_idle_connections,
    attack_control_with_control_characters,
    attack_metrics_with_slow_readers,
    attack_log,
]
