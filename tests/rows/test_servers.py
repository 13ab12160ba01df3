"""Row servers on real ranks: the bits of one process whatever their number and whatever is hot, checkpoints between any owners, and ends that name who is gone."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rows.test_hot_training import HOT, ITEMS, OPTIMIZERS, STEPS, USERS, Clicks, result, same, train
from schemes.aggregators import SECRET, Aggregator
from torch import nn

from tacit import rows
from tacit.errors import CheckpointError, ConfigError, TransportError


def made(
    optimizer: rows.RowOptimizer, hot: rows.Hot | None, servers: int, **options: Any
) -> tuple[Clicks, rows.Tables]:
    torch.manual_seed(7)
    model = Clicks()
    tables = rows.shard(
        model, optimizer=optimizer, adding="exact", hot=hot, unbounded=["tag"], servers=servers, **options
    )
    return model, tables


def train_with(
    rank: int, world: int, servers: int, optimizer: str, hot: rows.Hot | None, how: dict[str, Any]
) -> Any:
    """All rows, figures and hot keys on a rank; figures on a row server. `world` has the servers."""
    if rank >= world - servers:
        return rows.serve(servers).as_dict()
    model, tables = made(OPTIMIZERS[optimizer], hot, servers)
    train(model, tables, rank, world - servers, range(STEPS), **how)
    found = result(tables), tables.stats.as_dict(), {name: tables.hot_keys(name) for name in tables.names}
    tables.close()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return {name: train_with(0, 1, 0, name, None, {})[0] for name in OPTIMIZERS}


@pytest.mark.parametrize(("ranks_", "servers"), [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_ranks_and_servers_train_the_bits_of_one_process_whatever_is_hot(
    ranks: Any, alone: Any, ranks_: int, servers: int
) -> None:
    names = list(OPTIMIZERS) if (ranks_, servers) == (2, 2) else ["lazy_adam"]
    every = ranks.run(ranks_ + servers, train_all, servers, names)
    for found in every[:ranks_]:
        for (name, hot), (weights, stats, keys) in found.items():
            assert same(weights, alone[name]), (name, hot)
            if ranks_ > 1:
                assert stats["hot_rows"] == sum(len(each) for each in keys.values())
                assert (stats["hot_trained"] > 20) == (hot != "none")
    begun = sum(stats["row_nbytes"] for found in every[:ranks_] for _, stats, _ in found.values())
    assert begun == 4 * (4 * USERS + 3 * ITEMS) * len(every[0])  # what tables begin with, once
    for found in every[ranks_:]:
        for stats in found.values():
            assert (
                stats["looked_up"]
                == stats["gradient_nbytes"]
                == stats["lane_nbytes"]
                == 0
                < stats["row_nbytes"]
            )


def train_all(rank: int, world: int, servers: int, names: list[str]) -> Any:
    return {
        (name, hot): train_with(rank, world, servers, name, HOT[hot], {}) for name in names for hot in HOT
    }


def test_the_hot_rows_are_those_of_shards_on_the_ranks(ranks: Any) -> None:
    """Servers count what ranks report, so as many owners find the same rows."""
    hot = rows.Hot(rows=20, every=2)
    on_ranks = ranks.run(2, train_with, 0, "sgd", hot, {})[0][2]
    on_servers = ranks.run(4, train_with, 2, "sgd", hot, {})[0][2]
    assert all(torch.equal(on_ranks[name], on_servers[name]) for name in on_ranks)


def test_runs_with_any_options_have_the_bits_of_cold_rows(ranks: Any) -> None:
    for found in ranks.run(4, train_at_random, range(4))[:3]:
        assert all(same(hot, cold) for cold, hot in found)


def train_at_random(rank: int, world: int, seeds: range) -> Any:
    """Hot sets that change in every step, gradients of any size, look-ups in parts, empty batches; on 3 ranks and a server."""
    found = []
    for seed in seeds:
        pick = random.Random(seed)
        optimizer = pick.choice(list(OPTIMIZERS))
        hot = rows.Hot(
            pick.choice([1, 7, 60]), every=pick.choice([1, 2]), half_life_touches=pick.choice([40, 1000])
        )
        how: dict[str, Any] = {
            "noise": pick.choice([0.0, 1e-3, 1e5]),
            "parts": pick.choice([1, 2]),
            "pull": pick.random() < 0.5,
            "uneven": pick.random() < 0.5,
        }
        pair = [train_with(rank, world, 1, optimizer, each, how) for each in (None, hot)]
        found.append([each[0] for each in pair] if rank < world - 1 else [])
    return found


def test_lanes_through_an_aggregator_that_servers_need_not_know(ranks: Any, alone: Any) -> None:
    aggregator = Aggregator()
    try:
        found = ranks.run(3, train_through, aggregator.at)
    finally:
        aggregator.close()
    for weights, stats, sums in found[:2]:
        assert same(weights, alone["row_adagrad"]) and stats["hot_trained"] > 20 and sums > STEPS
    assert found[2]["lane_nbytes"] == 0 < found[2]["agreement_nbytes"]


def train_through(rank: int, world: int, at: str) -> Any:
    if rank == 2:
        return rows.serve(1).as_dict()
    hot = rows.Hot(rows=10_000, every=2, at=at, secret=SECRET)
    model, tables = made(OPTIMIZERS["row_adagrad"], hot, 1)
    train(model, tables, rank, 2, range(STEPS))
    found, link = result(tables), tables._hot._link
    tables.close()
    return found, tables.stats.as_dict(), link.through


# ---- checkpoints


OWNERS = {"2 servers": 2, "1 server": 1, "ranks": 0}


def test_saved_by_any_owners_training_goes_on_with_any_others(ranks: Any, tmp_path: Path) -> None:
    unbroken = ranks.run(4, go_on, 2, None, 0, None)[0]
    for before in OWNERS.values():
        folder = str(tmp_path / str(before))
        ranks.run(2 + before, go_on, before, None, 3, folder)
        files = sorted(path.name for path in Path(folder).iterdir())
        count = before or 2
        assert files == [f"rows-{part}-of-{count}.pt" for part in range(count)]
        for after in OWNERS.values():
            found = ranks.run(2 + after, go_on, after, folder, 3, None)[0]
            assert same(found[0], unbroken[0]), (before, after)
            if before == after:
                assert all(torch.equal(found[1][name], unbroken[1][name]) for name in found[1])


def go_on(rank: int, world: int, servers: int, load: str | None, cut: int, save: str | None) -> Any:
    """6 steps; those from `cut` on after loading, or those before it and then saving. An unbroken run saves too, where nobody reads it."""
    if rank >= world - servers:
        return rows.serve(servers).as_dict()
    world -= servers
    model, tables = made(OPTIMIZERS["lazy_adam"], rows.Hot(rows=30, every=2), servers)
    if load:
        tables.load(load)
    train(model, tables, rank, world, range(cut if load else 0, cut if save else 6), noise=0.5)
    if save:
        tables.save(save)
    found = result(tables), {name: tables.hot_keys(name) for name in tables.names}
    tables.close()
    return found


def test_what_is_no_checkpoint_is_refused_on_all_ranks_and_training_goes_on(
    ranks: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for rank, (unchanged, errors) in enumerate(ranks.run(4, load_badly, str(tmp_path))[:2]):
        assert unchanged, rank
        missing, other, damaged, mixed, unwritable, state = errors
        assert "has no part of a checkpoint of sharded tables, seen from owner 0 of 2" in missing
        assert "written with optimizer 'SGD' and these tables have 'FTRL'" in other
        assert "rows-1-of-2.pt cannot be read" in damaged
        assert "owners found parts of different checkpoints" in mixed
        assert "cannot be written" in unwritable
        assert (
            "state_dict() is for rows on the ranks, and these are on 2 row servers; use tables.save(folder)"
            in state
        )


def load_badly(rank: int, world: int, folder: str) -> Any:
    if rank >= 2:
        rows.serve(2)
        return rows.serve(2).as_dict()
    torch.manual_seed(7)
    _, other = made(OPTIMIZERS["sgd"], None, 2)
    other.save(f"{folder}/other")
    other.close()
    model, tables = made(OPTIMIZERS["ftrl"], None, 2)
    train(model, tables, rank, 2, range(1))
    for name in ("damaged", "mixed", "second"):
        tables.save(f"{folder}/{name}")
    if rank == 0:
        Path(folder, "damaged", "rows-1-of-2.pt").write_bytes(b"nothing")
        Path(folder, "second", "rows-1-of-2.pt").replace(Path(folder, "mixed", "rows-1-of-2.pt"))
    before, errors = result(tables), []
    for name in ("missing", "other", "damaged", "mixed"):
        errors.append(error_of(CheckpointError, lambda name=name: tables.load(f"{folder}/{name}")))
    errors.append(error_of(CheckpointError, lambda: tables.save(f"{folder}/file/in-a-file")))
    errors.append(error_of(ConfigError, tables.state_dict))
    unchanged = same(before, result(tables))
    tables.close()
    return unchanged, errors


# ---- ends


def test_a_server_that_dies_ends_all_ranks_with_its_name(ranks: Any) -> None:
    ranks.start(4, die, 3)
    found = ranks.results(4)
    assert found[3] == ("died", -signal.SIGKILL)
    for kind, message in found[:3]:
        assert (
            kind == "ok" and "row server 1 (rank 3) went away; restart all ranks and row servers" in message
        )


def test_a_rank_that_dies_is_named_by_servers_and_ranks(ranks: Any) -> None:
    ranks.start(4, die, 1)
    found = ranks.results(4)
    for rank in (0, 2, 3):
        assert found[rank][0] == "ok" and "rank 1 went away; restart" in found[rank][1], found[rank]


def die(rank: int, world: int, who: int) -> str:
    """2 ranks and 2 servers; one of them is killed in the third step, by a rank's order."""
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())

    def body() -> None:
        if rank >= 2:
            rows.serve(2)
        model, tables = made(OPTIMIZERS["sgd"], None, 2)
        try:
            for step in range(6):
                if step == 2 and rank == 0:
                    os.kill(pids[who], signal.SIGKILL)
                train(model, tables, rank, 2, range(step, step + 1))
        finally:
            tables.close()  # adds nothing to the error, and frees all
            assert tables._owners.wire is None and tables._owners.between is None

    return error_of(TransportError, body)


def error_of(kind: type[Exception], body: Any) -> str:
    with pytest.raises(kind) as refused:
        body()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_refused_batch_ends_ranks_and_servers(ranks: Any) -> None:
    for rank, error in enumerate(ranks.run(3, refuse)):
        assert (
            "key 99 is not in table '0'" if rank == 1 else "rank 1 refused its own part of exchange"
        ) in error


def refuse(rank: int, world: int) -> str:
    def body() -> None:
        if rank == 2:
            rows.serve(1)
        model = nn.Sequential(nn.Embedding(8, 2))
        rows.shard(model, optimizer=rows.SGD(lr=0.1), servers=1)
        model(torch.tensor([99 if rank else 1]))

    return error_of(ConfigError, body)


def test_options_that_differ_are_named_on_ranks_and_servers(ranks: Any) -> None:
    for rank, (rate, tables, number) in enumerate(ranks.run(3, differ)):
        assert "pass the same" in number
        assert "with another learning rate" in rate
        assert "shards other tables, or with other options, than rank" in tables, rank


def differ(rank: int, world: int) -> list[str]:
    def embedding() -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 2))

    def rates() -> None:
        if rank == 2:
            rows.serve(1)
        model = embedding()
        tables = rows.shard(model, optimizer=rows.SGD(lr=0.1), servers=1)
        model(torch.tensor([rank])).sum().backward()
        tables.step(lr=0.1 * (1 + rank))

    def number() -> None:
        if rank == 2:
            rows.serve(1)
        rows.shard(embedding(), optimizer=rows.SGD(lr=0.1))

    def seeds() -> None:
        if rank == 2:
            rows.serve(1)
        rows.shard(embedding(), optimizer=rows.SGD(lr=0.1), servers=1, seed=rank)

    return [error_of(ConfigError, body) for body in (rates, seeds, number)]


BAD = [
    (lambda: rows.shard(nn.Sequential(nn.Embedding(2, 2)), optimizer=rows.SGD(0.1), servers=1), "there is no process group"),
    (lambda: rows.serve(0), "servers=0: at least 1 rank serves rows"),
    (lambda: rows.serve(1), "servers=1, but there is no process group"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_servers_without_a_job_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_servers_keep_the_tables_of_one_model_at_a_time(ranks: Any) -> None:
    for error in ranks.run(3, shard_twice)[:2]:
        assert "the job's row servers keep the tables of an earlier shard(); call close()" in error


def shard_twice(rank: int, world: int) -> str:
    if rank == 2:
        return f"{rows.serve(1)}{rows.serve(1)}"
    model, second = (nn.Sequential(nn.Embedding(8, 2)) for _ in range(2))
    sgd = rows.SGD(0.1)
    tables = rows.shard(model, optimizer=sgd, servers=1)
    error = error_of(ConfigError, lambda: rows.shard(second, optimizer=sgd, servers=1))
    model(torch.tensor([rank])).sum().backward()
    tables.step()
    tables.close()
    rows.shard(second, optimizer=sgd, servers=1).close()
    return error


def test_places_that_cannot_be_are_refused(ranks: Any) -> None:
    for rank, (many, where, group) in enumerate(ranks.run(2, misplace)):
        assert "servers=2 of a job of 2 ranks leave none to train" in many
        assert (
            "which serve rows: call tacit.rows.serve" if rank else "is none of the last 1 ranks of 2"
        ) in where
        assert "leave group= out" in group


def misplace(rank: int, world: int) -> list[str]:
    model, sgd = nn.Sequential(nn.Embedding(2, 2)), rows.SGD(0.1)
    calls = [
        lambda: rows.shard(model, optimizer=sgd, servers=2),
        (lambda: rows.shard(model, optimizer=sgd, servers=1)) if rank else (lambda: rows.serve(1)),
        lambda: rows.shard(model, optimizer=sgd, servers=1, group=dist.group.WORLD),
    ]
    return [error_of(ConfigError, call) for call in calls]
