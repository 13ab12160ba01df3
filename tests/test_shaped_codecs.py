"""Codecs that use shapes in real trainings: DDP in several buckets, FSDP2, resumed, in another world."""

import copy

import pytest
import rank_one  # noqa: F401  registers rank1, in the rank processes too
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep, loss_of, own_state, train

import tacit
from tacit.errors import PairingError

STEPS = 4
TEXTS = ["rank1 / allreduce", "ef(rank1) / sharded", "lowrank(2)", "lowrank(2, p=hush, q=hush, rest=hush)"]


AUTO = "lowrank(rank=auto, refresh=1)"  # ranks move in every step, where a bucket has several matrices


def _start(wrap, text):
    model, bucket = deep(), "60kB" if text == AUTO else "20kB"
    if wrap == "fsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in list(model)[:-1] if text != AUTO else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif wrap == "ddp":
        model = DDP(model, bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, tacit.attach(model, optimizer, text, bucket=bucket, seed=7)


def _bits(model):
    whole = [p.detach() for p in model.parameters()]
    return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).reshape(-1) for p in whole])


def _trained(rank, world, wrap, text, first, last, states):
    """The model's bits, this rank's state and statistics after steps first..last, from `states` if there are any."""
    model, optimizer, handle = _start(wrap, text)
    loaded = None
    if states is not None:
        # a copy: the optimizer keeps the tensors it is given, and tensors sent to ranks lie in memory that they share
        start = copy.deepcopy(states[rank % len(states)])
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
        own = rank if len(states) == world else slice(None)
        found = [state["tacit"] for state in states]
        handle.load_state_dict(found[own])
        loaded = handle.memory.state()
    loss = train(model, optimizer, rank, range(first, last))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tacit": own_state(handle)}
    buckets = len(handle._attachment._backward.buckets) if wrap == "ddp" else 0
    return _bits(model), state, loaded, loss, buckets, handle.stats.as_dict()


@pytest.mark.parametrize("text", TEXTS)
def test_several_buckets_under_ddp_train_to_the_same_bits_and_resume_to_them(ranks, text):
    whole = ranks.run(4, _trained, "ddp", text, 0, 2 * STEPS, None)
    assert all(torch.equal(whole[0][0], other[0]) for other in whole)
    assert whole[0][4] >= 5  # buckets
    first = ranks.known(4, _trained, "ddp", text, 0, STEPS, None)
    second = ranks.run(4, _trained, "ddp", text, STEPS, 2 * STEPS, [state for _, state, *_ in first])
    for (bits, state, *_), (got, other, *_) in zip(whole, second, strict=True):
        assert torch.equal(got, bits)
        assert same_kept(state, other)


@pytest.mark.parametrize(("wrap", "world"), [("ddp", 4), ("fsdp", 2)])
def test_ranks_that_move_are_the_same_everywhere_and_resume_to_the_same_bits(ranks, wrap, world):
    def lengths(state):
        kept = state["tacit"]["memory"]["q"]
        return {(n, part): len(q) for n in kept for part, q in kept[n]["parts"].items()}

    whole = ranks.run(world, _trained, wrap, AUTO, 0, 2 * STEPS, None)
    assert len(set(lengths(whole[0][1]).values())) > 1
    assert all(torch.equal(whole[0][0], other[0]) for other in whole)
    assert all(same_kept(whole[0][1], other[1]) for other in whole)
    if wrap == "fsdp":
        found = ranks.run(world, _broken_off_under_fsdp, AUTO)
        assert all(torch.equal(unbroken, resumed) for unbroken, resumed in found)
        return
    saved = [state for _, state, *_ in ranks.run(world, _trained, wrap, AUTO, 0, STEPS, None)]
    assert len(set(lengths(saved[0]).values())) > 1
    resumed = ranks.run(world, _trained, wrap, AUTO, STEPS, 2 * STEPS, saved)
    assert all(torch.equal(bits, whole[0][0]) for bits, *_ in resumed)
    assert all(same_kept(state, whole[0][1]) for _, state, *_ in resumed)
    for bits, _, loaded, *_ in ranks.run(3, _trained, wrap, AUTO, STEPS, STEPS + 1, saved):
        assert {(n, ""): len(kept["parts"][""]) for n, kept in loaded["q"].items()} == lengths(saved[0])
        assert torch.isfinite(bits).all()


def same_kept(state, other):
    kept, found = state["tacit"]["memory"]["q"], other["tacit"]["memory"]["q"]
    return kept.keys() == found.keys() and all(
        torch.equal(t, found[n]["parts"][part]) for n in kept for part, t in kept[n]["parts"].items()
    )


@pytest.mark.parametrize("text", TEXTS[1:])
def test_parts_of_matrices_under_fsdp_train_to_the_same_bits_and_resume_to_them(ranks, text):
    whole = ranks.run(3, _trained, "fsdp", text, 0, 2 * STEPS, None)
    assert all(torch.equal(whole[0][0], other[0]) for other in whole)
    kept = whole[0][1]["tacit"]["memory"]["q"]["0.0.weight"]
    assert kept["rule"] == "first"
    requests = {"Sum", "TableSum", "Max"} if "hush" in text else {"Sum", "Max"}
    assert set(whole[0][5]["sent_by_request"]) == requests
    assert all(same_kept(whole[0][1], state) for _, state, *_ in whole)  # Q, on all ranks
    shape = (2, 64) if "lowrank" in text else (64,)
    assert {part: tuple(t.shape) for part, t in kept["parts"].items()} == {
        "0:0:22": shape,
        "0:22:44": shape,
        "0:44:64": shape,
    }
    first = ranks.run(3, _under_fsdp, text, range(STEPS), None)
    second = ranks.run(3, _under_fsdp, text, range(STEPS, 2 * STEPS), [state for _, state in first])
    unbroken = ranks.run(3, _under_fsdp, text, range(2 * STEPS), None)
    for (grads, state), (got, resumed) in zip(unbroken, second, strict=True):
        assert all(torch.equal(got[name], grads[name]) for name in grads)
        assert same_kept({"tacit": state}, {"tacit": resumed})
    states = [state for _, state in first]
    moved = ranks.run(2, _under_fsdp, text, range(STEPS, STEPS + 2), states)  # cut elsewhere: starts again
    assert all(torch.equal(moved[0][0][name], moved[1][0][name]) for name in grads)
    assert all("0:0:32" in kept["parts"] for n, kept in moved[0][1]["memory"]["q"].items() if n != "8.weight")


@pytest.mark.parametrize("text", ["rank1 / sharded", "lowrank(2)"])
def test_a_training_of_four_ranks_under_fsdp_resumes_to_the_same_bits(ranks, text):
    found = ranks.run(4, _broken_off_under_fsdp, text)
    for unbroken, resumed in found:
        assert torch.equal(unbroken, resumed)
        assert torch.equal(unbroken, found[0][0])


def _broken_off_under_fsdp(rank, world, text):
    """The model's bits after a training with momentum, in one go and resumed half-way."""
    model, optimizer, handle = _start("fsdp", text)
    train(model, optimizer, rank, range(STEPS))
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    unbroken = _bits(model)
    handle.close()
    model, optimizer, handle = _start("fsdp", text)
    for part, state in zip((model, optimizer, handle), kept, strict=True):
        part.load_state_dict(state)
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return unbroken, _bits(model)


def _under_fsdp(rank, world, text, steps, states):
    """The last gradients of a model that stays as it is, and this rank's state."""
    model, _, handle = _start("fsdp", text)
    if states is not None:
        handle.load_state_dict(states[rank] if len(states) == world else states)
    for step in steps:
        model.zero_grad()
        loss_of(model, rank, step).backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}, own_state(handle)


@pytest.mark.parametrize(("text", "world"), [(TEXTS[1], 2), (TEXTS[2], 3), (TEXTS[2], 5)])
def test_another_world_goes_on_from_the_factors_of_the_first_rank(ranks, world, text):
    saved = [state for _, state, *_ in ranks.known(4, _trained, "ddp", text, 0, STEPS, None)]
    found = ranks.run(world, _trained, "ddp", text, STEPS, 2 * STEPS, saved)
    first = saved[0]["tacit"]["memory"]
    for bits, _, loaded, *_ in found:
        assert torch.equal(bits, found[0][0])
        assert loaded["q"].keys() == first["q"].keys()
        assert all(torch.equal(loaded["q"][n]["parts"][""], first["q"][n]["parts"][""]) for n in first["q"])
        for name in first["residual"]:
            residuals = torch.stack([state["tacit"]["memory"]["residual"][name] for state in saved])
            torch.testing.assert_close(
                loaded["residual"][name], residuals.mean(0), rtol=1e-6, atol=1e-9
            )  # vectors: the mean


def _in_a_script(rank, world, wrap, dtype, text):
    """A training as people write it: accumulated gradients, clipping; the last loss, on a batch that all ranks have."""
    model = deep(dtype=dtype)
    model = DDP(model, bucket_cap_mb=0.03) if wrap == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = tacit.attach(model, optimizer, text, bucket="20kB") if text else None
    for step in range(40):
        optimizer.zero_grad()
        with (handle or model).no_sync():
            loss_of(model, rank, 2 * step, gap=2.0).backward()
        loss_of(model, rank, 2 * step + 1, gap=2.0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if handle:
        handle.merge()
    with torch.no_grad():
        losses = [loss_of(model, 9, 1000 + step, gap=2.0).item() for step in range(16)]
    return sum(losses) / len(losses), _bits(model)


@pytest.mark.parametrize(
    ("wrap", "dtype"), [("ddp", torch.float32), ("plain", torch.float32), ("ddp", torch.bfloat16)]
)
def test_low_rank_trains_as_plain_ddp_does_in_scripts_that_accumulate_and_clip(ranks, wrap, dtype):
    plain = ranks.known(4, _in_a_script, "ddp", dtype, None)
    found = ranks.run(4, _in_a_script, wrap, dtype, "lowrank(4)")
    assert all(torch.equal(bits, found[0][1]) for _, bits in found)
    assert abs(found[0][0] - plain[0][0]) <= 0.02 * plain[0][0]


def test_low_rank_sends_differences_of_models(ranks):
    plain = ranks.run(3, _in_a_script, "ddp", torch.float32, None)
    found = ranks.run(
        3, _in_a_script, "plain", torch.float32, "diloco(4, rate=1.0, momentum=0.0) / lowrank(4)"
    )
    assert all(torch.equal(bits, found[0][1]) for _, bits in found)
    assert found[0][0] <= 1.1 * plain[0][0]


def _owed_under_fsdp(rank, world, text, steps):
    """What all ranks' gradients were, what came back, and what this rank remembers."""
    given = got = None
    for codec in ("none / sharded", text):
        model, _, handle = _start("fsdp", codec)
        sums = {n: torch.zeros(p.shape) for n, p in deep().named_parameters()}
        for step in range(steps):  # of a model that stays as it is
            model.zero_grad()
            loss_of(model, rank, step).backward()
            for name, p in model.named_parameters():
                sums[name] += p.grad.full_tensor()
        given, got = got, sums
    return given, got, own_state(handle)["memory"]["residual"]


@pytest.mark.parametrize("text", ["lowrank(2)", "lowrank(2, q=bf16, rest=bf16) / sharded"])
def test_what_is_sent_and_what_is_remembered_add_up_under_fsdp(ranks, text):
    found = ranks.run(3, _owed_under_fsdp, text, 3)
    given, got, _ = found[0]
    for name in given:
        owed = sum(residual[name] for _, _, residual in found).view(given[name].shape) / 3
        torch.testing.assert_close(got[name] + owed, given[name], rtol=1e-4, atol=1e-6)


class _Table(torch.nn.Module):
    """nn.Embedding, or a module that has the same parameter and is none."""

    def __init__(self, embedding):
        super().__init__()
        self.table = torch.nn.Embedding(64, 64) if embedding else torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return x @ self.table.weight


def _with_table(rank, world):
    try:
        tacit.attach(_Table(embedding=rank == 0), None, "lowrank(4)")
    except PairingError as cause:
        return str(cause)
    return None


def test_ranks_that_do_not_agree_on_what_is_an_embedding_are_refused(ranks):
    assert all("rank" in (why or "") for why in ranks.run(2, _with_table))
