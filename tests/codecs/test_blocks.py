"""Block integers: the torch path that a CUDA tensor takes gives the bits of the native kernel."""

from itertools import pairwise

import pytest
import torch

from tacit import _core
from tacit.codecs import Int4, Int8, in_torch
from tacit.codecs.blocks import Blocks
from tacit.requests import loop_back
from tacit.testing import nmse, vectors

SIZES = [0, 1, 2, 3, 63, 64, 65, 255, 1000, 4097]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("numel", SIZES)
def test_device_agnostic_torch_equals_native_bit_for_bit(bits, rounding, numel):
    for block in (2, 64, 256):
        format = Blocks(bits, block, rounding)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3
        if numel > 2:
            x[1], x[2] = 1e-38, 1e30
        if numel > 1000:
            x[700], x[900] = torch.nan, -torch.inf
        native = format.pack(x, seed=2**63 + 11)
        twin = torch.empty_like(native)
        in_torch.pack_blocks(x, bits, block, 2**63 + 11, rounding == "stochastic", twin)
        assert native.numel() == format.nbytes(numel) == _core.packed_nbytes(numel, bits, block)
        assert torch.equal(native, twin)
        back = torch.ones(numel)
        in_torch.unpack_blocks(native, numel, bits, block, -1.0, True, back)
        expected = torch.ones(numel)
        format.unpack_add(native, expected, gain=-1.0)
        torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


def test_the_generator_is_the_same_in_both():
    out = torch.empty(1000, dtype=torch.uint32)
    _core.random_bits(12345678901234567890, out)
    assert torch.equal(
        out.to(torch.int64), in_torch.random_words(12345678901234567890, 1000, torch.device("cpu"))
    )


@pytest.mark.parametrize("codec", [Int8(), Int8(block=64), Int4(), Int4(block=128)], ids=str)
def test_a_payload_can_be_cut_between_blocks_and_joined_again(codec):
    format = codec.format
    x = torch.randn(10_007)
    data = format.pack(x, 1)
    for shards in (1, 2, 3, 5, 200):
        cuts = format.cuts(x.numel(), shards)
        parts = [format.cut(data, a, b) for a, b in pairwise(cuts)]
        assert torch.equal(format.join(parts), data)
        whole = torch.cat([format.unpack(p, b - a) for p, (a, b) in zip(parts, pairwise(cuts), strict=True)])
        assert torch.equal(whole, format.unpack(data, x.numel()))


def test_errors_of_this_size_are_what_the_bits_allow():
    """Pinned figures, Gaussian vectors, 4 ranks, sharded: both roundings counted."""
    inputs = vectors("gauss", 4, 1 << 16)
    for codec, low, high in [
        (Int8(), 4.5e-5, 5.5e-5),
        (Int8(rounding="nearest"), 2.2e-5, 2.7e-5),
        (Int4(), 0.0105, 0.0125),
        (Int4(rounding="nearest"), 0.0052, 0.0063),
    ]:
        assert low < nmse(loop_back(codec, inputs)[0].total, inputs) < high


def test_one_element_costs_a_scale_and_a_code():
    assert Int8().nbytes(1) == 5 and Int4().nbytes(1) == 5 and Int4().nbytes(3) == 6
    assert Int8().nbytes(256) == 260 and Int4().nbytes(64) == 36 and Int8().nbytes(0) == 0
