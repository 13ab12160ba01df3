"""Ranks in real processes, an aggregator in another: the bits of `sharded`, whoever dies."""

import logging
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from schemes.aggregators import SECRET, Aggregator, attached, link_of, strategy_of
from toys import deep, flat, train

import tacit
from tacit.errors import ConfigError, PairingError
from tacit.schemes import Star
from tacit.strategy import Strategy
from tacit.transports import aggregator_link
from tacit.transports.aggregator_link import AggregatorLink
from tacit.transports.aggregator_seat import Seat

LOW_RANK = "lowrank(2, p=hush, q=hush, rest=hush)"
EXACT = (
    "thc",
    "thc(granularity=255)",
    "thc(bits=2)",
    "hush",
    "ef(hush)",
    "signsgd",
    "terngrad",
    LOW_RANK,
    "ef(randomk(0.3) > hush)",
    "ef(scalecom(0.3) > thc)",
)  # 255 x 3 ranks need 16-bit lanes
FLOATS = ("none", "bf16", "lowrank(2, p=none, q=none, rest=none)")


@pytest.fixture(scope="module")
def shared():
    """One for all tests that leave it alive."""
    aggregator = Aggregator()
    yield aggregator
    aggregator.close()


@contextmanager
def mortal():
    aggregator = Aggregator()
    try:
        yield aggregator
    finally:
        aggregator.close()


def _train_all(rank, world, codecs, at, steps=2):
    """What this rank holds after some steps with each codec, and what it sent."""
    found = {}
    for codec in codecs:
        model, optimizer, handle = attached(codec, at)
        with handle:
            train(model, optimizer, rank, range(steps))
            through = link_of(handle).through if at else 0
            found[codec] = flat(model), handle.stats.as_dict()["sent_by_request"], through
    return found


def test_the_aggregator_gives_the_bits_of_sharded(ranks, shared):
    found = ranks.run(3, _train_all, EXACT, shared.at)
    expected = ranks.run(3, _train_all, EXACT, None)
    for codec in EXACT:
        for own, other in zip(found, expected, strict=True):
            assert torch.equal(own[codec][0], other[codec][0]), codec
        assert found[0][codec][2] >= 2 * 5  # sums went through: two steps of at least five buckets


def test_floats_travel_as_fixed_point_and_all_ranks_agree(ranks, shared):
    found = ranks.run(3, _train_all, FLOATS, shared.at)
    expected = ranks.run(3, _train_all, FLOATS, None)
    for codec, tolerance in zip(FLOATS, (1e-6, 1e-3, 1e-3), strict=True):
        for own in found:
            assert torch.equal(own[codec][0], found[0][codec][0])
        torch.testing.assert_close(found[0][codec][0], expected[0][codec][0], rtol=0, atol=tolerance)
        assert found[0][codec][2] >= 2 * 5


def _sums(rank, world, at):
    """Requests that no codec of ours makes, straight at the scheme."""
    from tacit.attachments.handle import leave, open_channel
    from tacit.requests import Payload, Sum

    strategy = strategy_of("none", at)
    channel, found = open_channel(strategy, None, None), {}
    cases = {
        "integers": torch.arange(5000, dtype=torch.int32) * (rank + 1) - 7,
        "tiny": torch.full((1000,), 1e-42) * (rank + 1),
        "huge": torch.full((1000,), 1e38),
        "zero": torch.zeros(10),
        "infinite": torch.tensor([1.0, float("inf")]),
        "doubles": torch.full((10,), 0.1, dtype=torch.float64),
        "none": torch.zeros(0),
    }
    for name, x in cases.items():
        payload = Payload.dense(x)
        total = channel.answer(Sum(payload), 0)
        found[name] = total.value, total.reduced(payload).contribution()
    found["through"] = channel.scheme.link.through
    leave(channel)
    return found


def test_sums_of_any_numbers(ranks, shared):
    found = ranks.run(2, _sums, shared.at)
    assert all(torch.equal(found[0][name][0], found[1][name][0]) for name in found[0] if name != "through")
    values = {name: found[0][name][0] for name in found[0] if name != "through"}
    assert torch.equal(values["integers"], (torch.arange(5000) * 3 - 14).float())
    torch.testing.assert_close(values["tiny"], torch.full((1000,), 3e-42), rtol=1e-2, atol=0)
    torch.testing.assert_close(values["huge"], torch.full((1000,), 2e38))
    assert values["zero"].eq(0).all() and values["infinite"].isinf().tolist() == [False, True]
    assert values["doubles"].dtype == torch.float64 and values["none"].numel() == 0
    assert found[0]["through"] == 3  # the others took the process group
    shares = found[0]["tiny"][1] + found[1]["tiny"][1]
    assert torch.equal(shares, values["tiny"])  # nothing disappears in rounding


def _polls(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _train_through_a_death(rank, world, codec, at, process_id, how, steps=30):
    """The aggregator is killed or frozen in the middle of a sum, and comes back."""
    model, optimizer, handle = attached(codec, at)

    def strike():
        _polls(lambda: link_of(handle)._inside)
        os.kill(process_id, how)

    murderer = threading.Thread(target=strike)
    with handle:
        for step in range(steps):
            if rank == 0 and step == 5:
                murderer.start()
            train(model, optimizer, rank, range(step, step + 1))
            if rank == 0 and step == 15:
                murderer.join()
                if how == signal.SIGSTOP:
                    os.kill(process_id, signal.SIGCONT)
                _polls(lambda: link_of(handle)._there)
        link = link_of(handle)
        return flat(model), link.through, link.round_about, link.changes


def _train_undisturbed(rank, world, codec, steps=30):
    model, optimizer, handle = attached(codec, None)
    with handle:
        train(model, optimizer, rank, range(steps))
        return flat(model)


@pytest.mark.parametrize(("codec", "how"), [("thc", signal.SIGKILL), ("hush", signal.SIGSTOP)])
def test_an_aggregator_that_dies_or_hangs_costs_no_step_and_is_used_again(ranks, codec, how):
    with mortal() as aggregator:
        ranks.start(3, _train_through_a_death, codec, aggregator.at, aggregator.process.pid, how)
        if how == signal.SIGKILL:
            assert aggregator.process.wait(120) == -signal.SIGKILL
            aggregator.close()
            aggregator.start()
        found = ranks.results(3)
    expected = ranks.run(3, _train_undisturbed, codec)
    for (kind, value), other in zip(found, expected, strict=True):
        assert kind == "ok", value
        own, through, round_about, changes = value
        assert torch.equal(own, other)
        assert through > 5 * 5 and round_about > 0 and changes >= 2  # gone, and back


def _train_with_a_sum_that_some_have(rank, world, at, codec="thc", steps=10):
    """Rank 1 loses the aggregator just when the others have their sum: they stand in the next maximum, and wait for it."""
    from tacit.transports.aggregator_seat import GoneError

    model, optimizer, handle = attached(codec, at)
    link = link_of(handle)
    reduce = link._reduce

    def unlucky(ask):
        total = reduce(ask)
        if rank == 1 and link._number == 12:
            raise GoneError("the test says so")
        return total

    link._reduce = unlucky
    with handle:
        train(model, optimizer, rank, range(steps))
        return flat(model), link.changes


def test_who_has_the_newest_sum_hands_it_to_those_who_lack_it(ranks, shared):
    found = ranks.run(3, _train_with_a_sum_that_some_have, shared.at)
    expected = ranks.run(3, _train_undisturbed, "thc", 10)
    for (own, changes), other in zip(found, expected, strict=True):
        assert torch.equal(own, other) and changes >= 1


def _meet_inside_sums(rank, world, at):
    """Rank 0 is in a sum when the aggregator goes, rank 1 begins it after the meeting; each sum of four consecutive ones."""
    from tacit.attachments.handle import leave, open_channel

    handler, warnings = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("tacit").addHandler(handler)
    channel = open_channel(strategy_of("none", at), None, None)
    link, store = channel.scheme.link, torch.distributed.distributed_c10d._get_default_store()
    totals = []

    def add():
        totals.append(
            channel.scheme._add(channel.wire, torch.full((8,), rank + 1, dtype=torch.int32)).tolist()
        )

    for residue in range(aggregator_link._EVERY):
        while link._number % aggregator_link._EVERY != residue or not link._using:
            add()
            time.sleep(0.002)
        link._try_s = 0.05 if residue < 3 else 100.0  # the next attempt to return is soon
        if rank == 1:
            store.wait([f"inside/{residue}"])
            link._say_down("the test says so")
            _polls(lambda: not link._using)
        else:
            threading.Thread(
                target=lambda n=residue: (_polls(lambda: link._inside), store.set(f"inside/{n}", "1"))
            ).start()
        add()
    found = len(totals), all(total == [3] * 8 for total in totals), link.changes, link._try_s
    leave(channel)
    return found, warnings


def test_ranks_that_met_inside_and_outside_a_sum_agree_on_the_next_announcement(ranks, shared):
    (found, warnings), (same, _) = ranks.run(2, _meet_inside_sums, shared.at, timeout_s=30)
    assert found == same and found[1:3] == (True, 7)  # gone four times, back three times
    # no return has lasted a minute: the pause doubles beyond the 30 s of one that is only gone
    assert found[3] == 200.0
    assert [text.partition("is ")[2].split()[0].strip(";") for text in warnings] == [
        "gone",
        "back",
    ]  # once each


def test_where_no_aggregator_is_the_process_group_adds(ranks):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        at = f"127.0.0.1:{nobody.getsockname()[1]}"
        found = ranks.run(2, _train_all, ("thc",), at)
    expected = ranks.run(2, _train_all, ("thc",), None)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own["thc"][0], other["thc"][0]) and own["thc"][2] == 0


def _train_until_somebody_dies(rank, world, codec, at):
    model, optimizer, handle = attached(codec, at)
    try:
        for step in range(1000):
            if rank == 2 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, rank, range(step, step + 1))
    except tacit.TacitError as error:
        return str(error)
    finally:
        handle.close()


def test_a_rank_that_dies_is_named_by_the_others(ranks, shared):
    ranks.start(3, _train_until_somebody_dies, "thc", shared.at)
    found = ranks.results(3)
    assert found[2] == ("died", -signal.SIGKILL)
    for kind, said in found[:2]:
        assert kind == "ok" and "rank 2 went away; restart all ranks" in said, said


def _wait_for_the_late(rank, world, at):
    """Rank 1 comes when the others have complained of it."""
    import logging

    said = []

    class Ear(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    model, optimizer, handle = attached("thc", at, patience=0.3)
    logging.getLogger("tacit").addHandler(ear := Ear())
    store = torch.distributed.distributed_c10d._get_default_store()
    try:
        with handle:
            train(model, optimizer, rank, range(1))
            if rank == 1:
                link = link_of(handle)
                reduce = link._reduce

                def late(ask):
                    store.wait(["complained"])
                    return reduce(ask)

                link._reduce = late
            else:
                threading.Thread(target=lambda: (_polls(lambda: said), store.set("complained", "1"))).start()
            train(model, optimizer, rank, range(1, 2))
    finally:
        logging.getLogger("tacit").removeHandler(ear)
    return said


def test_a_late_rank_is_waited_for_and_named(ranks, shared):
    said = ranks.run(2, _wait_for_the_late, shared.at)
    assert len(said[0]) == 1 and "for a sum that lacks rank 1; still waiting" in said[0][0]
    assert said[1] == []


def _with_the_wrong_secret(rank, world, at):
    model, optimizer, handle = attached("thc", at, secret="wrong")
    try:
        with handle:
            train(model, optimizer, rank, range(1))
    except tacit.TacitError as error:
        return type(error).__name__, str(error)


def test_a_wrong_secret_is_an_error_at_once(ranks, shared):
    for kind, said in ranks.run(2, _with_the_wrong_secret, shared.at):
        assert kind == "ConfigError" and "secret" in said


def _with_one_wrong_secret(rank, world, at):
    began = time.monotonic()
    model, optimizer, handle = attached("thc", at, secret="wrong" if rank else SECRET)
    try:
        with handle:
            train(model, optimizer, rank, range(1))
    except ConfigError as error:
        return str(error), time.monotonic() - began


def test_a_wrong_secret_of_one_rank_is_an_error_of_all(ranks, shared):
    (other, waited_s), (own, _) = ranks.run(2, _with_one_wrong_secret, shared.at)
    assert "the secret is not one" in own and other == f"rank 1: {own}"
    assert waited_s < 60  # of the process group's time-out of 120


def _with_two_faults(rank, world, at, nowhere, late):
    model, optimizer, handle = attached("thc", at, secret="wrong" if rank else SECRET)
    link = link_of(handle)
    if rank == 0:
        link._control = ("127.0.0.1", nowhere)
    reduce = link._reduce

    def after_the_other(ask):
        _polls(lambda: rank != late or link._store.check(["failed"]))
        return reduce(ask)

    link._reduce = after_the_other
    try:
        with handle:
            train(model, optimizer, rank, range(1))
            return link.round_about > 0
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("late", [0, 1])
def test_of_two_faults_at_the_first_join_the_first_decides_for_all_ranks(ranks, shared, late):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        found = ranks.run(2, _with_two_faults, shared.at, nobody.getsockname()[1], late, timeout_s=40)
    if (
        late == 1
    ):  # the aggregator was gone, for rank 0, before rank 1 could find out that its secret is wrong
        assert found == [True, True]
    else:
        assert all("the secret is not one" in said for said in found), found


# ---- attempts to return, without ranks


def _bare_link():
    """As rank 0 has it while the aggregator is gone: only what an attempt needs, and no thread."""
    link = AggregatorLink.__new__(AggregatorLink)
    link._state, link._wire, link._closing = threading.Condition(), SimpleNamespace(rank=0), False
    link._control, link._secret = ("127.0.0.1", 1), SECRET
    link._using, link._ready, link._there, link._attempt = False, None, 0, 0
    link._try_s, link._next_try, link._warned = 0.5, 0.0, set()
    return link


def test_whatever_is_raised_by_a_knock_an_attempt_only_fails(monkeypatch, caplog):
    def knock(*_):
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(aggregator_link, "knock", knock)
    link = _bare_link()
    link._lead_attempt()
    assert link._try_s == 1.0 and "does not add for this run yet (too many values" in caplog.text


def test_rank_0_tries_again_after_the_store_did_not_answer(monkeypatch, caplog):
    class Store:
        def set(self, key, value):
            if key.startswith("tried/"):
                raise RuntimeError("the connection was reset")

    monkeypatch.setattr(aggregator_link, "knock", lambda *_: None)
    link = _bare_link()
    link._store, link._kinds, link._error = Store(), [], None
    link._lead_attempt()
    # or it would take them for places that are about to be used
    assert link._ready is None and not link._there
    assert "the store does not answer" in caplog.text and link._next_try > time.monotonic()
    link._next_try = 0.0
    link._lead_attempt()
    assert link._attempt == 2


def test_attempts_that_fail_do_not_shorten_the_pause_of_an_aggregator_that_comes_and_goes():
    link = _bare_link()
    pauses = []
    for link._try_s in (0.5, 20.0, 30.0, 240.0):
        link._fail_attempt("")
        pauses.append(link._try_s)
    assert pauses == [1.0, 30.0, 30.0, 240.0]


def test_who_did_not_send_is_named_and_no_mtu_is_blamed_for_it():
    job = SimpleNamespace(data_nbytes=1000, result_nbytes=2000)
    seat = Seat(None, SimpleNamespace(job=job, rank=0, missing_racks={}), 1500, [4, 5, 6])
    assert seat.lost_size({1: 1}).startswith(
        "rank 5 did not send within 2 s; if this repeats, that path may lose"
    )
    assert seat.lost_size({0: 1, 1: 1}).startswith("packets of ")


def _without_an_address(rank, world):
    for name in ("TACIT_AGGREGATOR", "TACIT_AGGREGATOR_SECRET"):
        os.environ.pop(name, None)
    try:
        tacit.attach(deep(), None, "thc / star")
    except ConfigError as error:
        return str(error)


def test_a_star_without_an_address_says_how_to_give_one(ranks):
    for said in ranks.run(2, _without_an_address):
        assert "write star(at='host:port'), or set TACIT_AGGREGATOR" in said


def test_its_text_form_parses_back_and_keeps_the_secret():
    for text in (
        "star",
        "star(at='10.0.0.1:4800')",
        "star(at='10.0.0.1:4800', patience=2.5, mtu=9000, slots=128)",
    ):
        strategy = Strategy.parse(f"thc / {text}")
        assert str(strategy).endswith(f"/ {text}") and Strategy.parse(str(strategy)) == strategy
    secret = Star(at="10.0.0.1", secret="hidden")
    assert "hidden" not in str(secret) + repr(secret)


def test_what_cannot_work_is_refused_in_one_sentence():
    with pytest.raises(PairingError, match="cannot be added in the network; write 'int8"):
        Strategy.parse("int8 / star")
    with pytest.raises(PairingError, match="at most 255 ranks, 64 each"):
        Strategy.parse("none / star").check(256)
    with pytest.raises(ConfigError, match="is no address"):
        Strategy.parse("none / star(at='here:there')")
    for option, text in (
        ("patience=0", "more than 0"),
        ("mtu=60", "in one piece"),
        ("slots=1", "2 to 16384"),
    ):
        with pytest.raises(ConfigError, match=text):
            Strategy.parse(f"none / star({option})")


# ---- a tree: two racks of two ranks, and one aggregator above them


def _in_a_rack(rank, world, codec, ports):
    os.environ |= {"TACIT_AGGREGATOR": f"127.0.0.1:{ports[rank // 2]}", "TACIT_AGGREGATOR_SECRET": SECRET}
    return (
        _trained(rank, world, f"every / {codec} / star")
        if ports[0]
        else _trained(rank, world, f"every / {codec} / sharded")
    )


def _trained(rank, world, text):
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = tacit.attach(model, optimizer, text, bucket="20kB")
    try:
        train(model, optimizer, rank, range(4))
    except ConfigError as error:
        return str(error)
    through = handle._attachment.channel.scheme.link.through if "star" in text else 0
    handle.close()
    return flat(model), through


def test_two_racks_and_an_aggregator_above_them_give_the_bits_of_sharded(ranks):
    above = Aggregator()
    racks = [Aggregator(above.port, rack) for rack in range(2)]
    try:
        for codec in ("thc", "hush"):
            expected = ranks.run(4, _in_a_rack, codec, [0, 0])
            found = ranks.run(4, _in_a_rack, codec, [rack.port for rack in racks])
            for (bits, _), (same, through) in zip(expected, found, strict=True):
                assert torch.equal(bits, same) and through > 0
    finally:
        for aggregator in (*racks, above):
            aggregator.close()


def test_racks_without_one_above_them_are_refused(ranks):
    racks = [Aggregator(), Aggregator()]
    try:
        said = ranks.run(4, _in_a_rack, "thc", [rack.port for rack in racks])
        assert all("adds for 2 of 4 ranks" in sentence and "--parent" in sentence for sentence in said)
    finally:
        for aggregator in racks:
            aggregator.close()
