"""Meetings over sockets that go wrong in the middle: both sides move, or none does."""

import socket
import time
import warnings
import zlib
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from tacit.gossip import frames
from tacit.gossip.frames import Connection, PeerError
from tacit.gossip.peers import PeerAddress, Peers
from tacit.gossip.rendezvous import Endpoint
from tacit.gossip.replica import Prepared, Replica
from tacit.gossip.timeouts import FIRST_S, Timeouts
from tacit.rounds import Wish
from tacit.schemes import Gossip
from tacit.strategy import parse_codec

SECONDS = 20.0
HERE = Endpoint("127.0.0.1", "127.0.0.1")


def soon():
    return time.monotonic() + SECONDS


@contextmanager
def rank_zero(members, *, knows=lambda rank, incarnation: True, **options):
    """Rank 0 of two, with a model of four ones; what becomes of its calls is in `told`."""
    replica, told = Replica({"w": nn.Parameter(torch.ones(4))}), []
    options = {"knows": knows, "theta": 1.0} | options
    peers = Peers(
        replica, Gossip(), parse_codec("none"), rank=0, world=2, incarnation="zero", seed=0, endpoint=HERE,
        members=lambda: members, report=told.append, sent=lambda nbytes: None, **options,
    )  # fmt: skip
    try:
        yield peers, replica, told
    finally:
        peers.close()


@contextmanager
def called():
    """A socket at which rank 0 can call the test, as rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        yield server, {1: PeerAddress("127.0.0.1", server.getsockname()[1], "one")}


def call_of(peers):
    sock = socket.create_connection(("127.0.0.1", peers.port))
    return Connection(sock, 1 << 20, secret="", called=peers.incarnation)


def call_fields(replica, **more):
    """What rank 1 says when it calls rank 0."""
    about = {"says": "none", "layout": replica.layers.crc}
    return {"rank": 1, "life": "a", "meeting": 1, "refers": None, **about, **more}


def up_to_prepared(server):
    """The called side's part until PREPARED is due: the meeting's name, its connection, and the middle's checksum."""
    sock, _ = server.accept()
    connection = Connection(sock, 1 << 20, secret="", called="one", serving=True)
    call = connection.expect(frames.CALL, soon())
    connection.send(frames.READY, {"refers": None}, soon())
    own = torch.full((4,), 3.0)
    connection.swap(own.numpy().tobytes(), soon())
    return f"0-zero-{call.fields['meeting']}", connection, zlib.crc32(((torch.ones(4) + own) / 2).numpy())


def outcome(peers, meeting):
    connection = call_of(peers)
    connection.send(frames.OUTCOME, {"meeting": meeting, "rank": 1, "life": "a"}, soon())
    happened = connection.expect(frames.OUTCOME, soon()).fields["happened"]
    connection.close()
    return happened


def test_a_meeting_that_was_prepared_moves_the_caller_and_it_says_so_when_asked():
    with called() as (server, members), rank_zero(members) as (peers, replica, told):
        peers.wish(Wish("test"))
        meeting, connection, middle = up_to_prepared(server)
        connection.send(frames.PREPARED, {"middle": middle}, soon())
        connection.expect(frames.COMMIT, soon())
        connection.close()  # without DONE: the caller has moved all the same
        assert peers.wait(SECONDS) and told[0].outcome == "met"
        assert outcome(peers, meeting) and not outcome(peers, "another")
        assert torch.equal(replica.snapshot, torch.full((4,), 2.0))


def test_who_asks_how_it_ended_before_it_has_will_find_the_caller_unmoved():
    with called() as (server, members), rank_zero(members) as (peers, replica, told):
        peers.wish(Wish("test"))
        meeting, connection, middle = up_to_prepared(server)
        assert not outcome(peers, meeting)  # rank 1 does not move, so rank 0 must not
        connection.send(frames.PREPARED, {"middle": middle}, soon())
        with pytest.raises(PeerError):
            connection.expect(frames.COMMIT, soon())
        assert peers.wait(SECONDS) and "given the meeting up" in told[0].outcome
        assert torch.equal(replica.snapshot, torch.ones(4)) and not outcome(peers, meeting)


def test_different_middles_move_nobody():
    with called() as (server, members), rank_zero(members) as (peers, replica, told):
        peers.wish(Wish("test"))
        _, connection, middle = up_to_prepared(server)
        connection.send(frames.PREPARED, {"middle": middle + 1}, soon())
        assert peers.wait(SECONDS) and "different ends" in told[0].outcome
        assert torch.equal(replica.snapshot, torch.ones(4))


def test_a_caller_that_came_back_after_it_died_in_a_meeting_is_not_told_to_wait():
    with rank_zero({}) as (peers, replica, _):
        fields = call_fields(replica, layers=None)
        first = call_of(peers)
        first.send(frames.CALL, fields, soon())
        first.expect(frames.READY, soon())
        first.swap(torch.full((4,), 3.0).numpy().tobytes(), soon())
        first.expect(frames.PREPARED, soon())
        first.close()  # died: no COMMIT
        kind = frames.BUSY
        while kind == frames.BUSY:  # until rank 0 has seen that the first has gone
            again = call_of(peers)
            again.send(frames.CALL, fields | {"life": "b"}, soon())
            kind = again.receive(soon()).kind
            if kind == frames.READY:
                again.swap(torch.full((4,), 5.0).numpy().tobytes(), soon())
                again.expect(frames.PREPARED, soon())
                again.send(frames.COMMIT, {}, soon())
                again.expect(frames.DONE, soon())
            again.close()
        # of 1 and 5; never of 1 and the dead one's 3
        assert torch.equal(replica.snapshot, torch.full((4,), 3.0))
        assert replica.met == 1 and not replica.followed_meetings.undecided


def test_nonsense_ends_its_connection_and_nothing_else():
    with rank_zero({}) as (peers, _, _):
        who = {"rank": 1, "life": "a"}
        for kind, fields in ((frames.CALL, {}), (frames.DONE, {"meeting": "x"}), (frames.GET, {"what": 3})):
            connection = call_of(peers)
            connection.send(kind, fields | who, soon())
            if kind == frames.GET:
                assert not connection.expect(frames.MODEL, soon()).fields["there"]
            else:
                with pytest.raises(PeerError):
                    connection.receive(soon())
            connection.close()
        connection = call_of(peers)
        connection.send(frames.GET, who | {"what": "now"}, soon())
        assert bytes(connection.expect(frames.MODEL, soon()).payload) == torch.ones(4).numpy().tobytes()
        connection.close()


def test_one_that_may_still_load_a_checkpoint_is_busy():
    with rank_zero({}) as (peers, replica, _):
        for away, kind in ((True, frames.BUSY), (False, frames.READY)):
            peers.away = away
            connection = call_of(peers)
            connection.send(frames.CALL, call_fields(replica, layers=None), soon())
            assert connection.receive(soon()).kind == kind
            connection.close()
        assert torch.equal(replica.snapshot, torch.ones(4))


def test_a_connection_does_not_mind_more_files_than_select_can_number():
    import os
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this machine allows {hard} open files")
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        with rank_zero({}) as (peers, _, _):
            while not held or held[-1] < 1100:
                held.append(os.open(os.devnull, os.O_RDONLY))
            connection = call_of(peers)
            connection.send(frames.GET, {"what": "now", "rank": 1, "life": "a"}, soon())
            assert connection.expect(frames.MODEL, soon()).fields["there"]
            connection.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_one_that_does_not_answer_is_called_more_and_more_rarely_and_at_once_when_it_calls():
    timeouts, waits = Timeouts(), []
    for _ in range(6):
        timeouts.failed(100.0, 1000)
        waits.append(timeouts.retry_at - 100.0)
    assert waits == [1, 2, 4, 8, 8, 8]
    # a large model on a slow link needs it; silence ends it sooner
    assert timeouts.timeout_s(1000) == 16 * FIRST_S
    timeouts.answered()
    assert (timeouts.retry_at, timeouts.timeout_s(1000)) == (0.0, FIRST_S)


def test_patience_is_of_the_size_of_what_is_said():
    timeouts = Timeouts()
    for _ in range(200):
        timeouts.took(0.01, 1000)
    assert timeouts.timeout_s(1000) == 0.5  # never less
    # a model may take longer than its biases, but nobody knows how long
    assert timeouts.timeout_s(1 << 30) == FIRST_S
    for _ in range(200):
        timeouts.took(5.0, 1 << 30)
    assert timeouts.timeout_s(1000) == 0.5 and timeouts.timeout_s(1 << 30) == pytest.approx(10.0)
    assert timeouts.timeout_s(1 << 31) == pytest.approx(20.0) and timeouts.timeout_s(1 << 40) == FIRST_S
    assert timeouts.mean_s(1000) == pytest.approx(0.01) and timeouts.mean_s(1 << 29) == pytest.approx(5.0)
    timeouts.failed(0.0, 1 << 30)
    assert timeouts.timeout_s(1 << 30) > 10.5 and timeouts.timeout_s(1000) == 0.5  # more for what has failed


def test_silence_ends_a_connection_long_before_its_deadline(monkeypatch):
    monkeypatch.setattr(frames, "SILENCE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(socket.create_connection(server.getsockname()), 1 << 10, secret="", called="")
        with pytest.raises(PeerError, match=r"sent nothing for 0.01 s"):
            connection.receive(time.monotonic() + 3600)
        for timeout_s, silence_s in (
            (0.02, 0.01),
            (0.1, 0.025),
            (3600, 60),
        ):  # a quarter of it, within bounds
            connection.allow(timeout_s)
            assert connection.silence_s == silence_s
        connection.close()


@contextmanager
def two(codec, *, begun=True, mode="symmetric", dtype=torch.float32):
    """Two ranks that know each other, with models of two layers of 3,000: all ones, and all threes. `begun` together, from zeros."""
    found, addresses = [], {}
    try:
        for rank, value in enumerate((1.0, 3.0)):
            layers = {
                f"{name}.weight": nn.Parameter(torch.full((3000,), value, dtype=dtype)) for name in "ab"
            }
            replica, told = Replica(layers, start=torch.zeros(6000) if begun else None), []
            peers = Peers(
                replica, Gossip(mode=mode), parse_codec(codec), rank=rank, world=2, incarnation=str(rank), seed=0, endpoint=HERE,
                members=lambda rank=rank: {r: a for r, a in addresses.items() if r != rank}, report=told.append,
                sent=lambda nbytes: None, theta=1.0,
            )  # fmt: skip
            addresses[rank] = PeerAddress("127.0.0.1", peers.port, str(rank))
            found.append((peers, replica, told))
        yield found
    finally:
        for peers, *_ in found:
            peers.close()


def meet_about(found, layers, caller=0):
    peers, _, told = found[caller]
    peers.wish(Wish("test", layers))
    assert peers.wait(SECONDS) and told[-1].outcome == "met"
    with found[1 - caller][0].apart():  # until the called one is done, too
        return told[-1].sent_nbytes, [replica.snapshot.view(2, 3000).clone() for _, replica, _ in found]


@pytest.mark.parametrize("codec", ["none", "hush", "topk(share=0.25)"])
def test_a_meeting_about_a_layer_moves_and_says_that_layer_only_on_both_sides(codec):
    with two(codec) as found:
        sent, models = meet_about(found, (1,))
        assert sent < 1.1 * parse_codec(codec).nbytes(3000) + 64
        for value, model in zip((1.0, 3.0), models, strict=True):
            assert torch.equal(model[0], torch.full((3000,), value))
            # Of 1.0 before: 4 bits of what was said; or a quarter of it.
            assert (model[1] - 2.0).square().mean().sqrt() < (0.9 if "topk" in codec else 0.25)
        torch.testing.assert_close(models[0] + models[1], torch.full((2, 3000), 4.0), atol=1e-4, rtol=0)
        for number in range(
            1, 12
        ):  # what both refer to goes on by layers: they agree on all of it in the end
            _, models = meet_about(found, (number % 2,), caller=number % 2)
        torch.testing.assert_close(models[0], models[1], atol=1e-2, rtol=0)
        assert [replica.met for _, replica, _ in found] == [12, 12]
        if codec == "hush":
            left, right = (replica.pairs[1 - rank] for rank, (_, replica, _) in enumerate(found))
            assert left.version == right.version and torch.equal(left.reference, right.reference)


def test_two_that_share_nothing_yet_speak_of_all_layers_in_full():
    with two("hush", begun=False) as found:
        sent, models = meet_about(found, (0,))
        assert sent >= 4 * 6000
        assert all(torch.equal(model, torch.full((2, 3000), 2.0)) for model in models)
        sent, _ = meet_about(found, (0,), caller=1)
        assert sent < 4 * 3000  # from now on they do


def test_two_that_do_not_refer_to_the_same_speak_of_everything_the_next_time():
    with two("hush") as found:
        meet_about(found, (0,))
        before = found[1][1].snapshot.clone()
        found[0][1].pairs[1].reference[0] += 1.0  # no longer what rank 1 has, and called the same
        peers, _, told = found[0]
        peers.wish(Wish("test", (0,)))
        assert peers.wait(SECONDS) and "different ends" in told[-1].outcome
        assert torch.equal(found[1][1].snapshot, before)
        found[1][0].settle()  # how it ended, as it asks before its own next call
        peers._timeouts[1].answered()
        sent, models = meet_about(found, (0,))
        assert sent >= 4 * 6000 and told[-1].layers is None
        torch.testing.assert_close(models[0], models[1], rtol=0, atol=1e-6)
        left, right = (replica.pairs[1 - rank] for rank, (_, replica, _) in enumerate(found))
        assert left.version == right.version and torch.equal(left.reference, right.reference)


@pytest.mark.parametrize("mode", ["push", "pull"])
def test_one_side_moves_about_a_layer_and_who_has_exchanged_measures_anew(mode):
    with two("none", mode=mode) as found:
        for _, replica, _ in found:
            replica.refer()
        _, models = meet_about(found, (1,))
        moved, still = (1, 0) if mode == "push" else (0, 1)
        assert torch.equal(models[moved][1], torch.full((3000,), 2.0)) and models[still].unique().numel() == 1
        assert [replica.met for _, replica, _ in found] == ([1, 1] if mode == "push" else [1, 0])
        assert found[0][1]._exchanged == {1}


@pytest.mark.parametrize("happened", [True, False])
def test_a_layer_that_was_left_in_doubt_moves_when_it_is_known_and_blocks_its_peer_until_then(happened):
    with two("hush") as found:
        (peers, replica, _), (caller, *_) = found
        middle = torch.full((3000,), 2.0)
        replica.followed_meetings.prepare(
            Prepared("1-1-7", 1, "1", layers=(1,), delta=torch.ones(3000), middle=middle)
        )
        assert peers._led(None, 1, None, soon()) == ("busy", None)  # what both refer to is open
        if happened:
            caller._led_meetings.commit(0, caller._led_meetings.begin("1-1-7"))
        peers.settle()
        expected = torch.cat([torch.ones(3000), torch.full((3000,), 2.0 if happened else 1.0)])
        assert not replica.followed_meetings.undecided and torch.equal(replica.snapshot, expected)
        assert (1 in replica.pairs) == happened
        if happened:
            assert torch.equal(replica.pairs[1].reference, torch.cat([torch.zeros(3000), middle]))
        assert torch.equal(replica.start, torch.zeros(6000))  # which others still refer to


def test_a_model_that_is_cut_otherwise_is_not_met():
    with rank_zero({}) as (peers, replica, _):
        fields = call_fields(replica)
        for wrong in ({"layout": 1, "layers": None}, {"layers": "4"}, {"layers": [0]}, {}):
            connection = call_of(peers)
            connection.send(frames.CALL, fields | wrong, soon())
            with pytest.raises(PeerError):
                connection.receive(soon())
            connection.close()
        assert torch.equal(replica.snapshot, torch.ones(4))


def test_what_is_added_between_two_steps_is_not_taken_for_movement():
    replica = Replica({"a.weight": nn.Parameter(torch.ones(10)), "b.weight": nn.Parameter(torch.ones(10))})
    replica.refer()
    replica.stepped()
    replica.conclude(1, "m", (0,), torch.full((10,), 5.0), torch.ones(10), keep=False, led=True)
    assert torch.equal(replica.seen((0,)), torch.full((10,), 6.0)) and replica.moved == [0.0, 0.0]
    replica.stepped()
    assert replica.moved == [0.0, 0.0] and replica.lengths == [360.0, 10.0]
    assert torch.equal(replica.flat(), torch.cat([torch.full((10,), 6.0), torch.ones(10)]))


def test_layers_that_nobody_spoke_of_keep_their_bits_in_any_precision():
    for dtype in (torch.bfloat16, torch.float64):
        with two("none", dtype=dtype) as found:
            replica = found[0][1]
            with torch.no_grad():
                for parameter in replica.parameters.values():
                    parameter.fill_(1 / 3)
            replica.stepped()
            meet_about(found, (0,))
            assert replica.stepped()
            first, second = replica.parameters.values()
            assert torch.equal(second, torch.full((3000,), 1 / 3, dtype=dtype)) and first[0] > 1.6


def test_a_layers_change_is_measured_from_its_own_last_exchange():
    with two("none") as found:
        replica = found[0][1]
        replica.refer()
        with torch.no_grad():
            for parameter in replica.parameters.values():
                parameter += 0.5
        replica.stepped()
        assert replica.moved == pytest.approx([750.0, 750.0]) and replica.lengths == [3000.0, 3000.0]
        meet_about(found, (0,))
        replica.stepped()
        assert replica.moved == pytest.approx([0.0, 750.0]) and replica.lengths == pytest.approx(
            [15187.5, 3000.0]
        )
        replica.stepped()
        assert replica.moved == pytest.approx([0.0, 750.0])


# ---- who may call, and what it may do


@pytest.mark.filterwarnings("ignore:rank 0 refused")
def test_only_other_ranks_of_this_world_in_lives_that_the_store_knows_are_answered():
    asked = []

    def knows(rank, incarnation):
        asked.append((rank, incarnation))
        return incarnation == "one"

    wrong = [(77, "one"), (-1, "one"), (0, "one"), (True, "one"), ("1", "one"), (1, "two"), (1, 3)]
    with rank_zero({}, knows=knows) as (peers, replica, _):
        for rank, incarnation in wrong:
            for kind in (frames.CALL, frames.GET, frames.OUTCOME):
                connection = call_of(peers)
                fields = call_fields(replica, layers=None, rank=rank, life=incarnation, what="now")
                connection.send(kind, fields, soon())
                with pytest.raises(PeerError):
                    connection.receive(soon())
                connection.close()
        assert set(asked) == {(1, "two")}
        assert peers._refusals.counts == {"rank": 15, "incarnation": 6}
        assert not peers._timeouts and not peers._led_meetings.committed


@pytest.mark.filterwarnings("ignore:rank . refused")
@pytest.mark.parametrize("caller", [0, 1])
def test_a_meeting_moves_a_layer_by_a_bounded_amount_or_neither_side(caller):
    with two("none") as found:
        for peers, *_ in found:
            peers.most_move = 4.0  # as with the default threshold
        _, broken, _ = found[1]
        with torch.no_grad():
            list(broken.parameters.values())[1].fill_(1e30)
        broken.stepped()
        before = [replica.snapshot.clone() for _, replica, _ in found]
        peers, _, told = found[caller]
        peers.wish(Wish("test"))
        assert peers.wait(SECONDS) and told[-1].outcome != "met"
        for each, *_ in found:
            with each.apart():  # until both have noticed
                each._timeouts[0].answered()
        for each, *_ in found:
            each.settle()
        assert all(torch.equal(i.snapshot, b) for (_, i, _), b in zip(found, before, strict=True))
        assert sum(p._refusals.counts["movement"] for p, *_ in found) >= 1
        assert not any(replica.followed_meetings.undecided for _, replica, _ in found)


def test_a_small_layer_is_measured_by_the_model_it_belongs_to():
    scale, body = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((100_000,), 0.05))
    replica = Replica({"scale": scale, "body.weight": body})
    peers = Peers(
        replica, Gossip(), parse_codec("none"), rank=0, world=2, incarnation="zero", seed=0, endpoint=HERE,
        members=dict, report=lambda met: None, sent=lambda nbytes: None,
    )  # fmt: skip
    try:
        w = replica.snapshot
        peers._check_movement(1, None, w, torch.cat([torch.ones(1), torch.zeros(100_000)]))
        with pytest.raises(PeerError, match=r"move layer 0 by 7, of at most 6.4"):
            peers._check_movement(1, None, w, torch.cat([torch.full((1,), 7.0), torch.zeros(100_000)]))
    finally:
        peers.close()


def test_a_caller_that_stops_in_the_middle_holds_the_meeting_no_longer_than_the_pace_lets_it(monkeypatch):
    monkeypatch.setattr("tacit.gossip.peers.LEAST_HELD_S", 0.05)
    with rank_zero({}) as (peers, replica, _):
        for _ in range(50):
            peers._held.took(0.01, 16)  # as meetings went so far
        peers._timeouts[1].took(5.0, 16)
        connection = call_of(peers)
        connection.send(frames.CALL, call_fields(replica, layers=None), soon())
        connection.expect(frames.READY, soon())
        began = time.monotonic()
        connection.expect(frames.SWAP, soon())
        with pytest.raises(PeerError):
            connection.receive(soon())
        assert time.monotonic() - began < frames.SILENCE_S / 2
        with peers.apart():
            pass
        connection.close()
        assert peers._silence_s(None) == pytest.approx(0.5)  # no more for the next that stops
        peers._held = Timeouts()
        assert peers._silence_s(None) == pytest.approx(10.0)  # at most, also before anything was seen


def test_who_cannot_begin_a_meeting_in_time_leaves_the_peer_before_that_leaves_it(monkeypatch):
    monkeypatch.setattr("tacit.gossip.peers.GREETING_S", 0.1)
    with called() as (_, members), rank_zero(members) as (peers, _, told), peers.apart():
        peers.wish(Wish("test"))
        assert peers.wait(SECONDS) and told[0].outcome == "busy"


def test_warnings_as_errors_do_not_end_the_thread_that_calls(monkeypatch):
    with rank_zero({}) as (peers, _, told), warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(peers, "_report", lambda met: warnings.warn("trains alone", stacklevel=1))
        peers.wish(Wish("test"))
        assert peers.wait(SECONDS)
        monkeypatch.setattr(peers, "_report", told.append)
        peers.wish(Wish("test"))
        assert peers.wait(SECONDS) and told[0].outcome == "nobody to call"


def test_a_number_that_is_none_is_malformed():
    with rank_zero({}) as (peers, replica, _):
        connection = call_of(peers)
        connection.send(frames.CALL, call_fields(replica, layers=None, meeting=1e999), soon())
        with pytest.raises(PeerError):
            connection.receive(soon())
        connection.close()
        peers.close()  # waits for the thread that answered
        assert peers._refusals.counts["malformed"] == 1


def test_only_meetings_with_a_common_reference_show_how_data_differ():
    for known in (False, True):
        replica = Replica({"w": nn.Parameter(torch.ones(4))})
        replica.start = torch.ones(4)
        before = replica.differs
        replica.conclude(
            1, "m", None, torch.full((4,), 5.0), torch.full((4,), 1.5), keep=False, led=True, known=known
        )
        assert (replica.differs != before) == known


def test_readers_pin_no_more_than_two_models(monkeypatch):
    monkeypatch.setattr("tacit.gossip.peers.FRESH_S", -1.0)  # each would have its own
    with rank_zero({}) as (peers, _, _), ExitStack() as held:
        found = [held.enter_context(peers._offered("now")) for _ in range(3)]
        assert [offered is None for offered in found] == [False, False, True]
        connection = call_of(peers)
        connection.send(frames.GET, {"what": "now", "rank": 1, "life": "a"}, soon())
        assert connection.receive(soon()).kind == frames.BUSY
        connection.close()
        held.close()
        with peers._offered("now") as offered:
            assert offered is not None


def test_readers_that_come_together_share_a_snapshot_and_one_too_many_is_busy(monkeypatch):
    monkeypatch.setattr("tacit.gossip.peers.WAIT_READER_S", 0.01)
    with rank_zero({}) as (peers, replica, _):
        with peers._offered("now") as (_, first):
            replica._own = replica._own.clone()
            with peers._offered("now") as (_, second):
                assert second is first
        with peers._offered("now") as (_, third):
            assert third is not first
        for _ in range(8):
            assert peers._readers.acquire(blocking=False)
        connection = call_of(peers)
        connection.send(frames.GET, {"what": "now", "rank": 1, "life": "a"}, soon())
        assert connection.receive(soon()).kind == frames.BUSY
        connection.close()
        peers._readers.release(8)


def test_who_connects_and_proves_nothing_is_left_in_time(monkeypatch):
    monkeypatch.setattr("tacit.gossip.peers.GREETING_S", 0.05)
    with rank_zero({}) as (peers, _, _), socket.create_connection(("127.0.0.1", peers.port)) as silent:
        silent.settimeout(SECONDS)
        assert len(silent.recv(100)) == 20 and silent.recv(100) == b""
