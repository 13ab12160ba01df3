"""Rows of four ranks through an aggregator, and round it: the same bytes, whatever happens to it or to a rank."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schemes.aggregators import SECRET, Aggregator
from torch import Tensor

from tacit.errors import TransportError
from tacit.transports import Wire
from tacit.transports.aggregator_seat import GoneError
from tacit.transports.row_link import RowLink
from tacit.transports.row_seat import RowPath

WORLD, NUMBERS = 4, 40


# ---- what ranks do


def opened(at: str, *, secret: str = SECRET, timeout_s: float = 20, **options: Any) -> RowLink:
    host, port = at.split(":")
    timeout = timedelta(seconds=timeout_s)
    wire = Wire(dist.new_group(timeout=timeout))
    link = RowLink(wire, RowPath((host, int(port)), secret, 1500, 1 << 18), timeout=timeout, **options)
    wire.lost_ranks = link.lost
    return link


def message(number: int, source: int, to: int) -> Tensor:
    """What `source` has for `to` in an exchange; a quarter of them is empty."""
    chance = torch.Generator().manual_seed(1000 * number + 10 * source + to)
    numel = (0, 3, 400, 8_000)[int(torch.randint(4, (1,), generator=chance))]
    return torch.randint(-(2**31), 2**31, (numel,), generator=chance)


def moved(link: RowLink, number: int, rank: int, world: int) -> bool:
    """Whether everything came as it was sent."""
    parts = [message(number, rank, to) for to in range(world)]
    wanted = [message(number, source, rank) for source in range(world)]
    found = link.all_to_all(parts, [each.numel() for each in wanted])
    return len(found) == world and all(map(torch.equal, found, wanted))


def warnings() -> list[str]:
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    logging.getLogger("tacit").addHandler(Handler())
    return found


def udp_sockets(process: int | str = "self") -> int:
    """Of this process, as the kernel has them."""
    inodes = {int(line.split()[9]) for line in Path("/proc/net/udp").read_text().splitlines()[1:]}
    found = 0
    for opened in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found += opened.stat().st_ino in inodes
    return found


def run(
    rank: int,
    world: int,
    at: str,
    before: Callable[[int, RowLink], None] = lambda number, link: None,
    numbers: int = NUMBERS,
) -> Any:
    """Bytes that were right, how they came, warnings, sockets."""
    found = warnings()
    sockets = udp_sockets()
    link = opened(at)
    right = 0
    for number in range(numbers):
        before(number, link)
        right += moved(link, number, rank, world)
        if number % 8 == 3:
            dist.barrier()  # a collective elsewhere, as of dense gradients
    sockets = udp_sockets() - sockets
    sent = link._wire.sent_nbytes
    link.close()
    return right, (link.through, link.round_about, link.changes), found, sockets, sent


# ---- tests


@pytest.fixture
def aggregator() -> Any:
    made = Aggregator()
    yield made
    made.close()


def test_rows_go_through_the_aggregator_with_one_socket_a_rank(ranks: Any, aggregator: Aggregator) -> None:
    for rank, (right, ways, found, sockets, sent) in enumerate(ranks.run(WORLD, run, aggregator.at)):
        assert right == NUMBERS and ways == (NUMBERS, 0, 0) and found == []
        assert sockets == 1
        others = [to for to in range(WORLD) if to != rank]
        least = sum(8 * message(number, rank, to).numel() for number in range(NUMBERS) for to in others)
        assert least <= sent < 1.2 * least


def test_an_aggregator_that_dies_in_an_exchange_costs_no_byte(ranks: Any, aggregator: Aggregator) -> None:
    found = ranks.run(WORLD, run_through_a_death, aggregator.at, aggregator.process.pid)
    for rank, (right, (through, round_about, changes), said, _, _) in enumerate(found):
        assert right == NUMBERS
        assert through >= 10 < round_about and changes == 1
        assert len(said) == (rank == 0), said
    assert "is gone" in found[0][2][0] and "the process group moves rows from exchange" in found[0][2][0]


def run_through_a_death(rank: int, world: int, at: str, process_id: int) -> Any:
    def strike(link: RowLink) -> None:
        while not link._inside:
            time.sleep(0.0002)
        os.kill(process_id, signal.SIGKILL)

    def before(number: int, link: RowLink) -> None:
        if rank == 0 and number == 12:
            threading.Thread(target=strike, args=(link,)).start()

    return run(rank, world, at, before)


def test_rows_take_the_aggregator_again_once_it_is_back(
    ranks: Any, aggregator: Aggregator, tmp_path: Path
) -> None:
    ranks.start(WORLD, run_until_it_is_back, aggregator.at, str(tmp_path))
    wait_for(tmp_path / "began")
    aggregator.close()
    wait_for(tmp_path / "gone")
    aggregator.start()
    found = ranks.results(WORLD)
    for kind, value in found:
        assert kind == "ok", value
        right, (through, round_about, changes), numbers, _ = value
        assert right == numbers and changes == 2
        assert through > 20 and round_about > 0 and through + round_about == numbers
    said = found[0][1][3]
    assert ["is gone" in said[0], "is back" in said[1]] == [True, True] and len(said) == 2


def run_until_it_is_back(rank: int, world: int, at: str, folder: str) -> Any:
    found, link = warnings(), opened(at)
    right = number = after = 0
    deadline = time.monotonic() + 60
    while after < 10:
        right += moved(link, number, rank, world)
        number += 1
        if rank == 0 and number == 12:
            Path(folder, "began").touch()
        if rank == 0 and link.changes == 1:
            Path(folder, "gone").touch()
        after += link.changes == 2  # the same number on all ranks
        time.sleep(0.01)
        assert time.monotonic() < deadline, (link.changes, found)
    link.close()
    return right, (link.through, link.round_about, link.changes), number, found


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["absent", "another secret"])
def test_an_aggregator_that_is_not_there_or_refuses_is_named_once(
    ranks: Any, aggregator: Aggregator, how: str
) -> None:
    if how == "absent":
        aggregator.close()
    found = ranks.run(2, run_without, aggregator.at, "not the secret of the aggregator")
    for rank, (right, ways, said) in enumerate(found):
        assert right == 6 and ways == (0, 6, 0)
        assert len(said) == (rank == 0)
    reason = "no aggregator listens at" if how == "absent" else "the secret is not one"
    assert reason in found[0][2][0] and "the process group moves them" in found[0][2][0]


def run_without(rank: int, world: int, at: str, secret: str) -> Any:
    found, link = warnings(), opened(at, secret=secret)
    right = sum(moved(link, number, rank, world) for number in range(6))
    link.close()
    return right, (link.through, link.round_about, link.changes), found


def test_who_lacks_rows_of_a_number_that_others_have_finished_gets_them(
    ranks: Any, aggregator: Aggregator
) -> None:
    """Ranks 1 and 3 have finished it, and stand in a collective elsewhere that waits for ranks 0 and 2."""
    for rank, (right, (through, round_about, changes)) in enumerate(
        ranks.run(WORLD, lose_what_came, aggregator.at)
    ):
        assert right == 10 and changes == 1
        assert (through, round_about) == ((6, 4) if rank in (1, 3) else (5, 5))


def lose_what_came(rank: int, world: int, at: str) -> Any:
    link = opened(at)
    right = 0
    for number in range(10):
        if number == 5 and rank in (0, 2):
            lose(link, source=2 - rank)
        right += moved(link, number, rank, world)
        dist.barrier()
    link.close()
    return right, (link.through, link.round_about, link.changes)


def lose(link: RowLink, source: int) -> None:
    """Of the next exchange: what `source` has sent, and that it is over."""
    seat = link._seat
    assert seat is not None
    move = seat.exchange

    def lossy(parts: Any, rooms: Any, **options: Any) -> None:
        move(parts, rooms, **options)
        rooms[source][:] = 0
        raise GoneError("it is said to be gone")

    class Lossy:
        exchange = staticmethod(lossy)
        socket = type("Socket", (), {"here": [each != source for each in range(4)]})
        membership, count_nbytes, close = seat.membership, seat.count_nbytes, seat.close

    link._seat = Lossy()  # type: ignore[assignment]


def test_a_rank_that_is_late_is_named_and_one_that_does_not_come_ends_the_wait(
    ranks: Any, aggregator: Aggregator
) -> None:
    found = ranks.run(2, wait_for_rank_one, aggregator.at)
    sentence, said = found[0]
    assert re.search(r"rank 0 has waited \d s for rows of rank 1; restart all ranks from the last", sentence)
    assert len(said) == 1 and re.search(r"rank 0 has waited \d s for rows of rank 1; still waiting", said[0])


def wait_for_rank_one(rank: int, world: int, at: str) -> Any:
    found, link = warnings(), opened(at, patience_s=0.6, timeout_s=3)
    assert moved(link, 0, rank, world)
    if rank == 0:
        with pytest.raises(TransportError) as late:
            moved(link, 1, rank, world)
        dist.barrier()
        return str(late.value), found
    dist.barrier()
    return None


def test_a_rank_that_dies_is_named_by_all_others(ranks: Any, aggregator: Aggregator) -> None:
    try:
        ranks.start(3, lose_rank_one, aggregator.at)
        found = [ranks.result(rank) for rank in range(3)]
    finally:
        ranks.close()
    assert found[1] == ("died", 3)
    for kind, sentence in (found[0], found[2]):
        assert kind == "ok", sentence
        assert (
            "rank 1 went away; restart all ranks from the last checkpoint" in sentence
            and "\n" not in sentence
        )


def lose_rank_one(rank: int, world: int, at: str) -> str:
    link = opened(at)
    for number in range(5):
        assert moved(link, number, rank, world)
    if rank == 1:
        os._exit(3)
    try:
        for number in range(5, 50):
            moved(link, number, rank, world)
    except TransportError as lost:
        return str(lost)
    return "nothing was missed"


def test_a_rank_that_stood_still_longer_than_the_lease_costs_no_byte(ranks: Any, tmp_path: Path) -> None:
    aggregator = Aggregator(lease_s=1.0)
    try:
        ranks.start(2, run_until_it_is_gone, aggregator.at, str(tmp_path))
        wait_for(tmp_path / "began")
        os.kill(ranks.process_id(1), signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(ranks.process_id(1), signal.SIGCONT)
        found = ranks.results(2)
    finally:
        aggregator.close()
    for kind, value in found:
        assert kind == "ok" and value[0] == value[1] > 10, value


def run_until_it_is_gone(rank: int, world: int, at: str, folder: str) -> Any:
    link = opened(at)
    right, number, enough = 0, 0, torch.tensor([False])
    deadline = time.monotonic() + 30
    while not enough:
        right += moved(link, number, rank, world)
        number += 1
        if number == 10:
            Path(folder, "began").touch()
        time.sleep(0.01)
        assert time.monotonic() < deadline
        enough = torch.tensor([link.changes > 0])
        dist.broadcast(enough, 0)
    link.close()
    return right, number
