"""Lanes of hot rows through an aggregator: the bits of cold rows, over a bad path, through either plane, and when it dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from aggregator.plane_kinds import kernel_plane_missing
from aggregator.relay import Relay
from rows.test_hot_training import OPTIMIZERS, made, result, same, train
from schemes.aggregators import SECRET, Aggregator

from tacit import rows
from tacit.aggregator.client.host_stack import Client
from tacit.aggregator.client.membership import Membership
from tacit.errors import TransportError
from tacit.transports import aggregator_link

STEPS, NOISE = 8, 0.3
NAME = "row_adagrad"


def hot_at(at: str | None, **options: Any) -> rows.Hot | None:
    return rows.Hot(rows=10_000, every=2, at=at, secret=SECRET, **options) if at else None


def trained(
    rank: int, world: int, at: str | None, steps: int = STEPS, before_step: Any = None, **options: Any
) -> Any:
    """All rows as bits, and what of the sums took the aggregator."""
    model, tables = made(OPTIMIZERS[NAME], hot_at(at, **options))
    for step in range(steps):
        if before_step:
            before_step(step, tables)
        train(model, tables, rank, world, range(step, step + 1), noise=NOISE)
    found = result(tables)
    link = tables._hot._link if tables._hot else None
    counts = (link.through, link.round_about, link.changes) if link else (0, 0, 0)
    tables.close()
    return found, counts, tables.stats.as_dict()


def cold(rank: int, world: int, steps: int = STEPS) -> Any:
    return trained(rank, world, None, steps)[0]


@pytest.fixture(scope="module")
def expected(ranks: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = ranks.run(2, cold)[0]
    return found


def test_a_path_that_loses_repeats_and_reorders_changes_no_bit(ranks: Any, expected: Any) -> None:
    aggregator = Aggregator()
    try:
        found = ranks.run(2, train_over_a_bad_path, aggregator.at)
    finally:
        aggregator.close()
    for (weights, (through, _, _), stats), _, passed in found:
        assert same(weights, expected)
        assert through > 2 * 5
        assert stats["lane_nbytes"] > stats["touch_nbytes"] > 0 and stats["hot_rows"] > 100
        assert passed > 200
    assert sum(dropped for _, dropped, _ in found) > 0


def train_over_a_bad_path(rank: int, world: int, at: str) -> Any:
    relays: list[Relay] = []

    class Relayed(Membership):
        def __init__(self, control: Any, secret: Any, terms: Any, rank: int, own_port: int, **options: Any):
            relays.append(Relay(control, 1, seed=rank, loss=0.01, repeats=0.02, reorders=0.02).__enter__())
            super().__init__(control, secret, terms, rank, relays[-1].members[0][1], **options)
            self.plane = relays[-1].entrance(0)

    aggregator_link.Membership = Relayed  # type: ignore[misc, attr-defined]
    found = trained(rank, world, at, mtu=100)  # 8 lanes a packet
    return found, relays[0].dropped, relays[0].passed


def test_when_the_aggregator_dies_in_a_sum_the_process_group_adds_the_same_bits(
    ranks: Any, expected: Any
) -> None:
    aggregator = Aggregator()
    try:
        found = ranks.run(2, train_through_a_death, aggregator.at, aggregator.process.pid)
    finally:
        aggregator.close()
    for weights, (through, round_about, changes), _ in found:
        assert same(weights, expected)
        assert through > 0 < round_about and changes >= 1


def train_through_a_death(rank: int, world: int, at: str, process_id: int) -> Any:
    def strike(link: Any) -> None:
        deadline = time.monotonic() + 60
        while not link._inside and time.monotonic() < deadline:
            time.sleep(0.0005)
        os.kill(process_id, signal.SIGKILL)

    def before_step(step: int, tables: rows.Tables) -> None:
        if rank == 0 and step == STEPS - 3:
            threading.Thread(target=strike, args=(tables._hot._link,)).start()  # type: ignore[union-attr]

    return trained(rank, world, at, before_step=before_step)


def test_a_rank_that_dies_is_named_by_those_who_wait_for_its_lanes(ranks: Any) -> None:
    aggregator = Aggregator()
    try:
        ranks.start(3, lose_rank_one, aggregator.at)
        found = [ranks.result(rank) for rank in range(3)]
    finally:
        ranks.close()
        aggregator.close()
    assert found[1] == ("died", 3)
    for kind, sentence in (found[0], found[2]):
        assert kind == "ok", sentence
        assert (
            "rank 1 went away; restart all ranks from the last checkpoint" in sentence
            and "\n" not in sentence
        )


def lose_rank_one(rank: int, world: int, at: str) -> str:
    model, tables = made(OPTIMIZERS[NAME], hot_at(at))
    train(model, tables, rank, world, range(4))
    if rank == 1:
        assert tables._hot is not None
        tables._hot._add = lambda own: os._exit(3)  # type: ignore[method-assign]
    with pytest.raises(TransportError) as lost:
        train(model, tables, rank, world, range(4, 6))
    return str(lost.value)


def test_the_kernel_plane_adds_the_same_bits(ranks: Any, expected: Any) -> None:
    if reason := kernel_plane_missing():
        pytest.skip(reason)
    from aggregator.kernel import Switch, controlled_plane

    with Switch(2) as switch, controlled_plane(switch, SECRET, slots=256) as (plane, address, places):
        found = ranks.run(2, train_behind_a_switch, address, places)
        assert plane.counts()["completed"] > 10
    for weights, (through, _, _), _ in found:
        assert same(weights, expected)
        assert through > 2 * 5


def train_behind_a_switch(rank: int, world: int, at: str, places: Any) -> Any:
    """The process group is here, the way to the aggregator in the rank's namespace."""
    from aggregator.kernel import in_network

    path, host = places[rank]
    network = os.open(path, os.O_RDONLY)
    aggregator_link.Client = lambda: in_network(network, lambda: Client((host, 0)))  # type: ignore[misc, attr-defined]
    aggregator_link.Membership = lambda *args, **options: in_network(  # type: ignore[misc, attr-defined]
        network, lambda: Membership(*args, **options)
    )
    return trained(rank, world, at)
