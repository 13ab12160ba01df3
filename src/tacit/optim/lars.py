"""LARS (You, Gitman, Ginsburg 2017, arXiv 1708.03888): a layer's learning rate is as long as its weights are.

    ratio = trust |w| / (|g| + b |w|)          b: weight decay; 1 where |w| or the divisor is zero, and in groups with adapt=False
    u = momentum u + lr ratio (g + b w);   w -= u

Norms are a parameter's. Biases and norms take no ratio and no weight decay: `trust_groups`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tacit.optim.one_by_one import OneByOne
from tacit.optim.options import check_options


class Lars(OneByOne):
    """SGD with momentum and a trust ratio a layer, for large batches.

    Args:
        params: Parameters, or groups of them; a group with `adapt=False` takes no ratio.
        lr: The learning rate; with `trust` 0.001 it is a few units rather than a tenth.
        momentum: What a step keeps of the last one.
        weight_decay: b above.
        trust: How much of a layer's length a step may change.

    Raises:
        ConfigError: An option is outside of its limits.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Lars(trust_groups(model), lr=4.0, weight_decay=1e-4)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [1, 1]
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ):
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        check_options(options)
        super().__init__(params, {**options, "adapt": True})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        wanted = gradient.add(parameter, alpha=decay)
        if group["adapt"]:
            length = norm(parameter)
            wanted *= ratio(group["trust"] * length, norm(gradient) + decay * length)
        kept = self.state[parameter]
        if "momentum_buffer" not in kept:
            kept["momentum_buffer"] = torch.zeros_like(parameter)
        parameter.sub_(kept["momentum_buffer"].mul_(group["momentum"]).add_(wanted, alpha=group["lr"]))


def norm(x: Tensor) -> Tensor:
    """The Euclidean length of all of x."""
    found: Tensor = torch.linalg.vector_norm(x)
    return found


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """above / below, or 1 where either is zero; on its device, with no wait for it."""
    return torch.where((above > 0) & (below > 0), above / below, torch.ones_like(above))


def trust_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: weights with two dimensions or more, and biases and norms, which take no trust ratio and no weight decay.

    Args:
        model: Its parameters that want a gradient are taken.

    Example:
        >>> [group.get("adapt", True) for group in trust_groups(torch.nn.Linear(2, 1))]
        [True, False]
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    weights, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": weights},
        {"params": rest, "adapt": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
