"""Ranks behind a network that loses, repeats and reorders get exact sums, each number once."""

from random import Random

import pytest
from aggregator.clients import INTEGERS, Client, Network, Switchboard, exact_sums, some_job, some_payloads
from aggregator.plane_kinds import NATIVE, SpecPlane

from tacit.aggregator.wire import LaneType

FASTEST = list(NATIVE.values())[-1]


def run(plane, job, chunks, *, seed=0, loss=0.0, repeats=0.0, reorders=True, first_chunk=0):
    """Sums by rank, the exact ones, and how often all resent."""
    plane.add_job(job)
    payloads = some_payloads(job, chunks, seed)
    clients = [Client(job, rank, own, first_chunk) for rank, own in enumerate(payloads)]
    rounds = Switchboard(plane, clients, Network(Random(seed), loss, repeats, reorders)).run()
    assert {count for client in clients for count in client.counts} == {job.world}
    return [client.sums() for client in clients], exact_sums(job, payloads), rounds


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("lanes", INTEGERS, ids=lambda lanes: lanes.name)
def test_sums_are_exact(lanes, world, loss):
    job = some_job(world=world, lanes=lanes, elements=136, slots=8)
    plane = FASTEST(16)
    sums, exact, rounds = run(plane, job, 20, seed=world, loss=loss, repeats=loss)
    assert all(own == exact for own in sums)
    assert rounds == 0 or loss > 0
    counts = plane.counted()
    assert counts["wrote"] == counts["completed"] == 20 and counts["added"] == 20 * (world - 1)
    assert not counts["abandoned"] and not counts["saturated"]


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_delays_without_limit_and_sends_much_twice_changes_nothing(seed):
    plane = FASTEST(16)
    sums, exact, _ = run(plane, some_job(world=3, slots=2), 40, seed=seed, loss=0.1, repeats=0.9)
    assert all(own == exact for own in sums)
    assert plane.counted()["stale"] > 0  # copies that came two phases late, and were told from new ones


def test_versions_and_chunks_wrap():
    job = some_job(world=3, lanes=LaneType.TABLE_U8, slots=4)
    sums, exact, _ = run(FASTEST(16), job, 40, loss=0.05, first_chunk=2**32 - 17)
    assert all(own == exact for own in sums)


def test_full_packets_of_every_mtu_are_summed():
    for lanes in INTEGERS:
        for mtu in (1500, 3500, 9000):
            job = some_job(world=4, lanes=lanes, elements=lanes.elements(mtu), slots=2)
            sums, exact, _ = run(FASTEST(16), job, 3, loss=0.05)
            assert all(own == exact for own in sums)


def test_the_specification_itself_is_exact():
    for lanes in INTEGERS:
        sums, exact, _ = run(SpecPlane(16), some_job(world=4, lanes=lanes), 12, loss=0.2, repeats=0.2)
        assert all(own == exact for own in sums)


def test_two_jobs_share_a_plane_and_neither_slows_the_other_out_of_its_slots():
    jobs = [some_job(1, 3, LaneType.TABLE_U8, 40, 0, 8), some_job(2, 4, LaneType.I32, 24, 8, 4)]
    plane = FASTEST(16)
    payloads = [some_payloads(job, 24, seed=job.id) for job in jobs]
    for job in jobs:
        plane.add_job(job)
    clients = [
        Client(job, rank, own[rank])
        for job, own in zip(jobs, payloads, strict=True)
        for rank in range(job.world)
    ]
    Switchboard(plane, clients, Network(Random(4), loss=0.05, repeats=0.05)).run()
    for client in clients:
        assert client.sums() == exact_sums(client.job, payloads[client.job.id - 1])


def test_a_plane_that_forgets_everything_in_mid_round_costs_only_resends():
    """A restarted aggregator that knows the job again: what was unfinished is summed anew. (Finished chunks whose result
    reached some ranks only are for control and clients to resume.)"""
    job = some_job(world=3, slots=4)
    payloads = some_payloads(job, 4, seed=2)
    clients = [Client(job, rank, own) for rank, own in enumerate(payloads)]
    before, plane = FASTEST(16), FASTEST(16)
    before.add_job(job), plane.add_job(job)
    for client in clients[:2]:
        for packet in client.start():
            assert before.receive(packet, client.address) == []
    Switchboard(plane, clients, Network(Random(0))).run()
    assert all(client.sums() == exact_sums(job, payloads) for client in clients)
