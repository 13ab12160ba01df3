"""OmniReduce: the sum of all blocks, to the bit, in the bytes of those that are not zero."""

import pytest
import torch

from tacit import _core
from tacit.errors import ConfigError
from tacit.requests import loop_back
from tacit.shapes import requests_of
from tacit.strategy import Strategy, parse_codec
from tacit.testing import check


def sparse(world, numel=10_000, block=64, share=0.05):
    """Each rank uses some blocks of its own."""
    found = []
    for rank in range(world):
        rng = torch.Generator().manual_seed(rank)
        used = torch.rand(-(-numel // block), generator=rng) < share
        found.append(torch.randn(numel, generator=rng) * used.repeat_interleave(block)[:numel])
    return found


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("numel", [1, 63, 64, 9999, 10_000])
def test_the_sum_has_the_bits_of_the_plain_one(world, numel):
    inputs = sparse(world, numel, share=0.3)
    inputs[0][-1] = 1.0  # in the last block, which may be shorter
    plain, found = loop_back(parse_codec("none"), inputs), loop_back(parse_codec("omnireduce(64)"), inputs)
    assert all(torch.equal(a.total, b.total) for a, b in zip(plain, found, strict=True))
    assert all(torch.equal(r.contribution(), x) for r, x in zip(found, inputs, strict=True))


def test_bytes_are_those_of_the_union_of_blocks_and_a_byte_a_block():
    inputs, seen = sparse(4, numel=9_990), []
    loop_back(parse_codec("omnireduce(64)"), inputs, observe=seen.append)
    union = torch.stack(inputs).any(0)
    blocks = torch.nn.functional.pad(union, (0, 10_048 - 9990 - 0))[: 157 * 64].view(157, 64).any(1)
    numel = int(blocks.sum()) * 64 - (58 if blocks[-1] else 0)
    assert [request.nbytes for request in seen] == [157, 4 * numel]
    assert 4 * numel < 0.25 * 4 * 9990
    assert parse_codec("omnireduce(64)").nbytes(9_990) == 157 + 4 * 9990
    assert [a.up_nbytes for a in requests_of(parse_codec("omnireduce(64)"), 9_990, 4)] == [157, 4 * 9990]


def test_all_zero_costs_a_byte_a_block():
    seen = []
    found = loop_back(parse_codec("omnireduce > hush"), [torch.zeros(1000)] * 2, observe=seen.append)
    assert [request.nbytes for request in seen] == [4, 0, 0] and not found[0].total.any()


def test_blocks_are_found_by_the_core_as_by_torch():
    for numel, block in ((1, 1), (1000, 7), (4096, 256), (5000, 256), (3, 10)):
        x = sparse(1, numel, block=7, share=0.2)[0]
        x[0] = -0.0
        rows = torch.nn.functional.pad(x, (0, -numel % block)).view(-1, block)
        for variant in _core.simd_variants():
            before = _core.simd()
            _core.use_simd(variant)
            out = torch.empty(len(rows), dtype=torch.uint8)
            _core.used_blocks(x, block, out)
            _core.use_simd(before)
            assert torch.equal(out.bool(), (rows != 0).any(1))


@pytest.mark.slow
def test_all_rules_and_schemes():
    for text in ("omnireduce(32) > int4", "ef(omnireduce(32) > hush)"):
        assert [f for f in check(parse_codec(text)) if not f.passed] == []
    for who in ("ring", "allreduce", "star(at='127.0.0.1:1')"):
        assert Strategy.parse(f"every / omnireduce > hush / {who}")
    assert str(Strategy.parse("omnireduce > bf16")) == "every / omnireduce(block=256) > bf16 / allreduce"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("omnireduce(0)", "block=0: elements of a block"),
        ("omnireduce(1.5)", "block=1.5"),
        ("omnireduce > ef(int8)", "write ef(omnireduce > ...)"),
        ("adaptive / omnireduce / gossip", "what two ranks swap is of one length"),
    ],
)
def test_a_bad_option_is_one_sentence(text, sentence):
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(text)
    assert sentence in str(refused.value)
