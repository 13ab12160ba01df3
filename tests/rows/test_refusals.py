"""What cannot work is refused in one sentence, on all ranks, and nobody waits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tacit
from tacit import rows
from tacit.errors import ConfigError

SGD = rows.SGD(lr=0.1)


def embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 2, **options))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 2), nn.Linear(2, 8)
        self.head.weight = self.words.weight


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: rows.shard(nn.Linear(2, 2), optimizer=SGD), "the model has no nn.Embedding or nn.EmbeddingBag that is trained"),
    (lambda: rows.shard(embedding(), ["1"], optimizer=SGD), "there is no table '1' in the model; its tables are '0'"),
    (lambda: rows.shard(nn.Embedding(8, 2), optimizer=SGD), "the model itself is a table"),
    (lambda: rows.shard(embedding(max_norm=1.0), optimizer=SGD), "'0' has max_norm=1.0, which shards do not know"),
    (lambda: rows.shard(embedding(dtype=torch.float64), optimizer=SGD), "'0' is torch.float64; rows are stored as"),
    (lambda: rows.shard(Tied(), optimizer=SGD), "the weight of 'words' is also 'head.weight'"),
    (lambda: rows.shard(embedding(), optimizer=torch.optim.SGD), "is no row optimizer; use one of tacit.rows"),
    (lambda: rows.shard(embedding(), optimizer=SGD, adding="exat"), "adding='exat'; did you mean 'exact'"),
    (lambda: rows.shard(embedding(), optimizer=SGD, unbounded=["0"]), "'0' has weights and cannot be unbounded"),
    (lambda: rows.shard(embedding(), optimizer=SGD, unbounded=["x"]), "unbounded='x' is no table that is sharded"),
    (lambda: rows.SGD(lr=0.0), r"SGD\(lr=0.0\): a finite number above 0"),
    (lambda: rows.Adagrad(lr=0.1, eps=-1.0), r"Adagrad\(eps=-1.0\): a finite number of 0 or more"),
    (lambda: rows.LazyAdam(lr=0.1, beta2=1.0), r"LazyAdam\(beta2=1.0\): from 0 to less than 1"),
    (lambda: rows.Normal(-1.0), r"Normal\(std=-1.0\): a finite number, 0 or more"),
    (lambda: rows.Table("t", 0), "table 't' has rows of 0 elements"),
    (lambda: rows.Table("t", 1, 0), "table 't' has 0 keys"),
    (lambda: rows.Table("t", 1, 5, padding=5), "padding=5 of table 't': from 0 to 4"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_what_cannot_work_is_refused_when_it_is_built(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        build()
    assert "\n" not in str(refused.value)


def test_keys_out_of_range_and_unknown_tables_are_named() -> None:
    model = embedding()
    tables = rows.shard(model, optimizer=SGD)
    with pytest.raises(ConfigError, match="key 8 is not in table '0', whose keys are 0 to 7"):
        model(torch.tensor([1, 8]))
    with pytest.raises(ConfigError, match="key -1 is not in table '0'"):
        model(torch.tensor([-1]))
    with pytest.raises(ConfigError, match="keys of table '0' are torch.float32"):
        tables.pull({"0": torch.tensor([1.0])})
    with pytest.raises(ConfigError, match="there is no table 'o'; the tables are '0'"):
        tables.pull({"o": torch.tensor([1])})
    tables.pull({"0": torch.tensor([1, 2])})
    with pytest.raises(ConfigError, match="key 3 of table '0' is looked up, but was not pulled before"):
        model(torch.tensor([1, 3]))
    with pytest.raises(ConfigError, match="to=1: ranks are 0 to 0"):
        tables.gather(to=1)
    with pytest.raises(ConfigError, match=r"SGD\(lr=-1.0\)"):
        tables.step(lr=-1.0)


def test_a_launch_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4, but this process has no process group"):
        rows.shard(embedding(), optimizer=SGD)


def test_ranks_that_differ_all_end_with_one_sentence(ranks: Any) -> None:
    found = ranks.run(3, differ)
    for rank, (tables, batch, order, eval_, refused) in enumerate(found):
        assert "shards other tables, or with other options, than rank" in tables
        wanted = "key 99 is not in table '0'" if rank == 1 else "rank 1 refused its own part of exchange 2"
        assert wanted in batch
        assert "all ranks must look up, step and gather in the same order" in order
        assert "looks rows up without training" in eval_
        assert ("there is no table" if rank == 2 else "rank 2 refused its own part") in refused


def differ(rank: int, world: int) -> list[str]:
    def error(call: Callable[[], Any]) -> str:
        with pytest.raises(ConfigError) as refused:
            call()
        assert "\n" not in str(refused.value)
        return str(refused.value)

    found = [error(lambda: rows.shard(embedding(), optimizer=SGD, seed=rank // 2))]
    model = embedding()
    tables = rows.shard(model, optimizer=SGD)
    found.append(error(lambda: model(torch.tensor([99 if rank == 1 else 1]))))
    found.append(error(lambda: tables.step() if rank == 1 else model(torch.tensor([1]))))
    model.train(rank != 2)
    found.append(error(lambda: model(torch.tensor([1]))))
    ids = torch.tensor([1])
    alone: list[Callable[[], Any]] = [
        lambda: tables.pull({"x" if rank == 2 else "0": ids}),
        lambda: tables.step(lr=-1.0 if rank == 2 else 0.1),
        lambda: tables.gather_rows("x" if rank == 2 else "0"),
        lambda: tables.gather(to=7 if rank == 2 else 0),
    ]
    own = ["there is no table 'x'", "SGD(lr=-1.0)", "there is no table 'x'", "to=7"]
    for call, message in zip(alone, own, strict=True):
        assert (message if rank == 2 else "rank 2 refused its own part of exchange") in error(call)
    found.append(error(lambda: rows.shard(embedding(), ["x"] if rank == 2 else None, optimizer=SGD)))
    return found


def test_a_sharded_module_is_not_copied_and_ddp_comes_after(ranks: Any) -> None:
    model = embedding()
    rows.shard(model, optimizer=SGD)
    with pytest.raises(ConfigError, match="is in shards and cannot be copied with its model"):
        copy.deepcopy(model)
    assert "shard them first" in ranks.run(1, wrapped_before)[0]


def wrapped_before(rank: int, world: int) -> str:
    with pytest.raises(ConfigError) as refused:
        rows.shard(nn.parallel.DistributedDataParallel(embedding()), optimizer=SGD)
    return str(refused.value)


def test_rows_are_reached_from_a_plain_import() -> None:
    assert tacit.rows is rows


def test_after_close_every_call_is_refused_on_all_ranks() -> None:
    model = embedding()
    tables = rows.shard(model, optimizer=SGD)
    state = tables.state_dict()
    tables.close()
    tables.close()
    ids = torch.tensor([1])
    calls: list[Callable[[], Any]] = [
        lambda: model(ids),
        lambda: tables.pull({"0": ids}),
        tables.step,
        tables.gather,
        lambda: tables.gather_rows("0"),
        tables.state_dict,
        lambda: tables.load_state_dict(state),
        lambda: tables.save("never"),
        lambda: tables.load("never"),
    ]
    store = rows.Store(2, optimizer=SGD)
    store.close()
    store.close()
    calls += [
        lambda: store.pull(ids),
        lambda: store.push(ids, torch.ones(1, 2)),
        store.wait,
        store.state_dict,
        store.gather_rows,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="the tables were closed; shard the model again"):
            call()
    assert tables.stats.looked_up == 0 and tables.names == ["0"]
