"""Checkpoints of sharded tables: the same bits after a kill, the same rows in another world, and nothing loaded that is damaged."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tacit import rows
from tacit.errors import CheckpointError, ConfigError
from tacit.rows import folders

WORLD, KEYS, WIDTH = 4, 60, 3


def made(optimizer: rows.RowOptimizer, adding: str = "exact") -> tuple[nn.Module, rows.Tables]:
    torch.manual_seed(5)
    model = nn.ModuleDict(
        {
            "a": nn.Embedding(KEYS, WIDTH),
            "b": nn.Embedding(10**12, WIDTH, device="meta", dtype=torch.bfloat16),
        }
    )
    return model, rows.shard(model, optimizer=optimizer, adding=adding, init=rows.Normal(0.1))


def train(model: nn.Module, tables: rows.Tables, rank: int, steps: range) -> None:
    for step in steps:
        g = torch.Generator().manual_seed(step * 10 + rank)
        ids = torch.randint(KEYS, (8,), generator=g)
        out = model["a"](ids) + model["b"](ids * 10**10)
        (out * torch.randn(out.shape, generator=g)).sum().backward()
        tables.step()


def all_of(tables: rows.Tables) -> dict[str, Any]:
    return {name: tables.gather_rows(name) for name in tables.names}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(x, y) for name in b for x, y in zip(a[name], b[name], strict=True))


OPTIMIZERS = [
    rows.SGD(lr=0.1), rows.Adagrad(lr=0.1), rows.RowAdagrad(lr=0.1), rows.FTRL(lr=0.1, l1=0.01), rows.LazyAdam(lr=0.01),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What 4 ranks have saved after 3 steps, before they were killed."""
    folder = str(tmp_path_factory.mktemp("saved"))
    ranks.start(WORLD, train_until_killed, folder)
    assert {ranks.result(rank) for rank in range(WORLD)} == {("died", -signal.SIGKILL)}
    ranks.close()
    return folder


def test_after_a_kill_training_goes_on_with_the_same_bits(ranks: Any, folder: str) -> None:
    unbroken = ranks.run(WORLD, train_unbroken)
    resumed = ranks.run(WORLD, resume, folder, range(3, 6))
    for one, other in zip(resumed, unbroken, strict=True):
        assert all(same(a, b) for a, b in zip(one, other, strict=True))


def train_unbroken(rank: int, world: int) -> Any:
    found = []
    for optimizer in OPTIMIZERS:
        model, tables = made(optimizer)
        train(model, tables, rank, range(6))
        found.append(all_of(tables))
    return found


def train_until_killed(rank: int, world: int, folder: str) -> None:
    for number, optimizer in enumerate(OPTIMIZERS):
        model, tables = made(optimizer)
        train(model, tables, rank, range(3))
        torch.save(tables.state_dict(), f"{folder}/{number}-{rank}.pt")
        train(model, tables, rank, range(3, 4))
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resume(rank: int, world: int, folder: str, steps: range) -> Any:
    found = []
    for number, optimizer in enumerate(OPTIMIZERS):
        model, tables = made(optimizer)
        if world == WORLD:
            tables.load_state_dict(torch.load(f"{folder}/{number}-{rank}.pt", weights_only=True))
        else:
            tables.load_state_dict(states_in(folder, number))
        train(model, tables, rank, steps)
        found.append(all_of(tables))
    return found


def states_in(folder: str, number: int) -> list[Any]:
    return [torch.load(f"{folder}/{number}-{rank}.pt", weights_only=True) for rank in range(WORLD)]


def rows_in(states: list[Any]) -> dict[str, Any]:
    """By table all keys in order, and their rows."""
    found = {}
    for name in states[0]["tables"]:
        keys = torch.cat([state["tables"][name]["keys"] for state in states])
        weights = torch.cat([state["tables"][name]["weights"] for state in states])
        found[name] = keys.sort().values, weights[keys.argsort()]
    return found


def test_saved_on_4_ranks_the_same_rows_are_loaded_on_3_2_and_1(ranks: Any, folder: str) -> None:
    wanted = [rows_in(states_in(folder, number)) for number in range(len(OPTIMIZERS))]
    assert len(wanted[0]["a"][0]) == KEYS and 30 < len(wanted[0]["b"][0]) <= KEYS
    for world in (3, 2):
        for found, facts in ranks.run(world, load_in_another_world, folder):
            assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
            assert facts == "the same"
    assert all(same(a, b) for a, b in zip(resume(0, 1, folder, range(0)), wanted, strict=True))


def load_in_another_world(rank: int, world: int, folder: str) -> Any:
    """Rows, and whether steps, exponents and optimizer state of every key are as they were saved."""
    found, facts = [], "the same"
    for number, optimizer in enumerate(OPTIMIZERS):
        _, tables = made(optimizer)
        old = states_in(folder, number)
        tables.load_state_dict(old)
        own = tables.state_dict()
        for name, part in own["tables"].items():
            before = [state["tables"][name] for state in old]
            if part["steps"] != 3 or part["exponents"] != before[0]["exponents"]:
                facts = f"{name}: {part['steps']}, {part['exponents']}"
            keys = torch.cat([each["keys"] for each in before])
            places = torch.tensor([int((keys == key).nonzero()) for key in part["keys"]], dtype=torch.int64)
            for kept, value in part["state"].items():
                if not torch.equal(value, torch.cat([each["state"][kept] for each in before])[places]):
                    facts = f"{name}: {kept}"
        found.append(all_of(tables))
    return found, facts


def test_gathered_tables_are_plain_and_go_where_they_were(ranks: Any) -> None:
    assert ranks.run(2, gather) == ["plain", "nothing"]


def gather(rank: int, world: int) -> str:
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Embedding(20, 4, padding_idx=3), nn.EmbeddingBag(30, 4, mode="max", device="meta")
    )
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    ids = torch.tensor([[1, 2 + rank, 19]])
    with torch.no_grad():
        wanted = model[0](ids), model[1](ids)
    found = tables.gather(to=0)
    if rank:
        assert found == {}
        return "nothing"
    for name, plain in found.items():
        model.set_submodule(name, plain)
    assert type(model[0]) is nn.Embedding and type(model[1]) is nn.EmbeddingBag
    assert (model[0].padding_idx, model[1].mode) == (3, "max")
    assert all(torch.equal(model[at](ids), wanted[at]) for at in range(2))
    return "plain"


# ---- what is refused


def damaged(state: dict[str, Any], change: Any) -> dict[str, Any]:
    bad = copy.deepcopy(state)
    change(bad)
    return bad


def table(state: dict[str, Any]) -> dict[str, Any]:
    return state["tables"]["a"]  # type: ignore[no-any-return]


BAD: list[tuple[Any, str]] = [
    (lambda s: s.update(format=2), "checkpoint format 2 of sharded tables is not 1"),
    (lambda s: s.pop("world"), "'world' is missing in the checkpoint"),
    (lambda s: s.update(optimizer="SGD"), "written with optimizer 'SGD' and these tables have 'RowAdagrad'"),
    (lambda s: s.update(adding="rank order"), "written with adding 'rank order' and these tables have 'exact'"),
    (lambda s: s["tables"].pop("b"), r"has the tables \['a'\] and this model \['a', 'b'\]"),
    (lambda s: table(s).update(width=4), "is of another table 'a': its width is 4, and here it is 3"),
    (lambda s: table(s).update(range=9), "is of another table 'a': its range is 9, and here it is 60"),
    (lambda s: table(s).update(seed=1), "is of another table 'a': its seed is 1"),
    (lambda s: table(s).update(keys=table(s)["keys"].flip(0)), "has keys that do not increase"),
    (lambda s: table(s).update(keys=table(s)["keys"] + 1), "has the key 60, beyond 59"),
    (lambda s: table(s).update(keys=table(s)["keys"].float()), "has no vector of int64 keys"),
    (lambda s: table(s).update(weights=table(s)["weights"][1:]), "has weights that are not torch.float32 of shape"),
    (lambda s: table(s)["state"].pop("squares"), "has no state of RowAdagrad"),
    (lambda s: table(s).update(steps=-1), "has no whole number of steps"),
    (lambda s: table(s).update(exponents=["x"]), "has no list of exponents"),
]  # fmt: skip


def test_a_damaged_checkpoint_is_refused_in_one_sentence_and_changes_nothing() -> None:
    model, tables = made(rows.RowAdagrad(lr=0.1))
    train(model, tables, 0, range(2))
    state, before = tables.state_dict(), all_of(tables)
    for change, message in BAD:
        with pytest.raises(CheckpointError, match=message) as refused:
            tables.load_state_dict(damaged(state, change))
        assert "\n" not in str(refused.value)
        assert same(all_of(tables), before)
    with pytest.raises(CheckpointError, match="this is no state of sharded tables"):
        tables.load_state_dict({"model": 1})
    one = damaged(state, lambda s: s.update(world=2))
    with pytest.raises(CheckpointError, match="has keys that this rank does not own"):
        tables.load_state_dict(one)
    for each in one["tables"].values():
        for name in ("keys", "weights"):
            each[name] = each[name][:0]
        each["state"] = {name: kept[:0] for name, kept in each["state"].items()}
    with pytest.raises(
        CheckpointError, match=r"rank 0 of 1 cannot resume from ranks \[0\] of 2: pass a list"
    ):
        tables.load_state_dict(one)
    with pytest.raises(CheckpointError, match=r"the states come from worlds of \[1, 2\] ranks"):
        tables.load_state_dict([one, state])
    tables.load_state_dict(state)
    assert same(all_of(tables), before)


def test_rows_that_are_not_finite_are_loaded_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, tables = made(rows.Adagrad(lr=0.1), "rank order")
    for key, gradient in ((1, float("nan")), (2, 1e30)):  # NaN for a row, and squares that are infinite
        (model["a"](torch.tensor([key])) * gradient).sum().backward()
        tables.step()
    state = tables.state_dict()
    assert not state["tables"]["a"]["weights"][1].isfinite().any()
    assert state["tables"]["a"]["state"]["squares"][2].isinf().all()
    _, again = made(rows.Adagrad(lr=0.1), "rank order")
    again.load_state_dict(state)
    assert [each.getMessage()[:93] for each in caplog.records] == [
        "the checkpoint has rows with NaN or infinite numbers: 2 of table 'a', on owner 0 of 1; they s"
    ]
    keys, weights = again.gather_rows("a")
    assert torch.equal(weights.isnan(), tables.gather_rows("a")[1].isnan()) and len(keys) == KEYS


def test_states_of_different_steps_are_refused_on_all_ranks(ranks: Any) -> None:
    for rank, (mixed, own) in enumerate(ranks.run(2, load_mixed)):
        assert "the states were saved after steps [1, 2] of table 'a'; pass those of one" in mixed
        assert f"rank {1 - rank} loads a checkpoint of another step or run than rank {rank}" in own


def load_mixed(rank: int, world: int) -> list[str]:
    model, tables = made(rows.SGD(lr=0.1))
    states: list[Any] = []
    for step in range(2):
        train(model, tables, rank, range(step, step + 1))
        states.append([None] * world)
        dist.all_gather_object(states[-1], tables.state_dict())
    before, found = all_of(tables), []
    for state in ([states[0][0], states[1][1]], states[rank][rank]):
        with pytest.raises(ConfigError) as refused:
            tables.load_state_dict(state)
        found.append(str(refused.value))
        assert same(all_of(tables), before)
    tables.load_state_dict(states[0])
    assert not same(all_of(tables), before)
    return found


def test_a_folder_with_parts_of_several_counts_is_refused(tmp_path: Path) -> None:
    for part, count in ((0, 2), (0, 1), (1, 2)):
        folders.write(tmp_path, {"rank": part, "world": count, "checkpoint": f"of {count}"})
    for part, count in ((0, 2), (0, 1), (0, 3)):
        with pytest.raises(CheckpointError, match=r"has parts of 1 and of 2 owners .* seen from owner"):
            folders.read(tmp_path, part, count)


def test_a_table_of_unbounded_keys_has_no_plain_form() -> None:
    model = nn.Sequential(nn.Embedding(1, 2, device="meta"))
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0), unbounded=["0"])
    with pytest.raises(
        ConfigError, match="'0' has unbounded keys, which no nn.Embedding can hold; use gather_rows"
    ):
        tables.gather()
