"""Sparse gradients: any codec, any scheme, the bits of one process, and what is owed to a row stays with the row."""

import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from schemes.aggregators import Aggregator, strategy_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import own_state

import tacit
from tacit.errors import ConfigError, DivergenceError
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


@settings(deadline=None)  # the machine may be busy
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

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.users = nn.Embedding(50, 8, sparse=True, padding_idx=0)
        self.words = nn.EmbeddingBag(31, 4, mode="sum", sparse=True)
        self.seen, self.bought = (nn.Embedding(20, 8, sparse=True) for _ in range(2))
        self.bought.weight = self.seen.weight  # tied
        self.spare = nn.Embedding(9, 2, sparse=True)  # DDP wants every table in every step
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


def _steps(model, optimizers, ranks, steps=range(3)):
    """With the mean of the losses of `ranks`."""
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in ranks:
            (model(*_inputs(rank, step)) / len(ranks)).backward()
        for optimizer in optimizers:
            optimizer.step()


def _state(model):
    return {
        name.removeprefix("module.").removeprefix("_orig_mod."): p.detach().clone()
        for name, p in model.named_parameters()
    }


def _on_one_process(kind, world):
    model = Clicks()
    _steps(model, _optimizers(kind, model), range(world))
    return _state(model)


WRAPS = {
    "plain": lambda model: model,
    "ddp": DDP,
    "static ddp": partial(DDP, static_graph=True, gradient_as_bucket_view=True),
    "compiled": partial(torch.compile, backend="aot_eager"),
}


def _on_ranks(rank, world, wrap, who, kinds):
    found = {}
    for kind in kinds:
        model = WRAPS[wrap](Clicks())
        optimizers = _optimizers(kind, model)
        with tacit.attach(model, optimizers[0], who, bucket="200B", check_every=1):
            _steps(model, optimizers, [rank])
        found[kind] = _state(model)
    return found


def _assert_bits_of_one_process(found, kinds):
    for kind in kinds:
        expected = _on_one_process(kind, len(found))
        for name in expected:
            assert all(torch.equal(states[kind][name], expected[name]) for states in found), (kind, name)


@pytest.mark.parametrize(
    ("wrap", "who", "kinds"),
    [
        ("ddp", "sharded", ["momentum", "adam"]),
        ("plain", "allreduce", ["sgd", "momentum", "adagrad", "adam"]),
        ("compiled", "ring", ["sgd"]),
        ("static ddp", "server", ["sgd"]),
    ],
)
def test_with_whole_numbers_the_bits_are_those_of_one_process(ranks, wrap, who, kinds):
    world = 4 if who == "sharded" else 2
    _assert_bits_of_one_process(ranks.run(world, _on_ranks, wrap, f"none / {who}", kinds), kinds)


def test_through_the_aggregator_the_bits_are_the_same_too(ranks):
    aggregator, kinds = Aggregator(), ["sgd", "adagrad"]
    try:
        exact = ranks.run(2, _on_ranks, "ddp", strategy_of("none", aggregator.at), kinds)
        coded = ranks.run(2, _on_ranks, "ddp", strategy_of("thc", aggregator.at), kinds)
    finally:
        aggregator.close()
    _assert_bits_of_one_process(exact, kinds)
    sharded = ranks.run(2, _on_ranks, "ddp", "thc / sharded", kinds)
    for kind in kinds:
        for name in sharded[0][kind]:
            tables = [states[kind][name] for states in (*coded, *sharded)]
            assert all(torch.equal(tables[0], other) for other in tables)


class Learner(nn.Module):
    """A table, and a dense layer over the mean of five rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.EmbeddingBag(200, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, rank, step, rows=64):
        rng = torch.Generator().manual_seed(1000 * step + rank)
        x = (
            torch.rand(rows, 5, generator=rng) ** 2 * 200
        ).long()  # low rows are used often, high ones rarely
        likely = torch.sigmoid(2 * (x * 2654435761 % 101 > 50).float().sum(1, keepdim=True) - 5)
        clicked = (torch.rand(rows, 1, generator=rng) < likely).float()
        return nn.functional.binary_cross_entropy_with_logits(self.head(self.table(x)), clicked)


def _learned(rank, world, texts):
    found = {}
    for text in texts:
        model = DDP(Learner())
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        with tacit.attach(model, optimizer, text, check_every=10):
            _train(model, optimizer, rank, range(30))
        with torch.no_grad():
            found[text] = model(99, 99, rows=2000).item()
    return found


def test_lossy_codecs_train_to_the_loss_of_plain_numbers(ranks):
    texts = ["none", "int8", "int4", "ef(int4)", "hush", "thc", "ef(topk(0.25))"]
    first, second = ranks.run(2, _learned, texts)
    assert first == second
    assert first["none"] < 0.57  # of 0.70 at first; 0.68 is the best without a table
    assert all(loss < 1.05 * first["none"] for loss in first.values()), first


def _counted(rank, world, codecs):
    found = {}
    for codec in codecs:
        model, rows = DDP(nn.Embedding(1000, 8, sparse=True)), _rows(rank)
        with tacit.attach(model, None, f"{codec} / sharded", check_every=0) as handle:
            model(rows).sum().backward()
            found[codec] = len(rows.unique()), handle.stats.as_dict()
            model(rows[:0]).sum().backward()  # no rank uses any row
            assert handle.step == 2
    return found


def _rows(rank):
    return torch.randint(0, 1000, (200 * rank,), generator=torch.Generator().manual_seed(rank))


def test_the_bytes_that_leave_are_those_of_the_keys_and_of_the_unions_rows(ranks):
    found = ranks.run(4, _counted, ["none", "int4", "thc", "ef(topk)"])
    union = len(torch.cat([_rows(rank) for rank in range(4)]).unique())
    for codec in ("none", "int4"):
        stats = [rank[codec][1] for rank in found]
        sent = [each["sent_by_request"] for each in stats]
        assert sum(each["Sum"] for each in sent) == 2 * 3 * parse_codec(codec).nbytes(8 * union)
        for (rows, _), each in zip((rank[codec] for rank in found), sent, strict=True):
            assert each["Gather"] == 3 * (8 + keys_nbytes(rows, 1000))
        for each in stats:
            assert each["sent_nbytes"] == sum(each["sent_by_request"].values())
            assert (
                each["sent_by_group"]["0"]
                == each["sent_by_request"]["Sum"] + each["sent_by_request"]["Gather"]
            )
            assert each["elements"] == 8 * union


# ---- checkpoints


def _start(wrap):
    model = DDP(Learner()) if wrap == "ddp" else Learner()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return model, optimizer, tacit.attach(model, optimizer, "ef(int4(block=32)) / sharded", seed=5)


def _train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        model(rank, step).backward()
        optimizer.step()


def _killed(rank, world, wrap, path):
    model, optimizer, handle = _start(wrap)
    _train(model, optimizer, rank, range(3))
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tacit": handle.full_state_dict(),
    }
    torch.save(parts, f"{path}/{rank}.pt")
    _train(model, optimizer, rank, range(3, 6))
    torch.save((_state(model), own_state(handle)["memory"]), f"{path}/unbroken-{rank}.pt")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _resumed(rank, world, wrap, path):
    model, optimizer, handle = _start(wrap)
    kept = torch.load(f"{path}/{rank}.pt", weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    handle.load_state_dict(kept["tacit"])
    loaded = own_state(handle)["memory"]["residual"]
    _train(model, optimizer, rank, range(3, 6))
    return _state(model), own_state(handle)["memory"], loaded


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_a_killed_run_resumes_to_the_same_bits_and_in_another_world_by_the_rule(ranks, tmp_path, wrap):
    ranks.start(3, _killed, wrap, str(tmp_path))
    assert ranks.results(3) == [("died", -signal.SIGKILL)] * 3
    for rank, (state, memory, _) in enumerate(ranks.run(3, _resumed, wrap, str(tmp_path))):
        expected, kept = torch.load(f"{tmp_path}/unbroken-{rank}.pt", weights_only=True)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert all(torch.equal(memory["residual"][name], owed) for name, owed in kept["residual"].items())
    saved = torch.load(f"{tmp_path}/0.pt", weights_only=True)["tacit"]["ranks"]
    owed = torch.stack([state["memory"]["residual"]["table.weight"] for state in saved])
    assert owed.shape == (3, 200 * 8) and (owed.abs().amax(1) > 0).all()
    found = ranks.run(2, _resumed, wrap, str(tmp_path))
    for state, _, loaded in found:
        torch.testing.assert_close(loaded["table.weight"], owed.mean(0), rtol=1e-6, atol=1e-9)
        assert all(torch.equal(state[name], tensor) for name, tensor in found[0][0].items())


# ---- edges


def _used_by_some(rank, world, wrap):
    """A table that rank 1 looks nothing up in, and one that nobody uses in the second step."""
    model = Clicks()
    handle = tacit.attach(model, None, "ef(int4(rounding=nearest))", check_every=1)
    users, words, offsets, seen, x, scale = _inputs(rank, 0)
    model(users, words, offsets, seen, x, scale, spare=False).backward()
    never, owed = model.spare.weight.grad, own_state(handle)["memory"]["residual"]["words.weight"]
    model.zero_grad()
    loss = model.seen(seen + 1).sum() if rank == 0 else model.head(x).sum()
    loss.backward()
    kept = own_state(handle)["memory"]["residual"]["words.weight"]
    nobodys = model.users.weight.grad
    return never, owed, kept, nobodys, model.seen.weight.grad, model.bought.weight is model.seen.weight


def test_plain_modules_take_tables_that_few_ranks_or_none_use(ranks):
    found = ranks.run(2, _used_by_some, "plain")
    for never, owed, kept, nobodys, seen, tied in found:
        assert never is None and nobodys is None and tied
        assert owed.abs().max() > 0 and torch.equal(owed, kept)
        assert seen.is_coalesced() and torch.equal(seen.to_dense(), found[0][4].to_dense())
    lost = 1 + _inputs(0, 0)[3].max()  # rank 1 has used no row
    assert found[0][4].indices().max() <= lost


def _accumulated(rank, world, wrap):
    model = DDP(Clicks()) if wrap == "ddp" else Clicks()
    handle = tacit.attach(model, None, "none")
    with handle.no_sync():
        model(*_inputs(rank, 0)).backward()
    silent = handle.stats.sent_nbytes
    model(*_inputs(rank, 2)).backward()
    got = {name.removeprefix("module."): p.grad.to_dense().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    model(*_inputs(rank, 3)).backward()
    model.zero_grad()
    handle.close()
    if wrap == "ddp":  # as DDP does by itself
        model(*_inputs(rank, 0)).backward()
        return silent, got, model.module.users.weight.grad.to_dense()
    return silent, got, None


def test_no_sync_accumulates_rows_in_silence_and_ddp_goes_on_after_close(ranks):
    reference = Clicks()
    for rank, step in ((0, 0), (1, 0), (0, 2), (1, 2)):
        (reference(*_inputs(rank, step)) / 2).backward()
    expected = {name: p.grad.to_dense() for name, p in reference.named_parameters()}
    reference.zero_grad()
    for rank in range(2):
        (reference(*_inputs(rank, 0)) / 2).backward()
    for wrap in ("ddp", "plain"):
        for silent, got, after in ranks.run(2, _accumulated, wrap):
            assert silent == 0 and all(torch.equal(got[name], grad) for name, grad in expected.items())
            assert after is None or torch.equal(after, reference.users.weight.grad.to_dense())


def _low_precision(rank, world, texts):
    return [_low_precision_gradient(rank, text) for text in texts]


def _low_precision_gradient(rank, text):
    table = DDP(nn.Embedding(40, 8, sparse=True, dtype=torch.bfloat16))
    with tacit.attach(table, None, text):
        (
            table(_inputs(rank, 0)[0]) * torch.randn(8, generator=torch.Generator().manual_seed(rank))
        ).sum().backward()
    return table.module.weight.grad


def test_tables_of_16_bits_keep_their_dtype_and_repeated_rows_are_rounded_once(ranks):
    table = nn.Embedding(40, 8, sparse=True)
    for rank in range(2):
        scale = torch.randn(8, generator=torch.Generator().manual_seed(rank))
        ((table(_inputs(rank, 0)[0]) * scale.bfloat16()).sum() / 2).backward()
    expected = table.weight.grad.to_dense()
    found = ranks.run(2, _low_precision, ["none / sharded", "int8"])
    for limit, first, second in zip((0.005, 0.02), *found, strict=True):
        assert first.dtype == torch.bfloat16 and torch.equal(first.to_dense(), second.to_dense())
        assert (first.to_dense().float() - expected).norm() < limit * expected.norm()


def _not_finite(rank, world):
    model = DDP(Clicks())
    handle = tacit.attach(model, None, "none")
    inputs = list(_inputs(rank, 0))
    inputs[-1] = inputs[-1] * (torch.nan if rank == 1 else 1)  # `scale`, of two tables
    model(*inputs).backward()
    return handle.stats.as_dict()["nonfinite"]


def test_what_is_not_finite_is_reported_with_its_table(ranks):
    assert ranks.run(2, _not_finite) == [{"users.weight": 1, "seen.weight": 1}] * 2


def _diverged(rank, world):
    model = Clicks()
    tacit.attach(model, None, "int8", check_every=1)
    model(*_inputs(rank, 0)).backward()
    with torch.no_grad():
        model.words.weight[30] += rank
    with pytest.raises(DivergenceError, match="'words.weight'"):
        model(*_inputs(rank, 1)).backward()


def test_tables_that_differ_between_ranks_are_found(ranks):
    ranks.run(2, _diverged)


def _merged(rank, world, text):
    model = Clicks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    handle = tacit.attach(model, optimizer, text)
    _steps(model, [optimizer], [rank])
    handle.merge()
    handle.close()
    return _state(model)


@pytest.mark.parametrize("text", ["local(2) / none", "local(2, after=2) / none", "local(1) / none / gossip"])
def test_rules_that_merge_models_and_gossip_take_sparse_tables(ranks, text):
    first, second = ranks.run(2, _merged, text)
    assert all(torch.equal(first[name], second[name]) for name in first)
    if "gossip" in text:  # who met when is not the same in two runs
        assert not torch.equal(first["users.weight"], Clicks().users.weight)
    else:  # gradients that do not depend on the weights add up to plain SGD's
        for name, tensor in _on_one_process("sgd", 2).items():
            torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=1e-5)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight


class Hidden(nn.Module):
    """Uses one parameter in the other's way."""

    def __init__(self, sparse):
        super().__init__()
        self.table, self.weight = nn.Embedding(7, 4, sparse=True), nn.Parameter(torch.zeros(7, 4))
        self.sparse = sparse

    def forward(self, x):
        if self.sparse:
            return nn.functional.embedding(x, self.weight, sparse=True).sum() + self.table(x).sum()
        return self.table.weight.sum()


def _refused(rank, world):
    errors = []

    def caught(act):
        with pytest.raises(ConfigError) as found:
            act()
        errors.append(str(found.value))

    caught(lambda: tacit.attach(Shared(), None, "none"))
    late = DDP(nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)))
    late.module[1].bias.requires_grad_(False)
    caught(lambda: tacit.attach(late, None, "none"))
    sharded = fully_shard(nn.Sequential(nn.Embedding(7, 4, sparse=True)))
    caught(lambda: tacit.attach(sharded, None, "none"))
    for sparse in (True, False):
        model = Hidden(sparse)
        tacit.attach(model, None, "none")
        caught(model(torch.tensor([1, 2])).backward)
    frozen = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 1))
    frozen[0].weight.requires_grad_(False)
    with tacit.attach(DDP(frozen), None, "none") as handle:  # which is left alone
        assert handle.numels == {"1.weight": 4, "1.bias": 1}
    return errors


def test_what_cannot_be_exchanged_is_refused_in_one_sentence(ranks):
    for shared, late, sharded, functional, dense in ranks.run(2, _refused):
        assert "'table.weight' has sparse gradients and is shared with Linear" in shared
        assert (
            "built for 3 trainable parameters of 192 bytes and the model has 2 of 176" in late
            and "build DDP(model) again" in late
        )
        assert "FSDP2" in sharded and "sparse=False, or use DDP or a plain module" in sharded
        assert "'weight' has a sparse gradient and belongs to no nn.Embedding" in functional
        assert "'table.weight' was built with sparse=True and has a dense gradient" in dense
