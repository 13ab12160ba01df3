"""QSGD: unbiased, within the variance of the paper's lemma, and as many bits as it declares."""

import pytest
import torch

from tacit.codecs import Int4, Qsgd
from tacit.requests import loop_back
from tacit.testing import nmse, vectors


def sent(codec, x, seed):
    return codec.format.unpack(codec.format.pack(x, seed), x.numel())


def test_the_bytes_are_pinned():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 5.0, -0.0, -1.0, 2.0])
    for levels, golden in (
        (1, "5177ef40 66aa  00000040 03"),  # the norm, sqrt(56); codes 2 + q, four a byte
        (7, "77d6883f 694bc878  2549923e 0f"),
        (127, "055a713d 915eb33c80d5806f  0402813c ff"),
    ):
        assert Qsgd(levels, 8).format.pack(x, 7).numpy().tobytes() == bytes.fromhex(golden)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("levels", [1, 3, 7, 20, 127])
def test_it_is_unbiased_and_its_variance_is_below_that_of_the_lemma(levels, norm):
    """E|Q(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2, and the mean of 400 trials is within its own noise of x."""
    codec, trials = Qsgd(levels, 256, norm), 400
    x = vectors("lognormal", 1, 2048)[0] * torch.randn(2048).sign()
    errors = torch.stack([sent(codec, x, seed) for seed in range(trials)]).double() - x
    variance = errors.square().mean(0)
    for part, own in zip(x.double().split(256), variance.split(256), strict=True):
        bound = min(256 / levels**2, 16 / levels) * part.square().sum()
        assert own.sum() <= 1.05 * bound
    assert errors.mean(0).square().sum() < 1.5 * variance.sum() / trials  # 1 for an unbiased estimate


def test_every_level_is_a_whole_part_of_the_norm():
    x = vectors("gauss", 1, 512)[0]
    levels = sent(Qsgd(7), x, 1).double() / (x.double().norm() / 7)
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)
    assert ((levels - x / (x.norm() / 7)).abs() < 1.0001).all()


@pytest.mark.parametrize("numel", [0, 1, 511, 512, 5000])
def test_bits_are_those_of_the_levels(numel):
    buckets = -(-numel // 512)
    for levels, bits in ((1, 2), (2, 4), (7, 4), (8, 8), (127, 8)):
        codec = Qsgd(levels)
        full, rest = divmod(numel, 512)
        expected = 4 * buckets + full * 64 * bits + -(-rest * bits // 8)
        assert codec.nbytes(numel) == codec.format.pack(torch.ones(numel), 0).numel() == expected


def test_with_the_largest_number_as_norm_it_is_int4():
    inputs = vectors("gauss", 4, 1 << 14)
    ours = nmse(loop_back(Qsgd(7, 64, "max"), inputs)[0].total, inputs)
    assert ours == pytest.approx(nmse(loop_back(Int4(), inputs)[0].total, inputs), rel=0.02)
