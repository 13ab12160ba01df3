"""A gradient that is still on its way: whoever uses it waits for it.

It stands in `parameter.grad` from the end of the backward pass until its mean is there. Torch's operators, in place too, and the ways out
of torch that are written in Python (numpy, lists, DLPack, a pointer, a pickle, a copy) see the mean, and cost the time that was to be saved. Code in C or C++
that takes the memory of a tensor without an operator finds none: give it `p.grad.detach()`, or call `handle.flush()` first.
"""

import copy
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

    # ---- what would otherwise look for memory, which this one has none of

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.come().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.come().tolist()

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.come().cpu(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.come().to(*args, **kwargs)

    def data_ptr(self) -> int:
        return self.come().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.come().untyped_storage()

    @property
    def data(self) -> Tensor:
        return self.come().data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.come().data = value

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.come().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.come(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.come().__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return str(self.come())
