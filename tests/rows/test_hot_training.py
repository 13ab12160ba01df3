"""Training with hot rows on real ranks: the bits of one process, and of cold rows, whatever is hot and whoever adds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit import rows

USERS, ITEMS, SAMPLES, STEPS = 120, 40, 24, 8
OPTIMIZERS = {
    "sgd": rows.SGD(lr=0.125),
    "row_adagrad": rows.RowAdagrad(lr=0.1),
    "ftrl": rows.FTRL(lr=0.1, l1=0.01, l2=0.1),
    "lazy_adam": rows.LazyAdam(lr=0.01),
}
HOT = {
    "none": None,
    "some": rows.Hot(rows=20, every=2),
    "all": rows.Hot(rows=10_000, every=1),
}


class Clicks(nn.Module):
    """Two tables, one of them used twice, one with bags and padding, and a third in bfloat16 with keys without bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, 4)
        self.item = nn.EmbeddingBag(ITEMS, 3, mode="sum", padding_idx=0)
        self.tag = nn.Embedding(1, 2, device="meta", dtype=torch.bfloat16)

    def forward(self, user: Tensor, other: Tensor, items: Tensor) -> Tensor:
        tags = self.tag(user * 2**40 - 7).float()
        return torch.cat([self.user(user) + 2 * self.user(other), self.item(items), tags], 1)


def made(optimizer: rows.RowOptimizer, hot: rows.Hot | None) -> tuple[Clicks, rows.Tables]:
    torch.manual_seed(7)
    model = Clicks()
    tables = rows.shard(model, optimizer=optimizer, adding="exact", hot=hot, unbounded=["tag"])
    return model, tables


def batch(step: int, shift: int = 0) -> tuple[Tensor, ...]:
    """User, other user, items, and integers by which the loss weighs what they look up; a few rows are in most batches."""
    g = torch.Generator().manual_seed(100 + step)
    ids = (USERS * torch.rand(2, SAMPLES, generator=g) ** 3).long().add(shift) % USERS
    items = (ITEMS * torch.rand(SAMPLES, 5, generator=g) ** 3).long()
    return ids[0], ids[1], items, torch.randint(-8, 9, (SAMPLES, 9), generator=g).float()


def train(
    model: Clicks,
    tables: rows.Tables,
    rank: int,
    world: int,
    steps: range,
    *,
    pull: bool = False,
    parts: int = 1,
    uneven: bool = False,
    noise: float = 0.0,
    shift: int = 0,
) -> None:
    """Without `noise` gradients are integers, and so are their means: each rank's loss is `world` times the sum over its samples."""
    for step in steps:
        own = slice(SAMPLES * rank // world, SAMPLES * (rank + 1) // world)
        if uneven:
            own = (
                slice(0, 0)
                if rank == 0
                else slice(SAMPLES * (rank - 1) // (world - 1), SAMPLES * rank // (world - 1))
            )
        mine = [t[own] for t in batch(step, shift)]
        g = torch.Generator().manual_seed(step * 100 + rank)
        for user, other, items, weights in zip(*(t.tensor_split(parts) for t in mine), strict=True):
            if pull:
                tables.pull({"user": [user, other], "item": items, "tag": user * 2**40 - 7})
            factor = weights + noise * torch.randn(weights.shape, generator=g)
            (world * (model(user, other, items) * factor).sum()).backward()
        tables.step()


def result(tables: rows.Tables) -> dict[str, Tensor]:
    """By table keys and rows, as bits: NaN is NaN."""
    found = {}
    for name in tables.names:
        keys, weights = tables.gather_rows(name)
        found[name], found[f"{name} keys"] = weights.view(torch.int16), keys
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in b)


def train_with(rank: int, world: int, optimizer: str, hot: str, how: dict[str, Any]) -> Any:
    model, tables = made(OPTIMIZERS[optimizer], HOT[hot])
    train(model, tables, rank, world, range(STEPS), **how)
    found = result(tables), tables.stats.as_dict(), {name: tables.hot_keys(name) for name in tables.names}
    tables.close()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_train_the_bits_of_one_process_whatever_is_hot(ranks: Any, world: int) -> None:
    names = list(OPTIMIZERS) if world == 2 else ["lazy_adam"]
    alone = {name: train_with(0, 1, name, "none", {})[0] for name in names}
    for found in ranks.run(world, train_all, names):
        for (name, hot), (weights, stats, keys) in found.items():
            assert same(weights, alone[name]), (name, hot)
            assert stats["hot_rows"] == sum(len(each) for each in keys.values())
            if hot == "some":
                assert stats["hot_rows"] == 20 and stats["hot_read"] > 20 < stats["hot_trained"]
            if hot == "all":  # padding rows never are
                assert stats["hot_rows"] > 100 and 0 not in keys["item"]


def train_all(rank: int, world: int, names: list[str]) -> Any:
    return {(name, hot): train_with(rank, world, name, hot, {}) for name in names for hot in HOT}


WAYS: list[dict[str, Any]] = [
    {},
    {"pull": True},
    {"parts": 3},
    {"uneven": True, "pull": True, "parts": 2},
]


def test_with_any_gradients_and_in_every_way_hot_rows_have_the_bits_of_cold_ones(ranks: Any) -> None:
    for found in ranks.run(3, train_in_every_way):
        for cold, *hot in found:
            assert all(same(each[0], cold[0]) for each in hot)
            assert [each[1]["hot_trained"] > 0 for each in (cold, *hot)] == [False, True, True]


def train_in_every_way(rank: int, world: int) -> Any:
    return [[train_with(rank, world, "ftrl", hot, {"noise": 1.0, **way}) for hot in HOT] for way in WAYS]


def test_numbers_beyond_a_lane_and_beyond_all_numbers_have_the_bits_of_cold_rows(ranks: Any) -> None:
    for (cold, none), (hot, repaired) in ranks.run(2, train_through_an_explosion):
        assert same(cold, hot)
        assert none == 0 < repaired
        user = cold["user"].view(torch.float32)
        assert user.isnan().all(1).any() and not user.isnan().any(1).all()


def train_through_an_explosion(rank: int, world: int) -> Any:
    """Gradients of 1, then of 10^6 in some rows of rank 1, then one that is infinite."""
    found = []
    for hot in ("none", "all"):
        model, tables = made(OPTIMIZERS["sgd"], HOT[hot])
        for step in range(6):
            user, other, items, weights = (t[rank::world] for t in batch(0))
            factor = weights + 1e6 * (step in (2, 4)) * (rank == 1) * (user > USERS // 2)[:, None]
            factor[0] += torch.inf if step == 5 and rank == 0 else 0.0
            (model(user, other, items) * factor).sum().backward()
            tables.step()
        found.append((result(tables), tables.stats.hot_repaired))
        tables.close()
    return found


def test_hot_rows_are_read_here_and_their_gradients_reach_no_owner(ranks: Any) -> None:
    for cold, hot in ranks.run(2, count_bytes):
        assert hot["pulled"] < cold["pulled"] and hot["gradient_nbytes"] < cold["gradient_nbytes"]
        assert hot["hot_read"] + hot["pulled"] == cold["pulled"]
        assert 0 < hot["hot_looked_up"] < hot["looked_up"] == cold["looked_up"]
        kinds = ("header", "key", "row", "gradient", "touch", "lane", "agreement")
        assert hot["sent_nbytes"] == sum(hot[f"{kind}_nbytes"] for kind in kinds)
        assert all(cold[f"{kind}_nbytes"] == 0 for kind in kinds[4:])
        assert min(hot[f"{kind}_nbytes"] for kind in kinds) > 0


def count_bytes(rank: int, world: int) -> Any:
    return [train_with(rank, world, "sgd", hot, {"pull": True})[1] for hot in ("none", "some")]


def test_evaluation_reads_hot_rows_and_changes_nothing(ranks: Any) -> None:
    assert ranks.run(2, evaluate) == [(True, True, True)] * 2


def evaluate(rank: int, world: int) -> Any:
    model, tables = made(OPTIMIZERS["sgd"], HOT["all"])
    train(model, tables, rank, world, range(2))
    before, counts = result(tables), tables.state_dict()["hot"]
    with torch.no_grad():
        user, other, items, _ = batch(rank)
        found = model(user, other, items)
    weights = {name: tables.gather_rows(name)[1] for name in ("user", "item")}
    assert len(weights["user"]) == USERS and len(weights["item"]) == ITEMS
    rows_of_user, bags = weights["user"], weights["item"][items] * (items != 0)[:, :, None]
    wanted = torch.cat([rows_of_user[user] + 2 * rows_of_user[other], bags.sum(1)], 1)
    after = tables.state_dict()["hot"]
    unchanged = all(
        torch.equal(counts["tables"][name]["counts"], after["tables"][name]["counts"])
        for name in tables.names
    )
    return torch.allclose(found[:, :7], wanted), same(before, result(tables)), unchanged


def test_runs_with_any_options_have_the_bits_of_cold_rows(ranks: Any) -> None:
    """Hot sets that change in every step, few and many rows, a checkpoint loaded in between, gradients of any size."""
    for found in ranks.run(3, train_at_random, range(6)):
        assert all(same(hot, cold) for cold, hot in found)


def train_at_random(rank: int, world: int, seeds: range) -> Any:
    found = []
    for seed in seeds:
        pick = random.Random(seed)
        optimizer = OPTIMIZERS[pick.choice(list(OPTIMIZERS))]
        hot = rows.Hot(
            pick.choice([1, 7, 60]), every=pick.choice([1, 2]), half_life_touches=pick.choice([40, 1000])
        )
        ways: list[dict[str, Any]] = [
            {
                "noise": pick.choice([0.0, 1e-3, 1e5]),
                "parts": pick.choice([1, 2]),
                "shift": pick.choice([0, 5, 60]),
                "pull": pick.random() < 0.5,
                "uneven": pick.random() < 0.3,
            }
            for _ in range(7)
        ]
        runs = [made(optimizer, each) for each in (None, hot)]
        for model, tables in runs:
            for step, way in enumerate(ways):
                train(model, tables, rank, world, range(step, step + 1), **way)
                if step == 4 and seed % 2:
                    tables.load_state_dict(tables.state_dict())
        found.append([result(tables) for _, tables in runs])
    return found
