"""Control as ranks meet it: real connections, real packets. Who may join, who is told what, and what becomes of the slots."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from random import Random

import pytest
from aggregator.members import HERE, SECRET, aggregator, joined, some_terms, sum_exactly, until

from tacit.aggregator import LaneType, UserPlane
from tacit.aggregator.addresses import parse_address
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.protocol import REASONS
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.control.slot_allocator import SlotAllocator
from tacit.aggregator.control.status import StatusClient
from tacit.aggregator.spec import Address
from tacit.authentication import MOST_REQUEST_NBYTES, VERSION, ForgedError, SealedMessages, encode
from tacit.errors import ConfigError, TacitError, TransportError


def refused(error: type[TacitError], control: Address, terms: Terms, rank: int = 0, **options) -> str:
    """The one sentence in which this rank is told no."""
    options = {"secret": SECRET, "own_port": 4000, "timeout_s": 5.0} | options
    with pytest.raises(error) as caught:
        Membership(control, options.pop("secret"), terms, rank, options.pop("own_port"), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- joining ----


def test_ranks_that_join_get_one_job_and_exact_sums() -> None:
    with aggregator() as control, joined(control.address, some_terms(slots=6)) as ranks:
        jobs = {rank.job for rank in ranks}
        assert len(jobs) == 1
        job = jobs.pop()
        assert job.members == tuple(rank.socket.getsockname() for rank in ranks)
        assert job.slots == range(4)  # 6 is no power of two
        assert ranks[0].membership.plane == control.plane.address
        assert control.plane.jobs() == [job.id]
        assert all(rank.membership.alive and not rank.membership.lost for rank in ranks)
        sum_exactly(ranks, chunks=20, seed=1)
        assert control.status().counts["completed"] == 20


@pytest.mark.parametrize(("kind", "segment"), [("user", True), ("kernel", False), ("", False)])
def test_a_grant_says_whether_the_plane_takes_runs_of_packets(kind: str, segment: bool) -> None:
    with aggregator(kind=kind) as control, joined(control.address, some_terms(world=2)) as ranks:
        assert [rank.membership.segment for rank in ranks] == [segment] * 2


def test_two_jobs_at_once_have_their_own_slots_and_cookies_and_exact_sums() -> None:
    first, second = some_terms("a"), Terms("b", 2, LaneType.U16, 80, 8)
    with (
        aggregator() as control,
        joined(control.address, first) as a,
        joined(control.address, second) as b,
    ):
        assert not set(a[0].job.slots) & set(b[0].job.slots)
        assert len(a[0].job.slots) == len(b[0].job.slots) == 8
        assert a[0].job.cookie != b[0].job.cookie and a[0].job.id != b[0].job.id
        running = [threading.Thread(target=sum_exactly, args=(ranks, 30, 2)) for ranks in (a, b)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
        completed = [control.plane.stats(ranks[0].job.id).counts["completed"] for ranks in (a, b)]
        assert completed == [30, 30]


def test_a_wrong_secret_is_refused_counted_and_told_and_touches_nothing() -> None:
    with aggregator() as control:
        told = refused(ConfigError, control.address, some_terms(), secret="correct horse battery stable")
        assert "the secret is not one that this aggregator was started with" in told
        with pytest.raises(ConfigError, match="the secret"):
            StatusClient(control.address, "")
        now = control.status()
        assert now.refused["secret"] == 2 and sum(now.refused.values()) == 2
        assert not now.jobs and now.free_slots == 32 and now.admitted == 0


def test_an_aggregator_with_another_secret_cannot_pretend_to_be_ours() -> None:
    """An impostor that grants whatever is asked: the rank sees that it does not know the secret."""
    with socket.create_server(HERE) as server:

        def pretend() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                connection.sendall(encode({"tacit": VERSION, "nonce": "n"}))
                asked = json.loads(lines.readline())
                connection.sendall(
                    SealedMessages("a guess", "n", asked["nonce"], "control").seal({"say": "granted"})
                )
                lines.read()

        thread = threading.Thread(target=pretend)
        thread.start()
        assert "it does not know the secret" in refused(TransportError, server.getsockname(), some_terms())
        thread.join(30)


def test_jobs_of_the_same_name_under_different_keys_are_different_jobs() -> None:
    keys = ["k" * 20, "l" * 20]
    with (
        aggregator(keys=keys) as control,
        joined(control.address, some_terms(), keys[0]) as a,
        joined(control.address, some_terms(), keys[1]) as b,
    ):
        assert a[0].job.id != b[0].job.id
        assert len(control.status().jobs) == 2


def test_ranks_that_do_not_come_are_named() -> None:
    with aggregator() as control:
        told = refused(TransportError, control.address, some_terms("run 7", world=4), rank=1, timeout_s=0.2)
        assert told.startswith("ranks 0, 2 and 3 of 4 have not joined job 'run 7' within 0.2 s")
        now = control.status()
        assert now.refused["late"] == 1 and not now.jobs and now.free_slots == 32


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (some_terms(elements=48), "with elements=48, rank 0 with 40"),
        (some_terms(world=4), "with world=4, rank 0 with 3"),
        (some_terms(slots=16), "with slots=16, rank 0 with 8"),
        (replace(some_terms(), lanes=LaneType.U16), "with lanes=2, rank 0 with 3"),
        (some_terms(quorum=2), "with quorum=2, rank 0 with 0"),
    ],
)
def test_ranks_that_disagree_are_told_about_what(own: Terms, expected: str) -> None:
    with aggregator() as control, waiting(control, some_terms()):
        assert expected in refused(ConfigError, control.address, own, rank=1)
        assert control.status().refused["terms"] == 1


def test_a_place_that_is_taken_is_refused() -> None:
    with aggregator() as control, waiting(control, some_terms(), own_port=4000):
        told = refused(TransportError, control.address, some_terms(), timeout_s=0.05)
        assert "rank 0 of job 'run' has joined from 127.0.0.1 already" in told
        told = refused(TransportError, control.address, some_terms(), rank=1, timeout_s=0.05)
        assert "rank 1 of job 'run' claims to be at 127.0.0.1:4000, but there is rank 0" in told


def test_a_running_name_is_refused_and_granted_once_it_is_free() -> None:
    with aggregator() as control, joined(control.address, some_terms()) as ranks:
        before = ranks[0].job
        told = refused(TransportError, control.address, some_terms(), timeout_s=0.05)
        assert "job 'run' runs already" in told
        later = threading.Timer(0.3, lambda: [rank.membership.leave() for rank in ranks])
        later.start()
        with joined(control.address, some_terms()) as again:  # waits for the others to leave
            assert (again[0].job.cookie, again[0].job.id) != (before.cookie, before.id)
        later.join()


def test_bad_values_are_refused_before_anything_is_asked() -> None:
    with pytest.raises(ConfigError, match="rank=3: the ranks of job 'run' are 0 to 2"):
        Membership(("127.0.0.1", 1), SECRET, some_terms(), 3, 4000)
    with pytest.raises(ConfigError, match="own_port=0: bind the rank's UDP socket"):
        Membership(("127.0.0.1", 1), SECRET, some_terms(), 0, 0)
    for change, expected in (
        ({"name": ""}, "name=''"),
        ({"name": "a\nb"}, "printable"),
        ({"world": 65}, "world=65"),
        ({"slots": 1}, "slots=1"),
        ({"elements": 41}, "elements=41"),
        ({"quorum": 4}, "quorum=4"),
        ({"table": (1,)}, "table="),
    ):
        with pytest.raises(ConfigError, match=expected):
            replace(some_terms(), **change)


def test_where_no_aggregator_is_one_sentence_says_so() -> None:
    with socket.create_server(HERE) as taken:
        address = taken.getsockname()
    assert f"no aggregator listens at 127.0.0.1:{address[1]}" in refused(
        TransportError, address, some_terms()
    )
    with socket.create_server(HERE) as silent:
        told = refused(TransportError, silent.getsockname(), some_terms(), timeout_s=0.2)
    assert "does not greet within 0.2 s; is it an aggregator?" in told
    assert "is no known host" in refused(ConfigError, ("no such host", 4800), some_terms())


@contextmanager
def waiting(control: ControlServer, terms: Terms, rank: int = 0, own_port: int = 4999) -> Iterator[None]:
    """A rank that has joined and waits for the others; it gives up at the end."""
    sockets: list[socket.socket] = []
    connect = socket.create_connection

    def join() -> None:
        with suppress(TacitError):
            Membership(control.address, SECRET, terms, rank, own_port, timeout_s=60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tacit.aggregator.client.control_client.socket.create_connection",
            lambda *args: sockets.append(connect(*args)) or sockets[-1],
        )
        thread = threading.Thread(target=join)
        thread.start()
        until(lambda: control.status().jobs)
    try:
        yield
    finally:
        sockets[0].shutdown(socket.SHUT_RDWR)
        thread.join(30)
        until(lambda: not control.status().jobs)


# ---- slots ----


def test_every_one_of_the_expected_jobs_finds_its_share_and_one_more_is_refused() -> None:
    with aggregator(slots=32, jobs=4) as control, ExitStack() as stack:
        granted = [
            stack.enter_context(joined(control.address, some_terms(f"job {n}", world=1, slots=1024)))[
                0
            ].job.slots
            for n in range(4)
        ]
        assert granted == [range(8), range(8, 16), range(16, 24), range(24, 32)]
        told = refused(TransportError, control.address, some_terms("one more", world=1))
        assert told.startswith("all 32 slots are in use by 4 jobs")
        assert control.status().refused["full"] == 1 and control.status().free_slots == 0
    with (
        aggregator(slots=32, jobs=1) as control,
        joined(control.address, some_terms(world=1, slots=999)) as ranks,
    ):
        assert len(ranks[0].job.slots) == 32


@pytest.mark.parametrize("seed", range(5))
def test_shares_never_meet_and_fewer_jobs_than_expected_always_find_a_whole_one(seed: int) -> None:
    random, allocator, held = Random(seed), SlotAllocator(100, jobs=6), list[range]()
    assert (allocator.share, allocator.slots) == (16, 96)
    for _ in range(2000):
        if held and random.random() < 0.5:
            allocator.give_back(held.pop(random.randrange(len(held))))
        else:
            wish = random.choice([2, 3, 4, 8, 16, 1000])
            found = allocator.take(wish)
            if len(held) < 6:
                assert found is not None and len(found) == {2: 2, 3: 2, 4: 4, 8: 8, 16: 16, 1000: 16}[wish]
            if found is not None:
                assert len(found) <= wish and found.start % len(found) == 0 and found.stop <= 96
                held.append(found)
        slots = [slot for run in held for slot in run]
        assert len(slots) == len(set(slots)) == 96 - allocator.free


def test_slots_for_too_many_jobs_are_refused() -> None:
    for slots, jobs in ((7, 4), (8, 0), (8, -1)):
        with pytest.raises(ConfigError, match=f"{slots} slots for {jobs} jobs"):
            SlotAllocator(slots, jobs)


# ---- leaving, and being lost ----


def test_a_job_ends_when_all_have_left_and_its_slots_are_free() -> None:
    with aggregator() as control, joined(control.address, some_terms()) as ranks:
        first, *others = (rank.membership for rank in ranks)
        first.leave()
        first.leave()
        assert not first.alive and "rank 0 has left job 'run'" in first.why
        until(lambda: all(other.left == (0,) for other in others))
        assert all(other.alive and other.lost == () for other in others)
        assert control.plane.jobs()
        for other in others:
            other.leave()
        until(lambda: control.status().free_slots == 32)
        now = control.status()
        assert control.plane.jobs() == [] and now.lost_ranks == 0
        assert now.ended[0].why == "all ranks have left" and now.ended[0].well


def test_a_rank_whose_connection_breaks_is_lost_and_all_others_are_told() -> None:
    with aggregator() as control, joined(control.address, some_terms()) as ranks:
        ranks[1].membership._client.hang_up()
        for rank in (ranks[0], ranks[2]):
            until(lambda rank=rank: not rank.membership.alive)
            assert rank.membership.lost == (1,)
            assert (
                rank.membership.why == "rank 1 of job 'run' is lost: its connection closed without a message"
            )
            with pytest.raises(TransportError, match="rank 1 of job 'run' is lost"):
                rank.membership.missing()
        until(lambda: not ranks[1].membership.alive)
        assert "the aggregator at 127.0.0.1" in ranks[1].membership.why
        now = control.status()
        assert not now.jobs and now.free_slots == 32 and now.lost_ranks == 1 and not now.ended[0].well
        assert control.plane.jobs() == []


OTHER_RANK = """
import signal, sys
from tacit.aggregator.client.membership import LaneType, Membership, Terms
held = Membership(("127.0.0.1", int(sys.argv[1])), sys.argv[2], Terms("run", 2, LaneType.I32, 40, 8), 1, 4001, timeout_s=60)
signal.pause()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_process_that_dies_or_hangs_is_named_to_the_others(how: signal.Signals) -> None:
    with aggregator(lease_s=2.0) as control:
        command = [sys.executable, "-c", OTHER_RANK, str(control.address[1]), SECRET]
        with subprocess.Popen(command) as other:
            try:
                with Membership(
                    control.address, SECRET, some_terms(world=2), 0, 4000, timeout_s=60
                ) as membership:
                    other.send_signal(how)
                    until(lambda: not membership.alive)
                    assert membership.lost == (1,)
                    why = (
                        "it was silent for 2 s"
                        if how is signal.SIGSTOP
                        else "its connection closed without a message"
                    )
                    assert membership.why == f"rank 1 of job 'run' is lost: {why}"
            finally:
                other.kill()


def test_with_a_quorum_the_job_goes_on_until_too_few_are_left() -> None:
    with aggregator() as control, joined(control.address, some_terms(world=4, quorum=2)) as ranks:
        ranks[3].membership._client.hang_up()
        until(lambda: all(rank.membership.lost == (3,) for rank in ranks[:3]))
        assert all(rank.membership.alive for rank in ranks[:3])
        ranks[1].membership._client.hang_up()
        until(lambda: all(ranks[rank].membership.lost == (3, 1) for rank in (0, 2)))
        assert control.plane.jobs() and ranks[0].membership.alive
        ranks[0].membership._client.hang_up()
        until(lambda: not ranks[2].membership.alive)
        assert "ranks 3, 1 and 0 of job 'run' are lost" in ranks[2].membership.why
        assert control.plane.jobs() == []


def test_who_is_missing_can_be_asked() -> None:
    with aggregator() as control, joined(control.address, some_terms()) as ranks:
        assert ranks[0].membership.missing() == {}
        for chunk in range(3):
            ranks[0].send(chunk)
        ranks[1].send(0)
        until(lambda: control.status().counts["added"] == 1)
        until(lambda: control.status().counts["wrote"] == 3)
        assert ranks[2].membership.missing() == {1: 2, 2: 3}


def test_after_a_restart_the_ranks_know_and_can_join_again() -> None:
    with aggregator() as control:
        port = control.address[1]
        with joined(control.address, some_terms()) as ranks:
            before = ranks[0].job
            control.close()
            control.close()
            control.plane.close()
            until(lambda: not any(rank.membership.alive for rank in ranks))
            assert ranks[0].membership.why == "the aggregator was stopped"
            assert ranks[0].membership.lost == ()
            with aggregator(port=port) as again, joined(again.address, some_terms()) as anew:
                assert anew[0].job.cookie != before.cookie
                sum_exactly(anew, chunks=10, seed=3)


def test_ranks_that_still_gather_are_told_when_it_stops() -> None:
    with aggregator() as control:
        threading.Thread(target=lambda: (until(lambda: control.status().jobs), control.close())).start()
        told = refused(TransportError, control.address, some_terms(), timeout_s=30.0)
    assert told == "job 'run' was not granted: the aggregator was stopped"


def test_a_plane_that_will_not_have_a_job_is_quoted_to_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: UserPlane, job: object) -> None:
        raise ConfigError("packets of 9000 bytes are too long for this plane")

    monkeypatch.setattr(UserPlane, "add_job", refuse)
    with aggregator() as control:
        with (
            pytest.raises(ConfigError, match="too long for this plane"),
            joined(control.address, some_terms()),
        ):
            pass
        now = control.status()
        assert now.free_slots == 32 and not now.jobs and now.refused["plane"] == 1


# ---- strangers ----


@contextmanager
def overheard(control: Address, change=lambda line: line) -> Iterator[tuple[Address, bytearray]]:
    """A man in the middle: an address that leads to control, and all that passes; `change` may alter what goes there."""
    heard = bytearray()
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(HERE))
        threads: list[threading.Thread] = []

        def pass_on(source: socket.socket, target: socket.socket, change) -> None:
            with suppress(OSError), source.makefile("rb") as lines:
                for line in lines:
                    heard.extend(line)
                    target.sendall(change(line))
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    near = opened.enter_context(server.accept()[0])
                    far = opened.enter_context(socket.create_connection(control))
                    for way in ((near, far, change), (far, near, lambda line: line)):
                        threads.append(threading.Thread(target=pass_on, args=way, daemon=True))
                        threads[-1].start()

        accepting = threading.Thread(target=serve, daemon=True)
        accepting.start()
        yield server.getsockname(), heard
        server.shutdown(socket.SHUT_RDWR)
        accepting.join(30)


def test_neither_secret_nor_cookie_can_be_read_on_the_way() -> None:
    with aggregator() as control, overheard(control.address) as (address, heard):
        with joined(address, some_terms(world=2)) as ranks:
            cookie = ranks[0].job.cookie
            assert ranks[0].job.cookie == ranks[1].job.cookie
            ranks[0].membership.missing()
        told = bytes(heard)
    assert b"granted" in told and b"127.0.0.1" in told
    for secret in (
        SECRET.encode(),
        str(cookie).encode(),
        f"{cookie:x}".encode(),
        cookie.to_bytes(8, "little"),
    ):
        assert secret not in told


def test_a_line_changed_on_the_way_is_not_believed() -> None:
    def other_rank(line: bytes) -> bytes:
        return line.replace(rb"\"rank\":0", rb"\"rank\":1")

    with aggregator() as control, overheard(control.address, other_rank) as (address, _):
        assert "the secret" in refused(ConfigError, address, some_terms())
        assert control.status().refused["secret"] == 1


def test_a_recorded_greeting_is_worth_nothing_later() -> None:
    with aggregator() as control:
        with overheard(control.address) as (address, heard), joined(address, some_terms(world=1)):
            pass
        join = next(line for line in bytes(heard).splitlines(keepends=True) if b"join" in line)
        with socket.create_connection(control.address) as connection, connection.makefile("rb") as lines:
            lines.readline()
            connection.sendall(join)
            assert json.loads(lines.readline())["say"] == "refused"
        assert control.status().refused["secret"] == 1 and control.status().admitted == 1


def test_lines_are_proved_in_their_order_and_direction() -> None:
    def pair() -> tuple[SealedMessages, SealedMessages]:
        return SealedMessages("s", "a", "b", "control"), SealedMessages("s", "a", "b", "asker")

    def line(talk: SealedMessages, text: str) -> dict[str, object]:
        return json.loads(talk.seal({"say": text}))

    control, asker = pair()
    first, second = line(control, "one"), line(control, "two")
    with pytest.raises(ForgedError):
        asker.open(second)  # one was left out
    assert asker.open(first) == {"say": "one"} and asker.open(second) == {"say": "two"}
    with pytest.raises(ForgedError):
        asker.open(second)  # repeated
    control, asker = pair()
    with pytest.raises(ForgedError):
        control.open(line(control, "mine"))  # sent back
    for other in (
        SealedMessages("t", "a", "b", "asker"),
        SealedMessages("s", "x", "b", "asker"),
        SealedMessages("s", "a", "x", "asker"),
    ):
        with pytest.raises(ForgedError):
            other.open(first)
    for forged in (
        {},
        first | {"proof": 7},
        first | {"proof": "é"},
        first | {"text": None},
        first | {"text": "é"},
    ):
        with pytest.raises(ForgedError):
            pair()[1].open(forged)


def _garbage(random: Random) -> bytes:
    good = b'{"tacit":2,"nonce":"aa","proof":"bb","text":"{\\"say\\":\\"join\\"}"}\n'
    kinds = [
        lambda: random.randbytes(random.randrange(1, 300)) + b"\n",
        lambda: b"GET / HTTP/1.1\r\n\r\n",
        lambda: b"[" * random.randrange(1, MOST_REQUEST_NBYTES) + b"\n",
        lambda: b"x" * (MOST_REQUEST_NBYTES + random.randrange(1, 5000)) + b"\n",
        lambda: b'{"tacit":' + b"9" * random.choice([1, 5000]) + b"}\n",
        lambda: bytes(b if random.random() > 0.05 else random.randrange(256) for b in good) + b"\n",
        lambda: random.choice([b"null\n", b"{}\n", b'{"tacit":2}\n', b'{"tacit":2,"nonce":"\\ud800"}\n', b'"', b"\n", good]),
    ]  # fmt: skip
    return random.choice(kinds)()


def test_garbage_is_refused_and_counted_and_nobody_else_notices() -> None:
    random, told = Random(6), list[str]()
    with aggregator(log=told.append) as control, joined(control.address, some_terms()) as ranks:
        for _ in range(150):
            with socket.create_connection(control.address) as connection:
                connection.settimeout(30)
                with suppress(ConnectionError):
                    connection.sendall(_garbage(random))
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
        now = control.status()
        assert set(now.refused) == set(REASONS)
        assert len(told) < 20  # one line for each reason, not for each stranger
        assert now.refused["malformed"] > 20 and now.refused["secret"] > 5 and now.refused["version"] > 1
        assert all(rank.membership.alive for rank in ranks)
        sum_exactly(ranks, chunks=10, seed=4)


@pytest.mark.parametrize("how", ["raises", "blocks"])
def test_a_log_that_fails_ends_no_job_and_is_counted(how: str) -> None:
    opened = threading.Event()

    def tell(sentence: str) -> None:
        if how == "raises":
            raise BrokenPipeError(32, "Broken pipe")
        opened.wait(60)

    with aggregator(log=tell) as control:
        for name in ("a", "b"):
            with joined(control.address, some_terms(name)) as ranks:
                sum_exactly(ranks, chunks=10, seed=4)
        until(lambda: not control.status().jobs)
        assert control.status().admitted == 2 and control.status().lost_ranks == 0
        if how == "raises":
            until(lambda: control.status().lost_notices == 4)  # two jobs begin and end
        opened.set()


NASTY = "\x1b[2J\x1b]0;owned\x07\n\r\x00\x9b\u202e\u2028\ud800"


def test_control_characters_of_strangers_and_members_reach_nobody() -> None:
    told = list[str]()
    with aggregator(log=told.append) as control:
        with socket.create_connection(control.address) as stranger:
            stranger.sendall(encode({"tacit": NASTY, "nonce": NASTY}))
            stranger.shutdown(socket.SHUT_WR)
            with stranger.makefile("rb") as lines:
                answer = lines.read()
        assert b"\\\\x1b[2J" in answer  # escaped, and that in JSON
        with joined(control.address, some_terms()) as ranks:
            ranks[0].membership.leave(NASTY)
            until(lambda: not ranks[1].membership.alive)
            assert ranks[1].membership.why.isprintable()
        until(lambda: not control.status().jobs)
    assert len(told) == 3 and all(sentence.isprintable() for sentence in told)
    assert "the aggregator has version" in told[0] and r"\x1b[2J" in told[0]


def test_control_characters_of_whoever_answers_at_the_port_reach_no_error() -> None:
    with socket.create_server(HERE) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                connection.sendall(encode({"say": "refused", "why": NASTY * 40, "config": True}))
                lines.read()

        thread = threading.Thread(target=answer)
        thread.start()
        told = refused(ConfigError, server.getsockname(), some_terms())
        assert told.isprintable() and len(told) <= 600
        thread.join(30)


def test_a_burst_of_strangers_is_cut_off_down_to_the_newest_and_ranks_come_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # they are not cut off for being slow
    monkeypatch.setattr("tacit.aggregator.control.server.GREETING_S", 300.0)
    monkeypatch.setattr("tacit.aggregator.control.server.MOST_STRANGERS", 64)
    with aggregator() as control, ExitStack() as opened:
        strangers = [opened.enter_context(socket.create_connection(control.address)) for _ in range(300)]
        with joined(control.address, some_terms()) as ranks:
            sum_exactly(ranks, chunks=4, seed=4)
            until(lambda: len(control._strangers) <= 64 and len(control._connections) <= 64 + len(ranks))
        strangers[0].settimeout(30)
        with suppress(ConnectionError):
            while strangers[0].recv(65536):  # the greeting; then it is cut off
                pass


def test_members_whose_wishes_make_no_sense_are_refused() -> None:
    good = {
        "say": "join",
        "rank": 0,
        "port": 4000,
        "patience_s": 1.0,
        "terms": some_terms(world=1).as_message(),
    }
    bad = [
        {"say": "sing"},
        {},
        good | {"rank": -1},
        good | {"rank": "0"},
        good | {"port": 0},
        good | {"port": 65536},
        good | {"patience_s": None},
        good | {"patience_s": float("nan")},
        good | {"terms": None},
        good | {"terms": {}},
        good | {"terms": good["terms"] | {"world": 10**9}},
        good | {"terms": good["terms"] | {"world": True}},
        good | {"terms": good["terms"] | {"name": 7}},
        good | {"terms": good["terms"] | {"lanes": 99}},
        good | {"terms": good["terms"] | {"table": [1] * 300}},
        good | {"terms": good["terms"] | {"elements": 10**30}},
        good | {"terms": good["terms"] | {"slots": -5}},
    ]
    with aggregator() as control:
        for wish in bad:
            with socket.create_connection(control.address) as connection, connection.makefile("rb") as lines:
                nonce = json.loads(lines.readline())["nonce"]
                connection.sendall(
                    SealedMessages(SECRET, nonce, "mine", "asker").seal(wish, tacit=VERSION, nonce="mine")
                )
                answer = json.loads(lines.readline())
                assert answer["say"] == "refused" and answer["config"] and len(answer["why"]) < 410
        now = control.status()
        assert now.refused["terms"] == len(bad) - 2 and now.refused["malformed"] == 2
        assert not now.jobs and now.free_slots == 32


def test_silent_strangers_cannot_keep_ranks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.aggregator.control.server.MOST_STRANGERS", 64)
    with aggregator() as control, ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(control.address)) for _ in range(2 * 64)]
        with joined(control.address, some_terms()) as ranks:
            assert all(rank.membership.alive for rank in ranks)
        silent[0].settimeout(30)
        while silent[0].recv(4096):  # the greeting; then it is cut off
            pass


def test_a_member_that_sends_a_forged_line_is_lost() -> None:
    with aggregator() as control, joined(control.address, some_terms(world=2)) as ranks:
        ranks[0].membership._client._socket.sendall(encode({"proof": "00", "text": "{}"}))
        until(lambda: not ranks[1].membership.alive)
        assert ranks[1].membership.lost == (0,)


# ---- around it ----


def test_figures_can_be_read_from_anywhere_again_and_again() -> None:
    with (
        aggregator() as control,
        joined(control.address, some_terms()) as ranks,
        StatusClient(control.address, SECRET) as reader,
    ):
        before = reader.read()
        sum_exactly(ranks, chunks=10, seed=5)
        now = reader.read()
        assert before.jobs[0].stats and now.jobs[0].stats
        assert (before.counts["completed"], now.counts["completed"]) == (0, 10)
        assert now.jobs[0].stats.rates(before.jobs[0].stats).chunks_per_s > 0
        assert now.jobs[0].members == ranks[0].job.members
        assert str(ranks[0].job.cookie) not in json.dumps(now.as_dict())
        here = control.status()
        assert (here.counts, here.jobs[0].slots, here.refused) == (now.counts, now.jobs[0].slots, now.refused)


def test_the_first_figures_are_as_new_as_any_other() -> None:
    with (
        aggregator() as control,
        joined(control.address, some_terms()) as ranks,
        StatusClient(control.address, SECRET) as reader,
    ):
        sum_exactly(ranks, chunks=10, seed=5)
        assert reader.read().counts["completed"] == 10


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with aggregator() as control, UserPlane(HERE, slots=8) as plane:
        with pytest.raises(ConfigError, match="TCP 127.0.0.1:.* cannot be listened on"):
            ControlServer(plane, control.address, [SECRET])
        with pytest.raises(ConfigError, match="no secret"):
            ControlServer(plane, HERE, [])
        with pytest.raises(ConfigError, match="lease_s=0"):
            ControlServer(plane, HERE, [SECRET], lease_s=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        (":9100", ("h", 9100)),
        ("box:0", ("box", 0)),
        ("box", ("box", 4800)),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert parse_address(text, host="h", port=4800) == expected


@pytest.mark.parametrize("text", ["", ":", "box:", "box:99999", "box:-1", "a:b:1", "::1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address; write a host and a port"):
        parse_address(text, port=4800)
