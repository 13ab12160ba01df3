"""FSDP2 under tacit: exchanges go on beside the backward pass, and nobody can tell from the gradients."""

import threading
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from toys import deep, loss_of

import tacit
from tacit.attachments.fsdp_units import Unit
from tacit.schemes import Sharded

SETTINGS = {
    "plain": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16 sums": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
    "fp16 sums": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float16},
}


def _sharded(mesh, layers=3, **policy):
    model = deep(layers=layers)
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


def _gradients(model):
    return [p.grad.full_tensor().detach() for p in model.parameters()]


def _bits(rank, world, settings, text, late):
    """Gradients of an accumulation of three passes, the first without exchange, then of an ordinary step; the model after it."""
    hosts = {"mesh_shape": (2, 2), "mesh_dim_names": ("replica", "shard")} if world == 4 else None
    mesh = init_device_mesh("cpu", **hosts) if hosts else init_device_mesh("cpu", (world,))
    model = _sharded(mesh["shard"] if hosts else mesh, **SETTINGS[settings])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = mesh.get_group("replica") if hosts else None
    found = []
    with mock.patch.object(Unit, "lands_late", Unit.lands_late if late else lambda unit: False):
        handle = tacit.attach(model, optimizer, text, group=group)
        with handle.no_sync():
            loss_of(model, rank, 0).backward()
        for step in range(1, 4):
            loss_of(model, rank, step).backward()
            found += _gradients(model)
            if step == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
    return (
        found + [p.full_tensor().detach() for p in model.parameters()],
        handle.step,
        handle.stats.as_dict()["sent_nbytes"],
    )


def test_gradients_have_the_bits_that_they_have_where_fsdp2_waits(ranks):
    for settings, text in (
        ("plain", "ef(int4)"),
        ("bf16", "none / sharded"),
        ("bf16 sums", "int8"),
        ("fp16 sums", "int8"),
    ):
        late, waited = (ranks.run(2, _bits, settings, text, late) for late in (True, False))
        for (own, steps, sent), (expected, *rest) in zip(late, waited, strict=True):
            assert [steps, sent] == rest and steps == 3
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8))
                for a, b in zip(own, expected, strict=True)
            )


def test_so_they_have_between_replicas(ranks):
    late, waited = (ranks.run(4, _bits, "plain", "ef(int4)", late) for late in (True, False))
    for (own, *_), (expected, *_) in zip(late, waited, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


class _Held(Sharded):
    """Answers when it is let go."""

    go = threading.Event()
    answered = 0

    def answer_rows(self, wire, requests, seed):
        assert _Held.go.wait(60), "the backward pass waited for its first exchange"
        _Held.answered += 1
        return super().answer_rows(wire, requests, seed)


def _beside(rank, world):
    """The last layers' exchange gets its answer only when autograd has come to the first layer."""
    model = _sharded(init_device_mesh("cpu", (world,)))
    handle = tacit.attach(model, None, "int8")
    handle._attachment.channel.scheme = _Held()
    answered = []

    def reached(grad):
        answered.append(_Held.answered)
        _Held.go.set()

    model[0].register_forward_hook(lambda module, args, out: out.register_hook(reached) and None)
    loss_of(model, rank, 0).backward()
    return answered, _Held.answered, handle.stats.as_dict()["steps"]


def test_the_pass_goes_on_while_units_are_exchanged(ranks):
    assert ranks.run(2, _beside) == [([0], 4, 1)] * 2


def _watched(rank, world):
    """Hooks that FSDP2 calls with a unit's gradient see its mean, as those of an optimizer that steps in the backward pass must."""
    model = _sharded(init_device_mesh("cpu", (world,)))
    tacit.attach(model, None, "none / sharded")
    seen = []
    weight = model[0][0].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    loss_of(model, rank, 0).backward()
    return len(seen) == 1 and torch.equal(seen[0], weight.grad.to_local()) and bool(seen[0].abs().sum() > 0)


def test_hooks_of_parameters_see_means(ranks):
    assert ranks.run(2, _watched) == [True, True]


def _broken_off(rank, world):
    model = _sharded(init_device_mesh("cpu", (world,)))
    tacit.attach(model, None, "int8")

    def fail(grad):
        raise ArithmeticError("a hook of the user's")

    hook = model[0].register_forward_hook(lambda module, args, out: out.register_hook(fail) and None)
    try:
        loss_of(model, rank, 0).backward()
    except ArithmeticError:
        hook.remove()
        model._get_fsdp_state()._reset_iter_state()  # without which FSDP2 exchanges nothing any more
    try:
        loss_of(model, rank, 1).backward()
    except tacit.TacitError as error:
        return str(error)


def test_a_pass_that_was_interrupted_is_not_taken_for_a_whole_one(ranks):
    for text in ranks.run(2, _broken_off):
        assert "an earlier backward pass was interrupted" in text and "last checkpoint" in text


def _closed(rank, world):
    """Between replicas: after close() they average by themselves, in the user's own group."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = _sharded(mesh["shard"])
    tacit.attach(model, None, "int8", group=mesh.get_group("replica")).close()
    loss_of(model, rank, 0).backward()
    return _gradients(model)[0]


def test_after_close_replicas_average_in_their_own_group(ranks):
    first, second = ranks.run(2, _closed)
    assert torch.equal(first, second) and first.abs().sum() > 0
