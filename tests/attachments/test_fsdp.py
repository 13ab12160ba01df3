"""FSDP2 under tacit: CPU ranks over gloo."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import WIDTH, batch, deep, loss_of, own_state

import tacit


def _sharded(seed=1, mesh=None):
    model = deep(layers=4, seed=seed)
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _full_grads(model):
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def _grads(rank, world, text, steps=2):
    mesh = init_device_mesh("cpu", (world,))
    model = _sharded(mesh=mesh)
    handle = tacit.attach(model, None, text) if text else None
    for step in range(steps):
        model.zero_grad()
        loss_of(model, rank, step).backward()
    return _full_grads(model), handle and handle.stats.as_dict()


def test_without_a_codec_gradients_equal_fsdp_and_half_the_bytes_of_gloo_leave(ranks):
    for world in (2, 3):
        plain, got = ranks.known(world, _grads, None), ranks.run(world, _grads, "none / sharded")
        for name, expected in plain[0][0].items():
            torch.testing.assert_close(got[0][0][name], expected, rtol=1e-5, atol=1e-7)
        parameters = list(deep(layers=4).parameters())
        padded = sum(-(-p.shape[0] // world) * world * p.numel() // p.shape[0] for p in parameters)
        assert got[0][1]["steps"] == 2 and got[0][1]["elements"] == 2 * padded
        payload = 2 * 4 * padded * (world - 1) // world  # gloo's own would send twice that
        assert got[0][1]["sent_by_request"]["Sum"] == payload
        assert got[0][1]["sent_nbytes"] - payload <= 2 * 96  # the ranks' notes


def test_with_a_codec_gradients_are_near(ranks):
    plain = ranks.known(2, _grads, None)
    for text, limit in (
        ("bf16 / sharded", 0.01),
        ("int8", 0.05),
        ("ef(int8)", 0.05),
        ("hush", 0.1),
        ("ef(hush)", 0.1),
        ("thc", 0.2),
    ):
        got = ranks.run(2, _grads, text)
        for name, expected in plain[0][0].items():
            error = (got[0][0][name] - expected).norm() / expected.norm()
            assert error < 2 * limit
            assert torch.equal(got[0][0][name], got[1][0][name])


def _trained(rank, world, text):
    model = _sharded(mesh=init_device_mesh("cpu", (world,)))
    handle = tacit.attach(model, None, text) if text else None
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for step in range(40):
        optimizer.zero_grad()
        loss_of(
            model, rank, step, gap=2.0
        ).backward()  # classes overlap: the loss has a floor well above zero
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        losses = [loss_of(model, 9, 1000 + step, gap=2.0).item() for step in range(16)]
    return sum(losses) / len(losses), handle and handle.stats.as_dict()


def test_int8_trains_to_the_loss_of_fp32_within_two_percent(ranks):
    (plain, _), _ = ranks.run(2, _trained, None)
    for text, share in (("int8", 0.02), ("ef(int4)", 0.02), ("hush", 0.02), ("lowrank(8)", 0.01)):
        (loss, stats), _ = ranks.run(2, _trained, text)
        assert abs(loss - plain) <= share * plain, (text, loss, plain)
        assert stats["steps"] == 40
        sums = {"Sum", "TableSum"} if text == "hush" else {"Sum"}
        assert set(stats["sent_by_request"]) == sums | {"Max"}


def _resumed(rank, world, part, states):
    model = _sharded(mesh=init_device_mesh("cpu", (world,)))
    handle = tacit.attach(model, None, "ef(int4(block=32))")
    if part == "second":
        handle.load_state_dict(states)
    total = None
    for step in range(6) if part == "whole" else range(3) if part == "first" else range(3, 6):
        model.zero_grad()
        loss_of(model, rank, step).backward()
        total = _full_grads(model)
    return total, own_state(handle)


def test_memory_is_kept_by_parameter_and_resumes_to_the_same_bits(ranks):
    whole = ranks.run(2, _resumed, "whole", None)
    first = ranks.run(2, _resumed, "first", None)
    states = [state for _, state in first]
    shapes = {n: p.numel() for n, p in deep(layers=4).named_parameters()}
    assert {n: t.numel() for n, t in states[0]["memory"]["residual"].items()} == shapes
    second = ranks.run(2, _resumed, "second", states)
    for name in shapes:
        assert torch.equal(second[0][0][name], whole[0][0][name])
    ranks.run(3, _resumed, "second", states)  # another world: by the rule of the mean


def _replicas(rank, world, text):
    """Two hosts of two: FSDP2 inside, the strategy between."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = _sharded(mesh=mesh["shard"])
    if text:
        handle = tacit.attach(model, None, text, group=mesh.get_group("replica"))
    loss_of(model, rank, 0).backward()
    grads = _full_grads(model)
    if not text:
        for grad in grads.values():
            dist.all_reduce(grad, group=mesh.get_group("replica"))
            grad /= 2
        return grads, None
    return grads, handle.stats.as_dict()


def test_replicas_on_other_hosts_speak_the_strategy(ranks):
    plain = ranks.run(4, _replicas, None)
    for text, limit in (("none", 1e-5), ("int8", 0.05)):
        got = ranks.run(4, _replicas, text)
        for name, expected in plain[0][0].items():
            assert all(torch.equal(got[0][0][name], other[0][name]) for other in got)
            assert (got[0][0][name] - expected).norm() <= limit * expected.norm()
        assert got[0][1]["steps"] == 1 and got[0][1]["sent_nbytes"] > 0


def _partly_used(rank, world):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

        def forward(self, x):
            return self.used(x)

    model = fully_shard(Two(), mesh=init_device_mesh("cpu", (world,)))
    tacit.attach(model, None, "int8")
    x, _ = batch(rank, 0)
    try:
        model(x).sum().backward()
    except tacit.TacitError as error:
        message = str(error)
    model = fully_shard(Two(), mesh=init_device_mesh("cpu", (world,)))
    model.set_reduce_scatter_unused_params(True)
    tacit.attach(model, None, "int8")
    model(x).sum().backward()
    return message, model.used.weight.grad.full_tensor().abs().sum().item()


def test_a_unit_with_unused_parameters_says_what_to_do(ranks):
    for message, grad in ranks.run(2, _partly_used):
        assert "set_reduce_scatter_unused_params(True)" in message
        assert grad > 0


def _compiled_and_not_finite(rank, world):
    model = deep(layers=2)
    for i in range(2):
        model[i] = torch.compile(model[i], backend="aot_eager")
        fully_shard(model[i], mesh=init_device_mesh("cpu", (world,)))
    model = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == d], "name": n}
        for d, n in ((2, "mat"), (1, "vec"))
    ]
    handle = tacit.attach(model, torch.optim.SGD(groups, lr=0.1), "int8")
    loss = loss_of(model, rank, 0)
    (loss * torch.inf if rank == 1 else loss).backward()
    return dict(handle.stats.nonfinite), handle.stats.as_dict()["sent_by_group"], handle.step


def test_compiled_units_are_named_and_what_is_not_finite_is_reported(ranks):
    for nonfinite, sent, steps in ranks.run(2, _compiled_and_not_finite):
        assert nonfinite["0.0.weight"] == 1
        assert set(sent) == {"mat+vec", "control"}  # a unit travels as one
        assert steps == 1


def _two_meshes(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = deep(layers=2)
    fully_shard(model[0], mesh=mesh["a"])
    fully_shard(model, mesh=mesh["b"])
    try:
        tacit.attach(model, None, "int8")
    except tacit.TacitError as error:
        return str(error)


def test_units_on_different_meshes_are_refused(ranks):
    assert all("several meshes" in text for text in ranks.run(4, _two_meshes))
