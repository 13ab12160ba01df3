"""Tensors that come and go with every step, in memory that earlier ones have left: on the CPU, its pages are faulted in once.

Elsewhere torch's own allocator does the same. Measured in docs/decisions/0020-where-nothing-can-be-won.md.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tacit import _core

_LEAST_NBYTES = 64 * 1024  # smaller arrays come from malloc's own lists


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-D tensor with anything in it, as torch.empty."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LEAST_NBYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.utils.dlpack.from_dlpack(_core.recycled(nbytes)).view(dtype)


def empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of the shape, dtype and device of `x`, with anything in it."""
    return empty(prod(x.shape), x.dtype, x.device).view(x.shape)


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-D tensor of zeros."""
    return empty(numel, dtype, device).zero_()


def clone(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return empty_like(x).copy_(x)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` itself if it is of `dtype`, else a copy that is."""
    return x if x.dtype == dtype else empty(x.numel(), dtype, x.device).view(x.shape).copy_(x)


def join(parts: Sequence[Tensor]) -> Tensor:
    """1-D tensors one behind the other, in a new one."""
    numel = sum(part.numel() for part in parts)
    return torch.cat(list(parts), out=empty(numel, parts[0].dtype, parts[0].device))


def release() -> None:
    """Gives back to the system what no tensor uses."""
    _core.release_recycled()
