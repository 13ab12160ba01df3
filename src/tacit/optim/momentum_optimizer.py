"""What optimizers have in common whose ranks exchange momenta instead of gradients.

    the gradient of a rank arrives  ->  offer() makes it that rank's next momentum, in place  ->  it is exchanged as gradients are
    the mean is in p.grad           ->  step() takes it for the momentum

`tacit.attach` calls `offer` in all steps but the exact ones of its strategy (`exact(ef(sign), until=1000)`), in which gradients travel as they
are. So the momentum lies in the optimizer's own state alone: it is saved and loaded with it, and a codec sees numbers like any others.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tacit.errors import ConfigError
from tacit.optim.one_by_one import OneByOne


class MomentumOptimizer(OneByOne):
    """An optimizer that `tacit.attach` lets exchange momenta. One of your own needs `momentum` and `update`, which asks `exchanged`.

    Args:
        params: Parameters or groups of them, as torch's optimizers take them.
        defaults: Options by name.
    """

    _step_supports_amp_scaling = True  # so that a GradScaler leaves its verdict here, and is found out

    def __init__(self, params: Any, defaults: dict[str, Any]):
        self._offered: set[Tensor] = set()
        super().__init__(params, defaults)
        self._remember_groups()

    @abstractmethod
    def momentum(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """`gradient` becomes the momentum that it leads to, in place."""

    def exchanged(self, parameter: Tensor) -> bool:
        """Whether the gradient that `parameter` has is the mean of the ranks' momenta."""
        return parameter in self._offered

    @torch.no_grad()
    def offer(self, parameter: Tensor, gradient: Tensor) -> None:
        """`gradient`, this rank's, of the shape of `parameter`, becomes what is exchanged instead of it, in place.

        Raises:
            ConfigError: The last one has been exchanged and no step was taken: momenta do not add up as gradients do.
        """
        if parameter in self._offered:
            raise ConfigError(
                f"{type(self).__name__} exchanged a momentum that no step has taken, and now comes another gradient: accumulate under "
                f"handle.no_sync(), or call optimizer.zero_grad() where a step is left out"
            )
        self._offered.add(parameter)
        self.momentum(parameter, gradient, self.param_groups[self._place_of[parameter]])

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._offered.clear()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient; `closure` computes them first, where it is given.

        Raises:
            ConfigError: A GradScaler scaled the gradients.
        """
        if getattr(self, "found_inf", None) is not None:
            raise ConfigError(
                f"{type(self).__name__} mixes gradients into momenta before a GradScaler could undo its scale; train in bfloat16, without one"
            )
        loss = super().step(closure)
        self._offered.clear()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._remember_groups()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._offered = set()
        self._remember_groups()

    def _remember_groups(self) -> None:
        self._place_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
