"""FSDP2's parameters gathered in blocks of integers: CPU ranks over gloo."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from toys import WIDTH, deep, loss_of

import tacit
from tacit.codecs import Int4, Int8
from tacit.errors import ConfigError

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _sharded(world, policy=None, **options):
    mesh = init_device_mesh("cpu", (world,))
    model = deep(layers=2)
    for layer in list(model)[:-1]:
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy(), **options)
    return fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


def _seen(rank, world, text, policy):
    """The first layer as the forward and the backward pass compute with it, and what is kept; then the same after close()."""
    model = _sharded(world, policy)
    layer, seen = model[0][0], []

    def note(*_):
        seen.extend(p.detach().clone() for p in (layer.weight, layer.bias))

    handle = tacit.attach(model, None, "none / sharded", weights=text)
    layer.register_forward_pre_hook(note)
    layer.register_forward_hook(lambda module, args, out: out.register_hook(note) and None)
    loss_of(model, rank, 0).backward()
    sent, kept = handle.stats.as_dict()["sent_by_group"]["weights"], layer.weight.full_tensor().detach()
    handle.close()
    loss_of(model, rank, 0).backward()
    return seen, kept, sent


def _rows(weight, world):
    """What every rank has of it, padded to equal length."""
    rows = -(-weight.shape[0] // world)
    return [torch.cat([part, part.new_zeros(rows * WIDTH - part.numel())]) for part in
            (weight.view(-1)[r * rows * WIDTH : (r + 1) * rows * WIDTH] for r in range(world))]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "text", "policy"), [(2, "int8(block=256)", None), (3, "int4(block=32)", BF16)]
)
def test_all_ranks_compute_with_the_same_decoded_bits_in_both_passes(ranks, world, text, policy):
    codec = (Int8 if "int8" in text else Int4)(256 if "int8" in text else 32, "nearest").format
    dtype = torch.float32 if policy is None else torch.bfloat16
    found = ranks.run(world, _seen, text, policy)
    original = deep(layers=2)
    decoded = [
        codec.unpack(codec.pack(row, 0), row.numel()) for row in _rows(original[0][0].weight.detach(), world)
    ]
    expected = torch.cat(decoded)[: WIDTH * WIDTH].view(WIDTH, WIDTH).to(dtype)
    row_nbytes = 0
    for name, p in original.named_parameters():
        numel = -(-p.shape[0] // world) * p.numel() // p.shape[0]
        nbytes = codec.nbytes(numel) if p.dim() == 2 and numel >= codec.block else numel * dtype.itemsize
        row_nbytes += nbytes * (
            1 if name.startswith("2.") else 2
        )  # the root stays whole for the backward pass
    for seen, kept, sent in found:
        weight, bias, again, _, plain, *_ = seen
        assert torch.equal(weight, expected) and torch.equal(again, expected)
        assert torch.equal(bias, original[0][0].bias.detach().to(dtype))
        assert torch.equal(kept, original[0][0].weight.detach())  # the owners' own
        assert torch.equal(plain, kept.to(dtype))
        assert sent == (world - 1) * row_nbytes


def _trained(rank, world, texts):
    losses = []
    for weights in texts:
        model = _sharded(world, BF16)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        tacit.attach(model, optimizer, "int8", weights=weights)
        for step in range(40):
            optimizer.zero_grad()
            loss_of(model, rank, step, gap=2.0).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(sum(loss_of(model, 9, 1000 + step, gap=2.0).item() for step in range(16)) / 16)
    return losses


def test_packed_weights_train_to_the_same_loss_within_two_percent(ranks):
    plain, int8, int4 = ranks.run(2, _trained, (None, "int8(block=256)", "int4(block=32)"))[0]
    assert abs(int8 - plain) <= 0.02 * plain, (int8, plain)
    assert abs(int4 - plain) <= 0.02 * plain, (int4, plain)


def _refused(rank, world):
    said = []
    for make, text, weights in (
        (lambda: deep(), "int8", "int8"),
        (lambda: nn.parallel.DistributedDataParallel(deep()), "int8", "int8"),
        (lambda: replicate(deep(), mesh=init_device_mesh("cpu", (world,))), "int8", "int8"),
        (lambda: _sharded(world, reshard_after_forward=2), "int8", "int8"),
        (lambda: _sharded(world), "int8", "bf16"),
        (lambda: _sharded(world), "int8", "topk"),
    ):
        try:
            tacit.attach(make(), None, text, weights=weights)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_weights_that_nobody_gathers_so_are_refused_with_the_way_out(ranks):
    for plain, ddp, replicated, elsewhere, bf16, topk in ranks.run(4, _refused):
        assert "is for FSDP2, whose ranks gather parameters" in plain and plain == ddp
        assert "replicate() gathers no parameters" in replicated
        assert "reshard_after_forward=2" in elsewhere
        assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in bf16
        assert "int8(block=256) or int4(block=32)" in topk
