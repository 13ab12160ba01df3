"""Whatever happens to the aggregator or to the way there: training goes on, with the bits of `sharded` and one warning."""

import hashlib
import logging
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from aggregator.relay import Relay
from schemes.aggregators import Aggregator, attached, link_of
from toys import flat, train

from tacit.aggregator.client.membership import Membership
from tacit.transports import aggregator_link

WORLD, CODEC, MOST_STEPS = 2, "thc", 250
LEASE_S = 1.5  # where times are scaled: 6, 13 and 40 s are to the usual lease of 10 s what 0.9, 2 and 6 s are to this one
PAUSES_S = {6: 0.9, 13: 2.0, 40: 6.0}


# ---- the ranks


def _train(rank, world, at, folder, how):
    """Trains until what the case waits for has happened. What it found: bits, steps, warnings, and what it cost."""
    how = CASES[how]
    warnings = _warnings()
    if how.lost_nbytes:
        aggregator_link.Membership = _through_a_relay(folder, *how.lost_nbytes)
    model, optimizer, handle = attached(CODEC, at)
    link = link_of(handle)
    if rank == 1 and (relay := Path(folder, "relay")).exists():
        link._control = ("127.0.0.1", int(relay.read_text()))
    with handle:
        longest_s, after, before, deadline = 0.0, 0, 0, time.monotonic() + 90
        for step in range(MOST_STEPS):
            began = time.monotonic()
            train(model, optimizer, rank, range(step, step + 1))
            longest_s = max(longest_s, time.monotonic() - began)
            assert time.monotonic() < deadline, f"{how.name}: {link.changes} changes, {warnings}"
            if step == 5 and rank == 0:
                Path(folder, "trained").touch()
            struck = Path(folder, "struck").exists()
            after, before = after + struck, before if struck else link.through
            enough = torch.tensor([after >= 5 and how.enough(link, before)])
            dist.broadcast(enough, 0)
            if enough:
                break
            time.sleep(0.1)
        return _digest(model), step, link.changes, warnings, longest_s


def _expected(rank, world):
    """The bits of `sharded` after every step."""
    model, optimizer, handle = attached(CODEC, None)
    found = []
    with handle:
        for step in range(MOST_STEPS):
            train(model, optimizer, rank, range(step, step + 1))
            found.append(_digest(model))
    return found


def _digest(model):
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


def _warnings():
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    logging.getLogger("tacit").addHandler(Handler())
    return found


def _through_a_relay(folder, up_nbytes, down_nbytes):
    """Memberships whose packets pass a path that loses those above a size; at once, or when the case strikes."""

    class Relayed(Membership):
        def __init__(self, control, secret, terms, rank, own_port, **options):
            relay = Relay(control, 1, largest=(up_nbytes, down_nbytes))
            relay.narrow = Path(folder, "narrow").exists
            self._relay = relay.__enter__()
            super().__init__(control, secret, terms, rank, relay.members[0][1], **options)
            self.plane = relay.entrance(0)

    return Relayed


# ---- what is done to them


class ControlRelay:
    """In the path of a rank's connections to control: can stop passing bytes on, and can reset them all."""

    def __init__(self, control: tuple[str, int]) -> None:
        self._control, self._paused, self._closed = control, threading.Event(), False
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def pause(self, seconds: float) -> None:
        self._paused.set()
        time.sleep(seconds)
        self._paused.clear()

    def reset(self) -> None:
        for each in self._pairs:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
                each.close()
        self._pairs.clear()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inside, _ = self._listener.accept()
                outside = socket.create_connection(self._control)
                self._pairs += [inside, outside]
                for source, to in ((inside, outside), (outside, inside)):
                    threading.Thread(target=self._pass, args=(source, to), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self._paused.is_set() and not self._closed:
                    time.sleep(0.01)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)


@dataclass
class Scene:
    aggregator: Aggregator
    relay: ControlRelay
    rank_pid: int
    folder: Path

    def restart(self, **how: object) -> None:
        self.aggregator.close()
        self.aggregator.start(**how)

    def pause(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def put_another_service_there(self) -> None:
        """One that sends a banner, as SSH does, and closes."""
        self.aggregator.close()
        listener = socket.create_server(("127.0.0.1", self.aggregator.port))

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=serve, daemon=True).start()
        self.close = listener.close

    def close(self) -> None:
        pass


def _is_back(link, before) -> bool:
    """It adds again: more sums than had taken that way when the case had struck."""
    return link._using and link.changes >= 2 and link.through > before


def _is_out(link, before) -> bool:
    """It was tried again since it went, after 1 s, and is not to be tried before another 2 s."""
    return not link._using and link._try_s >= 2.0


def _is_through(link, before) -> bool:
    return link._using and link.changes == 0


def _went(link, before) -> bool:
    return link.changes >= 1


@dataclass(frozen=True)
class Case:
    name: str
    strike: Callable[[Scene], None]
    enough: Callable[[object, int], bool]
    reason: str  # in exactly one warning; empty: there is none at all
    lease_s: float = 10.0
    relayed: bool = False
    full: bool = False
    lost_nbytes: tuple[int, int] = ()  # up and down, packets above these


def _pause_of(what: str, seconds: int, scale: bool = True) -> Case:
    pause_s = PAUSES_S[seconds] if scale else seconds
    lease_s = LEASE_S if scale else 10.0
    lost = f"silent for {lease_s:g} s" if seconds > 10 else ""
    name = f"a pause of {seconds} s of {what}"
    end = _is_through if not lost else _is_back if seconds == 13 else _went
    if what == "the aggregator":
        pause_s, end = max(pause_s, 1.6), _went
        lost = "nothing has come from its plane|is gone from job"  # the plane after 1 s, or the lease: whichever is seen first
        return Case(name, lambda s: s.pause(s.aggregator.process.pid, pause_s), end, lost, lease_s)
    if what == "a rank":
        return Case(name, lambda s: s.pause(s.rank_pid, pause_s), end, lost, lease_s)
    return Case(name, lambda s: s.relay.pause(pause_s), end, lost, lease_s, relayed=True)


SIZE = r"packets of \d+ bytes do not .*set star\(mtu="
CASES = {
    case.name: case
    for case in (
        Case("kill", lambda s: s.restart(), _is_back, "is gone"),
        *(_pause_of("the aggregator", seconds) for seconds in PAUSES_S),
        *(_pause_of("a rank", seconds) for seconds in PAUSES_S),
        *(_pause_of("a control connection", seconds, scale=seconds != 13) for seconds in PAUSES_S),
        Case("a reset control connection", lambda s: s.relay.reset(), _is_back, "is gone", relayed=True),
        Case("full", lambda s: s.restart(full=True), _is_out, "all 256 slots are in use by 4 jobs"),
        Case("full from the start", lambda s: None, _is_out, "all 256 slots are in use by 4 jobs", full=True),
        Case(
            "a rotated secret",
            lambda s: s.restart(secret="another secret of this test"),
            _is_out,
            "the secret is not one that this aggregator was started with",
        ),
        Case(
            "another service",
            lambda s: s.put_another_service_there(),
            _is_out,
            "does not answer like an aggregator",
        ),
        Case("a path that loses large packets", lambda s: None, _is_out, SIZE, lost_nbytes=(500, 1500)),
        Case("a path that loses large results", lambda s: None, _is_out, SIZE, lost_nbytes=(1500, 1000)),
        Case(
            "a path that begins to lose large packets",
            lambda s: (s.folder / "narrow").touch(),
            _is_out,
            SIZE,
            lost_nbytes=(500, 1500),
        ),
    )
}


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks.run(WORLD, _expected)[0]


@contextmanager
def _scene(ranks, case, folder: Path) -> Iterator[Scene]:
    with ExitStack() as opened:
        aggregator = Aggregator(lease_s=case.lease_s, full=case.full)
        opened.callback(aggregator.close)
        relay = ControlRelay(("127.0.0.1", aggregator.port))
        opened.callback(relay.close)
        if case.relayed:
            (folder / "relay").write_text(str(relay.port))
        if case.lost_nbytes and "begins" not in case.name:
            (folder / "narrow").touch()
        ranks.start(WORLD, _train, aggregator.at, str(folder), case.name)
        scene = Scene(aggregator, relay, ranks.process_id(1), folder)
        opened.callback(lambda: scene.close())
        yield scene


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_with_the_bits_of_sharded_and_one_warning(ranks, expected, tmp_path, name):
    case = CASES[name]
    with _scene(ranks, case, tmp_path) as scene:
        deadline = time.monotonic() + 60
        while not (tmp_path / "trained").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        case.strike(scene)
        (tmp_path / "struck").touch()
        found = ranks.results(WORLD)
    for kind, value in found:
        assert kind == "ok", value
    for digest, step, _, _, _ in (value for _, value in found):
        assert digest == expected[step]
    _, step, changes, warnings, longest_s = found[0][1]
    assert found[1][1][3] == []  # rank 0 speaks for all
    naming = [text for text in warnings if re.search(case.reason or ".", text)]
    assert len(naming) == bool(case.reason), warnings
    # it takes 1 s to notice, 2 s for a path; attempts to return take no time of a step
    assert longest_s < 10.0
    assert changes == 1 or case.enough is not _is_out


def test_the_names_of_the_musts_are_all_there():
    wanted = "kill", "6 s", "13 s", "40 s", "reset", "full", "secret", "service", "large packets"
    assert all(any(text in name for name in CASES) for text in wanted)
