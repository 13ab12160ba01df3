"""1-bit Adam against its algorithm in plain float64; ranks take turns in one process."""

import copy

import pytest
import torch
from torch import nn

from tacit.codecs import ErrorFeedback, Exact, Sign
from tacit.errors import ConfigError
from tacit.optim import OneBitAdam
from tacit.requests import LocalMemory, loop_back

WORLD, NUMEL = 3, 40


def _gradients(steps):
    rng = torch.Generator().manual_seed(1)
    return [[torch.randn(NUMEL, generator=rng) + 0.3 for _ in range(WORLD)] for _ in range(steps)]


def test_with_exact_steps_alone_it_is_adamw():
    own, torchs = (nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2))
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = OneBitAdam([own], **options), torch.optim.AdamW([torchs], **options)
    for step in range(8):
        own.grad = torch.sin(torch.arange(6.0, dtype=torch.float64) + step)
        torchs.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-14)


def _paper(gradients, exact_at, scaled, lr, b1, b2, eps):
    """The algorithm with C(p) = mean |p| sign(p) of each rank, where the sum of what they send loses nothing more."""
    w = torch.zeros(NUMEL, dtype=torch.float64)
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    errors, exact, seen = [torch.zeros_like(w) for _ in range(WORLD)], 0, []
    for step, own in enumerate(gradients):
        if exact_at(step):
            g, exact = torch.stack(own).double().mean(0), exact + 1
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            divisor = (v / (1 - b2**exact)).sqrt() + eps
        else:
            sent, unit = [], divisor if scaled else torch.ones_like(w)
            for rank, g in enumerate(own):
                p = (b1 * m + (1 - b1) * g.double()) / unit + errors[rank]
                sent.append(p.abs().mean() * torch.where(p >= 0, 1.0, -1.0))
                errors[rank] = p - sent[-1]
            m = unit * torch.stack(sent).mean(0)
        w = w - lr * m / (1 - b1 ** (step + 1)) / divisor
        seen.append(w)
    return seen


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("schedule", [{"until": 4}, {"until": 2, "doubling": 2}])
def test_it_is_the_paper_s_algorithm_in_exact_steps_and_in_others(schedule, scaled):
    codec, steps = Exact(ErrorFeedback(Sign(block=64)), **schedule), 14
    gradients = _gradients(steps)
    expected = _paper(gradients, codec.exact_at, scaled, 0.01, 0.9, 0.99, 1e-8)
    w = nn.Parameter(torch.zeros(NUMEL))
    optimizer = OneBitAdam([w], lr=0.01, betas=(0.9, 0.99), scaled=scaled)
    memories = [LocalMemory(torch.empty(NUMEL)) for _ in range(WORLD)]
    for step, own in enumerate(gradients):
        inputs = [g.clone() for g in own]
        if not codec.exact_at(step):
            for x in inputs[:-1]:
                optimizer.momentum(w, x, optimizer.param_groups[0])
            optimizer.offer(w, inputs[-1])
        w.grad = loop_back(codec, inputs, memories=memories, step=step, scheme="ideal")[0].total / WORLD
        optimizer.step()
        torch.testing.assert_close(w.detach().double(), expected[step], rtol=1e-4, atol=1e-6)


def test_scaling_keeps_one_bit_from_throwing_elements_with_small_gradients():
    """One size for a block says nothing of an element whose gradients are a thousandth of the others': it is thrown by as much as they are."""
    longest = {}
    for scaled in (True, False):
        w = nn.Parameter(torch.zeros(64))
        optimizer = OneBitAdam([w], lr=0.01, scaled=scaled)
        codec, memories, moves = (
            Exact(ErrorFeedback(Sign(block=64)), until=3),
            [LocalMemory(torch.empty(64))],
            [],
        )
        size = torch.cat([torch.full((63,), 1.0), torch.tensor([1e-3])])
        for step in range(12):
            x, before = size * (-1) ** step, w[-1].item()
            if not codec.exact_at(step):
                optimizer.offer(w, x)
            w.grad = loop_back(codec, [x], memories=memories, step=step)[0].total
            optimizer.step()
            moves.append(abs(w[-1].item() - before))
        longest[scaled] = max(moves)
    assert longest[True] <= 0.01 and longest[False] > 1


def test_what_had_no_gradient_in_exact_steps_stays_where_it_is():
    w = nn.Parameter(torch.ones(2))
    optimizer = OneBitAdam([w], lr=0.1)
    w.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    momentum = torch.tensor([0.5, 0.5])
    optimizer.offer(w, momentum)
    w.grad = torch.tensor([0.1, 0.1])  # a codec's error where there is no momentum
    optimizer.step()
    assert w[0].item() < 0.9 and w[1].item() == 1.0


def test_before_the_first_exact_step_nothing_moves():
    w = nn.Parameter(torch.ones(2))
    optimizer = OneBitAdam([w], lr=0.1, weight_decay=0.5)
    w.grad = torch.ones(2)
    optimizer.offer(w, w.grad)
    optimizer.step()
    assert w.tolist() == [1.0, 1.0]


def test_a_saved_optimizer_goes_on_to_the_same_bits():
    w = nn.Parameter(torch.zeros(NUMEL))
    optimizer = OneBitAdam([w], lr=0.01)
    for own in _gradients(3):
        w.grad = own[0]
        optimizer.step()
    other = nn.Parameter(w.detach().clone())
    loaded = OneBitAdam([other], lr=0.5)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own in _gradients(5)[3:]:
        for p, each in ((w, optimizer), (other, loaded)):
            p.grad = own[1].clone()
            each.offer(p, p.grad)
            each.step()
    assert torch.equal(w, other)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_training_with_torch_s_goes_on_with_its_state(kind):
    w = nn.Parameter(torch.zeros(NUMEL))
    adam = kind([w], lr=0.01, weight_decay=0.0)
    for own in _gradients(3):
        w.grad = own[0]
        adam.step()
    other = nn.Parameter(w.detach().clone())
    loaded = OneBitAdam([other], lr=0.5, scaled=False)
    loaded.load_state_dict(copy.deepcopy(adam.state_dict()))
    assert not loaded.param_groups[0]["scaled"]
    for own in _gradients(5)[3:]:
        w.grad, other.grad = own[0].clone(), own[0].clone()
        adam.step()
        loaded.step()
    torch.testing.assert_close(other, w, rtol=1e-5, atol=1e-7)
    loaded.offer(other, own[1])


def test_a_bad_option_is_one_sentence():
    with pytest.raises(ConfigError, match="eps=-1: 0 or more"):
        OneBitAdam([nn.Parameter(torch.ones(1))], eps=-1)
