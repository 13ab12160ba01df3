"""DDP under tacit, in real processes over gloo."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import WIDTH, batch, deep, flat, gradients, loss_of, own_state, train

import tacit
from tacit.errors import ConfigError

SMALL = {"bucket": "20kB"}
EXACT = ["every / none / allreduce", "every / none / sharded"]
CODED = [
    "every / bf16 / allreduce",
    "every / fp16 / sharded",
    "every / int8 / sharded",
    "every / ef(int4) / sharded",
]


def _grads_after_one_backward(rank, world, text, steps=1):
    model = DDP(deep(), bucket_cap_mb=0.03)
    handle = tacit.attach(model, None, text, **SMALL) if text else None
    for step in range(steps):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    buckets = len(handle._attachment._backward.buckets) if handle else 0
    return gradients(model), buckets, handle and handle.stats.as_dict()


@pytest.mark.parametrize("text", EXACT)
def test_without_a_codec_gradients_equal_plain_ddp_before_and_after_the_bucket_rebuild(ranks, text):
    for steps in (1, 3):  # DDP rebuilds its buckets after the first step
        plain = ranks.known(4, _grads_after_one_backward, None, steps)
        tacit_ = ranks.run(4, _grads_after_one_backward, text, steps)
        for (expected, _, _), (got, buckets, _) in zip(plain, tacit_, strict=True):
            assert buckets >= 5
            for name in expected:
                torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-7)


def _watched(attachment):
    """Whether each bucket that leaves from now on lies in DDP's memory."""
    lies, buffers, take, reduce = [], [], attachment.take, attachment.exchange.reduce

    def taken(bucket):
        buffers.append(bucket.buffer().untyped_storage().data_ptr())
        return take(bucket)

    def reduced(bucket, x, *args, **options):
        lies.append(x.untyped_storage().data_ptr() in buffers)
        return reduce(bucket, x, *args, **options)

    attachment.take, attachment.exchange.reduce = taken, reduced
    return lies


def _reduced_where_it_lies(rank, world, text):
    def start(views):
        model = DDP(deep(), bucket_cap_mb=0.03, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, optimizer, tacit.attach(model, optimizer, text, bucket="40kB")

    found = []
    for views in (False, True):
        model, optimizer, handle = start(views)
        lies = _watched(handle._attachment)
        train(model, optimizer, rank, range(3))
        state, weights = own_state(handle), {k: v.clone() for k, v in model.state_dict().items()}
        train(model, optimizer, rank, range(3, 6))
        last = lies[-len(handle._attachment._backward.buckets) :]
        resumed, again, other = start(views)
        resumed.load_state_dict(weights)
        other.load_state_dict(state)
        train(resumed, again, rank, range(3, 6))
        found.append((flat(model), flat(resumed), last, state["cut"]))
    return found


@pytest.mark.parametrize("text", ["every / none / allreduce", "every / bf16 / allreduce"])
def test_buckets_as_large_as_ddps_are_reduced_where_they_lie_and_resume_to_the_same_bits(ranks, text):
    """Among three ranks the order of additions shows, and the first step after a start has other buckets of DDP's."""
    found = ranks.run(3, _reduced_where_it_lies, text)
    for rank in found:
        for whole, resumed, lies, cut in rank:
            assert torch.equal(whole, resumed) and torch.equal(whole, found[0][0][0])
            assert lies and all(lies)
            assert cut == [31457, 31457]


def _not_finite_on_rank_1(rank, world, text, views):
    model = DDP(deep(), bucket_cap_mb=0.03, gradient_as_bucket_view=views)
    handle = tacit.attach(model, None, text, bucket="40kB")
    said: list[str] = []
    found = handle.stats.found_nonfinite
    handle.stats.found_nonfinite = lambda names, step, source: (
        said.append(source),
        found(names, step, source),
    )
    for step in range(3):
        model.zero_grad()
        loss = loss_of(model, rank, step)
        (loss * float("nan") if step == 2 and rank == 1 else loss).backward()
    return said, dict(handle.stats.nonfinite)


@pytest.mark.parametrize("views", [False, True])
def test_what_is_not_finite_is_traced_to_its_rank_though_it_was_summed_in_place(ranks, views):
    found = ranks.run(3, _not_finite_on_rank_1, "every / none / allreduce", views)
    for rank, (said, names) in enumerate(found):
        assert said and len(names) == 18
        assert all(("this rank's own" in one) == (rank == 1) for one in said)


@pytest.mark.parametrize("text", CODED)
def test_with_a_codec_all_ranks_hold_the_same_bits_near_the_true_mean(ranks, text):
    plain = ranks.known(4, _grads_after_one_backward, None, 2)
    coded = ranks.run(4, _grads_after_one_backward, text, 2)
    limit = 0.4 if "int4" in text else 0.05
    expected = torch.cat([g.flatten() for g in plain[0][0].values()])
    got = [torch.cat([g.flatten() for g in found[0].values()]) for found in coded]
    assert all(torch.equal(got[0], other) for other in got)
    assert (got[0] - expected).norm() / expected.norm() < limit


def _trained(rank, world, text, kind):
    model = deep()
    if kind == "compile inside":
        model = torch.compile(model, backend="aot_eager")
    model = DDP(model)
    if kind == "compile outside":
        model = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    tacit.attach(model, optimizer, text, **SMALL)
    first = loss_of(model, rank, 0).item()
    last = train(model, optimizer, rank, range(40))
    return flat(model), first, last


@pytest.mark.parametrize("kind", ["eager", "compile inside", "compile outside"])
def test_training_lowers_the_loss_with_and_without_compile(ranks, kind):
    found = ranks.run(2, _trained, "int8", kind)
    assert torch.equal(found[0][0], found[1][0])
    assert all(last < 0.5 * first for _, first, last in found)


def _accumulated(rank, world, text):
    model = DDP(deep(), bucket_cap_mb=0.03)
    handle = tacit.attach(model, None, text, **SMALL) if text else None
    with model.no_sync():
        loss_of(model, rank, 0).backward()
        before = handle.stats.sent_nbytes if handle else 0
    loss_of(model, rank, 1).backward()
    return gradients(model), before


def test_no_sync_accumulates_without_sending(ranks):
    plain, coded = ranks.run(2, _accumulated, None), ranks.run(2, _accumulated, "none / sharded")
    assert coded[0][1] == 0
    for name, expected in plain[0][0].items():
        torch.testing.assert_close(coded[0][0][name], expected, rtol=1e-5, atol=1e-7)


class Branches(nn.Module):
    """Uses `a` on even ranks, `b` on odd ones, `never` nowhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.never = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x, rank):
        return self.head((self.a if rank % 2 == 0 else self.b)(x))


def _unused(rank, world, text, wrap):
    model = Branches()
    if wrap == "ddp":
        model = DDP(model, find_unused_parameters=True)
    if text:
        tacit.attach(model, None, text, bucket="1kB")
    for step in range(3):
        model.zero_grad(set_to_none=True)
        x, label = batch(rank, step)
        nn.functional.cross_entropy(model(x, rank), label).backward()
    return gradients(model)


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_unused_parameters_behave_as_in_plain_ddp(ranks, wrap):
    plain, coded = ranks.known(2, _unused, None, "ddp"), ranks.run(2, _unused, "none / sharded", wrap)
    for expected, got in zip(plain, coded, strict=True):
        assert got["never.weight"] is None and expected["never.weight"] is None
        for name in ("a.weight", "b.weight", "head.weight"):
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-7)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.low = nn.Linear(WIDTH, 32, dtype=torch.bfloat16)
        self.high = nn.Linear(32, 4)
        self.empty = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.high(self.low(x.bfloat16()).float()) * self.one + self.empty.sum()


def _mixed(rank, world, text, wrap):
    model = DDP(Mixed()) if wrap == "ddp" else Mixed()
    handle = tacit.attach(model, None, text, bucket="1kB") if text else None
    for step in range(3):
        model.zero_grad()
        x, label = batch(rank, step)
        nn.functional.cross_entropy(model(x), label).backward()
    dtypes = {n: str(p.grad.dtype) for n, p in model.named_parameters()}
    return gradients(model), dtypes, handle and handle.stats.as_dict()["sent_nbytes"]


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
@pytest.mark.parametrize("text", ["none / allreduce", "none / sharded", "int8", "ef(int8)"])
def test_mixed_dtypes_and_empty_and_single_elements_travel(ranks, wrap, text):
    plain, coded = ranks.known(3, _mixed, None, "ddp"), ranks.run(3, _mixed, text, wrap)
    for (expected, kinds, _), (got, dtypes, sent) in zip(plain, coded, strict=True):
        assert set(dtypes.values()) == set(kinds.values()) == {"torch.bfloat16", "torch.float32"}
        assert sent > 0 and got["empty"].numel() == 0
        for name in expected:
            torch.testing.assert_close(got[name].float(), expected[name].float(), rtol=0.05, atol=0.01)


def _clipped(rank, world, wrap):
    model = DDP(deep()) if wrap != "plain" else deep()
    if wrap != "ddp without tacit":
        tacit.attach(model, None, "none / sharded")
    loss_of(model, rank, 0).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return norm.item(), gradients(model)


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_clipping_sees_the_mean_gradient(ranks, wrap):
    plain, coded = ranks.known(2, _clipped, "ddp without tacit"), ranks.run(2, _clipped, wrap)
    assert coded[0][0] == coded[1][0] == pytest.approx(plain[0][0], rel=1e-5)
    torch.testing.assert_close(coded[0][1]["8.weight"], plain[0][1]["8.weight"], rtol=1e-4, atol=1e-8)


def _two_models(rank, world):
    one, two = DDP(deep(seed=1)), DDP(deep(seed=2), bucket_cap_mb=0.03)
    first = tacit.attach(one, None, "int8", **SMALL)
    second = tacit.attach(two, None, "ef(int4)", bucket="9kB")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    for step in range(10):
        x, label = batch(rank, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = one(x) + two(x)  # one graph through both
        nn.functional.cross_entropy(out, label).backward()
        dist.all_reduce(torch.ones(3))  # the user's own collectives do not mix with tacit's
        for optimizer in optimizers:
            optimizer.step()
    return flat(one), flat(two), first.stats.sent_nbytes, second.stats.sent_nbytes


def test_two_models_in_one_process_do_not_mix(ranks):
    found = ranks.run(3, _two_models)
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0]) and torch.equal(found[0][1], other[1])
    assert found[0][2] > found[0][3] > 0


def _static_graph(rank, world):
    model = DDP(deep(), static_graph=True, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tacit.attach(model, optimizer, "int8", **SMALL)
    train(model, optimizer, rank, range(4))
    return flat(model)


def test_static_graphs_and_bucket_views_work(ranks):
    found = ranks.run(2, _static_graph)
    assert torch.equal(found[0], found[1])


def _closed(rank, world):
    model = DDP(deep())
    handle = tacit.attach(model, None, "int4", **SMALL)
    loss_of(model, rank, 0).backward()
    handle.close()
    handle.close()
    sent = handle.stats.sent_nbytes
    model.zero_grad()
    loss_of(model, rank, 1).backward()
    with pytest.raises(ConfigError, match="already has a communication hook"):
        tacit.attach(model, None, "int8")
    return gradients(model), sent == handle.stats.sent_nbytes


def _plain(rank, world):
    model = DDP(deep())
    loss_of(model, rank, 1).backward()
    return gradients(model)


def test_after_close_the_model_is_plain_ddp_again(ranks):
    closed, plain = ranks.run(2, _closed), ranks.run(2, _plain)
    assert all(silent for _, silent in closed)
    torch.testing.assert_close(closed[0][0], plain[0])


def _alone(rank, world):
    model = DDP(deep())
    handle = tacit.attach(model, None, "int4")
    loss_of(model, rank, 0).backward()
    handle.load_state_dict(handle.state_dict())
    alone = deep()
    loss_of(alone, rank, 0).backward()
    return gradients(model), gradients(alone), handle.stats.sent_nbytes


def test_a_world_of_one_has_nothing_to_say(ranks):
    [(got, expected, sent)] = ranks.run(1, _alone)
    assert sent == 0
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = deep(), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


def _checkpointed(rank, world, text, reentrant):
    model = DDP(Checkpointed(reentrant), bucket_cap_mb=0.02)
    handle = tacit.attach(model, None, text, **SMALL) if text else None
    for step in range(3):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    return gradients(model), handle and handle.step


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_of_both_kinds_work(ranks, reentrant):
    plain, got = (
        ranks.run(2, _checkpointed, None, reentrant),
        ranks.run(2, _checkpointed, "none / sharded", reentrant),
    )
    torch.testing.assert_close(got[0][0], plain[0][0], rtol=1e-4, atol=1e-6)
    assert got[0][1] == 3


def _ignoring(rank, world, text):
    model = deep()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["3.0.weight"])
    model = DDP(model)
    model.module[0][0].bias.requires_grad_(False)
    model.module[0][0].bias.requires_grad_(True)
    if text:
        tacit.attach(model, None, text, **SMALL)
    loss_of(model, rank, 0).backward()
    return gradients(model)


def test_parameters_that_ddp_ignores_are_left_alone(ranks):
    plain, got = ranks.run(2, _ignoring, None), ranks.run(2, _ignoring, "none / sharded")
    for expected, found in zip(plain, got, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def _doubles(rank, world, text):
    model = DDP(deep(dtype=torch.float64))
    tacit.attach(model, None, text, **SMALL)
    loss_of(model, rank, 0).backward()
    return next(model.parameters()).grad


@pytest.mark.parametrize("text", ["none / sharded", "fp16", "ef(int8)"])
def test_double_precision_parameters_travel(ranks, text):
    found = ranks.run(2, _doubles, text)
    assert found[0].dtype == torch.float64 and torch.equal(found[0], found[1])


def _twice(rank, world, wrap):
    model = DDP(deep()) if wrap == "ddp" else deep()
    first = tacit.attach(model, None, "int8")
    with pytest.raises(ConfigError, match="already has the strategy 'every / int8"):
        tacit.attach(model, None, "int4")
    first.close()
    with pytest.raises(ConfigError, match="closed"):
        first.full_state_dict()
    if wrap == "plain":
        tacit.attach(model, None, "int4").close()


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
def test_a_model_has_one_handle_at_a_time(ranks, wrap):
    ranks.run(2, _twice, wrap)


def _many(rank, world):
    model = deep(layers=1)
    tacit.attach(model, None, "int8").close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        tacit.attach(model, None, "int8").close()
    return len(list(Path("/proc/self/fd").iterdir())) - before


def test_a_closed_handle_leaves_no_sockets_behind(ranks):
    assert all(left <= 2 for left in ranks.run(2, _many))
