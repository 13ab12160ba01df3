"""Which rows are hot: they follow what is touched, none where they do not pay, and a killed run goes on with the same ones."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rows.test_hot_training import HOT, OPTIMIZERS, SAMPLES, USERS, Clicks, batch, made, result, same, train
from torch import nn

from tacit import rows
from tacit.errors import CheckpointError, ConfigError, TransportError
from tacit.rows import hot_list
from tacit.rows.hot_list import HotList
from tacit.rows.hot_slots import Slots
from tacit.rows.owners import Owners

# ---- which rows


def test_the_hot_rows_follow_what_is_touched(ranks: Any) -> None:
    (first, second), other = ranks.run(2, drift)
    assert all(torch.equal(a, b) for a, b in zip((first, second), other, strict=True))
    assert len(first) == len(second) == 6
    for hot, often in ((first, 0), (second, USERS // 2)):
        distance = (hot - often) % USERS
        assert (distance < USERS // 8).all(), hot


def drift(rank: int, world: int) -> Any:
    """Users near 0 are looked up most often, later users near 60."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"user": nn.Embedding(USERS, 4)})
    hot = rows.Hot(rows=6, every=2, half_life_touches=150)
    tables = rows.shard(model, optimizer=rows.SGD(lr=0.1), hot=hot)
    found = []
    for shift in (0, USERS // 2):
        for step in range(20):
            user, other, _, _ = batch(step, shift)
            model["user"](torch.cat([user, other])[rank::world]).sum().backward()
            tables.step()
        found.append(tables.hot_keys("user"))
    return found


def test_where_hot_rows_do_not_pay_there_are_none_and_one_sentence_reports_it(ranks: Any) -> None:
    found = ranks.run(2, train_automatically)
    for sentences, stats, weights, cold in found:
        assert (stats["hot_rows"], stats["touch_nbytes"], stats["lane_nbytes"]) == (0, 0, 0)
        assert stats["agreement_nbytes"] > 0 and same(weights, cold)
        assert len(sentences) == (sentences is found[0][0])  # rank 0 speaks for all
    assert "hot rows do not pay here (H = 0): the best number gains 1." in found[0][0][0]
    assert "give Hot(rows=...) a number to have that many anyway" in found[0][0][0]


def train_automatically(rank: int, world: int) -> Any:
    sentences = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tacit").addHandler(handler)
    found = []
    for hot in (rows.Hot(every=2), None):
        model, tables = made(OPTIMIZERS["sgd"], hot)
        train(model, tables, rank, world, range(8))
        found.append((result(tables), tables.stats.as_dict()))
    return sentences, found[0][1], found[0][0], found[1][0]


def test_where_they_pay_as_many_rows_are_hot_as_the_rule_finds(ranks: Any) -> None:
    (hot, bits, cold), other = ranks.run(2, train_where_it_pays)
    assert hot > 20 and other[0] == hot
    assert same(bits, cold)


def train_where_it_pays(rank: int, world: int) -> Any:
    """As if one server held the shards of eight ranks."""
    rule = hot_list.cost_and_rule

    def few_servers(*args: Any) -> Any:
        cost, found = rule(*args)
        return replace(cost, ratio=8.0), found

    hot_list.cost_and_rule = few_servers
    found = []
    for hot in (rows.Hot(every=4), None):
        model, tables = made(OPTIMIZERS["sgd"], hot)
        train(model, tables, rank, world, range(12), noise=1.0)
        found.append((tables.stats.hot_rows, result(tables)))
    return found[0][0], found[0][1], found[1][1]


def test_slots_number_the_rows_of_all_tables_and_lead_back_to_them() -> None:
    slots, places = Slots(3), [torch.randperm(n).numpy() for n in (5000, 3, 20_000)]
    numbers = [slots.of(table, each) for table, each in enumerate(places)]
    late = slots.of(1, places[0] + 4000)
    every = torch.cat([torch.from_numpy(each) for each in [*numbers, late]])
    assert len(every.unique()) == len(every) and every.max() < len(every) + 6 * 4096
    for table, _, found in slots.by_table(numbers[2]):
        assert found.tolist() == (places[2].tolist() if table == 2 else [])
    assert [len(found) for _, _, found in slots.by_table(every.numpy())] == [5000, 5003, 20_000]
    assert slots.of(0, places[0][:0]).tolist() == []


# ---- checkpoints

WORLD = 2
SAVED = ("row_adagrad", "lazy_adam")


@pytest.fixture(scope="module")
def folder(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What 2 ranks have saved after 5 steps, with 20 hot rows, before they were killed."""
    folder = str(tmp_path_factory.mktemp("saved"))
    ranks.start(WORLD, train_until_killed, folder)
    assert {ranks.result(rank) for rank in range(WORLD)} == {("died", -signal.SIGKILL)}
    ranks.close()
    return folder


def train_until_killed(rank: int, world: int, folder: str) -> None:
    for name in SAVED:
        model, tables = made(OPTIMIZERS[name], HOT["some"])
        train(model, tables, rank, world, range(5), noise=1.0)
        torch.save(tables.state_dict(), f"{folder}/{name}-{rank}.pt")
        train(model, tables, rank, world, range(5, 6), noise=1.0)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def unbroken(rank: int, world: int, hot: str = "some") -> Any:
    found = []
    for name in SAVED:
        model, tables = made(OPTIMIZERS[name], HOT[hot])
        train(model, tables, rank, world, range(10), noise=1.0)
        found.append((result(tables), {each: tables.hot_keys(each) for each in tables.names}))
    return found


def resume(rank: int, world: int, folder: str, hot: str) -> Any:
    found = []
    for name in SAVED:
        model, tables = made(OPTIMIZERS[name], HOT[hot])
        states = [torch.load(f"{folder}/{name}-{r}.pt", weights_only=True) for r in range(WORLD)]
        tables.load_state_dict(states[rank] if world == WORLD else states)
        if hot == "some" and world == WORLD:
            with torch.no_grad():
                model(*batch(0)[:3])
            assert tables.stats.hot_rows == 20
        train(model, tables, rank, world, range(5, 10), noise=1.0)
        found.append((result(tables), {each: tables.hot_keys(each) for each in tables.names}))
    return found


def test_after_a_kill_training_goes_on_with_the_same_bits_and_the_same_hot_rows(
    ranks: Any, folder: str
) -> None:
    wanted = ranks.run(WORLD, unbroken)
    for one, other in zip(ranks.run(WORLD, resume, folder, "some"), wanted, strict=True):
        for (weights, keys), (bits, hot) in zip(one, other, strict=True):
            assert same(weights, bits) and same(keys, hot) and sum(map(len, hot.values())) == 20
    for one, other in zip(ranks.run(WORLD, resume, folder, "none"), wanted, strict=True):
        assert all(same(a[0], b[0]) for a, b in zip(one, other, strict=True))  # without hot rows too


def test_in_another_world_the_same_rows_are_loaded_and_the_hot_list_begins_anew(
    ranks: Any, folder: str
) -> None:
    hot, cold = (ranks.run(3, resume, folder, kind)[0] for kind in ("some", "none"))
    for (weights, keys), (bits, _) in zip(hot, cold, strict=True):
        assert same(weights, bits) and sum(map(len, keys.values())) == 20


BAD: list[tuple[Any, str]] = [
    (lambda h: h.update(steps=-1), "no whole number of steps"),
    (lambda h: h.update(time=[0.0]), "no time of three numbers"),
    (lambda h: h["tables"].pop("user"), "other tables than its rows"),
    (lambda h: h["tables"]["user"].update(hot=torch.tensor([1.0])), "no vector of int64 keys of table 'user'"),
    (lambda h: h["tables"]["user"].update(hot=torch.tensor([USERS])), "keys of table 'user' that do not increase, or"),
    (lambda h: h["tables"]["user"].update(counts=torch.zeros(3)), "no float32 count for each row of table 'user'"),
    (lambda h: h["tables"]["user"]["counts"].fill_(-1.0), "counts of table 'user' that are no numbers"),
]  # fmt: skip


def test_damaged_hot_rows_are_refused_and_change_nothing(ranks: Any, folder: str) -> None:
    assert ranks.run(WORLD, load_damaged, folder) == ["refused"] * WORLD


def load_damaged(rank: int, world: int, folder: str) -> str:
    model, tables = made(OPTIMIZERS[SAVED[0]], HOT["some"])
    train(model, tables, rank, world, range(3))
    before = result(tables)
    for damage, message in BAD:
        state = torch.load(f"{folder}/{SAVED[0]}-{rank}.pt", weights_only=True)
        damage(state["hot"])
        with pytest.raises(CheckpointError, match=f"the hot rows in the checkpoint have {message}"):
            tables.load_state_dict(state)
    assert same(result(tables), before) and tables.stats.hot_rows == 20
    return "refused"


# ---- refusals


def test_what_cannot_work_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"adding='rank order' with hot rows, which are added in any order"):
        rows.shard(Clicks(), optimizer=rows.SGD(lr=0.1), hot=rows.Hot(), adding="rank order")
    for options, message in (
        ({"rows": 0}, r'rows=0\): a number of rows, at least 1, or "auto"'),
        ({"rows": "all"}, r"rows='all'"),
        ({"every": 0}, "at least 1; 50 are enough"),
        ({"at": "here:there"}, "is no address"),
        ({"mtu": 60}, "in one piece"),
        ({"slots": 1}, "2 to 16384 packets"),
        ({"half_life_touches": 0}, "a number above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            rows.Hot(**options)  # type: ignore[arg-type]
    assert "hidden" not in repr(rows.Hot(secret="hidden"))


def test_the_environment_has_the_aggregator_and_the_world_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TACIT_AGGREGATOR", raising=False)
    assert rows.Hot().about != rows.Hot(at="10.0.0.1").about == rows.Hot(at="10.0.0.2:5000").about
    monkeypatch.setenv("TACIT_AGGREGATOR", "10.0.0.1:4800")
    assert rows.Hot().about == rows.Hot(at="10.0.0.2").about
    with pytest.raises(ConfigError, match="world 256: hot rows are for at most 255 ranks; leave hot= out"):
        rows.Hot().check("exact", 256)


def test_one_rank_alone_has_no_hot_rows_and_needs_none() -> None:
    model, tables = made(OPTIMIZERS["sgd"], HOT["all"])
    train(model, tables, 0, 1, range(2))
    assert tables.hot_keys("user").tolist() == [] and tables.stats.sent_nbytes == 0
    with pytest.raises(ConfigError, match="there is no table 'uses'; did you mean 'user'"):
        tables.hot_keys("uses")


def test_ranks_that_differ_or_refuse_end_all_with_one_sentence(ranks: Any) -> None:
    for rank, (options, batch_, loaded) in enumerate(ranks.run(2, differ)):
        assert "shards other tables, or with other options, than rank" in options
        assert ("key 120 is not in table 'user'" if rank else "rank 1 refused its own part") in batch_
        assert (
            f"rank {1 - rank} {'looks rows up to train them' if rank else 'loads'} where" in loaded
            and "\n" not in loaded
        )


def differ(rank: int, world: int) -> list[str]:
    def error(call: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            call()
        return str(refused.value)

    found = [error(lambda: made(OPTIMIZERS["sgd"], rows.Hot(rows=10 + rank)))]
    model, tables = made(OPTIMIZERS["sgd"], HOT["some"])
    train(model, tables, rank, world, range(4))
    ids = torch.full((SAMPLES,), USERS if rank else 1)
    found.append(error(lambda: model.user(ids)))
    one = torch.zeros(1, dtype=torch.int64)
    found.append(error(lambda: tables.load_state_dict(tables.state_dict()) if rank else model.user(one)))
    return found


def test_a_rank_that_dies_ends_the_others_with_one_sentence(ranks: Any) -> None:
    ranks.start(3, lose_rank_one)
    found = [ranks.result(rank) for rank in range(3)]
    ranks.close()
    assert found[1] == ("died", 3)
    for rank in (0, 2):
        assert found[rank][0] == "ok", found[rank]
        assert f"rank {rank} of 3 lost the exchange in a sum of hot rows" in found[rank][1]
        assert "restart all ranks from the last checkpoint" in found[rank][1] and "\n" not in found[rank][1]


def lose_rank_one(rank: int, world: int) -> str:
    model, tables = made(OPTIMIZERS["sgd"], HOT["some"])
    train(model, tables, rank, world, range(4))
    assert tables._hot is not None
    if rank == 1:
        tables._hot._add = lambda own: os._exit(3)  # type: ignore[method-assign]
    with pytest.raises(TransportError) as lost:
        train(model, tables, rank, world, range(4, 6))
    return str(lost.value)


def test_the_size_that_rank_0_reports_is_that_of_all_hot_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Beside row servers rank 0 owns no row, and its own change has none."""
    hot = object.__new__(HotList)
    hot._options, hot._owners, hot._pays = rows.Hot(), Owners(None), False
    hot._set = SimpleNamespace(size=1234)  # type: ignore[assignment]
    with caplog.at_level(logging.INFO, logger="tacit"):
        hot._report(SimpleNamespace(size=0, decision=SimpleNamespace(hot=1200, gain=2.0)))  # type: ignore[arg-type]
    assert "1,234 rows are hot: a step sends 2.00 times less" in caplog.text
