"""A gradient that is still on its way: whoever uses it waits for it.

It stands in `parameter.grad` from the end of the backward pass until its mean is there. Reading it, or changing it in place, is
right at any time; it only costs the time that was to be saved.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class PendingGradient(torch.Tensor):
    """In the place of a mean of the shape of `like`; `come()` returns it, and blocks until it is there."""

    come: Callable[[], Tensor]

    @staticmethod
    def __new__(cls: type[Self], like: Tensor, come: Callable[[], Tensor]) -> Self:
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.come = come
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda pending: pending.come(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return str(self.come())
