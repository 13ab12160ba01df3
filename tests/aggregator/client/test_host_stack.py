"""The C++ client against the user-space plane, over real sockets: exact sums, whatever the network or the others do."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from aggregator.clients import INTEGERS, some_job, values
from aggregator.relay import HERE, Relay

from tacit.aggregator import LaneType, PlaneJob, UserPlane
from tacit.aggregator.client.host_stack import Client, SumOutcome
from tacit.errors import ConfigError

LONG_S = 60.0  # of patience, where none should be needed


class Team:
    """The clients of one job; vectors are summed in a thread a rank."""

    def __init__(self, job: PlaneJob, clients: list[Client]) -> None:
        self.job, self.clients = job, clients
        self.sums: list[np.ndarray] = []

    def vectors(self, numel: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
        """Packed bytes by rank, and the lanes that their sum must have."""
        rng, lanes = np.random.default_rng(seed), self.job.lanes
        if lanes.indexed:
            data = [rng.integers(0, 256, -(-numel // 2), np.uint8) for _ in self.clients]
        else:
            limits = np.iinfo(lanes.dtype)
            low, high = -(-limits.min // self.job.world), limits.max // self.job.world
            data = [
                rng.integers(low, high, numel, lanes.dtype, endpoint=True).view(np.uint8)
                for _ in self.clients
            ]
        exact = sum(values(self.job, own.tobytes())[:numel] for own in data)
        return data, np.asarray(exact).astype(lanes.dtype)

    def room(self, numel: int) -> np.ndarray:
        return np.full(self.job.lanes.result_nbytes(8) * numel // 8, 0xEE, np.uint8)

    def reduce(self, numel: int, seed: int = 0, ranks: range | None = None, **options: float) -> np.ndarray:
        """Every rank gets the exact sum, which is returned."""
        data, exact = self.vectors(numel, seed)
        self.sums = [self.room(numel) for _ in self.clients]
        ended: dict[int, SumOutcome] = {}

        def work(rank: int) -> None:
            settings = {"patience_s": LONG_S, **options}
            ended[rank] = self.clients[rank].reduce(data[rank], self.sums[rank], numel, **settings)

        chosen = ranks if ranks is not None else range(len(self.clients))
        with running([lambda rank=rank: work(rank) for rank in chosen]):
            pass
        assert ended == dict.fromkeys(chosen, SumOutcome.DONE)
        if len(chosen) == self.job.world:
            for own in self.sums:
                assert np.array_equal(own.view(self.job.lanes.dtype), exact)
        return exact


@contextmanager
def running(bodies: list[Callable[[], None]]) -> Iterator[list[threading.Thread]]:
    """Threads that have ended when the block has."""
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(2 * LONG_S)
        assert not thread.is_alive()


@contextmanager
def team(
    job: PlaneJob, *, start: int = 0, admit: bool = True, segment: bool = True, **network: float
) -> Iterator[tuple[Team, UserPlane, Relay]]:
    """Clients, a plane that knows them, and the network between them."""
    with ExitStack() as stack:
        plane = stack.enter_context(UserPlane(HERE, slots=job.slots.stop))
        relay = stack.enter_context(Relay(plane.address, job.world, **network))
        job = replace(job, members=relay.members)
        if admit:
            plane.add_job(job)
        clients = [stack.enter_context(Client(HERE)) for _ in job.members]
        for rank, client in enumerate(clients):
            client.start(job, rank, relay.entrance(rank), start, segment=segment)
        yield Team(job, clients), plane, relay


@contextmanager
def team_without_network(job: PlaneJob, segment: bool = True) -> Iterator[tuple[Team, UserPlane]]:
    with ExitStack() as stack:
        plane = stack.enter_context(UserPlane(HERE, slots=job.slots.stop))
        clients = [stack.enter_context(Client(HERE)) for _ in job.members]
        job = replace(job, members=tuple(("127.0.0.1", client.port) for client in clients))
        plane.add_job(job)
        for rank, client in enumerate(clients):
            client.start(job, rank, plane.address, segment=segment)
        yield Team(job, clients), plane


def becomes(read: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not read():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("lanes", INTEGERS, ids=lambda lanes: lanes.name)
def test_sums_are_exact(lanes, world):
    job = some_job(world=world, lanes=lanes, elements=lanes.elements(1500), slots=16)
    with team_without_network(job) as (ranks, plane):
        for numel in (0, 1, 7, job.elements, 50 * job.elements, 40 * job.elements + 3):
            ranks.reduce(numel, seed=numel)
        counts = plane.counts()
        assert counts["completed"] == counts["wrote"] == 1 + 1 + 1 + 50 + 41 and not counts["abandoned"]
        assert ranks.clients[0].stats.chunks == counts["completed"]
        assert ranks.clients[0].count == world and not ranks.clients[0].saturated


@pytest.mark.parametrize("segment", [True, False], ids=["cut by the kernel", "packet by packet"])
def test_packets_of_every_mtu_are_summed_however_they_are_sent(segment):
    for mtu in (1500, 3500, 9000):
        job = some_job(world=2, lanes=LaneType.I32, elements=LaneType.I32.elements(mtu), slots=32)
        with team_without_network(job, segment=segment) as (ranks, plane):
            ranks.reduce(100 * job.elements + 5)
            assert plane.counts()["truncated"] == plane.counts()["oversized"] == 0


def test_a_plane_that_does_not_take_runs_gets_packets_one_by_one():
    job = some_job(world=2, elements=128, slots=32)
    with team(job, whole=True, segment=False) as (ranks, _, relay):
        ranks.reduce(500 * job.elements)
        assert relay.runs == 0
    with team(job, whole=True, segment=True) as (ranks, _, relay):
        ranks.reduce(50 * job.elements)  # slow, since only copies pass, and still exact
        assert relay.runs > 0


@pytest.mark.parametrize("loss", [0.001, 0.01, 0.05])
@pytest.mark.parametrize("lanes", [LaneType.TABLE_U8, LaneType.I32], ids=lambda lanes: lanes.name)
def test_sums_are_exact_under_loss_repetition_and_reordering(lanes, loss):
    job = some_job(world=3, lanes=lanes, elements=128, slots=32)
    with team(job, loss=loss, repeats=loss, reorders=loss, seed=3) as (ranks, plane, relay):
        for seed in range(3):
            ranks.reduce(300 * job.elements + seed, seed)
        counts = plane.counts()
        assert counts["completed"] == counts["wrote"] == 300 + 301 + 301
        assert counts["added"] == 2 * counts["wrote"] and not counts["abandoned"]
        assert relay.dropped > 0
        stats = [client.stats for client in ranks.clients]
        assert sum(each.repaired + each.timeouts for each in stats) > 0


def test_losses_are_repaired_before_any_time_out_where_later_results_show_them():
    job = some_job(world=2, elements=128, slots=32)
    with team(job, loss=0.02, seed=5) as (ranks, _, relay):
        ranks.reduce(2000 * job.elements)
        assert relay.dropped > 80 and sum(client.stats.repaired for client in ranks.clients) > 40


def present(job: PlaneJob, sums: np.ndarray) -> np.ndarray:
    """Whose numbers are in each lane: rank r sends 2^r everywhere."""
    return sums.view(np.float32).astype(np.int64)[:, None] >> np.arange(job.world) & 1


def reduce_powers(ranks: Team, numel: int, late: dict[int, float] | None = None) -> list[np.ndarray]:
    """The sums of all ranks, of which some begin so many seconds later."""
    sums = [ranks.room(numel) for _ in ranks.clients]

    def work(rank: int) -> None:
        time.sleep((late or {}).get(rank, 0.0))
        data = np.full(numel, 2.0**rank, np.float32).view(np.uint8)
        assert ranks.clients[rank].reduce(data, sums[rank], numel, patience_s=LONG_S) is SumOutcome.DONE

    with running([lambda rank=rank: work(rank) for rank in range(ranks.job.world)]):
        pass
    return sums


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_ranks_of_a_lossy_job_get_the_same_sums_whatever_is_lost(loss):
    job = some_job(world=4, lanes=LaneType.F32, elements=40, slots=256, deadline_ms=10_000)
    with team(job, loss=loss, repeats=loss, reorders=loss / 2, seed=7) as (ranks, plane, relay):
        for numel in (700 * job.elements, 3, 30 * job.elements + 5):
            sums = reduce_powers(ranks, numel)
            assert all(np.array_equal(own, sums[0]) for own in sums)
            there = present(job, sums[0])
            assert there.sum(1).min() >= 2  # half of them
            if numel > 20_000:
                assert there.mean() >= 1 - 2 * loss
                assert there.all() == (loss == 0)
        counts = plane.counts()
        assert counts["completed"] == 732 and not counts["stale"] and not counts["abandoned"]
        assert (counts["partial"] > 0) == (relay.dropped > 0) == (loss > 0)


def test_a_late_rank_of_a_lossy_job_is_not_waited_for_and_gets_what_it_missed():
    job = some_job(world=3, lanes=LaneType.F32, elements=40, slots=256, deadline_ms=20)
    with team_without_network(job) as (ranks, plane):
        reduce_powers(ranks, 100 * job.elements)
        sums = [reduce_powers(ranks, 60 * job.elements, late={2: 0.4}) for _ in range(2)]
        for own in sums:
            assert np.array_equal(own[0], own[1]) and np.array_equal(own[0], own[2])
            assert not present(job, own[0])[:, 2].any()
        stats = plane.stats(job.id)
        assert [rank.left_out for rank in stats.ranks][2] >= 120 and not stats.counts["stale"]
        assert ranks.clients[2].ahead == 0


def test_a_rank_of_a_lossy_job_knows_how_far_the_others_are():
    job = some_job(world=3, lanes=LaneType.F32, elements=40, slots=256, deadline_ms=20)
    numel = 50 * job.elements
    with team_without_network(job) as (ranks, _):
        data, outs = np.ones(numel, np.float32).view(np.uint8), [ranks.room(numel) for _ in range(3)]

        def reduce(rank: int) -> None:
            ranks.clients[rank].reduce(data, outs[rank], numel, patience_s=LONG_S)

        for _ in range(2):
            with running([lambda: reduce(0), lambda: reduce(1)]):
                pass
        assert ranks.clients[2].ahead == 100
        reduce(2)
        assert (outs[2].view(np.float32) == 2).all() and ranks.clients[2].ahead == 50


def test_versions_and_chunk_numbers_wrap():
    job = some_job(world=3, lanes=LaneType.TABLE_U16, elements=40, slots=4)
    with team(job, start=2**32 - 17, loss=0.02, seed=1) as (ranks, _, _):
        for seed in range(3):
            ranks.reduce(13 * job.elements - 1, seed)
        assert [client.next_chunk for client in ranks.clients] == [3 * 13 - 17] * 3


def test_limits_of_lanes_are_reported():
    with team_without_network(some_job(world=2, elements=40)) as (ranks, _):
        full, sums = np.full(100, 200, np.uint8), [ranks.room(100) for _ in range(2)]

        def work(rank: int) -> None:
            assert ranks.clients[rank].reduce(full, sums[rank], 100, patience_s=LONG_S) is SumOutcome.DONE

        with running([lambda rank=rank: work(rank) for rank in range(2)]):
            pass
        assert ranks.clients[1].saturated and (sums[1] == 255).all()


def test_a_late_rank_costs_its_peers_few_packets_and_hides_no_loss():
    job = some_job(world=2, elements=128, slots=64)
    with team(job, loss=0.05, seed=2) as (ranks, plane, _):
        numel = 64 * job.elements
        data, exact = ranks.vectors(numel)
        early, late = ranks.clients
        sums = [ranks.room(numel), ranks.room(numel)]
        with running([lambda: early.reduce(data[0], sums[0], numel, patience_s=LONG_S)]):
            becomes(lambda: plane.counts()["echoed"] >= 4)
            assert plane.counts()["completed"] == 0
            assert late.reduce(data[1], sums[1], numel, patience_s=LONG_S) is SumOutcome.DONE
        assert all(np.array_equal(own, exact) for own in sums)
        assert early.stats.timeouts <= 8 * early.stats.probes + 64


def test_a_missing_rank_is_told_from_a_missing_plane():
    job = some_job(world=2, elements=40, slots=4)
    with team(job) as (ranks, _, relay):
        numel = 10 * job.elements
        data, exact = ranks.vectors(numel)
        early, late = ranks.clients
        sums = [ranks.room(numel), ranks.room(numel)]
        assert early.reduce(data[0], sums[0], numel, patience_s=0.3) is SumOutcome.STALLED
        assert early.stats.echoes > 0
        relay.cut.set()
        assert early.resume(patience_s=0.3) is SumOutcome.SILENT
        relay.cut.clear()
        with running([lambda: late.reduce(data[1], sums[1], numel, patience_s=LONG_S)]):
            assert early.resume(patience_s=LONG_S) is SumOutcome.DONE
        assert all(np.array_equal(own, exact) for own in sums)


def test_a_plane_that_does_not_know_the_job_says_so_at_once_and_may_learn_it():
    job = some_job(world=1, elements=40, slots=4)
    with team(job, admit=False) as (ranks, plane, _):
        data, exact = ranks.vectors(100)
        total = ranks.room(100)
        assert ranks.clients[0].reduce(data[0], total, 100, patience_s=LONG_S) is SumOutcome.UNKNOWN
        plane.add_job(ranks.job)
        # earlier packets' answers come first
        again = (ranks.clients[0].resume(patience_s=LONG_S) for _ in range(50))
        assert next(outcome for outcome in again if outcome is not SumOutcome.UNKNOWN) is SumOutcome.DONE
        assert np.array_equal(total, exact)


def test_a_dead_port_is_silence():
    with Client(HERE) as client, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(HERE)
        plane = nobody.getsockname()
        nobody.close()
        client.start(some_job(world=1, elements=40), 0, plane)
        data, total = np.zeros(40, np.uint8), np.zeros(40, np.uint8)
        assert client.reduce(data, total, 40, patience_s=0.1) is SumOutcome.SILENT
        assert client.stats.refused > 0


def test_a_quorum_is_summed_up_without_the_missing_rank_and_counted():
    job = some_job(world=3, lanes=LaneType.I32, elements=40, slots=4, quorum=2)
    with team(job, loss=0.02, seed=4) as (ranks, plane, _):
        ranks.reduce(20 * job.elements)
        data, _ = ranks.vectors(12 * job.elements, seed=1)
        ranks.reduce(12 * job.elements, seed=1, ranks=range(2), settle_s=0.05)
        exact = sum(values(job, own.tobytes()) for own in data[:2]).astype(np.int32)
        for client, own in zip(ranks.clients[:2], ranks.sums[:2], strict=True):
            assert np.array_equal(own.view(np.int32), exact)
            assert client.count == 2 and client.counts.tolist() == [2] * 12
        assert plane.counts()["settled"] == 12
        # Who comes later gets the same sum as long as its cells hold it, and is told when they do not.
        late = ranks.clients[2]
        assert (
            late.reduce(data[2], ranks.room(12 * job.elements), 12 * job.elements, patience_s=LONG_S)
            is SumOutcome.BEHIND
        )


def test_ranks_that_give_a_vector_up_go_on_with_the_next():
    job = some_job(world=2, elements=40, slots=4)
    with team(job) as (ranks, plane, relay):
        data, _ = ranks.vectors(400)
        assert ranks.clients[0].reduce(data[0], ranks.room(400), 400, patience_s=0.1) is SumOutcome.STALLED
        ranks.clients[0].abandon()
        ranks.clients[1].start(ranks.job, 1, relay.entrance(1), ranks.clients[0].next_chunk)
        ranks.reduce(800, seed=1)
        assert plane.counts()["abandoned"] == 4


def test_ctrl_c_ends_the_wait():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plane, Client(HERE) as client:
        plane.bind(HERE)
        plane.settimeout(LONG_S)
        client.start(some_job(world=1, elements=40), 0, plane.getsockname())

        def interrupt() -> None:
            plane.recv(65536)  # the vector is on its way, so the main thread waits
            os.kill(os.getpid(), signal.SIGINT)

        with running([interrupt]), pytest.raises(KeyboardInterrupt):
            client.reduce(np.zeros(40, np.uint8), np.zeros(40, np.uint8), 40, patience_s=LONG_S)


def test_mistakes_are_named_in_one_sentence():
    job = some_job(world=2, lanes=LaneType.TABLE_U8, elements=40)
    small, large = np.zeros(20, np.uint8), np.zeros(40, np.uint8)
    with Client(HERE) as client:
        with pytest.raises(ConfigError, match="start\\(\\) comes before a vector"):
            client.reduce(small, large, 40, patience_s=1)
        with pytest.raises(ConfigError, match="rank=2: the job has ranks 0 to 1"):
            client.start(job, 2, HERE)
        with pytest.raises(ConfigError, match="host 'localhost': four numbers"):
            client.start(job, 0, ("localhost", 1))
        with pytest.raises(ConfigError, match="cannot be bound to"):
            Client(("127.0.0.1", client.port))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
            nobody.bind(HERE)
            client.start(job, 0, nobody.getsockname())
            with pytest.raises(ConfigError, match="40 bytes of data: 40 elements have 20"):
                client.reduce(large, large, 40, patience_s=1)
            with pytest.raises(ConfigError, match="20 bytes for the sum: 40 elements have 40"):
                client.reduce(small, small, 40, patience_s=1)
            assert client.reduce(small, large, 40, patience_s=0.05) is SumOutcome.SILENT
            with pytest.raises(ConfigError, match="on its way already"):
                client.reduce(small, large, 40, patience_s=1)
        client.close()
        client.close()
        with pytest.raises(ConfigError, match="no vector on its way"):
            client.resume(patience_s=1)
