"""Two bits of statistical levels: what is sent is a mean, how much it shrinks x, and a block that is mostly zeros."""

import math

import pytest
import torch

from tacit.codecs import ErrorFeedback, Sign, TwoBit
from tacit.errors import ConfigError
from tacit.requests import LocalMemory, loop_back
from tacit.shapes import requests_of
from tacit.strategy import parse_codec
from tacit.testing import vectors


def sent(codec, x):
    return codec.format.unpack(codec.format.pack(x, 0), x.numel())


def test_the_bytes_are_pinned():
    x = torch.tensor([1.0, -1.0, 8.0, -10.0, 2.0, 0.0, -0.0, 1.0, -3.0])
    # a limit of 4.9: sizes up to it are 5/6 on average, above it 9; elements 1, 3, 6 are negative; then a block of one, which is its own mean
    assert TwoBit(8).format.pack(x, 0).numpy().tobytes() == bytes.fromhex(
        "5555553f 00001041 e4 10 00000000 00004040 03"
    )
    torch.testing.assert_close(
        sent(TwoBit(8), x), torch.tensor([5 / 6, -5 / 6, 9, -9, 5 / 6, 5 / 6, -5 / 6, 5 / 6, -3])
    )


@pytest.mark.parametrize("numel", [0, 1, 7, 512, 513, 5000])
def test_two_bits_are_two_bits_on_the_wire(numel):
    blocks, rest = divmod(numel, 512)
    expected = 8 * (blocks + (rest > 0)) + blocks * 128 + math.ceil(2 * rest / 8)
    assert TwoBit().nbytes(numel) == TwoBit().format.pack(torch.ones(numel), 0).numel() == expected
    asked = requests_of(TwoBit(), numel, 4)
    assert [(a.kind, a.up_nbytes, a.down_nbytes, a.on) for a in asked] == [
        ("Sum", expected, expected, "meta")
    ]


@pytest.mark.parametrize("family", ["gauss", "lognormal", "blocky"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_levels_are_the_means_of_what_they_stand_for(family, scale):
    """So that |x - C(x)|^2 = |x|^2 - |C(x)|^2 in every block, and two bits are never worse than one."""
    x = vectors(family, 1, 1 << 15)[0]
    x = x / x.abs().max() * scale
    for part, two, one in zip(
        x.double().split(512),
        sent(TwoBit(), x).double().split(512),
        sent(Sign(512), x).double().split(512),
        strict=True,
    ):
        part, two, one = part / scale, two / scale, one / scale
        for level in two.abs().unique():
            mean = part.abs()[two.abs() == level].mean().item()
            assert level.item() == pytest.approx(mean, rel=1e-6)
        left = (part - two).square().sum().item()
        assert left == pytest.approx((part.square().sum() - two.square().sum()).item(), rel=1e-4)
        assert left <= (part - one).square().sum().item() * (1 + 1e-6)


def test_normal_numbers_keep_what_the_best_four_levels_keep():
    x = vectors("gauss", 1, 1 << 18)[0]
    left = (x - sent(TwoBit(1 << 14), x)).square().mean().item()
    assert left == pytest.approx(0.1175, abs=0.002)  # Lloyd and Max


def test_what_is_mostly_zeros_shrinks_far_more_than_with_one_bit():
    """A gradient behind dead units: sign sends its zeros as large as all others, and error feedback takes 50 steps to take them back."""
    x = torch.zeros(4096)
    x[::64] = torch.randn(64, generator=torch.Generator().manual_seed(0))
    energy = x.square().sum()
    assert (x - sent(TwoBit(), x)).square().sum() / energy < 0.35
    assert (x - sent(Sign(), x)).square().sum() / energy > 0.98


def test_error_feedback_sends_a_constant_gradient_whole_in_time():
    x = vectors("gauss", 1, 4096)[0]
    codec, memory, total = ErrorFeedback(TwoBit()), [LocalMemory(x)], torch.zeros(4096)
    for step in range(30):
        total += loop_back(codec, [x], memories=memory, step=step)[0].total
    torch.testing.assert_close(total / 30 + memory[0].vector("residual") / 30, x, rtol=1e-4, atol=1e-4)
    assert (total / 30 - x).norm() / x.norm() < 0.06  # a step alone is off by .34


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_block_that_is_not_finite_is_nan_and_leaves_the_others_alone(bad):
    x = torch.ones(2048)
    x[600] = bad
    found = sent(TwoBit(), x)
    assert (
        found[512:1024].isnan().all()
        and torch.equal(found[:512], x[:512])
        and torch.equal(found[1024:], x[1024:])
    )


@pytest.mark.parametrize(
    "text", ["twobit(block=12)", "twobit(block=0)", "twobit(block=half)", "twobit(bits=3)"]
)
def test_bad_options_are_one_sentence(text):
    with pytest.raises(ConfigError) as caught:
        parse_codec(text)
    assert "\n" not in str(caught.value)
