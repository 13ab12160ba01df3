"""LAMB against its formula in plain float64."""

import pytest
import torch
from torch import nn

from tacit.errors import ConfigError
from tacit.optim import Lamb, trust_groups


def test_it_is_the_formula_after_every_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    lr, (b1, b2), eps, decay = 0.05, (0.8, 0.95), 1e-6, 1e-2
    optimizer = Lamb(trust_groups(model), lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    expected = {p: (p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    for t in range(1, 6):
        x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        for p, (w, m, v) in expected.items():
            m.copy_(b1 * m + (1 - b1) * p.grad)
            v.copy_(b2 * v + (1 - b2) * p.grad**2)
            r = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
            if p.dim() > 1:
                r = r + decay * w
                r = r * w.norm() / r.norm()
            w.sub_(lr * r)
        optimizer.step()
        for p, (w, _, _) in expected.items():
            torch.testing.assert_close(p.detach(), w, rtol=1e-11, atol=1e-13)


def test_without_the_ratio_it_is_adam_with_its_decay_in_the_step():
    w = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    own, adam = torch.nn.Parameter(w.detach().clone()), torch.nn.Parameter(w.detach().clone())
    lamb = Lamb([{"params": [own], "adapt": False}], lr=0.1, eps=1e-8)
    torchs = torch.optim.Adam([adam], lr=0.1)
    for value in (1.0, -2.0, 0.5):
        own.grad, adam.grad = torch.full((1, 2), value), torch.full((1, 2), value)
        lamb.step()
        torchs.step()
    torch.testing.assert_close(own, adam)


def test_a_layer_moves_by_its_own_length():
    long, short = nn.Parameter(torch.full((2, 2), 100.0)), nn.Parameter(torch.full((2, 2), 0.01))
    optimizer = Lamb([long, short], lr=0.1)
    before = [p.detach().clone() for p in (long, short)]
    long.grad, short.grad = 1e-3 * torch.ones(2, 2), 1e3 * torch.ones(2, 2)
    optimizer.step()
    for p, old in zip((long, short), before, strict=True):
        assert ((p - old).norm() / old.norm()).item() == pytest.approx(0.1, rel=1e-4)


def test_a_bad_option_is_one_sentence():
    for betas in ((0.9, 1.0), 0.9, (0.9,), "no"):
        with pytest.raises(ConfigError, match="two numbers from 0 to below 1"):
            Lamb([nn.Parameter(torch.ones(1))], betas=betas)
