"""The key-value store: exact in order, bounded where it is not, and errors with whoever waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tacit import rows
from tacit.errors import ConfigError, TransportError

KEYS, WIDTH = 40, 3


def step_of(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Keys, some of them twice, and integers for gradients; a rank's share of 12."""
    g = torch.Generator().manual_seed(step)
    keys, gradients = (
        torch.randint(KEYS, (12,), generator=g),
        torch.randint(-8, 9, (12, WIDTH), generator=g).float(),
    )
    own = slice(12 * rank // world, 12 * (rank + 1) // world)
    return keys[own], world * gradients[own]


def train(rank: int, world: int, adding: str = "rank order", stale: int = 0) -> Any:
    store = rows.Store(WIDTH, optimizer=rows.Adagrad(lr=0.1), adding=adding, stale=stale)
    pulled = []
    for step in range(6):
        keys, gradients = step_of(step, rank, world)
        pulled.append(store.pull(torch.arange(KEYS)))
        store.push(keys, gradients)
    found = [each.wait() for each in pulled]
    everything = store.gather_rows()
    store.close()
    return found, everything


def test_ranks_hold_the_rows_of_one_process_and_every_pull_its_version(ranks: Any) -> None:
    wanted, (keys, weights) = train(0, 1)
    assert not torch.equal(wanted[0], wanted[1])
    for found, everything in ranks.run(3, train):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert torch.equal(everything[0], keys) and torch.equal(everything[1], weights)


def test_a_stale_pull_sees_at_least_the_pushes_it_may_not_overtake(ranks: Any) -> None:
    wanted, (keys, weights) = train(0, 1)
    versions = [*wanted, wanted[-1].index_copy(0, keys, weights)]
    for found, everything in ranks.run(3, train, "exact", 2):
        for step, pulled in enumerate(found):
            for key in range(KEYS):  # owners may be apart, by as much as is allowed
                seen = [version for version in range(7) if torch.equal(pulled[key], versions[version][key])]
                assert seen and max(seen) >= step - 2
        assert torch.equal(everything[0], keys) and torch.equal(everything[1], weights)


def test_a_push_pull_returns_rows_after_the_step() -> None:
    store = rows.Store(2, optimizer=rows.SGD(lr=1.0), init=rows.Normal(0.0), keys=10)
    found = store.push_pull(torch.tensor([[3, 3, 4]]), torch.ones(1, 3, 2))
    assert torch.equal(found.wait(), -torch.tensor([[[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]]]))
    assert found.done()
    assert store.pull(torch.empty(0, dtype=torch.int64)).wait().shape == (0, 2)
    assert store.stats.sent_nbytes == 0


def test_a_store_goes_on_from_a_checkpoint_in_another_world(ranks: Any) -> None:
    states = ranks.run(3, save)
    wanted = train(0, 1)[1]
    for found in ranks.run(2, load, states):
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


def save(rank: int, world: int) -> Any:
    store = rows.Store(WIDTH, optimizer=rows.Adagrad(lr=0.1))
    for step in range(3):
        store.push(*step_of(step, rank, world))
    return store.state_dict()


def load(rank: int, world: int, states: Any) -> Any:
    store = rows.Store(WIDTH, optimizer=rows.Adagrad(lr=0.1))
    store.load_state_dict(states)
    for step in range(3, 6):
        store.push(*step_of(step, rank, world))
    return store.gather_rows()


def test_errors_reach_whoever_waits_on_all_ranks_and_the_store_goes_on(ranks: Any) -> None:
    assert ranks.run(2, refuse) == [
        "key 99 is not in table 'store'",
        "rank 0 refused its own part of exchange",
    ]


def refuse(rank: int, world: int) -> str:
    store = rows.Store(2, optimizer=rows.SGD(lr=1.0), keys=10)
    bad = store.push(torch.tensor([99 if rank == 0 else 1]), torch.ones(1, 2))
    good = store.pull(torch.tensor([1]))
    with pytest.raises(ConfigError) as refused:
        bad.wait()
    assert good.wait().shape == (1, 2)
    with pytest.raises(ConfigError, match=r"gradients have the shape \(2, 2\); keys of \(1,\) need \(1, 2\)"):
        store.push(torch.tensor([1]), torch.ones(2, 2)).wait()
    if rank == 0:
        with pytest.raises(TransportError, match=r"the store did not answer within 0.05 s"):
            store.pull(torch.tensor([1])).wait(0.05)
    torch.distributed.barrier()
    if rank == 1:
        store.pull(torch.tensor([1])).wait()
    return str(refused.value)[
        : len("rank 0 refused its own part of exchange") if rank else len("key 99 is not in table 'store'")
    ]


def test_an_error_of_a_push_that_nobody_waits_for_comes_with_the_next_wait() -> None:
    store = rows.Store(2, optimizer=rows.SGD(lr=1.0), keys=10)
    ids, gradients = torch.tensor([99]), torch.ones(1, 2)
    for ask in (store.wait, store.state_dict, store.gather_rows):
        store.push(ids, gradients)
        store.push_pull(ids + 1, gradients)
        with pytest.raises(ConfigError, match="key 99 is not in table 'store'"):
            ask()
        store.wait()  # once
    kept, pair = store.push(ids, gradients), store.push_pull(ids, gradients)
    store.wait()
    for each in (kept, pair):
        with pytest.raises(ConfigError, match="key 99 is not in table 'store'"):
            each.wait()
    del kept, pair, each
    store.wait()
    store.push(ids, gradients)
    with pytest.raises(ConfigError, match="key 99 is not in table 'store'"):
        store.close()
    store.close()


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="stale=-1: a whole number of pushes, 0 or more"):
        rows.Store(2, optimizer=rows.SGD(lr=1.0), stale=-1)
    with pytest.raises(ConfigError, match="adding='any'"):
        rows.Store(2, optimizer=rows.SGD(lr=1.0), adding="any")
