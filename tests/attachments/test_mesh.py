"""A strategy for one dimension of a device mesh, and attach() on models whose mesh has a replicate dimension: CPU ranks over gloo."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import WIDTH, deep, loss_of, own_state

import tacit
from tacit.errors import CheckpointError, ConfigError
from tacit.requests import Sum, TableSum, loop_back
from tacit.strategy import parse_codec

CODECS = ("int8", "ef(int4)", "hush")
UNITS = (*[WIDTH * WIDTH + WIDTH] * 3, WIDTH * WIDTH + WIDTH + WIDTH * 4 + 4)  # the root has the head


def _mesh(kind, text=None):
    shape, names = ((2, 2), ("dp_replicate", "dp_shard")) if kind == "hsdp" else ((2,), ("dp_replicate",))
    backends = {"dp_replicate": tacit.mesh_backend(text)} if text else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backends)


def _built(kind, mesh):
    model = deep(layers=4)
    put = fully_shard if kind == "hsdp" else replicate
    for layer in list(model)[:-2]:
        put(layer, mesh=mesh)
    return put(model, mesh=mesh)


def _with(kind, way, text):
    """The model, its optimizer and its handle, on a mesh of its own."""
    mesh = _mesh(kind, text if way == "mesh" else None)
    model = _built(kind, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    if way == "plain":
        return model, optimizer, None
    handle = (
        tacit.mesh_handle(mesh["dp_replicate"]) if way == "mesh" else tacit.attach(model, optimizer, text)
    )
    return model, optimizer, handle


def _trained(rank, world, kind):
    """{(way, codec): (loss, stats, numbers that were scattered)}."""
    found, scattered = {}, []
    native = collectives.DefaultReduceScatter.__call__

    def counted(self, output_tensor, input_tensor, *args, **options):
        scattered.append(input_tensor.numel() if input_tensor.dtype == torch.float32 else -1)
        return native(self, output_tensor, input_tensor, *args, **options)

    collectives.DefaultReduceScatter.__call__ = counted
    for way, text in (("plain", ""), *(("mesh", text) for text in CODECS), ("attach", "ef(int4)")):
        model, optimizer, handle = _with(kind, way, text)
        scattered.clear()
        for step in range(24):
            optimizer.zero_grad()
            loss_of(model, rank, step, gap=2.0).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            losses = [loss_of(model, 9, 1000 + step, gap=2.0).item() for step in range(16)]
        found[way, text] = sum(losses) / len(losses), handle and handle.stats.as_dict(), sum(scattered)
        if handle:
            handle.close()
    return found


def _sent(text, numel):
    """Bytes that leave one rank of two for a vector of `numel`, as the codec's requests have them, with the sharded scheme."""
    requests = []
    loop_back(parse_codec(text), [torch.ones(numel)] * 2, observe=requests.append)
    sums = sum(r.nbytes for r in requests if isinstance(r, Sum))  # half of it, twice
    return sums + sum((r.nbytes + r.look_up().nbytes) // 2 for r in requests if isinstance(r, TableSum))


@pytest.mark.parametrize(("kind", "world"), [("hsdp", 4), ("replicate", 2)])
def test_trains_to_the_plain_loss_within_two_percent_and_only_the_replicate_dimension_sends_what_is_declared(
    ranks, kind, world
):
    found = ranks.run(world, _trained, kind)[0]
    plain, _, scattered = found.pop(("plain", ""))
    assert scattered == (24 * sum(UNITS) if kind == "hsdp" else 0)
    for (way, text), (loss, stats, untouched) in found.items():
        assert abs(loss - plain) <= 0.02 * plain, (way, text, loss, plain)
        assert untouched == scattered
        declared = 24 * sum(_sent(text, numel // (world // 2)) for numel in UNITS)
        assert stats["sent_by_group"]["gradients" if way == "mesh" else "0"] == declared, (way, text)
        assert stats["steps"] == 24 and stats["elements"] == 24 * sum(UNITS) // (world // 2)
        beside = stats["sent_nbytes"] - declared
        assert beside == 0 if way == "mesh" else beside <= 24 * 48  # the ranks' notes


def _accumulated(rank, world, kind, way):
    model, _, _ = _with(kind, way, "none")
    grads = []
    for step in range(2):
        model.zero_grad()
        switch = model.set_requires_all_reduce if kind == "hsdp" else model.set_requires_gradient_sync
        switch(False)
        loss_of(model, rank, 10 + step).backward()
        switch(True)
        loss_of(model, rank, step).backward()
        grads += [p.grad.full_tensor() for p in model.parameters()]
    return grads


@pytest.mark.parametrize(("kind", "world"), [("hsdp", 4), ("replicate", 2)])
def test_with_none_accumulated_gradients_have_the_bits_of_torch(ranks, kind, world):
    plain = ranks.run(world, _accumulated, kind, "plain")
    for way in ("mesh", "attach"):
        for rank, grads in enumerate(ranks.run(world, _accumulated, kind, way)):
            assert all(torch.equal(a, b) for a, b in zip(grads, plain[rank], strict=True)), way


def _again(rank, world):
    """Attached, closed and attached again, to a group that is not all ranks; then plain, as it was built."""
    model, _, first = _with("hsdp", "attach", "int8")
    loss_of(model, rank, 0).backward()
    first.close()
    second = tacit.attach(model, None, "bf16 / ring")
    loss_of(model, rank, 1).backward()
    second.close()
    model.zero_grad()
    loss_of(model, rank, 2).backward()
    return [p.grad.full_tensor() for p in model.parameters()], first.step, second.step


def test_a_model_is_attached_again_and_after_close_all_reduces_as_built(ranks):
    found = ranks.run(4, _again)
    model = deep(layers=4)
    sum(loss_of(model, rank, 2) / 4 for rank in range(4)).backward()
    for grads, first, second in found:
        assert (first, second) == (1, 1)
        for own, p in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(own, p.grad, rtol=1e-4, atol=1e-6)


def _asked(rank, world):
    """What a dimension with int8 answers; `inside` is what it answered while a backward pass ran."""
    mesh = _mesh("replicate", "int8")
    group, handle = mesh.get_group(), tacit.mesh_handle(mesh)
    x = torch.linspace(-1, 1, 1024) * (rank + 1)
    inside = {}

    def all_reduce(name, value, op):
        dist.all_reduce(value, op, group=group)
        inside[name] = value

    def hook(gradient):
        all_reduce("sum", x.clone(), dist.ReduceOp.SUM)
        all_reduce("mean", x.clone(), dist.ReduceOp.AVG)
        all_reduce("bf16", x.bfloat16(), dist.ReduceOp.SUM)
        all_reduce("matrix", x.view(32, 32).clone(), dist.ReduceOp.SUM)
        all_reduce("largest", x.clone(), dist.ReduceOp.MAX)
        all_reduce("integers", torch.arange(1024) + rank, dist.ReduceOp.SUM)
        all_reduce("few", x[:8].clone(), dist.ReduceOp.SUM)

    outside = x.clone()
    dist.all_reduce(outside, group=group)
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(hook)
    leaf.sum().backward()
    sent = handle.stats.as_dict()
    objects, parts = [None, None], [torch.empty(1024) for _ in range(2)]
    dist.all_gather_object(objects, rank, group=group)
    dist.all_gather(parts, x, group=group)
    dist.broadcast(first := x.clone(), group=group, group_src=0)
    scattered = torch.empty(512)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            dist.reduce_scatter_tensor(scattered, x.clone(), group=group)
    dist.barrier(group=group)
    handle.close()
    leaf.sum().backward()  # a plain dimension again
    return outside, sent, objects, parts, first, [str(w.message) for w in said], inside


def test_sums_and_means_are_honoured_and_what_is_no_gradient_passes_unchanged(ranks):
    ramp = torch.linspace(-1, 1, 1024)
    for outside, sent, objects, parts, first, said, after in ranks.run(2, _asked):
        assert torch.equal(outside, ramp + 2 * ramp)
        assert sent["steps"] == 1 and sent["elements"] == 4 * 1024
        assert sent["sent_by_group"] == {
            "gradients": 4 * _sent("int8", 1024),
            "passed on": 4 * 1024 + 4 * 1024 + 8 * 1024 + 4 * 8,
        }
        assert objects == [0, 1] and torch.equal(parts[1], 2 * ramp) and torch.equal(first, ramp)
        assert sum("tacit.attach(model)" in text for text in said) == 1
        assert torch.equal(after["sum"], ramp + 2 * ramp)


def _answers(rank, world, text):
    mesh = _mesh("replicate", text)
    x, leaf = torch.linspace(-1, 1, 1024) * (rank + 1), torch.zeros(1, requires_grad=True)
    found = []

    def hook(gradient):
        for op, value in ((dist.ReduceOp.SUM, x), (dist.ReduceOp.AVG, x), (dist.ReduceOp.SUM, x.bfloat16())):
            dist.all_reduce(own := value.clone().view(32, 32), op, group=mesh.get_group())
            found.append(own)

    leaf.register_hook(hook)
    leaf.sum().backward()
    return found


def test_what_is_compressed_is_near_and_alike_on_all_ranks(ranks):
    exact = 3 * torch.linspace(-1, 1, 1024).view(32, 32)
    (total, mean, half), other = ranks.run(2, _answers, "int8")
    assert all(torch.equal(a, b) for a, b in zip((total, mean, half), other, strict=True))
    for got, expected in ((total, exact), (mean, exact / 2), (half.float(), exact)):
        assert 0 < (got - expected).norm() < 0.02 * expected.norm()
    assert half.dtype == torch.bfloat16


def _resumed(rank, world):
    """The gradients of step 5, of an unbroken run and of one that was resumed at step 3 on a mesh of its own."""

    def run(model, steps):
        for step in steps:
            model.zero_grad()
            loss_of(model, rank, step).backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    found = []
    for way in ("mesh", "attach"):
        model, _, _ = _with("replicate", way, "ef(int4)")
        whole = run(model, range(6))
        model, _, first = _with("replicate", way, "ef(int4)")
        run(model, range(3))
        model, _, second = _with("replicate", way, "ef(int4)")
        second.load_state_dict(first.state_dict())
        found.append((whole, run(model, range(3, 6)), sorted(own_state(second)["memory"]["residual"])))
        if way == "mesh":
            by_place = first.state_dict()
    with pytest.raises(CheckpointError, match="the parameter does not exist in this model"):
        second.load_state_dict(by_place)
    return found


def test_memory_resumes_to_the_same_bits_by_place_and_by_name(ranks):
    for (whole, second, places), (whole_named, second_named, names) in ranks.run(2, _resumed):
        assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(whole_named, second_named, strict=True))
        assert [int(place.split()[1]) for place in places] == [0, 1, 2, 3]
        assert sorted(int(place.split()[-1]) for place in places) == sorted(UNITS)
        assert names == sorted(name for name, _ in deep(layers=4).named_parameters())


def _passes(rank, world, text, *passes):
    """A backward pass with gradients of these sizes after the other; what refuses one of them, or how many there were."""
    mesh = _mesh("replicate", text)
    for sizes in passes:
        leaf = torch.zeros(1, requires_grad=True)

        def hook(gradient, sizes=sizes):
            for numel in sizes:
                dist.all_reduce(torch.ones(numel), group=mesh.get_group())

        leaf.register_hook(hook)
        try:
            leaf.sum().backward()
        except ConfigError as error:
            return str(error)
    return tacit.mesh_handle(mesh).stats.steps


def test_a_codec_with_memory_refuses_passes_that_are_not_alike(ranks):
    other_size = ranks.run(2, _passes, "ef(int4)", (512, 1024), (512, 2048))
    other_number = ranks.run(2, _passes, "ef(int4)", (512, 1024), (512,))
    for refused in (*other_size, *other_number):
        assert "tacit.attach(model), which knows the parameters" in refused
    assert "gradient 1 of this backward pass has 2048 numbers, and the pass before" in other_size[0]
    assert "had 1 gradients and the last one 2" in other_number[0]
    assert ranks.run(2, _passes, "int8", (512, 1024), (512,), (2048,)) == [3, 3]


class _Simple(nn.Module):
    """One parameter as compiled FSDP has it: gradients are partial sums, which a functional collective makes whole."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(
            DTensor.from_local(torch.randn(WIDTH, WIDTH), mesh, [Replicate()], run_check=False)
        )

    def forward(self, x):
        return x @ self.weight.redistribute(placements=[Replicate()]).to_local(
            grad_placements=[Partial("avg")]
        )


def _compiled(rank, world):
    mesh = _mesh("replicate", "int8")
    model = torch.compile(_Simple(mesh), backend="aot_eager", fullgraph=True)
    model(_row(rank)).square().sum().backward()
    return model.weight.grad.full_tensor(), tacit.mesh_handle(mesh).stats.as_dict()["sent_by_group"]


def _row(rank):
    return torch.linspace(-1, 1 + rank, WIDTH).view(1, WIDTH)


def test_functional_collectives_of_a_compiled_backward_pass_take_the_strategy(ranks):
    torch.manual_seed(3)
    weight = torch.randn(WIDTH, WIDTH)
    mean = sum(2 * _row(rank).T @ (_row(rank) @ weight) for rank in range(2)) / 2
    (got, sent), (other, _) = ranks.run(2, _compiled)
    assert torch.equal(got, other)
    assert 0 < (got - mean).norm() < 0.02 * mean.norm()
    assert sent == {"gradients": _sent("int8", WIDTH * WIDTH)}


def _tensor_parallel(rank, world, texts):
    found = []
    for text in texts:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        if text:
            tacit.attach(model, None, text)
        for step in range(2):
            model.zero_grad()
            loss_of(model, rank // 2, step).backward()
        if text == "none / sharded":  # torch's gloo cannot do this: TorchTitan divides itself
            mean = model[0].bias.grad.full_tensor().clone()
            model.set_gradient_divide_factor(1.0)
            model.zero_grad()
            loss_of(model, rank // 2, 1).backward()
            torch.testing.assert_close(model[0].bias.grad.full_tensor(), 2 * mean)
        found.append(torch.cat([p.grad.full_tensor().view(-1) for p in model.parameters()]))
    return found


def test_fsdp_with_tensor_parallelism_has_the_gradients_of_torch(ranks):
    got = ranks.run(4, _tensor_parallel, (None, "none / sharded", "int8", "ef(int4)"))
    for plain, *found in got:
        found[0] = found[0] / 2
        for own, limit in zip(found, (1e-6, 0.02, 0.35), strict=True):
            assert (own - plain).norm() <= limit * plain.norm(), limit
    for rank in (0, 1):  # a codec sees another vector on each place of `tp`
        assert all(torch.equal(a, b) for a, b in zip(got[rank], got[rank + 2], strict=True))


def _one_replica():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return fully_shard(deep(), mesh=mesh)


def _two_strategies(rank, world):
    mesh = _mesh("replicate", "int8")
    said = []
    for act in (
        lambda: tacit.attach(_built("replicate", mesh), None, "int8"),
        lambda: tacit.attach(_built("replicate", _mesh("replicate")), None, "int8", group=dist.group.WORLD),
        lambda: tacit.mesh_handle(_mesh("replicate")),
        lambda: tacit.mesh_handle(mesh).no_sync().__enter__(),
        lambda: init_device_mesh("cpu", (2,), backend_override={0: "tacit"}),
        lambda: tacit.attach(_one_replica(), None, "int8"),
    ):
        try:
            act()
        except ConfigError as error:
            said.append(str(error))
    return said


def test_what_cannot_work_says_what_to_do(ranks):
    for one, two, three, four, five, six in ranks.run(2, _two_strategies):
        assert "leave tacit.attach() out: tacit.mesh_handle" in one
        assert "leave group= out" in two
        assert "backend_override={its name: tacit.mesh_backend(...)}" in three
        assert "model.set_requires_gradient_sync(False)" in four
        assert "needs a strategy" in five
        assert "build FSDP2 on the dimension that shards alone" in six


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("diloco(8) / int8", "write 'every / int8"),
        ("lowrank(4)", "tacit.attach(model), which knows the parameters"),
        ("dct > bf16", "tacit.attach(model), which knows the parameters"),
        ("gossip", "unknown"),
    ],
)
def test_a_strategy_that_no_dimension_can_have_is_refused(text, way_out):
    with pytest.raises(tacit.TacitError, match="(?s).*") as refused:
        tacit.mesh_backend(text)
    assert way_out in str(refused.value)
