"""Training with hot rows on real ranks: the bits of one process, and of cold rows, whatever is hot and whoever adds."""

from __future__ import annotations

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
    alone = {name: train_with(0, 1, name, "none", {})[0] for name in OPTIMIZERS}
    for found in ranks.run(world, train_all):
        for (name, hot), (weights, stats, keys) in found.items():
            assert same(weights, alone[name]), (name, hot)
            hot_rows = sum(len(each) for each in keys.values())
            assert stats["hot_rows"] == hot_rows
            if hot == "some":
                assert hot_rows == 20 and stats["hot_read"] > 0 < stats["hot_trained"] and stats["pulled"] > 0
            if hot == "all":
                assert hot_rows == sum(len(weights[name]) for name in keys) - 4 or hot_rows > 100


def train_all(rank: int, world: int) -> Any:
    return {(name, hot): train_with(rank, world, name, hot, {}) for name in OPTIMIZERS for hot in HOT}
