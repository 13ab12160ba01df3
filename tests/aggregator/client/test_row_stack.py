"""The ends of row flows over real sockets: every byte once, over a path that loses, repeats and reorders, and an answer when it is gone."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from aggregator.clients import some_job
from aggregator.relay import HERE
from aggregator.row_switch import members, same

from tacit.aggregator.client.row_stack import RowSocket, RowsOutcome
from tacit.errors import ConfigError

ROOM = 1424  # bytes of a message in a packet at MTU 1500


def becomes(read: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not read():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(("loss", "seed"), [(0.0, 0), (0.01, 1), (0.01, 2), (0.05, 3), (0.05, 4)])
def test_every_message_comes_once_and_whole_whatever_the_path_does(loss, seed):
    with members(4, seed=seed, loss=loss, repeats=2 * loss, reorders=2 * loss) as (team, path):
        for nbytes in (0, 1, ROOM, ROOM + 1, 20 * ROOM, 100_000):
            for _ in range(3):
                sent = team.messages(nbytes, even=False)
                assert same(sent, team.exchange(sent))
        stats = [each.stats for each in team.sockets]
    assert set(path.plane.counts) <= {"forwarded", "echoed"}
    assert all(each.exchanges == 18 and each.foreign == each.unsent == 0 for each in stats)
    again = sum(each.repaired + each.timeouts for each in stats)
    if loss:
        assert path.dropped > 10 and again > 10
        assert again < 4 * path.dropped + path.passed // 10
    else:
        assert sum(each.repaired for each in stats) == 0


def test_numbers_wrap():
    """Of packets at 2^32, of exchanges at 2^16; the bitmap goes round, and the window is used up again and again."""
    with members(3, first=2**32 - 40, loss=0.02, seed=5) as (team, _):
        for _ in range(60):
            sent = team.messages(6 * ROOM, even=False)
            assert same(sent, team.exchange(sent))


def test_two_members_are_enough():
    with members(2, loss=0.02, seed=6) as (team, _):
        sent = team.messages(300_000)
        assert same(sent, team.exchange(sent))


@pytest.mark.parametrize(("world", "window"), [(2, 1 << 16), (5, 1 << 16), (3, 1 << 26)])
def test_all_senders_together_stay_within_one_receivers_window(world, window):
    with members(world, window_nbytes=window) as (team, path):
        sent = team.messages(400_000)
        assert same(sent, team.exchange(sent))
        for receiver in range(world):
            on_the_way = [
                path.most_on_the_way[sender, receiver] for sender in range(world) if sender != receiver
            ]
            assert max(on_the_way) <= 1024
            assert sum(on_the_way) * ROOM <= window or window > 1 << 20
            assert min(on_the_way) >= min(8, window // ROOM // world // 2)


def test_a_member_that_begins_late_finds_what_was_sent_to_it():
    """The others do not send it again and again: what has come is kept there."""
    with members(3, window_nbytes=1 << 16) as (team, _):
        for _ in range(3):
            sent = team.messages(100_000)
            got = [team.rooms(sent, own) for own in range(3)]
            for own in (0, 1):
                team.sockets[own].begin(sent[own], got[own])
            for each in team.sockets[:2]:
                becomes(lambda each=each: each.here == each.acknowledged == [True, True, False])
                assert each.wait(0.0) is RowsOutcome.RUNNING
            time.sleep(0.2)
            team.sockets[2].begin(sent[2], got[2])
            for each in team.sockets:
                assert each.wait(30.0) is RowsOutcome.DONE
            assert same(sent, got)
        assert team.sockets[2].stats.early >= 3 * 2 * ((1 << 16) // 2 // ROOM)
        assert sum(each.stats.timeouts for each in team.sockets) < 3 * 2 * 20


def test_a_member_goes_on_acknowledging_between_exchanges():
    """Whoever has finished owes the others nothing but acknowledgements, and those come while it computes."""
    with members(3, loss=0.3, seed=8) as (team, _):
        for _ in range(6):
            sent = team.messages(4 * ROOM)
            assert same(sent, team.exchange(sent))


def test_a_path_that_goes_silent_is_noticed():
    with members(3) as (team, path):
        sent = team.messages(50_000)
        assert same(sent, team.exchange(sent))
        path.cut = True
        began = time.monotonic()
        for own, each in enumerate(team.sockets):
            each.begin(sent[own], team.rooms(sent, own))
        assert [each.wait(30.0) for each in team.sockets] == [RowsOutcome.SILENT] * 3
        assert 1.9 < time.monotonic() - began < 20
        for each in team.sockets:
            each.abandon()
            assert each.stats.probes >= 10
            with pytest.raises(ConfigError, match="given up"):
                each.begin(sent[0], team.rooms(sent, 0))


def test_a_member_that_waits_for_a_late_one_is_not_silent():
    with members(2) as (team, _):
        sent = team.messages(10)
        room = team.rooms(sent, 0)
        team.sockets[0].begin(sent[0], room)
        assert team.sockets[0].wait(1.6) is RowsOutcome.RUNNING


def test_a_plane_that_has_forgotten_the_job_is_noticed():
    with members(2) as (team, path):
        sent = team.messages(10)
        assert same(sent, team.exchange(sent))
        path.plane.remove_job(some_job().id)
        for own, each in enumerate(team.sockets):
            each.begin(sent[own], team.rooms(sent, own))
            assert each.wait(30.0) is RowsOutcome.UNKNOWN


def test_a_path_that_loses_large_packets_only_is_noticed():
    with members(2) as (team, path):
        sent = team.messages(10 * ROOM)
        assert same(sent, team.exchange(sent))
        path.most_nbytes = 600
        for own, each in enumerate(team.sockets):
            each.begin(sent[own], team.rooms(sent, own))
        assert [each.wait(30.0) for each in team.sockets] == [RowsOutcome.NARROW] * 2


def test_a_message_of_another_length_is_refused():
    with members(2) as (team, _):
        sent = team.messages(10)
        team.sockets[0].begin(sent[0], team.rooms(sent, 0))
        team.sockets[1].begin(sent[1], [np.empty(12, np.uint8)] * 2)
        assert team.sockets[1].wait(30.0) is RowsOutcome.MISMATCHED
        assert team.sockets[1].mismatch == (0, 10, 12)


def test_waiting_leaves_the_interpreter_to_others():
    with members(2) as (team, _):
        sent = team.messages(10)
        counted = 0
        team.sockets[0].begin(sent[0], team.rooms(sent, 0))
        waiter = threading.Thread(target=team.sockets[0].wait, args=(0.3,))
        waiter.start()
        while waiter.is_alive():
            counted += 1
        assert counted > 1000


def test_what_cannot_be_is_one_sentence():
    with members(2) as (team, path):
        job = some_job(world=2)
        one = RowSocket(HERE)
        with pytest.raises(ConfigError, match="start\\(\\) comes before"):
            one.begin([], [])
        with pytest.raises(ConfigError, match="a multiple of 16"):
            one.start(job, 0, path.address, room_nbytes=1000, window_nbytes=1 << 16)
        with pytest.raises(ConfigError, match="member 2 of 2"):
            one.start(job, 2, path.address, room_nbytes=ROOM, window_nbytes=1 << 16)
        with pytest.raises(ConfigError, match="1 parts and 1 rooms: the job has 2 members"):
            team.sockets[0].begin([np.empty(1, np.uint8)], [np.empty(1, np.uint8)])
        one.close()
        one.close()
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+ cannot be bound to"):
            RowSocket(("127.0.0.1", team.sockets[0].port))
