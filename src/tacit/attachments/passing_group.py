"""A process group that hands everything on to another one, so that a subclass may take over a single collective."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

_PASSED = (
    "broadcast", "allreduce_coalesced", "reduce", "allgather", "allgather_coalesced", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single", "send", "recv", "recv_anysource", "barrier", "set_timeout", "_start_coalescing", "_end_coalescing", "_get_backend",
    "_get_backend_name", "_has_hooks", "_wait_for_pending_works",
)  # fmt: skip


def _passed(name: str) -> Callable[..., Any]:
    def method(self: "PassingGroup", *args: Any, **options: Any) -> Any:
        return getattr(self.inner, name)(*args, **options)

    method.__name__ = name
    return method


class PassingGroup(dist.ProcessGroup):
    """The ranks of `inner`, under a name of its own; whatever is asked of it, `inner` does."""

    def __init__(self, inner: dist.ProcessGroup, name: str):
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner, self._name = inner, name

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def _device_types(self) -> Any:
        return self.inner._device_types

    def getBackendName(self) -> str:  # noqa: N802, torch's name for it
        return "tacit"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """As torch's own functions call it: the tensors, and AllreduceOptions."""
        return self.inner.allreduce(tensors, *([] if opts is None else [opts]))

    def shutdown(self) -> None:
        """torch destroys `inner` by itself, and asks this one too."""

    def abort(self) -> None:
        self.inner.abort()


for _name in _PASSED:
    if hasattr(dist.ProcessGroup, _name):  # torch adds names and takes some away
        setattr(PassingGroup, _name, _passed(_name))


def done(tensors: list[Tensor]) -> Any:
    """The work of a collective whose result is in `tensors` already; on an accelerator, once the current stream has come here."""
    devices: list[Any] = [] if tensors[0].device.type == "cpu" else [tensors[0].device]
    future: Future[list[Tensor]] = Future(devices=devices)
    future.set_result(tensors)
    return c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def adds(opts: Any) -> bool:
    """Whether an all-reduce is to bring a sum or a mean."""
    # `in` would ask the other way round, and torch's enumeration does not know its own wrapper
    return opts is not None and (opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG)
