"""Linear scaling and warm-up."""

import pytest
import torch

from tacit.errors import ConfigError
from tacit.optim import linear_scaling, warm_up


def _rates(steps, first, count):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=3.2)
    schedule, seen = warm_up(optimizer, steps, first), []
    for _ in range(count):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_the_rate_rises_in_a_line_and_stays():
    assert _rates(4, 0.0, 6) == pytest.approx([0.0, 0.8, 1.6, 2.4, 3.2, 3.2])
    assert _rates(4, 1 / 32, 6) == pytest.approx([0.1, 0.875, 1.65, 2.425, 3.2, 3.2])


def test_the_rate_grows_with_the_batch():
    assert linear_scaling(0.1, 8192, 256) == pytest.approx(3.2)
    assert linear_scaling(0.1, 64, 256) == pytest.approx(0.025)


def test_bad_options_are_one_sentence():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    for call, sentence in (
        (lambda: linear_scaling(0.1, 0, 256), "batch=0: a batch has at least one sample"),
        (lambda: linear_scaling(0.1, 256, -1), "base_batch=-1"),
        (lambda: warm_up(optimizer, 0), "steps=0: the rate rises over at least one step"),
        (lambda: warm_up(optimizer, 5, first=1.5), "first=1.5: the part of the rate"),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        assert sentence in str(refused.value)
