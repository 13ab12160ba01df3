"""One codec for matrices and one for the rest: each gets its own parameters, memory stays by name, and the bits are the same on all ranks."""

import pytest
import torch
import toys

import tacit
from tacit.errors import ConfigError
from tacit.layout import Layout
from tacit.requests import LocalMemory, loop_back
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check

LAYOUT = Layout.of({"a.weight": (30, 20), "a.bias": (30,), "b.weight": (7, 3, 3), "b.bias": (7,)})
TEXTS = {
    "by_shape(matrix=topk(0.05) > int8, rest=bf16)": "by_shape(matrix=topk(share=0.05, chunk=4096) > int8(block=256), rest=bf16)",
    "by_shape(int8, none)": "by_shape(matrix=int8(block=256), rest=none)",
    "by_shape(matrix=ef(int4), rest=hush)": "by_shape(matrix=ef(int4(block=64)), rest=hush)",
    "ef(by_shape(matrix=topk, rest=int8))": "ef(by_shape(matrix=topk(share=0.015625, bits=2, chunk=4096), rest=int8(block=256)))",
}


def noise(world, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYOUT.numel, generator=rng) for _ in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_it_is_written_in_one_form_and_keeps_all_rules(text):
    codec = parse_codec(text)
    assert str(codec) == TEXTS[text] and parse_codec(str(codec)) == codec
    assert Strategy.parse(text).what == codec
    if "matrix=ef" not in text:  # there only a part remembers, and vectors of the kit have no matrix
        assert [f for f in check(codec) if not f.passed] == []


def test_matrices_take_one_codec_and_the_rest_the_other():
    codec, inputs, asked = parse_codec("by_shape(matrix=topk(0.05) > none, rest=none)"), noise(3), []
    reduced = loop_back(codec, inputs, layout=LAYOUT, observe=asked.append)
    total, exact = LAYOUT.split(reduced[0].total), LAYOUT.split(torch.stack(inputs).sum(0))
    for name in LAYOUT.names:
        assert torch.equal(total[name], exact[name]) == name.endswith("bias")
    assert sum(request.nbytes for request in asked) == codec.nbytes_of(LAYOUT)
    assert codec.nbytes_of(LAYOUT) == parse_codec("topk(0.05) > none").nbytes(663) + 4 * 37
    shares = torch.stack([each.contribution() for each in reduced]).sum(0)
    assert torch.allclose(shares, reduced[0].total, atol=1e-5)


def test_what_is_not_sent_is_remembered_under_the_parameters_own_place():
    codec, memories = parse_codec("by_shape(matrix=ef(topk(0.05)), rest=none)"), []
    memories = [LocalMemory(torch.empty(LAYOUT.numel), given=LAYOUT) for _ in range(2)]
    owed = torch.zeros(LAYOUT.numel)
    for step in range(3):
        inputs = noise(2, seed=step)
        total = loop_back(codec, inputs, memories=memories, step=step)[0].total
        owed += torch.stack(inputs).sum(0) - total
    kept = torch.stack([memory.vector("residual") for memory in memories]).sum(0)
    assert torch.allclose(kept, owed, atol=1e-4)
    assert all(LAYOUT.split(kept)[name].any() == name.endswith("weight") for name in LAYOUT.names)


def test_a_codec_is_needed_for_both():
    for text in (
        "by_shape(matrix=3, rest=int8)",
        "by_shape(matrix=int8)",
        "by_shape(matrix=int9, rest=int8)",
    ):
        with pytest.raises(ConfigError, match="a codec is needed|does not fit its options|unknown codec"):
            parse_codec(text)


def _trained(rank, world, text):
    model = toys.deep(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with tacit.attach(model, optimizer, text):
        toys.train(model, optimizer, rank, range(6))
        return toys.flat(model), toys.loss_of(model, 0, 99).item()


def test_real_ranks_stay_equal(ranks):
    (a, last), (b, _) = ranks.run(
        2, _trained, "every / by_shape(matrix=ef(topk(0.1) > int8), rest=bf16) / sharded"
    )
    assert torch.equal(a, b) and last < 1.4


def _sharded(rank, world, text):
    from torch.distributed.fsdp import fully_shard

    model = toys.deep(layers=2)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = toys.loss_of(model, 0, 99).item()
    handle = tacit.attach(model, optimizer, text) if text else None
    toys.train(model, optimizer, rank, range(4))
    flat = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
    last = toys.loss_of(model, 0, 99).item()
    if handle is not None:
        handle.close()
    return flat, first, last


def test_fsdp2_scatters_both_parts(ranks):
    plain = ranks.run(3, _sharded, "")[0][0]
    exact = ranks.run(3, _sharded, "by_shape(matrix=none, rest=none) / sharded")
    assert all(torch.allclose(flat, plain, atol=1e-5) for flat, _, _ in exact)
    found = ranks.run(3, _sharded, "by_shape(matrix=ef(topk(0.1) > int8), rest=bf16) / sharded")
    assert all(torch.equal(flat, found[0][0]) and last < first for flat, first, last in found)
