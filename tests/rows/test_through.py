"""Rows that go through an aggregator: the bits of training over the process group, through either plane, and when it dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aggregator.plane_kinds import kernel_plane_missing
from aggregator.relay import Relay
from rows.test_hot_training import Clicks, result, same, train
from schemes.aggregators import SECRET, Aggregator
from transports.test_row_link import udp_sockets

from tacit import rows
from tacit.aggregator.client.host_stack import Client
from tacit.aggregator.client.membership import Membership
from tacit.aggregator.client.row_stack import RowSocket
from tacit.errors import ConfigError, TransportError
from tacit.rows import Through
from tacit.transports import aggregator_link, row_link, row_seat
from tacit.transports.row_link import RowLink

STEPS = 6


def trained(
    rank: int,
    world: int,
    at: str | None,
    before_step: Any = None,
    *,
    hot: bool = False,
    servers: int = 0,
    **options: Any,
) -> Any:
    """All rows as bits, how exchanges were made, and the traffic. `world` is that of the ranks."""
    torch.manual_seed(7)
    tables = rows.shard(
        (model := Clicks()),
        optimizer=rows.RowAdagrad(lr=0.1),
        adding="exact",
        unbounded=["tag"],
        hot=rows.Hot(rows=20, every=2, at=at or "", secret=SECRET) if hot else None,
        through=Through(at, secret=SECRET, **options) if at else None,
        servers=servers,
    )
    for step in range(STEPS):
        if before_step:
            before_step(step, tables)
        train(model, tables, rank, world, range(step, step + 1), noise=0.3)
    found = result(tables)
    link = tables._owners.link
    ways = (link.through, link.round_about, link.changes) if link else None
    tables.close()
    return found, ways, tables.stats.as_dict()


@pytest.fixture(scope="module")
def expected(ranks: Any) -> Any:
    return ranks.run(4, trained, None)[0]


def test_rows_through_the_aggregator_train_the_bits_of_the_process_group(ranks: Any, expected: Any) -> None:
    aggregator = Aggregator()
    try:
        found = ranks.run(4, trained, aggregator.at)
    finally:
        aggregator.close()
    for weights, (through, round_about, changes), _ in found:
        assert same(weights, expected[0])
        assert through > 5 * STEPS and round_about == changes == 0
    for name in ("key_nbytes", "row_nbytes", "gradient_nbytes"):
        over_the_group = expected[2][name]
        assert over_the_group <= found[0][2][name] < 1.2 * over_the_group, name


@pytest.mark.parametrize("servers", [0, 2])
def test_a_path_that_loses_repeats_and_reorders_changes_no_bit_with_hot_rows_too(
    ranks: Any, expected: Any, servers: int
) -> None:
    aggregator = Aggregator()
    try:
        found = ranks.run(4 + servers, train_over_a_bad_path, aggregator.at, servers)
    finally:
        aggregator.close()
    for (weights, (through, round_about, _), stats), _, passed in found[:4]:
        assert same(weights, expected[0])
        assert through > 5 * STEPS and round_about == 0
        assert passed > 100 and stats["hot_rows"] == 20
    assert sum(dropped for _, dropped, _ in found) > 0


def train_over_a_bad_path(rank: int, world: int, at: str, servers: int) -> Any:
    os.environ["TACIT_AGGREGATOR_SECRET"] = SECRET
    relays: list[Relay] = []

    class Relayed(Membership):
        def __init__(self, control: Any, secret: Any, terms: Any, rank: int, own_port: int, **options: Any):
            relays.append(Relay(control, 1, seed=rank, loss=0.01, repeats=0.02, reorders=0.02).__enter__())
            super().__init__(control, secret, terms, rank, relays[-1].members[0][1], **options)
            self.plane = relays[-1].entrance(0)
            self.segment = False  # the relay passes packets on, not runs

    row_seat.Membership = Relayed  # type: ignore[misc, attr-defined]
    ranks = world - servers
    found = (
        rows.serve(servers) if rank >= ranks else trained(rank, ranks, at, hot=True, servers=servers, mtu=200)
    )
    return found, relays[0].dropped, relays[0].passed


def test_when_the_aggregator_dies_in_an_exchange_no_bit_changes(ranks: Any, expected: Any) -> None:
    aggregator = Aggregator()
    try:
        found = ranks.run(4, train_through_a_death, aggregator.at, aggregator.process.pid)
    finally:
        aggregator.close()
    for weights, (through, round_about, changes), _ in found:
        assert same(weights, expected[0])
        assert through > 0 < round_about and changes >= 1


def train_through_a_death(rank: int, world: int, at: str, process_id: int) -> Any:
    return trained(rank, world, at, strike_at(process_id) if rank == 0 else None)


def strike_at(process_id: int) -> Any:
    """What kills the aggregator while an exchange is on its way, two steps before the end."""

    def strike(link: Any) -> None:
        deadline = time.monotonic() + 60
        while not link._inside and time.monotonic() < deadline:
            time.sleep(0.0002)
        os.kill(process_id, signal.SIGKILL)

    def before_step(step: int, tables: rows.Tables) -> None:
        if step == STEPS - 2:
            threading.Thread(target=strike, args=(tables._owners.link,)).start()

    return before_step


class OfferedSeat:
    """A place in a job that nobody uses."""

    def __init__(self) -> None:
        self.membership, self.closed = SimpleNamespace(alive=True, why=""), 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def voter(monkeypatch: pytest.MonkeyPatch) -> RowLink:
    """Rank 0's link while the aggregator is gone, with a place in attempt 3 and no thread; `store.tries` are the attempts it leads."""
    link = object.__new__(RowLink)
    tries: list[str] = []
    store = SimpleNamespace(tries=tries, set=lambda key, _: tries.append(key))
    link._wire, link._store, link._meeting = SimpleNamespace(rank=0, world=2), store, None  # type: ignore[assignment]
    link._path = SimpleNamespace(control=("127.0.0.1", 1), secret="")  # type: ignore[assignment]
    link._state, link._ready, link._attempt = threading.Condition(), (3, OfferedSeat()), 3  # type: ignore[assignment]
    link._using = link._down = link._voting = link._closing = False
    link._seat, link._error, link._age, link._number, link._run = None, None, 2, 16, "run"
    link._next_try, link._try_s, link._tried, link._timeout_s = 0.0, 0.5, time.monotonic(), 1.0
    link._warned, link._why, link._since, link.changes = set(), "", 0.0, 0
    monkeypatch.setattr(row_link, "knock", lambda *_: None)
    monkeypatch.setattr(row_link, "take_row_seat", lambda *_, **__: OfferedSeat())
    return link


def test_no_attempt_is_led_while_a_vote_is_under_way(voter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, seat = voter._ready
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: voter._lead_attempt())
    voter._vote()
    assert voter._store.tries == [] and voter._seat is seat and not seat.closed
    assert (voter._age, voter._using, voter._ready, voter._voting) == (3, True, None, False)


def test_a_place_in_an_older_attempt_is_given_up_for_a_newer_one(
    voter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch joins attempt 4 while the others vote against 3; the next vote is about 4, with the place in 4."""
    votes: list[Any] = []

    def others(own: torch.Tensor, **_: Any) -> None:
        votes.append(own.tolist())
        if len(votes) == 1:
            voter._take_part(4)
            own[0] = 0

    _, old = voter._ready
    monkeypatch.setattr(dist, "all_reduce", others)
    voter._vote()
    number, new = voter._ready
    assert (number, old.closed, new.closed) == (4, 1, 0)
    voter._vote()
    assert votes == [[3, -3], [4, -4]] and voter._seat is new and voter._age == 4


def test_a_place_that_is_overwritten_is_closed(voter: Any) -> None:
    _, old = voter._ready
    assert voter._try_seat(4) == "" and old.closed == 1 and voter._ready[0] == 4


def test_a_reason_is_warned_of_again_after_the_aggregator_was_steady(
    voter: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, own, **_: out.copy_(own))
    voter._inside, voter._waiting, voter._finished, voter._why = False, None, 16, "it is silent"
    voter._store.set = lambda *_: None
    warned = []
    for steady_s in (0.0, 1.0, 100.0):
        voter._since = time.monotonic() - steady_s
        voter._meet()
        warned.append(sum(each.levelname == "WARNING" for each in caplog.records))
    assert warned == [1, 1, 2]


@pytest.mark.parametrize("dies", [False, True], ids=["whole", "dies"])
def test_row_servers_take_the_aggregator_too(ranks: Any, expected: Any, dies: bool) -> None:
    """Ranks tell them where it is; its secret they have in their environment."""
    aggregator = Aggregator()
    try:
        found = ranks.run(6, train_with_servers, aggregator.at, aggregator.process.pid if dies else 0)
    finally:
        aggregator.close()
    for (weights, (through, round_about, changes), stats), _ in found[:4]:
        assert same(weights, expected[0])
        assert stats["hot_rows"] == 20 and through > 10
        assert (round_about > 0, changes > 0) == (dies, dies)
    rows_and_sums, rows_alone = (
        [2] * 4,
        [1] * 2,
    )  # W + S sockets of rows, whoever sends to whom; sums have their own
    assert found[0][1] == rows_and_sums + rows_alone or dies
    for stats in found[4:]:
        assert stats["row_nbytes"] > 0 == stats["gradient_nbytes"]


def train_with_servers(rank: int, world: int, at: str, process_id: int) -> Any:
    """What `trained` has, and how many data sockets each member had open before the last step, as the kernel has them."""
    os.environ["TACIT_AGGREGATOR_SECRET"] = SECRET
    members, sockets = [0] * world, [0] * world
    dist.all_gather_object(members, os.getpid())
    before = [udp_sockets(each) for each in members]
    dist.barrier()
    if rank >= 4:
        return rows.serve(2).as_dict()
    strike = strike_at(process_id) if process_id else None

    def look(step: int, tables: rows.Tables) -> None:
        if strike:
            strike(step, tables)
        if step == STEPS - 1:
            sockets[:] = [udp_sockets(each) - old for each, old in zip(members, before, strict=True)]

    return trained(rank, 4, at, look if rank == 0 else None, hot=True, servers=2), sockets


@pytest.mark.parametrize(("member", "name"), [(3, "row server 1 (rank 3)"), (1, "rank 1")])
def test_who_dies_is_named_by_all_others(ranks: Any, member: int, name: str) -> None:
    aggregator = Aggregator()
    try:
        ranks.start(4, lose, member, aggregator.at)
        found = ranks.results(4)
    finally:
        aggregator.close()
    assert found[member] == ("died", -signal.SIGKILL)
    for kind, sentence in found[:member] + found[member + 1 :]:
        assert kind == "ok" and name in sentence and "went away; restart all ranks" in sentence, sentence


def lose(rank: int, world: int, member: int, at: str) -> str:
    """Rank 0 kills the member before the third step."""
    os.environ["TACIT_AGGREGATOR_SECRET"] = SECRET
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())

    def strike(step: int, tables: rows.Tables) -> None:
        if step == 2 and rank == 0:
            os.kill(pids[member], signal.SIGKILL)

    try:
        rows.serve(2) if rank >= 2 else trained(rank, 2, at, strike, servers=2)
    except TransportError as lost:
        return str(lost)
    return "nothing was missed"


@pytest.mark.parametrize("servers", [0, 2])
def test_the_kernel_plane_passes_the_same_bits_on(ranks: Any, expected: Any, servers: int) -> None:
    """With row servers it adds the sums of hot rows too."""
    if reason := kernel_plane_missing():
        pytest.skip(reason)
    from aggregator.kernel import Switch, controlled_plane

    with (
        Switch(4 + servers) as switch,
        controlled_plane(switch, SECRET, slots=256) as (plane, address, places),
    ):
        found = ranks.run(4 + servers, train_behind_a_switch, address, places, servers)
        counts = plane.counts()
    assert counts["forwarded"] > 4 * 5 * STEPS
    assert (counts["completed"] >= STEPS) == (servers > 0)
    for weights, (through, round_about, _), stats in found[:4]:
        assert same(weights, expected[0])
        assert through > 2 * STEPS and round_about == 0
        assert stats["hot_rows"] == (20 if servers else 0)


def train_behind_a_switch(rank: int, world: int, at: str, places: Any, servers: int) -> Any:
    """The process group is here, the way to the aggregator in the rank's namespace."""
    from aggregator.kernel import in_network

    path, host = places[rank]
    network = os.open(path, os.O_RDONLY)
    row_seat.RowSocket = lambda: in_network(network, lambda: RowSocket((host, 0)))  # type: ignore[misc, attr-defined]
    aggregator_link.Client = lambda: in_network(network, lambda: Client((host, 0)))  # type: ignore[misc, attr-defined]
    for seat in (row_seat, aggregator_link):
        seat.Membership = lambda *args, **options: in_network(  # type: ignore[attr-defined]
            network, lambda: Membership(*args, **options)
        )
    os.environ["TACIT_AGGREGATOR_SECRET"] = SECRET
    ranks = world - servers
    if rank >= ranks:
        return rows.serve(servers).as_dict()
    return trained(rank, ranks, at, hot=servers > 0, servers=servers)


def test_what_cannot_be_is_one_sentence() -> None:
    model = torch.nn.Embedding(4, 2)
    for options, sentence in (
        ({"at": 7}, "texts, host:port"),
        ({"at": "nowhere"}, None),
        ({"at": "10.0.0.1:port"}, "is no address"),
        ({"mtu": 60}, r"Through\(mtu=60\)"),
        ({"window_nbytes": 100}, r"Through\(window_nbytes=100\)"),
    ):
        if sentence:
            with pytest.raises(ConfigError, match=sentence):
                Through(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not say where the aggregator is"):
        rows.shard(torch.nn.Sequential(model), optimizer=rows.SGD(lr=0.1), through=Through())
    assert "secret" not in repr(Through("10.0.0.1:4800", secret="hidden"))
