"""Sparse gradients: any codec, any scheme, the bits of one process, and what is owed to a row stays with the row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schemes.aggregators import Aggregator, strategy_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.errors import ConfigError
from tacit.layout import Layout
from tacit.memory import MemoryStore
from tacit.requests import Payload, loop_back
from tacit.sparse import TouchedRows, keys_nbytes, pack_keys, unpack_keys
from tacit.strategy import parse_codec

TABLES = Layout.of({"a": (40, 4), "b": (12, 3)}, outer={"a", "b"})
CPU = torch.device("cpu")


class OverRows:
    """A codec of COO gradients for the loop-back driver: `inner` over the rows that some rank has."""

    def __init__(self, inner, observed=None):
        self.inner, self.observed = inner, [] if observed is None else observed
        self.traits = tacit.Traits(rounds=1 + inner.traits.rounds, summable=False)

    def reduce(self, gradients, context):
        touched = TouchedRows(context.layout, gradients)
        reduced = yield from touched.talk(self.inner, context)
        self.observed.append(touched)
        return reduced


def _coo(rows, values, shape):
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, shape, check_invariants=False
    )


def _gradients(seed, rows_a, rows_b):
    rng = torch.Generator().manual_seed(seed)
    return [
        _coo(rows_a, torch.randn(len(rows_a), 4, generator=rng), (40, 4)),
        _coo(rows_b, torch.randn(len(rows_b), 3, generator=rng), (12, 3)),
    ]


def _exchanged(codec, ranks_gradients, stores=None, step=0):
    """What the ranks of one process end with: (touched, reduced) each."""
    stores = [MemoryStore() for _ in ranks_gradients] if stores is None else stores
    over = OverRows(parse_codec(codec))
    ends = loop_back(over, ranks_gradients, memories=[s.of(TABLES, CPU) for s in stores], step=step)
    return list(zip(over.observed, ends, strict=True))


def _sum(ranks_gradients):
    return [sum(table.to_dense() for table in tables) for tables in zip(*ranks_gradients, strict=True)]


ROWS = [([3, 7, 3, 39], [0, 11]), ([7, 8], []), ([], []), ([0, 39], [5, 5, 5])]


def test_the_total_is_the_coalesced_sum_over_the_union_of_rows():
    own = [_gradients(rank, *rows) for rank, rows in enumerate(ROWS)]
    for touched, reduced in _exchanged("none", own):
        assert [rows.tolist() for rows in touched.rows] == [[0, 3, 7, 8, 39], [0, 5, 11]]
        assert touched.layout.shapes == {"a": (5, 4), "b": (3, 3)}
        for total, expected in zip(touched.split(reduced.total), _sum(own), strict=True):
            assert total.is_coalesced()
            torch.testing.assert_close(total.to_dense(), expected, rtol=1e-6, atol=1e-6)


def test_a_step_in_which_no_rank_used_a_row_is_empty_for_every_codec():
    own = [_gradients(0, [], []) for _ in range(2)]
    for codec in (
        "none",
        "bf16",
        "int8",
        "ef(int4)",
        "thc",
        "hush",
        "topk",
        "lowrank",
        "by_shape(matrix=int4, rest=none)",
    ):
        for touched, reduced in _exchanged(codec, own):
            assert [part._nnz() for part in touched.split(reduced.total)] == [0, 0]


def test_what_is_owed_to_rows_that_nobody_uses_stays_and_is_sent_when_they_are_used_again():
    stores = [MemoryStore() for _ in range(2)]
    first = [_gradients(rank, [3, 7], [1]) for rank in range(2)]
    ((touched, reduced), _) = _exchanged("ef(int4(rounding=nearest))", first, stores)
    owed = sum(store.state()["residual"]["a"].view(40, 4) for store in stores)
    sent = touched.split(reduced.total)[0].to_dense()
    torch.testing.assert_close(sent + owed, _sum(first)[0], rtol=1e-5, atol=1e-6)
    assert owed[3].abs().max() > 0 and owed[[r for r in range(40) if r not in (3, 7)]].abs().max() == 0
    second = [_gradients(10 + rank, [7, 20], []) for rank in range(2)]
    ((touched, reduced), _) = _exchanged("ef(int4(rounding=nearest))", second, stores, step=1)
    left = sum(store.state()["residual"]["a"].view(40, 4) for store in stores)
    assert torch.equal(left[3], owed[3])  # nobody used it
    sent = touched.split(reduced.total)[0].to_dense()
    torch.testing.assert_close(sent[7] + left[7], _sum(second)[0][7] + owed[7], rtol=1e-5, atol=1e-6)


def _table_of_rank_one(seed, count):
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randperm(400, generator=rng)[:count].tolist()
    return [_coo(rows, torch.randn(count, 1, generator=rng) * torch.ones(32), (400, 32))]


@pytest.mark.parametrize(
    ("codec", "limit", "kept"),
    [
        ("lowrank(4)", 0.1, {"residual"}),  # a table travels with `rest`
        ("lowrank(4, embeddings=True)", 0.2, {"residual", "q"}),
        ("by_shape(matrix=int8, rest=none)", 0.01, set()),
    ],
)
def test_low_rank_and_by_shape_take_tables_of_any_number_of_rows(codec, limit, kept):
    tables = Layout.of({"a": (400, 32)}, outer={"a"})
    stores = [MemoryStore() for _ in range(2)]
    for step, count in enumerate((150, 90)):
        own = [_table_of_rank_one(10 * step + rank, count) for rank in range(2)]
        over = OverRows(parse_codec(codec))
        owed = (
            sum(s.of(tables, CPU).vector("residual") for s in stores).view(400, 32)
            if "residual" in kept
            else 0
        )
        ends = loop_back(over, own, memories=[store.of(tables, CPU) for store in stores], step=step)
        (total,) = over.observed[0].split(ends[0].total)
        wanted = (_sum(own)[0] + owed) * (total.to_dense().abs().amax(1, keepdim=True) > 0)
        assert (total.to_dense() - wanted).norm() / wanted.norm() < limit
    assert set(stores[0].state()) == kept


class NumberARow:
    """Keeps one number a row as a tensor, which rows that change in every step cannot have."""

    traits = tacit.Traits(rounds=1, summable=True)

    def reduce(self, x, context):
        for span in context.layout.spans:
            context.memory.tensor("age", span.name, span.shape[:1], rule="first").add_(1)
        payload = Payload.dense(x)
        return (yield tacit.Sum(payload)).reduced(payload)


def test_a_codec_that_keeps_a_tensor_of_as_many_rows_is_refused():
    stores = [MemoryStore()]
    tables = Layout.of({"a": (400, 32)})

    def step(count):
        memories = [store.of(tables, CPU) for store in stores]
        loop_back(OverRows(NumberARow()), [_table_of_rank_one(0, count)], memories=memories)

    step(5)
    with pytest.raises(ConfigError, match=r"'age' of table 'a' has another shape .* sparse=False"):
        step(6)


@given(st.integers(1, 2**40), st.lists(st.integers(0, 2**40), max_size=50))
def test_keys_are_packed_and_unpacked_and_are_as_long_as_declared(count, numbers):
    keys = torch.tensor(sorted({number % count for number in numbers}), dtype=torch.int64)
    packed = pack_keys(keys, count)
    assert torch.equal(unpack_keys(packed, count), keys)
    assert packed.numel() == keys_nbytes(len(keys), count) < 80 + 8 * len(keys)


@pytest.mark.parametrize(
    ("count", "share", "bits"), [(10_000, 0.3, 4.4), (5_000_000, 0.008, 9.6), (5_000_000, 1e-5, 20)]
)
def test_a_key_takes_few_bits(count, share, bits):
    assert 8 * keys_nbytes(int(share * count), count) / (share * count) < bits


# ---- real ranks


class Clicks(nn.Module):
    """Tables of every kind. With whole numbers in, all gradients are whole numbers, whatever the weights."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(2)
        self.users = nn.Embedding(50, 8, sparse=True, padding_idx=0, dtype=dtype)
        self.words = nn.EmbeddingBag(31, 4, mode="sum", sparse=True, dtype=dtype)
        self.seen, self.bought = (nn.Embedding(20, 8, sparse=True, dtype=dtype) for _ in range(2))
        self.bought.weight = self.seen.weight  # tied
        self.spare = nn.Embedding(9, 2, sparse=True, dtype=dtype)  # DDP wants every table in every step
        self.head = nn.Linear(8, 3)
        with torch.no_grad():  # of few bits, so that sums of steps are exact in any order
            for parameter in self.parameters():
                parameter.mul_(16).round_().div_(16)

    def forward(self, users, words, offsets, seen, x, scale, spare=True):
        found = (self.users(users) * scale).sum() + 2 * self.words(words, offsets).sum()
        found = found + (self.seen(seen) * scale).sum() - self.bought(seen // 2).sum() + self.seen(seen).sum()
        found = found + self.head(x).sum()
        return found + self.spare(seen[:0]).sum() if spare else found


def _inputs(rank, step):
    """Whole numbers. Rank 1 has nothing to look up in step 1, and no rank uses the upper rows of a table."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    count = 0 if (rank, step) == (1, 1) else 12 + rank

    def look_up(rows):
        return torch.randint(0, rows, (count,), generator=rng)

    offsets = torch.arange(0, count, 3)
    x = torch.randint(-3, 4, (2, 8), generator=rng).float()
    scale = torch.randint(-4, 5, (8,), generator=rng).float()
    return look_up(40), look_up(25), offsets, look_up(17), x, scale


def _optimizers(kind, model):
    tables = [p for name, p in model.named_parameters() if "head" not in name]
    rest = [p for name, p in model.named_parameters() if "head" in name]
    made = {
        "sgd": lambda: [torch.optim.SGD(model.parameters(), lr=0.25)],
        "momentum": lambda: [torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)],
        "adagrad": lambda: [torch.optim.Adagrad(model.parameters(), lr=0.25)],
        "adam": lambda: [torch.optim.SparseAdam(tables, lr=0.25), torch.optim.Adam(rest, lr=0.25)],
    }
    return made[kind]()


def _steps(model, optimizers, ranks, steps=range(4)):
    """With the mean of the losses of `ranks`."""
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in ranks:
            (model(*_inputs(rank, step)) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()


def _state(model):
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def _on_one_process(kind, world):
    model = Clicks()
    _steps(model, _optimizers(kind, model), range(world))
    return _state(model)


def _on_ranks(rank, world, wrap, text, kinds):
    found = {}
    for kind in kinds:
        model = DDP(Clicks()) if wrap == "ddp" else Clicks()
        optimizers = _optimizers(kind, model)
        with tacit.attach(model, optimizers[0], text, bucket="200B", check_every=1):
            _steps(model, optimizers, [rank])
        found[kind] = _state(model)
    return found


KINDS = ["sgd", "momentum", "adagrad", "adam"]


def _assert_bits_of_one_process(found, kinds):
    for kind in kinds:
        expected = _on_one_process(kind, len(found))
        for name in expected:
            assert all(torch.equal(states[kind][name], expected[name]) for states in found), (kind, name)


@pytest.mark.parametrize(("wrap", "who"), [("ddp", "sharded"), ("plain", "allreduce")])
def test_with_whole_numbers_the_bits_are_those_of_one_process(ranks, wrap, who):
    _assert_bits_of_one_process(ranks.run(4, _on_ranks, wrap, f"none / {who}", KINDS), KINDS)


def test_through_the_aggregator_too(ranks):
    aggregator = Aggregator()
    try:
        found = ranks.run(2, _on_ranks, "ddp", strategy_of("none", aggregator.at), ["sgd", "adagrad"])
    finally:
        aggregator.close()
    _assert_bits_of_one_process(found, ["sgd", "adagrad"])
