"""LARS against its formula in plain float64, with and without the trust ratio."""

import pytest
import torch
from torch import nn

from tacit.errors import ConfigError
from tacit.optim import Lars, trust_groups


def _small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def test_it_is_the_formula_after_every_step():
    model, lr, momentum, decay, trust = _small(), 3.0, 0.9, 1e-2, 0.02
    optimizer = Lars(trust_groups(model), lr=lr, momentum=momentum, weight_decay=decay, trust=trust)
    expected = {p: (p.detach().clone(), torch.zeros_like(p)) for p in model.parameters()}
    for step in range(5):
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for p, (w, u) in expected.items():
            g, b = p.grad, decay if p.dim() > 1 else 0.0
            ratio = trust * w.norm() / (g.norm() + b * w.norm()) if p.dim() > 1 else 1.0
            u.mul_(momentum).add_(lr * ratio * (g + b * w))
            w.sub_(u)
        optimizer.step()
        for p, (w, _) in expected.items():
            torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-14)


def test_weights_of_length_zero_and_gradients_of_zero_take_no_ratio():
    zero, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Lars([zero, still], lr=0.5, momentum=0.0)
    zero.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    optimizer.step()
    assert zero.tolist() == [[-0.5, -0.5], [-0.5, -0.5]] and still.tolist() == [[1, 1], [1, 1]]


def test_biases_and_norms_are_the_parameters_without_it():
    model = _small()
    model[0].weight.requires_grad_(False)
    weights, rest = trust_groups(model)
    assert weights == {"params": [model[2].weight]}
    assert {id(p) for p in rest["params"]} == {id(p) for p in model.parameters() if p.dim() == 1}
    assert (rest["adapt"], rest["weight_decay"]) == (False, 0.0)
    assert trust_groups(nn.Linear(2, 2, bias=False))[0].keys() == {"params"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1.0}, "lr=-1.0: a learning rate of 0 or more"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum=1.0: 0 to below 1"),
        ({"lr": 0.1, "trust": float("nan")}, "trust=nan: 0 or more"),
        ({"lr": 0.1, "weight_decay": "no"}, "weight_decay='no': 0 or more"),
    ],
)
def test_a_bad_option_is_one_sentence(options, sentence):
    with pytest.raises(ConfigError) as refused:
        Lars([nn.Parameter(torch.ones(1))], **options)
    assert sentence in str(refused.value)
