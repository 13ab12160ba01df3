"""Training with tables in shards, on real ranks: the same bits as in one process, and torch's own optimizers on a plain table."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tacit
from tacit import rows
from tacit.errors import TransportError

USERS, ITEMS, SAMPLES, STEPS = 50, 30, 12, 5
OPTIMIZERS = {
    "sgd": rows.SGD(lr=0.125),
    "adagrad": rows.Adagrad(lr=0.1),
    "row_adagrad": rows.RowAdagrad(lr=0.1),
    "ftrl": rows.FTRL(lr=0.1, l1=0.01, l2=0.1),
    "lazy_adam": rows.LazyAdam(lr=0.01),
}


class Two(nn.Module):
    """Two tables, one of them used twice, one with bags."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, 4, device=device)
        self.item = nn.EmbeddingBag(ITEMS, 3, mode="sum", padding_idx=0, device=device)

    def forward(self, user: Tensor, other: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        return self.user(user) + 2 * self.user(other), self.item(items)


def batch(step: int) -> tuple[Tensor, ...]:
    """User, other user, items, and integers by which the loss weighs what they look up."""
    g = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(USERS, (2, SAMPLES), generator=g)
    items = torch.randint(ITEMS, (SAMPLES, 5), generator=g)
    weights = torch.randint(-8, 9, (SAMPLES, 7), generator=g).float()
    return ids[0], ids[1], items, weights


def model_of(device: str = "cpu") -> Two:
    torch.manual_seed(7)
    return Two(device)


def part_of(rank: int, world: int, uneven: bool) -> slice:
    if uneven:  # rank 0 has nothing; the last has the rest
        return (
            slice(0, 0)
            if rank == 0 and world > 1
            else slice((rank - 1) * 2 if world > 1 else 0, rank * 2 if rank < world - 1 else None)
        )
    return slice(SAMPLES * rank // world, SAMPLES * (rank + 1) // world)


def train(
    model: Any,
    tables: rows.Tables,
    rank: int,
    world: int,
    steps: range,
    *,
    uneven: bool = False,
    parts: int = 1,
    pull: bool = False,
) -> None:
    """Gradients are integers, and so are their means: each rank's loss is `world` times the sum over its samples."""
    for step in steps:
        own = [t[part_of(rank, world, uneven)] for t in batch(step)]
        pieces = list(zip(*(t.tensor_split(parts) for t in own), strict=True))
        for user, other, items, weights in pieces:
            if pull:
                tables.pull({"user": [user, other], "item": items})
            a, b = model(user, other, items)
            (world * ((a * weights[:, :4]).sum() + (b * weights[:, 4:]).sum())).backward()
        tables.step()


def result(tables: rows.Tables) -> dict[str, Tensor]:
    return {name: table.weight.detach() for name, table in tables.gather().items()}


def train_on(rank: int, world: int, name: str, device: str, adding: str, how: dict[str, Any]) -> Any:
    model = model_of(device)
    tables = rows.shard(model, optimizer=OPTIMIZERS[name], adding=adding)
    train(model, tables, rank, world, range(STEPS), **how)
    return result(tables), tables.stats.as_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


_ALONE: dict[Any, dict[str, Tensor]] = {}


def alone(name: str, device: str = "cpu") -> dict[str, Tensor]:
    if (name, device) not in _ALONE:
        _ALONE[name, device] = train_on(0, 1, name, device, "rank order", {})[0]
    return _ALONE[name, device]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_train_the_bits_of_one_process(ranks: Any, world: int) -> None:
    for found in ranks.run(world, train_all):
        assert len(found) == 2 * len(OPTIMIZERS)
        for (name, device), weights in found.items():
            assert same(weights, alone(name, device)), (name, device)


def train_all(rank: int, world: int) -> Any:
    kinds = [(name, device) for name in OPTIMIZERS for device in ("cpu", "meta")]
    adding = {"cpu": "rank order", "meta": "exact"}
    return {
        (name, device): train_on(rank, world, name, device, adding[device], {})[0] for name, device in kinds
    }


HOW = [
    {"pull": True},
    {"uneven": True},
    {"uneven": True, "pull": True},
    {"parts": 3},
    {"parts": 2, "pull": True},
]


def test_empty_batches_accumulation_and_one_pull_for_all_tables_change_no_bit(ranks: Any) -> None:
    for found in ranks.run(3, train_in_every_way):
        for weights in found:
            assert same(weights, alone("adagrad"))


def train_in_every_way(rank: int, world: int) -> Any:
    return [train_on(rank, world, "adagrad", "cpu", "rank order", how)[0] for how in HOW]


def test_rows_of_a_table_on_meta_begin_alike_whatever_the_world_and_only_trained_ones_are_kept(
    ranks: Any,
) -> None:
    found = ranks.run(3, kept_rows)
    assert sum(n for n, _ in found) == found[0][1] < USERS


def kept_rows(rank: int, world: int) -> Any:
    model = model_of("meta")
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    train(model, tables, rank, world, range(1))
    with torch.no_grad():
        model.user(torch.arange(USERS))  # reading makes no row
    touched = torch.cat(batch(0)[:2]).unique()
    keys, _ = tables.gather_rows("user")
    assert torch.equal(keys, touched)
    return tables.owned("user"), len(touched)


# ---- torch's own optimizers


def plain_training(optimizer: Any, loss_of: Any, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = Two()
    model.user.sparse = model.item.sparse = True
    made = optimizer(model.parameters())
    for step in range(steps):
        made.zero_grad()
        loss_of(model, *batch(step)).backward()
        made.step()
    return {name: table.weight.detach() for name, table in (("user", model.user), ("item", model.item))}


def real_loss(model: Any, user: Tensor, other: Tensor, items: Tensor, weights: Tensor) -> Tensor:
    a, b = model(user, other, items)
    return F.mse_loss(torch.cat([a, b], 1), weights / 8)


TORCH = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.125),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "lazy_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.01),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning"
)  # torch's own, of torch.optim.Adagrad
@pytest.mark.parametrize("world", [1, 3])
def test_training_is_torch_s_on_a_plain_table(ranks: Any, world: int) -> None:
    found = ranks.run(world, train_real) if world > 1 else [train_real(0, 1)]
    for weights in found:
        for name, optimizer in TORCH.items():
            wanted = plain_training(optimizer, real_loss, 8)
            for table in wanted:
                assert (weights[name][table] - wanted[table]).abs().max() < 1e-6
                assert (weights[name][table] - getattr(model_of(), table).weight).abs().max() > 0.01


def train_real(rank: int, world: int) -> Any:
    found = {}
    for name in TORCH:
        model = model_of()
        tables = rows.shard(model, optimizer=OPTIMIZERS[name])
        for step in range(8):
            real_loss(model, *(t[part_of(rank, world, False)] for t in batch(step))).backward()
            tables.step()
        found[name] = result(tables)
    return found


def test_ddp_trains_the_dense_rest_and_forward_pulls_all_tables_in_one_exchange(ranks: Any) -> None:
    one, two = ranks.run(2, train_beside_ddp)
    assert same(one[0], two[0]) and torch.equal(one[1], two[1])
    assert one[2] == two[2] == (12, 12)


class WithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two, self.head = Two(), nn.Linear(7, 1)

    def forward(self, user: Tensor, other: Tensor, items: Tensor) -> Tensor:
        return self.head(torch.cat(self.two(user, other, items), 1))


def train_beside_ddp(rank: int, world: int) -> Any:
    torch.manual_seed(1)
    model = WithHead()
    tables = rows.shard(
        model,
        optimizer=rows.RowAdagrad(lr=0.1),
        keys=lambda user, other, items: {"two.user": [user, other], "two.item": items},
    )
    assert [name for name, _ in model.named_parameters()] == ["head.weight", "head.bias"]
    wrapped = nn.parallel.DistributedDataParallel(model)
    handle = tacit.attach(wrapped, None, "every / none / allreduce")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    losses = []
    for step in [0, 1, 2] * 4:
        user, other, items, weights = (t[rank::world] for t in batch(step))
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(user, other, items)[:, 0], weights[:, 0])
        loss.backward()
        optimizer.step()
        tables.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    handle.close()
    return result(tables), model.head.weight.detach(), (tables.stats.pulls, tables.stats.pushes)


# ---- edges


def test_a_padding_row_stays_and_bags_leave_it_out() -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(
        nn.Embedding(9, 2, padding_idx=4), nn.EmbeddingBag(9, 2, mode="mean", padding_idx=4)
    )
    with torch.no_grad():
        plain[0].weight[4] = 5.0
    before = [each.weight.detach().clone() for each in plain]
    ids = torch.tensor([[4, 1, 1], [4, 4, 4]])
    wanted = [plain[0](ids), plain[1](ids)]
    tables = rows.shard(plain, optimizer=rows.FTRL(lr=0.1))
    found = [plain[0](ids), plain[1](ids)]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        one.sum().backward(retain_graph=True)
    tables.step()
    for name, start in zip("01", before, strict=True):
        weight = tables.gather()[name].weight.detach()
        assert torch.equal(weight[4], start[4])
        assert not torch.equal(weight[1], start[1])
        assert torch.equal(weight[[0, 2, 3, 5, 6, 7, 8]], start[[0, 2, 3, 5, 6, 7, 8]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_offsets_and_weights_are_those_of_torch(mode: str) -> None:
    torch.manual_seed(3)
    plain, twin = (nn.EmbeddingBag(20, 4, mode=mode, include_last_offset=True) for _ in range(2))
    twin.load_state_dict(plain.state_dict())
    model = nn.Sequential(twin)
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    ids, offsets = torch.tensor([3, 3, 7, 19, 0]), torch.tensor([0, 0, 2, 5])
    weights = torch.rand(5) if mode == "sum" else None
    wanted, found = (bag(ids, offsets, per_sample_weights=weights) for bag in (plain, model[0]))
    assert torch.equal(wanted, found)
    for bags in (wanted, found):
        (bags**2).sum().backward()
    tables.step()
    assert (tables.gather()["0"].weight - (plain.weight - plain.weight.grad)).abs().max() < 1e-6
    none = torch.empty(0, dtype=torch.int64)
    assert torch.equal(model[0](none, torch.tensor([0, 0])), torch.zeros(1, 4))


@pytest.mark.parametrize("pulled", [False, True])
def test_a_compiled_model_trains_the_same_bits(pulled: bool) -> None:
    model = model_of()
    keys = (lambda user, other, items: {"user": [user, other], "item": items}) if pulled else None
    tables = rows.shard(model, optimizer=OPTIMIZERS["adagrad"], keys=keys)
    train(torch.compile(model, backend="eager"), tables, 0, 1, range(STEPS))
    assert same(result(tables), alone("adagrad"))
    assert tables.stats.pulls == (STEPS if pulled else 3 * STEPS)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_batch_without_ids_trains_nothing(dtype: torch.dtype) -> None:
    model = model_of()
    tables = rows.shard(model, optimizer=rows.LazyAdam(lr=0.1))
    before = result(tables)
    none = torch.empty(0, dtype=dtype)
    a, b = model(none, none, torch.empty(0, 5, dtype=dtype))
    assert (a.shape, b.shape) == ((0, 4), (0, 3))
    (a.sum() + b.sum()).backward()
    tables.step()
    assert same(result(tables), before)


def test_bf16_tables_are_stored_in_bf16_and_computed_in_float32(ranks: Any) -> None:
    for stored, wanted, nbytes in ranks.run(2, train_bf16):
        assert torch.equal(stored, wanted)
        assert nbytes[0] == nbytes[1]


def train_bf16(rank: int, world: int) -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(40, 8, dtype=torch.bfloat16))
    wanted, squares = model[0].weight.detach().clone(), torch.zeros(40, 8)
    tables = rows.shard(model, optimizer=rows.Adagrad(lr=0.1))
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        ids, weights = (
            torch.randint(40, (2, 16), generator=g),
            torch.randint(-4, 5, (2, 16, 8), generator=g).bfloat16(),
        )
        out = model[0](ids[rank])
        assert out.dtype == torch.bfloat16 and torch.equal(out, wanted[ids[rank]])
        (out * weights[rank]).sum().backward()
        tables.step()
        mean = torch.zeros(40, 8).index_add_(0, ids.view(-1), weights.float().view(-1, 8)) / 2
        squares += mean**2
        touched = ids.unique()
        wanted[touched] = (wanted.float() - 0.1 * (mean / (squares.sqrt() + 1e-10)))[touched].bfloat16()
    keys = [
        torch.tensor(
            sorted(
                set(torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(s))[1 - rank].tolist())
            )
        )
        for s in range(3)
    ]
    table = rows.Table("0", 8, 40, torch.bfloat16)
    owned = sum(table.by_owner(k, world)[1][rank] for k in keys)
    return tables.gather_rows("0")[1], wanted, (tables.stats.row_nbytes, owned * 16 + tables.owned("0") * 16)


def test_modules_that_share_a_weight_are_one_table() -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"a": nn.Embedding(6, 2), "b": nn.Embedding(6, 2), "c": nn.Embedding(6, 2)})
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]
    before = model["a"].weight.detach().clone()
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    assert tables.names == ["a"]
    (model["a"](torch.tensor([1, 2])).sum() + model["b"](torch.tensor([2])).sum()).backward()
    tables.step()
    before[1] -= 1
    before[2] -= 2
    found = tables.gather()
    assert torch.equal(found["a"].weight, before)
    assert found["b"].weight is found["a"].weight and found["c"] is found["a"] is not found["b"]


def test_evaluation_only_reads(ranks: Any) -> None:
    assert ranks.run(2, evaluate) == [True, True]


def test_rows_that_were_pulled_to_read_are_pulled_anew_to_train() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(6, 2), "b": nn.Embedding(6, 2)})
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    ids = torch.tensor([1, 2])
    before = {name: table.weight.detach().clone() for name, table in tables.gather().items()}
    with torch.no_grad():
        tables.pull({"a": ids, "b": ids})
        read = model["a"](ids)
    trained = model["a"](ids)
    assert torch.equal(read, trained) and trained.requires_grad and not read.requires_grad
    trained.sum().backward()
    tables.step()
    tables.pull({"a": ids, "b": ids})
    model["b"].eval()
    assert not model["b"](ids).requires_grad
    (model["a"](ids).sum() + model["b"](ids).sum()).backward()
    tables.step()
    before["a"][ids] -= 1
    before["a"][ids] -= 1
    assert {name: table.weight.tolist() for name, table in tables.gather().items()} == {
        name: weight.tolist() for name, weight in before.items()
    }
    assert tables.stats.pulls == 3


def evaluate(rank: int, world: int) -> bool:
    model = model_of()
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    before = result(tables)
    with torch.no_grad():
        model(*batch(0)[:3])
    model.eval()
    assert not model(*batch(1)[:3])[0].requires_grad
    assert (tables.stats.pulls, tables.stats.pushes) == (6, 0)
    sent = tables.stats.gradient_nbytes
    tables.step()
    assert tables.stats.gradient_nbytes == sent == 0
    return same(result(tables), before)


def test_unbounded_tables_take_any_64_bit_key(ranks: Any) -> None:
    one, two = ranks.run(2, any_key)
    assert one[0].tolist() == two[0].tolist() == [-(2**63), -5, 0, 2**63 - 1]
    assert torch.equal(one[1], two[1])


def any_key(rank: int, world: int) -> Any:
    model = nn.Sequential(nn.Embedding(1, 2, device="meta"))
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0), unbounded=["0"], init=rows.Uniform(0.5))
    keys = torch.tensor([[-(2**63), 0, -5], [2**63 - 1, 0, 0]])[rank]
    start = model(keys).detach()
    model.zero_grad()
    tables.zero_grad()
    model(keys).sum().backward()
    tables.step()
    moved = start - model(keys).detach()
    assert torch.allclose(moved[keys != 0], torch.tensor(0.5)) and torch.allclose(
        moved[keys == 0], torch.tensor(1.5)
    )
    tables.zero_grad()
    return tables.gather_rows("0")


def test_a_step_may_be_left_out_and_its_rate_replaced() -> None:
    model = nn.Sequential(nn.Embedding(3, 1))
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    start = tables.gather()["0"].weight.detach()
    model(torch.tensor([1])).sum().backward()
    tables.zero_grad()
    tables.step()
    assert torch.equal(tables.gather()["0"].weight, start)
    model(torch.tensor([1])).sum().backward()
    tables.step(lr=0.25)
    assert torch.equal(start[1] - tables.gather()["0"].weight.detach()[1], torch.tensor([0.25]))


# ---- bytes


def test_traffic_is_counted_to_the_byte(ranks: Any) -> None:
    world = 3
    found = ranks.run(world, counted)
    table = {"user": rows.Table("user", 4), "item": rows.Table("item", 3)}
    for rank, stats in enumerate(found):
        asked = [keys_of(r, world) for r in range(world)]
        routes = {
            (r, name): table[name].by_owner(keys, world)[1]
            for r, each in enumerate(asked)
            for name, keys in each.items()
        }
        away = {name: sum(n for to, n in enumerate(routes[rank, name]) if to != rank) for name in table}
        served = {name: sum(routes[r, name][rank] for r in range(world) if r != rank) for name in table}
        widths = {"user": 4, "item": 3}
        assert stats["key_nbytes"] == 8 * sum(away.values())
        assert stats["row_nbytes"] == sum(4 * widths[name] * served[name] for name in table)
        assert stats["gradient_nbytes"] == sum(4 * widths[name] * away[name] for name in table)
        assert stats["header_nbytes"] == (world - 1) * 8 * (
            4 + 2 * 8
        )  # agreement; pull and push, of two tables
        assert stats["sent_nbytes"] == sum(
            stats[f"{kind}_nbytes"] for kind in ("key", "row", "gradient", "header")
        )
        assert stats["pulled"] == stats["pushed"] == sum(len(keys) for keys in asked[rank].values())
        assert stats["looked_up"] == 2 * 4 + 4 * 5
        assert (stats["pulls"], stats["pushes"]) == (1, 1)


def keys_of(rank: int, world: int) -> dict[str, Tensor]:
    user, other, items, _ = (t[part_of(rank, world, False)] for t in batch(0))
    return {"user": torch.cat([user, other]).unique(), "item": items.unique()}


def counted(rank: int, world: int) -> Any:
    model = model_of()
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    assert tables.stats.sent_nbytes == (world - 1) * 8 * 4
    train(model, tables, rank, world, range(1), pull=True)
    return tables.stats.as_dict()


def test_messages_of_megabytes_and_a_group_of_some_ranks_train_the_same_bits(ranks: Any) -> None:
    one, two, three = ranks.run(3, train_wide)
    alone = train_wide(0, 1)
    assert torch.equal(one[0], two[0]) and torch.equal(one[0], alone[0]) and three is None
    assert one[1] + two[1] > 2 * 2**20


def train_wide(rank: int, world: int) -> Any:
    group, members = None, 1
    if world > 1:
        group, members = dist.new_group([0, 1]), 2
        if rank == 2:
            return None
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(9000, 64))
    tables = rows.shard(model, optimizer=rows.RowAdagrad(lr=0.1), group=group)
    g = torch.Generator().manual_seed(9)
    ids, weights = torch.randint(9000, (8000,), generator=g), torch.randint(-8, 9, (8000, 64), generator=g)
    own = slice(rank, None, members)
    (members * (model(ids[own]) * weights[own]).sum()).backward()
    tables.step()
    return tables.gather()["0"].weight.detach(), tables.stats.row_nbytes + tables.stats.gradient_nbytes


def test_a_rank_that_dies_ends_the_others_with_one_sentence(ranks: Any) -> None:
    ranks.start(3, lose_rank_one)
    found = [ranks.result(rank) for rank in range(3)]
    ranks.close()
    assert found[1] == ("died", 3)
    for rank in (0, 2):
        assert found[rank][0] == "ok", found[rank]
        assert f"rank {rank} of 3 lost the exchange in a transfer of rows" in found[rank][1]
        assert "restart all ranks from the last checkpoint" in found[rank][1] and "\n" not in found[rank][1]


def lose_rank_one(rank: int, world: int) -> str:
    model = model_of()
    tables = rows.shard(model, optimizer=rows.SGD(lr=1.0))
    train(model, tables, rank, world, range(1))
    if rank == 1:
        os._exit(3)
    with pytest.raises(TransportError) as lost:
        train(model, tables, rank, world, range(1, 3))
    return str(lost.value)


def test_exact_sums_train_the_same_bits_in_whatever_order_ranks_have_the_batches(ranks: Any) -> None:
    found = ranks.run(3, train_in_two_orders)
    for exact, turned, in_order, in_other_order in found:
        assert torch.equal(exact, turned)
        assert not torch.equal(in_order, in_other_order)


def train_in_two_orders(rank: int, world: int) -> Any:
    def trained(adding: str, rank: int) -> Tensor:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Embedding(5, 64))
        tables = rows.shard(model, optimizer=rows.Adagrad(lr=0.1), adding=adding)
        for step in range(4):
            weights = torch.randn(world, 64, generator=torch.Generator().manual_seed(step)) * 10.0**-step
            (model(torch.tensor([1, 2])) * weights[rank]).sum().backward()
            tables.step()
        return tables.gather()["0"].weight.detach()

    dist.barrier()
    orders = (rank, (rank + 1) % world)
    return [trained(adding, r) for adding in ("exact", "rank order") for r in orders]
