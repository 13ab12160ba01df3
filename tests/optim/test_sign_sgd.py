"""SignSgd: steps of one length, and DeMo's memory as the paper's momentum."""

import pytest
import torch

from tacit.codecs import Dct, ErrorFeedback, Plain
from tacit.codecs.dct import cosines
from tacit.errors import ConfigError
from tacit.layout import Layout
from tacit.optim import SignSgd
from tacit.requests import LocalMemory, loop_back


def test_every_element_moves_by_the_rate_and_decays():
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 4.0]))
    w.grad = torch.tensor([3.0, -1e-9, 0.0])
    SignSgd([w], lr=0.5, weight_decay=0.1).step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.45, -1.4, 3.8]))


def _demo(gradients, w, lr, decay, share):
    """Algorithm 1 of DeMo on one tile, in float64: the weights after each step, and the momenta."""
    d, kept = cosines(8, torch.device("cpu")).double(), round(share * 64)
    momenta, seen = [torch.zeros(8, 8, dtype=torch.float64) for _ in gradients[0]], []
    for own in gradients:
        sent = []
        for rank, g in enumerate(own):
            m = decay * momenta[rank] + g.double()
            c = d @ m @ d.T
            q = torch.where(c.abs() >= c.abs().flatten().topk(kept).values[-1], c, 0.0)
            momenta[rank] = m - d.T @ q @ d
            sent.append(q)
        w = w - lr * (d.T @ sum(sent) @ d / len(sent)).sign()
        seen.append(w)
    return seen, momenta


def test_with_dct_in_error_feedback_it_is_demo_s_algorithm():
    world, lr, decay, share = 3, 0.1, 0.9, 1 / 8
    rng = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(8, 8, generator=rng) for _ in range(world)] for _ in range(8)]
    start = torch.randn(8, 8, generator=rng)
    expected, momenta = _demo(gradients, start.double(), lr, decay, share)
    codec, layout = ErrorFeedback(Dct(share, chunk=8, values=Plain()), decay=decay), Layout.of({"w": (8, 8)})
    memories = [LocalMemory(torch.empty(64), given=layout) for _ in range(world)]
    w = torch.nn.Parameter(start.clone())
    optimizer = SignSgd([w], lr=lr)
    for step, own in enumerate(gradients):
        reduced = loop_back(codec, [g.flatten() for g in own], memories=memories, step=step, layout=layout)
        w.grad = (reduced[0].total / world).view(8, 8)
        optimizer.step()
        torch.testing.assert_close(w.detach().double(), expected[step], rtol=1e-5, atol=1e-5)
    for memory, m in zip(memories, momenta, strict=True):
        torch.testing.assert_close(memory.vector("residual").double(), m.flatten(), rtol=1e-4, atol=1e-5)


def test_a_bad_option_is_one_sentence():
    with pytest.raises(ConfigError, match="lr='fast': a learning rate of 0 or more"):
        SignSgd([torch.nn.Parameter(torch.ones(1))], lr="fast")
