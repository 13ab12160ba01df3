"""signSGD: the majority of votes, exactly, and shares that add up to it."""

import pytest
import torch

from tacit.codecs import MajorityVote
from tacit.requests import loop_back
from tacit.shapes import requests_of
from tacit.strategy import default_scheme
from tacit.testing import vectors


@pytest.mark.parametrize("world", [1, 2, 3, 4, 9, 300])
@pytest.mark.parametrize("codec", [MajorityVote(), MajorityVote("unit", 64)], ids=str)
def test_the_total_is_the_majority_times_the_mean_of_all(world, codec):
    inputs = vectors("gauss", world, 1000)
    votes = sum(torch.where(x < 0, -1, 1) for x in inputs)
    sizes = torch.stack(inputs).double().abs().mean(0).split(codec.block)
    scale = torch.cat([part.mean().expand(len(part)) for part in sizes])
    expected = world * votes.sign() * (scale if codec.scale == "mean" else 1.0)
    for own in loop_back(codec, inputs):
        torch.testing.assert_close(own.total.double(), expected.double(), rtol=1e-6, atol=0)
    assert (votes == 0).any() or world % 2  # ties are zero


def test_a_minority_has_no_voice_however_loud():
    loud, quiet = torch.full((100,), 100.0), torch.full((100,), -1.0)
    (first, *_) = loop_back(MajorityVote("unit"), [loud, quiet, quiet])
    assert first.total.eq(-3).all()


def test_the_shares_add_up_to_the_majority():
    inputs = vectors("windows", 5, 3000)
    reduced = loop_back(MajorityVote(block=256), inputs)
    shares = torch.stack([own.contribution() for own in reduced]).double().sum(0)
    torch.testing.assert_close(shares, reduced[0].total.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("numel", [0, 1, 9, 1000, 5000])
def test_a_vote_is_a_bit_up_and_a_lane_down(numel):
    blocks = -(-numel // 1024)
    for world, lane in ((4, 1), (255, 1), (256, 2)):
        small, votes = requests_of(MajorityVote(), numel, world)
        assert (small.kind, small.up_nbytes) == ("Sum", 8 * blocks)
        assert (votes.kind, votes.up_nbytes, votes.down_nbytes) == ("TableSum", -(-numel // 8), lane * numel)
    assert MajorityVote().nbytes(numel) == 8 * blocks + -(-numel // 8)
    assert str(default_scheme(MajorityVote())) == "sharded"


def test_a_published_step_is_one_whatever_the_size_and_zeros_stay_zero():
    for scale in (1e-30, 1.0, 1e37):
        inputs = [x * scale for x in vectors("identical", 4, 100)]
        assert loop_back(MajorityVote("unit"), inputs)[0].total.abs().eq(4).all()
    assert not loop_back(MajorityVote("unit"), [torch.zeros(100)] * 3)[0].total.any()


@pytest.mark.parametrize("codec", [MajorityVote(block=64), MajorityVote("unit", 64)], ids=str)
def test_a_nan_reaches_all_ranks_and_no_other_block(codec):
    inputs = vectors("gauss", 3, 256)
    inputs[2][70] = torch.nan
    for own in loop_back(codec, inputs):
        assert own.total[64:128].isnan().all() and own.total[:64].isfinite().all()
