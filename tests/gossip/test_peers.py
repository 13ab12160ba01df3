"""Meetings over sockets that go wrong in the middle: both sides move, or none does."""

import socket
import time
import zlib
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tacit.gossip import frames
from tacit.gossip.frames import PeerError, Talk
from tacit.gossip.island import Island
from tacit.gossip.pace import FIRST_S, Pace
from tacit.gossip.partners import Gossip
from tacit.gossip.peers import Address, Peers
from tacit.strategy import parse_codec

SECONDS = 20.0


def soon():
    return time.monotonic() + SECONDS


@contextmanager
def rank_zero(members):
    """Rank 0 of two, with a model of four ones; what becomes of its calls is in `told`."""
    island, told = Island({"w": nn.Parameter(torch.ones(4))}), []
    peers = Peers(
        island, Gossip(), parse_codec("none"), rank=0, world=2, incarnation="zero", seed=0, host="127.0.0.1",
        members=lambda: members, tell=told.append, sent=lambda nbytes: None,
    )  # fmt: skip
    try:
        yield peers, island, told
    finally:
        peers.close()


@contextmanager
def called():
    """A socket at which rank 0 can call the test, as rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        yield server, {1: Address("127.0.0.1", server.getsockname()[1], "one")}


def call_of(peers):
    return Talk(socket.create_connection(("127.0.0.1", peers.port)), 1 << 20)


def up_to_prepared(server):
    """The called side's part until PREPARED is due: the meeting's name, its talk, and the middle's checksum."""
    connection, _ = server.accept()
    talk = Talk(connection, 1 << 20)
    call = talk.expect(frames.CALL, soon())
    talk.send(frames.READY, {"refers": None}, soon())
    own = torch.full((4,), 3.0)
    talk.swap(own.numpy().tobytes(), soon())
    return call.words["meeting"], talk, zlib.crc32(((torch.ones(4) + own) / 2).numpy())


def outcome(peers, meeting):
    talk = call_of(peers)
    talk.send(frames.OUTCOME, {"meeting": meeting, "rank": 1}, soon())
    happened = talk.expect(frames.OUTCOME, soon()).words["happened"]
    talk.close()
    return happened


def test_a_meeting_that_was_prepared_moves_the_caller_and_it_says_so_when_asked():
    with called() as (server, members), rank_zero(members) as (peers, island, told):
        peers.wish("test")
        meeting, talk, middle = up_to_prepared(server)
        talk.send(frames.PREPARED, {"middle": middle}, soon())
        talk.expect(frames.COMMIT, soon())
        talk.close()  # without DONE: the caller has moved all the same
        assert peers.wait(SECONDS) and told[0].outcome == "met"
        assert outcome(peers, meeting) and not outcome(peers, "another")
        assert torch.equal(island.snapshot, torch.full((4,), 2.0))


def test_who_asks_how_it_ended_before_it_has_will_find_the_caller_unmoved():
    with called() as (server, members), rank_zero(members) as (peers, island, told):
        peers.wish("test")
        meeting, talk, middle = up_to_prepared(server)
        assert not outcome(peers, meeting)  # rank 1 does not move, so rank 0 must not
        talk.send(frames.PREPARED, {"middle": middle}, soon())
        with pytest.raises(PeerError):
            talk.expect(frames.COMMIT, soon())
        assert peers.wait(SECONDS) and "given the meeting up" in told[0].outcome
        assert torch.equal(island.snapshot, torch.ones(4)) and not outcome(peers, meeting)


def test_different_middles_move_nobody():
    with called() as (server, members), rank_zero(members) as (peers, island, told):
        peers.wish("test")
        _, talk, middle = up_to_prepared(server)
        talk.send(frames.PREPARED, {"middle": middle + 1}, soon())
        assert peers.wait(SECONDS) and "different ends" in told[0].outcome
        assert torch.equal(island.snapshot, torch.ones(4))


def test_a_caller_that_came_back_after_it_died_in_a_meeting_is_not_told_to_wait():
    with rank_zero({}) as (peers, island, _):
        words = {"rank": 1, "refers": None, "says": "none", "numel": 4}
        first = call_of(peers)
        first.send(frames.CALL, words | {"meeting": "1-a-1", "incarnation": "a"}, soon())
        first.expect(frames.READY, soon())
        first.swap(torch.full((4,), 3.0).numpy().tobytes(), soon())
        first.expect(frames.PREPARED, soon())
        first.close()  # died: no COMMIT
        kind = frames.BUSY
        while kind == frames.BUSY:  # until rank 0 has seen that the first has gone
            again = call_of(peers)
            again.send(frames.CALL, words | {"meeting": "1-b-1", "incarnation": "b"}, soon())
            kind = again.receive(soon()).kind
            if kind == frames.READY:
                again.swap(torch.full((4,), 5.0).numpy().tobytes(), soon())
                again.expect(frames.PREPARED, soon())
                again.send(frames.COMMIT, {}, soon())
                again.expect(frames.DONE, soon())
            again.close()
        assert torch.equal(
            island.snapshot, torch.full((4,), 3.0)
        )  # of 1 and 5; never of 1 and the dead one's 3
        assert island.met == 1 and not island.doubts


def test_nonsense_ends_its_connection_and_nothing_else():
    with rank_zero({}) as (peers, _, _):
        for kind, words in ((frames.CALL, {}), (frames.OUTCOME, {"meeting": "x"}), (frames.GET, {"what": 3})):
            talk = call_of(peers)
            talk.send(kind, words, soon())
            if kind == frames.GET:
                assert not talk.expect(frames.MODEL, soon()).words["there"]
            else:
                with pytest.raises(PeerError):
                    talk.receive(soon())
            talk.close()
        assert peers.fetch(Address("127.0.0.1", peers.port, "zero"), "now", soon())[0].equal(torch.ones(4))


def test_one_that_does_not_answer_is_called_more_and_more_rarely_and_at_once_when_it_calls():
    pace, waits = Pace(), []
    for _ in range(6):
        pace.failed(100.0)
        waits.append(pace.retry_at - 100.0)
    assert waits == [1, 2, 4, 8, 8, 8]
    assert pace.patience_s == 16 * FIRST_S  # a large model on a slow link needs it; silence ends it sooner
    pace.answered()
    assert (pace.retry_at, pace.patience_s) == (0.0, FIRST_S)


def test_silence_ends_a_talk_long_before_its_deadline(monkeypatch):
    monkeypatch.setattr(frames, "SILENCE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        talk = Talk(socket.create_connection(server.getsockname()), 1 << 10)
        with pytest.raises(PeerError, match=r"said nothing for 0.01 s"):
            talk.receive(time.monotonic() + 3600)
        talk.close()
