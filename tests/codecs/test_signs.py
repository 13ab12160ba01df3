"""One bit and a mean or two: what is sent, how much it shrinks x, and what error feedback makes of it."""

import math

import pytest
import torch

from tacit.codecs import ErrorFeedback, OneBit, Sign
from tacit.requests import LocalMemory, loop_back
from tacit.shapes import requests_of
from tacit.testing import vectors


def sent(codec, x):
    return codec.format.unpack(codec.format.pack(x, 0), x.numel())


def test_the_bytes_are_pinned():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 5.0, -0.0, -1.0, 2.0])
    one, two = (codec.format.pack(x, 0).numpy().tobytes() for codec in (Sign(8), OneBit(8)))
    # |x| is 2 on average; elements 0, 2, 4, 5, 6 are not below zero; then a block of one
    assert one == bytes.fromhex("00000040 75  00000040 01")
    # -7/3 and 9/5; nothing below zero, and 2
    assert two == bytes.fromhex("555515c0 6666e63f 75  00000000 00000040 01")


@pytest.mark.parametrize("codec", [Sign(8), Sign(1024), OneBit(64), OneBit(4096)], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000, 5000])
def test_a_bit_is_a_bit_on_the_wire(codec, numel):
    blocks, rest = divmod(numel, codec.block)
    expected = 4 * codec.means * (blocks + (rest > 0)) + blocks * codec.block // 8 + math.ceil(rest / 8)
    assert codec.nbytes(numel) == codec.format.pack(torch.ones(numel), 0).numel() == expected
    assert [(a.kind, a.up_nbytes, a.down_nbytes, a.on) for a in requests_of(codec, numel, 4)] == [
        ("Sum", expected, expected, "meta")
    ]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e37])
def test_means_are_those_of_seide_and_karimireddy(scale):
    x = (torch.randn(3000, generator=torch.Generator().manual_seed(0)) + 0.3) * scale
    for part, one, two in zip(
        x.split(1024), sent(Sign(), x).split(1024), sent(OneBit(), x).split(1024), strict=True
    ):
        wide = part.double()
        mean = wide.abs().mean()
        torch.testing.assert_close(one.double(), wide.sign() * mean, rtol=1e-6, atol=0)
        sides = torch.where(wide < 0, wide[wide < 0].mean(), wide[wide >= 0].mean())
        torch.testing.assert_close(two.double(), sides, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["gauss", "lognormal", "blocky"])
def test_the_contraction_is_the_one_of_the_paper_and_two_means_shrink_more(family):
    """|x - C(x)|^2 = (1 - |x|_1^2 / (d |x|_2^2)) |x|^2 in every block: 1 - 2/pi for normal numbers."""
    x = vectors(family, 1, 1 << 16)[0]
    ones, twos = sent(Sign(), x), sent(OneBit(), x)
    for part, one, two in zip(x.split(1024), ones.split(1024), twos.split(1024), strict=True):
        wide, energy = part.double(), part.double().square().sum()
        delta = wide.abs().sum() ** 2 / (1024 * energy)
        left = (wide - one).square().sum() / energy
        assert left == pytest.approx(1 - delta.item(), abs=1e-6)
        assert (wide - two).square().sum() / energy <= left + 1e-6
    if family == "gauss":
        assert (x - ones).square().mean().item() == pytest.approx(1 - 2 / math.pi, abs=0.01)


def test_error_feedback_sends_a_constant_gradient_whole_in_time():
    """The mean of what was sent in t steps is within |residual| / t of x: 1-bit SGD and EF-signSGD."""
    x = vectors("gauss", 1, 4096)[0]
    for inner in (Sign(), OneBit()):
        codec, memory, total = ErrorFeedback(inner), [LocalMemory(x)], torch.zeros(4096)
        for step in range(60):
            total += loop_back(codec, [x], memories=memory, step=step)[0].total
        torch.testing.assert_close(total / 60 + memory[0].vector("residual") / 60, x, rtol=1e-4, atol=1e-4)
        assert (total / 60 - x).norm() / x.norm() < 0.13  # a step alone is off by .61


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("codec", [Sign(64), OneBit(64)], ids=str)
def test_a_block_that_is_not_finite_is_nan_and_leaves_the_others_alone(codec, bad):
    x = torch.ones(256)
    x[70] = bad
    found = sent(codec, x)
    assert found[64:128].isnan().all() and found[:64].eq(1).all() and found[128:].eq(1).all()
