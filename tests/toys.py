"""Small models and training loops that the tests share; importable by rank processes too."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64


def deep(layers: int = 8, seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    """About 33,000 parameters: five or more buckets at 20 kB."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4)).to(dtype)


def batch(rank: int, step: int, rows: int = 16, gap: float = 4.0) -> tuple[Tensor, Tensor]:
    """A batch that depends on rank and step only: four noisy directions to tell apart, `gap` sigma each."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    label = torch.randint(0, 4, (rows,), generator=rng)
    return torch.randn(rows, WIDTH, generator=rng) + gap * torch.eye(4, WIDTH)[label], label


def loss_of(model: nn.Module, rank: int, step: int, gap: float = 4.0) -> Tensor:
    x, label = batch(rank, step, gap=gap)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), label)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> float:
    """The loss of the last step."""
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
    return loss.item()


def own_state(handle: Any) -> dict[str, Any]:
    """What a rank's checkpoint holds, without the name that no other rank's has."""
    ((state,),) = handle.state_dict().values()
    return dict(state)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        n.removeprefix("module."): None if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }
