"""The step of signSGD (Bernstein et al., ICML 2018, arXiv 1802.04434) and of DeMo (Peng, Quesnelle, Kingma 2024, arXiv 2411.19870).

    w -= lr (sign(g) + weight_decay w)

g is what the strategy brings, and it has the momentum where there is one:

    every / ef(dct, decay=0.999) / sharded     DeMo: every rank's m = 0.999 m + g loses its fastest parts, and those are exchanged
    every / signsgd / sharded                  majority vote: the sign of the sum of signs
"""

from typing import Any

from torch import Tensor

from tacit.optim.one_by_one import OneByOne
from tacit.optim.options import check_options


class SignSgd(OneByOne):
    """Steps of one length for all elements, in the direction of their gradients' signs.

    Args:
        params: Parameters or groups of them.
        lr: The length of a step; a tenth to a third of what AdamW takes is a start.
        weight_decay: Decoupled, as AdamW's.

    Raises:
        ConfigError: An option is outside of its limits.

    Example:
        >>> import tacit, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = tacit.optim.SignSgd(model.parameters(), lr=1e-3)
        >>> handle = tacit.attach(model, optimizer, "every / ef(dct, decay=0.999) / sharded")
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0):
        options = {"lr": lr, "weight_decay": weight_decay}
        check_options(options)
        super().__init__(params, options)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(gradient.sign(), alpha=-group["lr"])
