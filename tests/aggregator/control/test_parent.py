"""Aggregators below an aggregator, as ranks meet them: real connections and packets, sums of all racks, and who is told what."""

import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from aggregator.members import HERE, SECRET, aggregator, some_terms, until
from aggregator.relay import Relay
from aggregator.trees import some_tree
from cli.test_aggregate import LONG, serving

from tacit.aggregator import LaneType, UserPlane
from tacit.aggregator.addresses import address_text
from tacit.aggregator.client.host_stack import Client, SumOutcome
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.diagnosis import diagnose
from tacit.aggregator.control.parent import Parent
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.spec import Address, Upstream
from tacit.cli import main
from tacit.errors import ConfigError, TacitError, TransportError

THC_TABLE = tuple(range(0, 32, 2))


@contextmanager
def racks(count: int, **options) -> Iterator[tuple[ControlServer, list[ControlServer]]]:
    """An aggregator and so many below it."""
    with ExitStack() as opened:
        top = opened.enter_context(aggregator(**options))
        below = [
            opened.enter_context(aggregator(parent=Parent(top.address, rack, count))) for rack in range(count)
        ]
        yield top, below


class Rank:
    def __init__(
        self, control: Address, terms: Terms, rank: int, secret: str = SECRET, timeout_s: float = 30
    ):
        self.client = Client(HERE)
        try:
            self.membership = Membership(control, secret, terms, rank, self.client.port, timeout_s=timeout_s)
        except BaseException:
            self.client.close()
            raise
        self.client.start(self.membership.job, rank, self.membership.plane)

    def close(self) -> None:
        self.membership.leave()
        self.client.close()


@contextmanager
def everybody(
    controls: Sequence[Address], terms: Sequence[Terms], secret: str = SECRET, timeout_s: float = 30
) -> Iterator[list[list[Rank]]]:
    """All ranks of all racks; they leave at the end, if they have not yet."""
    places = [(rack, rank) for rack, own in enumerate(terms) for rank in range(own.world)]
    with ThreadPoolExecutor(len(places)) as pool, ExitStack() as opened:
        joining: list[Future[Rank]] = [
            pool.submit(Rank, controls[rack], terms[rack], rank, secret, timeout_s) for rack, rank in places
        ]
        errors = [error for each in joining if (error := each.exception())]
        found: list[list[Rank]] = [[] for _ in terms]
        for (rack, _), each in zip(places, joining, strict=True):
            if not each.exception():
                found[rack].append(each.result())
                opened.callback(each.result().close)
        if errors:
            raise errors[0]
        yield found


def refused(
    error: type[TacitError], controls: Sequence[Address], terms: Sequence[Terms], timeout_s: float = 30
) -> str:
    """The one sentence in which ranks of all racks are told no."""
    with pytest.raises(error) as caught, everybody(controls, terms, timeout_s=timeout_s):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sum_exactly(ranks: list[Rank], numel: int, seed: int) -> None:
    """Every rank of every rack ends with the exact sum over all of them."""
    rng = np.random.default_rng(seed)
    job = ranks[0].membership.job
    if job.lanes.indexed:
        packed = rng.integers(0, 256, (len(ranks), numel // 2), np.uint8)
        indices = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(ranks), -1)
        data, exact = packed, np.array(job.table)[indices].sum(axis=0).astype(job.lanes.dtype)
    else:
        limit = np.iinfo(job.lanes.dtype).max // len(ranks)
        data = rng.integers(0, limit, (len(ranks), numel)).astype(job.lanes.dtype)
        exact = data.sum(axis=0).astype(job.lanes.dtype)

    def reduce(rank: int) -> bytes:
        out = np.zeros(numel * job.lanes.dtype.itemsize, np.uint8)
        assert (
            ranks[rank].client.reduce(data[rank].view(np.uint8), out, numel, patience_s=30) is SumOutcome.DONE
        )
        assert set(ranks[rank].client.counts.tolist()) == {len(ranks)} and not ranks[rank].client.saturated
        return out.tobytes()

    with ThreadPoolExecutor(len(ranks)) as pool:
        sums = list(pool.map(reduce, range(len(ranks))))
    assert all(own == exact.tobytes() for own in sums)


def completed(control: ControlServer) -> int:
    return control.status().counts["completed"]


# ---- sums ----


@pytest.mark.parametrize("worlds", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("lanes", [LaneType.I32, LaneType.TABLE_U8], ids=lambda lanes: lanes.name)
def test_ranks_of_all_racks_get_one_exact_sum(lanes: LaneType, worlds: tuple[int, ...]) -> None:
    table = THC_TABLE if lanes.indexed else (0,) * 16
    terms = [Terms("run", world, lanes, 40, 8, table) for world in worlds]
    with racks(2) as (top, below), everybody([rack.address for rack in below], terms) as found:
        ranks = [rank for own in found for rank in own]
        assert all(rank.membership.job_ranks == sum(worlds) for rank in ranks)
        for seed in range(3):
            sum_exactly(ranks, numel=1000, seed=seed)
        for control in (top, *below):
            assert completed(control) == 3 * 25
        assert [(job.world, job.relayed, job.lanes) for job in top.status().jobs] == [
            (2, True, lanes.above.name.lower())
        ]
        parents = [job.parent for rack in below for job in rack.status().jobs]
        assert parents == [address_text(top.address)] * 2


def test_three_levels_are_only_more_of_the_same() -> None:
    with (
        aggregator() as top,
        aggregator(parent=Parent(top.address, 0, 2)) as middle,
        aggregator(parent=Parent(middle.address, 0, 2)) as left,
        aggregator(parent=Parent(middle.address, 1, 2)) as right,
        aggregator(parent=Parent(top.address, 1, 2)) as other,
    ):
        terms = [some_terms(world=world) for world in (2, 1, 2)]
        with everybody([left.address, right.address, other.address], terms) as found:
            ranks = [rank for own in found for rank in own]
            assert {rank.membership.job_ranks for rank in ranks} == {5}
            sum_exactly(ranks, numel=1000, seed=1)


def test_two_jobs_go_up_side_by_side() -> None:
    with racks(2) as (top, below):
        controls = [rack.address for rack in below]
        with (
            everybody(controls, [some_terms("a", world=2)] * 2) as a,
            everybody(controls, [Terms("b", 1, LaneType.U16, 80, 8)] * 2) as b,
            ThreadPoolExecutor(2) as pool,
        ):
            jobs = [[rank for own in found for rank in own] for found in (a, b)]
            list(pool.map(sum_exactly, jobs, (2000, 2000), (1, 2)))
            assert len(top.status().jobs) == 2


def test_a_parent_with_fewer_slots_makes_windows_smaller_and_the_rest_is_free() -> None:
    with (
        racks(2, slots=8) as (top, below),
        everybody([rack.address for rack in below], [some_terms(world=1)] * 2) as found,
    ):
        assert top.status().share == 2
        for own, rack in zip(found, below, strict=True):
            assert len(own[0].membership.job.slots) == 2
            assert rack.status().free_slots == 30
        sum_exactly([own[0] for own in found], numel=500, seed=3)


@pytest.mark.slow
def test_real_processes_sum_across_racks() -> None:
    with ExitStack() as opened:
        top = opened.enter_context(serving(secret=LONG))
        above = ["--parent", address_text(top.address)]
        below = [opened.enter_context(serving(*above, "--rack", f"{n}/2", secret=LONG)) for n in range(2)]
        assert below[1].told["parent"] == f"{address_text(top.address)}, rack 1/2"
        terms = [Terms("run", world, LaneType.I32, 360, 64) for world in (2, 1)]
        with everybody([rack.address for rack in below], terms, LONG) as found:
            sum_exactly([rank for own in found for rank in own], numel=100_000, seed=4)
        for rack in below:
            code, error = rack.end(signal.SIGTERM)
            assert code == 0 and "jobs served: 1, chunks summed: 278, ranks lost: 0" in error
        code, error = top.end(signal.SIGTERM)
        assert code == 0 and "job 'run' runs: 2 racks" in error and "all ranks have left" in error


@pytest.mark.parametrize("lanes", [LaneType.I32, LaneType.TABLE_U8], ids=lambda lanes: lanes.name)
def test_sums_are_exact_where_both_levels_lose_repeat_and_reorder(lanes: LaneType) -> None:
    """Real sockets, without control; a lossy network between ranks and racks, and another between racks and parent."""
    losses = {"loss": 0.03, "repeats": 0.03, "reorders": 0.05}
    with ExitStack() as opened:
        parent = opened.enter_context(UserPlane(HERE, slots=32))
        racks = [opened.enter_context(UserPlane(HERE, slots=32)) for _ in range(2)]
        above = opened.enter_context(Relay(parent.address, 2, seed=9, **losses))
        top, jobs = some_tree(lanes, (2, 2), windows=(8, 8))
        top = replace(top, members=above.members)
        parent.add_job(top)
        ranks = []
        for number, (rack, job) in enumerate(zip(racks, jobs, strict=True)):
            relay = opened.enter_context(Relay(rack.address, 2, seed=number, **losses))
            upstream = Upstream(above.entrance(number), top, number)
            job = replace(job, members=relay.members, upstream=upstream)
            rack.add_job(job)
            for rank in range(2):
                client = opened.enter_context(Client(HERE))
                client.start(replace(job, upstream=None), rank, relay.entrance(rank))
                ranks.append(SimpleNamespace(client=client, membership=SimpleNamespace(job=job)))
        sum_exactly(ranks, numel=12_000, seed=6)
        for plane in (parent, *racks):
            assert plane.counts()["completed"] == 300 and not plane.counts()["abandoned"]
        assert above.dropped > 0 and all(rack.counts()["answered"] == 300 for rack in racks)


# ---- who is told what ----


def test_a_rack_that_does_not_come_is_named_to_the_ranks_of_the_others() -> None:
    with racks(3) as (top, below):
        told = refused(TransportError, [below[1].address], [some_terms(world=1)], timeout_s=2)
        assert "racks 0 and 2 of 3 have not joined job 'run' within" in told
        assert told.startswith(f"above, at {address_text(top.address)}: ")
        now = below[1].status()
        assert not now.jobs and now.free_slots == 32 and now.refused["parent"] == 1
        until(lambda: not top.status().jobs)
        assert top.status().refused["late"] == 1


def test_while_racks_are_awaited_status_says_so_on_both_levels() -> None:
    with racks(2) as (top, below), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Rank, below[0].address, some_terms(world=1), 0)
        until(lambda: top.status().jobs)
        assert diagnose(below[0].status())[0].sentence.startswith(
            f"job 'run' waits for the aggregator above, at {address_text(top.address)}, since"
        )
        assert diagnose(top.status())[0].sentence.startswith("job 'run' waits for rack 1 of 2 to join")
        ranks = [Rank(below[1].address, some_terms(world=1), 0), waiting.result()]
        for rank in ranks:
            rank.close()


def test_a_rank_that_dies_is_named_in_every_rack() -> None:
    with (
        racks(2) as (top, below),
        everybody([rack.address for rack in below], [some_terms(world=2)] * 2) as found,
    ):
        found[0][1].membership._client.hang_up()
        survivors = [found[0][0], *found[1]]
        until(lambda: not any(rank.membership.alive for rank in survivors))
        why = "rank 1 of job 'run' is lost: its connection closed without a message"
        assert found[0][0].membership.why == why and found[0][0].membership.lost == (1,)
        assert found[1][0].membership.why == f"rack 0 of job 'run' is lost: {why}"
        for control in (top, *below):
            until(lambda control=control: not control.status().jobs)
            assert control.plane.jobs() == [] and control.status().free_slots == 32


def test_a_parent_that_goes_ends_the_jobs_below_and_they_come_again_when_it_is_back() -> None:
    with ExitStack() as opened:
        top = aggregator()
        port = opened.enter_context(ExitStack())
        control = port.enter_context(top)
        below = [
            opened.enter_context(aggregator(parent=Parent(control.address, rack, 2))) for rack in range(2)
        ]
        controls, terms = [rack.address for rack in below], [some_terms(world=1)] * 2
        with everybody(controls, terms) as found:
            sum_exactly([own[0] for own in found], numel=100, seed=1)
            port.close()
            until(lambda: not any(own[0].membership.alive for own in found))
            assert found[0][0].membership.why == "the aggregator was stopped"
        assert ": no aggregator listens at" in refused(TransportError, controls, terms)
        opened.enter_context(aggregator(port=control.address[1]))
        with everybody(controls, terms) as found:
            sum_exactly([own[0] for own in found], numel=100, seed=2)


def test_an_aggregator_that_stops_tells_the_other_racks_why() -> None:
    with (
        racks(2) as (_, (own, other)),
        everybody([own.address, other.address], [some_terms(world=1)] * 2) as found,
    ):
        own.close()
        until(lambda: not found[1][0].membership.alive)
        assert found[1][0].membership.why == "rack 0 of job 'run' is lost: the aggregator was stopped"


def test_a_late_rack_is_named_and_status_points_up() -> None:
    with (
        racks(2) as (top, below),
        everybody([rack.address for rack in below], [some_terms(world=2)] * 2) as found,
    ):
        (first, second), others = found
        data, outs = np.ones(160, np.uint8), [np.zeros(160, np.uint8) for _ in range(4)]
        for rank, out in ((first, outs[0]), (second, outs[1])):
            assert rank.client.reduce(data, out, 40, patience_s=0.2) in (SumOutcome.STALLED, SumOutcome.DONE)
        assert first.membership.missing() == {} and first.membership.missing_racks == {1: 1}
        before = below[0].status()
        assert before.jobs[0].stats and before.jobs[0].stats.above == 1
        sentence = diagnose(below[0].status(), before)[0].sentence
        assert sentence.startswith(
            f"job 'run' waits for the aggregator above, at {address_text(top.address)}: 1 chunk"
        )
        threads = [
            threading.Thread(target=rank.client.reduce, args=(data, out, 40), kwargs={"patience_s": 30})
            for rank, out in zip(others, outs[2:], strict=True)
        ]
        threads += [
            threading.Thread(target=rank.client.resume, kwargs={"patience_s": 30}) for rank in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(out.tolist() == [4] * 160 for out in outs)


def test_a_rank_that_goes_while_racks_are_awaited_takes_its_rack_back() -> None:
    with racks(2) as (top, below), ThreadPoolExecutor(4) as pool:
        terms = some_terms(world=2)
        impatient = pool.submit(Rank, below[0].address, terms, 0, SECRET, 0.6)
        patient = pool.submit(Rank, below[0].address, terms, 1, SECRET, 0.6)
        assert isinstance(impatient.exception(), TacitError) and isinstance(patient.exception(), TacitError)
        until(lambda: not top.status().jobs and not below[0].status().jobs)
        with everybody([rack.address for rack in below], [terms] * 2) as found:
            sum_exactly([rank for own in found for rank in own], numel=100, seed=5)


def test_what_cannot_work_is_refused() -> None:
    with (
        racks(1) as (top, below),
        pytest.raises(ConfigError, match="quorum=1: this aggregator has another above"),
    ):
        Rank(below[0].address, some_terms(world=2, quorum=1), 0)
    with (
        aggregator(keys=["another secret altogether"]) as top,
        aggregator(parent=Parent(top.address, 0, 1)) as own,
        pytest.raises(ConfigError, match=r"above, at .*: the secret is not one"),
    ):
        Rank(own.address, some_terms(world=1), 0)
    loud = Terms("run", 2, LaneType.TABLE_U8, 40, 8, (100,) * 16)  # fits two ranks, and not four
    with racks(2) as (top, below):
        told = refused(ConfigError, [rack.address for rack in below], [loud] * 2)
        assert "table up to 100 from 4 ranks" in told
        until(lambda: not top.status().jobs)
    with pytest.raises(ConfigError, match="rack=2: 2 racks have the numbers 0 to 1"):
        Parent(HERE, 2, 2)
    with pytest.raises(ConfigError, match="racks=65"):
        Parent(HERE, 0, 65)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--parent", "10.0.0.1:4800"], "--parent and --rack go together"),
        (["--rack", "0/2"], "--parent and --rack go together"),
        (["--parent", "10.0.0.1:4800", "--rack", "2/2"], "rack=2: 2 racks have the numbers 0 to 1"),
        (["--parent", "10.0.0.1:4800", "--rack", "one"], "--rack one: a number from 0 on"),
        (["--parent", "::1", "--rack", "0/2"], "is no address"),
        (
            ["--plane", "kernel", "--interfaces", "lo", "--parent", "10.0.0.1", "--rack", "0/2"],
            "--plane user",
        ),
    ],
)
def test_bad_options_are_one_sentence(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["aggregate", "--listen", "127.0.0.1:0", *options]) != 0
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_an_aggregator_joins_from_the_address_of_its_plane() -> None:
    """Its packets leave from there, and the parent believes no other."""
    with (
        aggregator() as top,
        UserPlane(("127.0.0.7", 0), slots=32) as plane,
        ControlServer(plane, ("127.0.0.1", 0), [SECRET], parent=Parent(top.address, 0, 1)) as own,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine,
    ):
        mine.bind(HERE)
        with Membership(own.address, SECRET, some_terms(world=1), 0, mine.getsockname()[1]):
            assert top.status().jobs[0].members == (plane.address,)
