"""fp8 by block: the bits of torch's own casts, with a scale."""

import pytest
import torch

from tacit.codecs import Fp8

TYPES = {"e4m3": (torch.float8_e4m3fn, 448.0, 1 / 16), "e5m2": (torch.float8_e5m2, 57344.0, 1 / 8)}


def sent(codec, x, seed=0):
    return codec.format.unpack(codec.format.pack(x, seed), x.numel())


def test_the_bytes_are_pinned():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 5.0, -0.0, -1.0, 2.0])
    for kind, golden in (
        ("e4m3", "6edb363c 6bf378fb007e80eb  2549923b 7e"),  # 5 / 448
        ("e5m2", "6edbb638 72f678fa007b80f2  25491238 7b"),  # 5 / 57344
    ):
        assert Fp8(kind, 8).format.pack(x, 0).numpy().tobytes() == bytes.fromhex(golden)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_to_the_nearest_it_is_torchs_cast(kind, scale):
    dtype, largest, _ = TYPES[kind]
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3)) * torch.linspace(-20, 0, 4096).exp2()
    x = (x.double() * scale).float()
    data = Fp8(kind, 4096).format.pack(x, 0)
    factor = data[:4].view(torch.float32)
    torch.testing.assert_close(factor, x.abs().max().reshape(1) / largest)
    expected = (x * (1 / factor)).clamp(-largest, largest).to(dtype)
    assert torch.equal(data[4:], expected.view(torch.uint8))
    assert torch.equal(sent(Fp8(kind, 4096), x), expected.float() * factor)


@pytest.mark.parametrize("kind", TYPES)
def test_errors_are_half_a_step_of_the_mantissa(kind):
    _, largest, most = TYPES[kind]
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(4))
    error = (sent(Fp8(kind), x) - x).abs().view(-1, 256)
    grain = x.abs().view(-1, 256).amax(1, keepdim=True) / largest * (2**-9 if kind == "e4m3" else 2**-16)
    assert (error <= torch.maximum(most * x.abs().view(-1, 256), grain / 2) * 1.0001).all()


@pytest.mark.parametrize("kind", TYPES)
def test_stochastic_rounding_is_unbiased_also_where_numbers_are_subnormal(kind):
    codec, trials = Fp8(kind, 1024, "stochastic"), 500
    x = torch.randn(1024, generator=torch.Generator().manual_seed(5)) * torch.linspace(-14, 0, 1024).exp2()
    errors = torch.stack([sent(codec, x, seed) for seed in range(trials)]).double() - x
    variance = errors.square().mean(0)
    for some in (slice(0, 512), slice(512, 1024)):  # the first half is below the normal numbers of e4m3
        assert 0 < errors.mean(0)[some].square().sum() < 1.4 * variance[some].sum() / trials


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 5000])
def test_a_byte_an_element_and_a_scale_a_block(numel):
    assert Fp8().nbytes(numel) == Fp8().format.pack(torch.ones(numel), 0).numel()
    assert Fp8().nbytes(numel) == numel + 4 * -(-numel // 256)
