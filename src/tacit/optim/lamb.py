"""LAMB (You et al., ICLR 2020, arXiv 1904.00962): Adam's step, as long for each layer as its weights are.

    m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
    w -= lr ratio r;   ratio = |w| / |r|          1 where either is zero, and in groups with adapt=False

Norms are a parameter's. Biases and norms take no ratio and no weight decay: `trust_groups`.
"""

from typing import Any

import torch
from torch import Tensor

from tacit.optim.lars import norm, ratio
from tacit.optim.one_by_one import OneByOne
from tacit.optim.options import check_options


class Lamb(OneByOne):
    """Adam with a trust ratio a layer, for large batches.

    Args:
        params: Parameters, or groups of them; a group with `adapt=False` takes no ratio.
        lr: The learning rate: the part of a layer's length that a step changes.
        betas: b1 and b2.
        eps: Keeps the divisor from zero.
        weight_decay: As above.

    Raises:
        ConfigError: An option is outside of its limits.

    Example:
        >>> from tacit.optim import trust_groups
        >>> optimizer = Lamb(trust_groups(torch.nn.Linear(2, 1)), lr=2e-3, weight_decay=0.01)
        >>> optimizer.param_groups[1]["weight_decay"]
        0.0
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_options(options)
        super().__init__(params, {**options, "adapt": True})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        kept, (b1, b2) = self.state[parameter], group["betas"]
        if not kept:
            kept |= {"step": 0, "exp_avg": torch.zeros_like(parameter)}
            kept["exp_avg_sq"] = torch.zeros_like(parameter)
        kept["step"] += 1
        m = kept["exp_avg"].lerp_(gradient, 1 - b1)
        v = kept["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        divisor = (v / (1 - b2 ** kept["step"])).sqrt_().add_(group["eps"])
        wanted = (m / (1 - b1 ** kept["step"])).div_(divisor).add_(parameter, alpha=group["weight_decay"])
        if group["adapt"]:
            wanted *= ratio(norm(parameter), norm(wanted))
        parameter.sub_(wanted, alpha=group["lr"])
