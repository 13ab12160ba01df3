"""Natural compression: powers of two, without bias, an eighth of the energy as noise at most."""

import pytest
import torch

from tacit.codecs import Natural

FORMAT = Natural.format


def sent(x, seed=0):
    return FORMAT.unpack(FORMAT.pack(x, seed), x.numel())


def test_the_bytes_are_pinned():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 5.0, -0.0, -1.0, 2.0])
    # a byte of signs, exponents 127 + log2: 3 became 2 and 5 became 4; then a record of one
    assert FORMAT.pack(x, 7).numpy().tobytes() == bytes.fromhex("ca 7f8080810081007f  00 80")


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30, 1e37])
def test_a_number_becomes_one_of_the_powers_around_it(scale):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * scale
    found = sent(x)
    mantissa = torch.frexp(found).mantissa.abs()
    assert mantissa[found != 0].eq(0.5).all()
    low = torch.ldexp(torch.ones(5000), torch.frexp(x).exponent - 1)
    ratio = found.double() / x.double().sign() / low.double()
    normal = x.abs() >= 2.0**-126
    assert ratio[normal].double().log2().round().unique().tolist() in ([0.0, 1.0], [0.0], [1.0])


def test_it_is_unbiased_and_its_variance_is_at_most_an_eighth():
    x, trials = torch.randn(2000, generator=torch.Generator().manual_seed(2)), 1000
    errors = torch.stack([sent(x, seed) for seed in range(trials)]).double() / x - 1
    variance = errors.square().mean(0)
    assert errors.mean(0).square().sum() < 1.15 * variance.sum() / trials
    assert 0.11 < variance.max() < 0.125 * 1.15 and variance.mean() < 0.09


def test_powers_of_two_zeros_and_the_ends_of_the_range_are_kept():
    x = torch.tensor([0.0, -0.0, 1.0, -0.5, 2.0**127, -(2.0**-126), 2.0**-100])
    assert torch.equal(sent(x), x)
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    assert sent(largest).eq(2.0**127).all()  # not infinity
    broken = sent(torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]))
    assert broken[:3].isnan().all() and broken[3] == 1


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 5000])
def test_nine_bits_an_element(numel):
    assert Natural().nbytes(numel) == FORMAT.pack(torch.ones(numel), 0).numel() == numel + -(-numel // 8)
