"""TernGrad: -1, 0 and 1 of one scale, whose sum anybody can add."""

import pytest
import torch

from tacit.codecs import TernGrad
from tacit.requests import LocalMemory, TableSum, context_for, loop_back
from tacit.shapes import requests_of
from tacit.testing import vectors


def test_the_bytes_are_pinned():
    x = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])
    context = context_for(LocalMemory(x), seed=0, step=0, bucket="b", rank=0, world=2)
    talk = TernGrad(clip=0).reduce(x, context)
    assert next(talk).value.tolist() == [1.0]
    request = talk.send(torch.tensor([1.0]))
    assert isinstance(request, TableSum) and request.table == (0, 1, 2, 1)
    assert request.index.numpy().tobytes().hex() == "9200"  # 2, 0, 1, 2; then 0


@pytest.mark.parametrize("world", [1, 4, 150])
def test_what_all_ranks_receive_are_whole_multiples_of_the_largest_of_all(world):
    inputs = vectors("gauss", world, 1000)
    scale = max(x.abs().max() for x in inputs)
    reduced = loop_back(TernGrad(clip=0), inputs)
    found = reduced[0].total / scale
    torch.testing.assert_close(found, found.round(), rtol=0, atol=1e-5)
    own = torch.stack([each.contribution() for each in reduced]) / scale
    assert set(own.round(decimals=4).unique().tolist()) <= {-1.0, 0.0, 1.0}
    torch.testing.assert_close(own.sum(0), found, rtol=0, atol=1e-4)


def test_without_clipping_the_mean_of_many_trials_is_the_gradient():
    inputs, trials = vectors("gauss", 2, 1024), 400
    exact = (inputs[0] + inputs[1]).double()
    found = torch.stack([loop_back(TernGrad(clip=0), inputs, step=t)[0].total for t in range(trials)])
    errors = found.double() - exact
    variance = errors.square().mean(0)
    assert errors.mean(0).square().sum() < 1.2 * variance.sum() / trials
    # of one rank it is |x_i| (s - |x_i|)
    scale = max(x.abs().max() for x in inputs).double()
    expected = sum((x.double().abs() * (scale - x.double().abs())).sum() for x in inputs)
    assert variance.sum().item() == pytest.approx(expected.item(), rel=0.02)


def test_clipping_cuts_at_deviations_of_the_block_and_lowers_the_noise():
    codec, x = TernGrad(2.5, 512), vectors("gauss", 1, 2048)[0]
    limits = codec.limits(x)
    for part, limit in zip(x.split(512), limits, strict=True):
        sigma = part.double().std(correction=0)
        assert limit.item() == pytest.approx(min(2.5 * sigma.item(), part.abs().max().item()), rel=1e-5)
    exact = vectors("gauss", 4, 1 << 14)
    errors = [(loop_back(TernGrad(clip), exact)[0].total - sum(exact)).square().sum() for clip in (0, 2.5)]
    assert errors[1] < 0.6 * errors[0]


def test_equal_numbers_are_sent_as_they_are():
    for x in (torch.full((2000,), 0.3), torch.full((1,), -2.0)):
        torch.testing.assert_close(loop_back(TernGrad(), [x, x])[0].total, 2 * x)


@pytest.mark.parametrize("numel", [0, 1, 4, 5, 1024, 5000])
def test_two_bits_up_and_a_lane_down(numel):
    blocks = -(-numel // 1024)
    for world, lane in ((4, 1), (127, 1), (128, 2)):
        scales, sums = requests_of(TernGrad(), numel, world)
        assert (scales.kind, scales.up_nbytes) == ("Max", 4 * blocks)
        assert (sums.kind, sums.up_nbytes, sums.down_nbytes) == ("TableSum", -(-numel // 4), lane * numel)
    assert TernGrad().nbytes(numel) == 4 * blocks + -(-numel // 4)
