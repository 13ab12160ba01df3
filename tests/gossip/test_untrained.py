"""What of a model is not trained: it travels to the bit, whatever its type, and has a mean where that makes sense."""

import pytest
import torch

from tacit.gossip.frames import PeerError
from tacit.gossip.untrained import Mean, Untrained, raw_bytes


def untrained(seed):
    rng = torch.Generator().manual_seed(seed)
    buffers = [
        torch.randn(3, 2, generator=rng), torch.tensor(7 + seed), torch.empty(0), torch.tensor([True, False]),
        torch.randn(5, generator=rng).bfloat16(), torch.randn(2, generator=rng).double(),
    ]  # fmt: skip
    return Untrained(buffers, [torch.randn(4, generator=rng)])


def test_buffers_and_frozen_parameters_arrive_as_they_were():
    one, two = untrained(1), untrained(2)
    assert one.crc != two.crc
    two.take(two.decode(one.encode()))
    two.take_frozen(raw_bytes(one.frozen[0]))
    assert one.crc == two.crc
    for left, right in zip((*one.buffers, *one.frozen), (*two.buffers, *two.frozen), strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


def test_another_models_are_refused():
    with pytest.raises(PeerError, match="other buffers or frozen parameters"):
        untrained(1).decode(untrained(1).encode() + b"x")


def test_a_mean_is_of_what_is_finite_and_counts_are_the_firsts():
    mean, models = (
        Mean(),
        [torch.tensor([1.0, 2.0]), torch.tensor([float("inf"), 0.0]), torch.tensor([3.0, 6.0])],
    )
    taken = [mean.add(model, untrained(seed).buffers) for seed, model in enumerate(models)]
    model, buffers = mean.of_all()
    assert taken == [True, False, True] and torch.equal(model, torch.tensor([2.0, 4.0]))
    torch.testing.assert_close(buffers[0], (untrained(0).buffers[0] + untrained(2).buffers[0]) / 2)
    assert int(buffers[1]) == 7 and buffers[3].tolist() == [True, False]
    assert torch.equal(models[0], torch.tensor([1.0, 2.0]))  # only read
