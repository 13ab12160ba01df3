"""What all optimizers here have in common: they step one parameter after another."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class OneByOne(torch.optim.Optimizer, ABC):
    """An optimizer that is written as the step of one parameter.

    Args:
        params: Parameters or groups of them, as torch's optimizers take them.
        defaults: Options by name.
    """

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """The step of one parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; `closure` computes them first, where it is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
        return loss
