"""What optimizers that exchange momenta have in common: which gradient is one, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

from tacit.errors import ConfigError
from tacit.optim import OneBitAdam


def _one():
    w = nn.Parameter(torch.ones(2))
    return w, OneBitAdam([w], lr=0.1, scaled=False)


def test_a_gradient_is_a_momentum_from_its_offer_to_the_step_or_to_zero_grad():
    for end in (lambda optimizer: optimizer.step(), lambda optimizer: optimizer.zero_grad()):
        w, optimizer = _one()
        w.grad = torch.ones(2)
        assert not optimizer.exchanged(w)
        optimizer.offer(w, w.grad)
        assert optimizer.exchanged(w)
        end(optimizer)
        assert not optimizer.exchanged(w)


def test_a_second_gradient_without_a_step_is_refused():
    w, optimizer = _one()
    optimizer.offer(w, torch.ones(2))
    with pytest.raises(
        ConfigError, match=r"accumulate under handle\.no_sync\(\), or call optimizer\.zero_grad"
    ):
        optimizer.offer(w, torch.ones(2))


def test_each_group_has_its_own_momentum_also_those_added_loaded_and_copied():
    _, optimizer = _one()
    other = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [other], "betas": (0.5, 0.9)})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[1]["betas"] = (0.25, 0.9)
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, copied):
        mine, its = (group["params"][0] for group in each.param_groups)
        a, b = torch.ones(2), torch.ones(2)
        each.offer(mine, a)
        each.offer(its, b)
        torch.testing.assert_close(torch.cat([a, b]), torch.tensor([0.1, 0.1, 0.75, 0.75]))


def test_a_grad_scaler_is_refused():
    w, optimizer = _one()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((w * 2).sum()).backward()
    with pytest.raises(ConfigError, match="before a GradScaler could undo its scale; train in bfloat16"):
        scaler.step(optimizer)
    assert w.tolist() == [1.0, 1.0]


def test_a_closure_computes_the_gradients():
    w, optimizer = _one()

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0 and w[0].item() < 1.0
