"""DistributedDataParallel, through its communication hook.

DDP brings its buckets, which it rebuilds after the first step; they are cut anew into tacit's own (buckets.py), without
a copy wherever these lie inside one of DDP's. Accumulation, unused parameters and static graphs stay DDP's business.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from tacit.attachments.agreement import agree
from tacit.attachments.ahead import ForwardOverlap, refuse_sparse, refuse_what_forbids_it
from tacit.attachments.backward import Backward, call_after_backward, is_behind, zeroed
from tacit.attachments.guard import BackgroundGuard, Guard, Watch
from tacit.attachments.handle import (
    Handle,
    leave,
    leave_with,
    left_on_failure,
    open_channel,
    weak_parameters,
    weakly,
    when_dropped,
)
from tacit.attachments.sizing import DEFAULT_NBYTES, settled_nbytes, warn_of_wide_buckets
from tacit.attachments.target import Target
from tacit.buckets import (
    Bucket,
    DdpSizes,
    clean_name,
    cutter,
    digest_of,
    has_sparse_tables,
    outer_names,
    sparse_names,
)
from tacit.errors import ConfigError, TacitError
from tacit.exchange import Exchange
from tacit.schemes import Channel
from tacit.strategy import Strategy


def attach_ddp(handle: Handle, target: Target) -> None:
    if target.group is not None:
        raise ConfigError("group= is the process group of DDP(..., process_group=...); leave it out here")
    ddp: nn.parallel.DistributedDataParallel = target.module
    groups, bucket_nbytes, timeout, check_every = (
        target.groups,
        target.bucket_nbytes,
        target.timeout,
        target.check_every,
    )
    if dist.get_world_size(ddp.process_group) == 1:
        return
    reduced = _reduced(ddp)
    labels = {name: groups.get(name, "0") for name in reduced}
    outer, sparse = outer_names(ddp, reduced), sparse_names(ddp, reduced)
    sizes = ddp_sizes(ddp)
    cut = cutter(weak_parameters(reduced), labels, outer, sparse, sizes)
    buckets = cut(bucket_nbytes or DEFAULT_NBYTES)
    stray = _stray(ddp, reduced)
    optimizer = None
    if target.overlap == "forward":
        _refuse_unused(ddp, buckets)
        optimizer = refuse_what_forbids_it(target.optimizer, ddp.module, reduced)
    facts = ["ddp", digest_of(buckets), handle.seed, check_every, stray, target.overlap, bucket_nbytes]
    agree(ddp.process_group, handle.strategy, facts, timeout, asked=target.asked)
    if stray:
        raise ConfigError(
            f"parameter {stray[0]!r} was unfrozen or added after DDP was built, so DDP does not reduce it and ranks would differ; "
            f"build DDP(model) again"
        )
    with left_on_failure(open_channel(handle.strategy, ddp.process_group, timeout)) as channel:
        nbytes = settled_nbytes(handle, channel, reduced, bucket_nbytes)
        buckets = cut(nbytes)
        if (
            channel.wire.paced or channel.wire.world == 2
        ):  # not where links are so fast that nothing is to be gained
            warn_of_wide_buckets(ddp, sum(p.nbytes for p in reduced.values()), nbytes)
        if channel.scheme.losses is not None and ddp.will_sync_module_buffers():
            raise ConfigError(
                "DDP sends rank 0's buffers to all ranks in every forward pass, and with star(loss=...) ranks need not be at the same step; "
                "build DDP(model, broadcast_buffers=False)"
            )
        guard = Guard(
            handle,
            Watch(ddp, reduced.values()),
            weak_parameters(reduced),
            check_every,
            buckets[0].device,
            sparing=channel.scheme.losses is not None,
        )
        attachment = DdpAttachment(handle, ddp, channel, buckets, guard, reduced, optimizer, cut, sizes)
        try:
            ddp.register_comm_hook(attachment, _hook)
        except RuntimeError as cause:
            attachment.close()
            raise ConfigError(
                "this DDP module already has a communication hook; attach a fresh DDP(model)"
            ) from cause
        leave_with(attachment, channel)
    handle.fasten(attachment)


_FIRST_NBYTES = 1 << 20  # of DDP's first bucket, unless bucket_cap_mb is given


def ddp_sizes(ddp: nn.parallel.DistributedDataParallel) -> DdpSizes | None:
    """When DDP closes its buckets from the second step on; None where each has a size of its own (`bucket_cap_mb_list`)."""
    if getattr(ddp, "bucket_bytes_cap_list", None):
        return None
    nbytes = int(ddp.bucket_bytes_cap)
    return DdpSizes(_FIRST_NBYTES if ddp.bucket_bytes_cap_default else nbytes, nbytes)


def _reduced(ddp: nn.parallel.DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP's reducer knows, whatever was frozen, thawed or ignored since: those will arrive."""
    if has_sparse_tables(ddp):
        return _counted(ddp)
    known = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    return {clean_name(name, ddp): p for name, p in ddp.named_parameters() if id(p) in known}


def _counted(ddp: nn.parallel.DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The same where there are sparse tables: the reducer can then not list its parameters, only count them."""
    found = {
        clean_name(name, ddp): p
        for name, p in ddp.named_parameters()
        if p.requires_grad and name.removeprefix("module.") not in ddp.parameters_to_ignore
    }
    known = ddp._get_ddp_logging_data()
    count, nbytes = known["num_parameter_tensors"], known["total_parameter_size_bytes"]
    here = sum(p.nbytes for p in found.values())
    if (count, nbytes) != (len(found), here):
        raise ConfigError(
            f"DDP was built for {count} trainable parameters of {nbytes} bytes and the model has {len(found)} of {here} bytes: some were frozen, "
            f"unfrozen or added since; build DDP(model) again"
        )
    return found


def _stray(ddp: nn.parallel.DistributedDataParallel, reduced: Mapping[str, nn.Parameter]) -> list[str]:
    """Parameters that want a gradient, that DDP does not reduce, and that nobody asked it to ignore."""
    names = {
        clean_name(name, ddp): p
        for name, p in ddp.named_parameters()
        if name.removeprefix("module.") not in ddp.parameters_to_ignore
    }
    return [name for name, p in names.items() if p.requires_grad and name not in reduced]


def _refuse_unused(ddp: nn.parallel.DistributedDataParallel, buckets: list[Bucket]) -> None:
    """What DDP finds out about unused parameters comes with the last gradient, after the step has begun."""
    if ddp.find_unused_parameters or ddp.static_graph:
        raise ConfigError(
            "overlap='forward' needs a gradient of every parameter in every step; build DDP without find_unused_parameters= and static_graph="
        )
    refuse_sparse(buckets)


class DdpAttachment:
    """Keeps the two halves of a step together: DDP's buckets coming in, tacit's going out."""

    def __init__(
        self,
        handle: Handle,
        ddp: nn.parallel.DistributedDataParallel,
        channel: Channel,
        buckets: list[Bucket],
        guard: Guard,
        parameters: Mapping[str, nn.Parameter],
        stepped: torch.optim.Optimizer | None,
        cut: Callable[[int], list[Bucket]],
        sizes: DdpSizes | None,
    ):
        """`stepped`: the optimizer whose steps may be taken in the next forward pass."""
        self.channel, self.wire, self.group = channel, channel.wire, ddp.process_group
        self._ddp = weakref.ref(ddp)  # which holds this one where the garbage collector cannot see it: in C++
        self._kept = None if ddp.gradient_as_bucket_view else _gradients_of(weak_parameters(parameters))
        self._name_of = {id(parameter): clean_name(name, ddp) for name, parameter in ddp.named_parameters()}
        self._handle, self._cut, self._sizes = handle, cut, sizes
        self._overlap: ForwardOverlap | None = None
        self._pending: dict[str, _Pending] = {}
        self.exchange: Exchange | None = self._opened(handle.strategy, buckets)
        if stepped is not None:
            self._overlap = ForwardOverlap(
                self.exchange, ddp.module, stepped, parameters, buckets, in_memory_order=True
            )
            self._backward.overlap = self._overlap
        self._guard = BackgroundGuard(guard, self.exchange, buckets[0].device)

    def _opened(self, strategy: Strategy, buckets: list[Bucket]) -> Exchange:
        """An exchange of these buckets, over the channel as it is now."""
        exchange = Exchange(self.channel, strategy.what, self._handle.stats, device=buckets[0].device)
        # DDP may be waiting for futures that will not come any more
        exchange.on_fail = weakly(self._fail)
        self._keep = when_dropped(self, exchange.drop)
        self._backward = Backward(self._handle, exchange, buckets)
        self._backward.kept = self._kept
        return exchange

    def switch(self, strategy: Strategy, bucket_nbytes: int) -> None:
        """Between two steps, on all ranks alike: from the next one on gradients are exchanged so. Strategies that `auto` chooses from
        have schemes without a link of their own."""
        assert self.exchange is not None, "a closed handle switches nothing"
        self._guard.settle()
        self._keep()
        self.exchange.close()
        self._pending.clear()
        self.channel.scheme = strategy.scheme
        self.exchange = self._opened(strategy, self._cut(bucket_nbytes))
        self._guard = self._guard.over(self.exchange)

    def cut_of(self, bucket_nbytes: int) -> list[int]:
        sizes = self._sizes
        return (
            [sizes.first_nbytes, sizes.nbytes] if sizes is not None and sizes.follows(bucket_nbytes) else []
        )

    def hold(self, held: Callable[[Mapping[str, Tensor]], None] | None) -> None:
        self._backward.held = held

    def settle(self) -> None:
        self._guard.settle()

    @property
    def numels(self) -> dict[str, int]:
        return self._backward.numels

    def take(self, bucket: GradBucket) -> Future[Tensor]:
        """One of DDP's buckets: its gradients arrive, and its future completes when all of them are means."""
        if not self._backward.started:
            if self._overlap is not None:
                self._overlap.begin()
            self._guard.begin()
        buffer = bucket.buffer()
        names = [self._name_of[id(parameter)] for parameter in bucket.parameters()]
        pending = _Pending(buffer, len(names))
        self._pending.update(dict.fromkeys(names, pending))
        start = 0
        for name in names:
            stop = start + self._backward.numels[name]
            part = buffer if name in self._backward.sparse else buffer[start:stop]  # a table is alone there
            self._backward.arrive(name, part, self._delivered)
            start = stop
        if self._backward.complete:  # as DDP does: with the last gradient, whichever nested pass brings it
            call_after_backward(self._finish)
        if self._overlap is not None:  # DDP's copy of the gradients has been read when the pass is over
            pending.release()
        return pending.future

    def _finish(self) -> None:
        self._backward.finish()
        self._guard.end()
        self._handle.step_ended()
        if self._overlap is not None:
            call_after_backward(self._overlap.handed_over)  # after DDP, which writes gradients until then

    def missed(self) -> bool:
        ddp = self._ddp()
        if (
            self._overlap is not None
            or self._backward.sparse
            or self.exchange is None
            or ddp is None
            or not is_behind(self.exchange)
        ):
            return False
        parameters = {self._name_of[id(p)]: p for p in ddp.parameters() if id(p) in self._name_of}
        parameters = {name: p for name, p in parameters.items() if name in self._backward.numels}
        zeroed(parameters.values())
        # in the memory order of the parameters, as DDP lays gradients out
        means = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self._guard.begin()
        for name, parameter in parameters.items():
            self._backward.arrive(name, means[name].as_strided((parameter.numel(),), (1,)))
        self._finish()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad.copy_(means[name])
        return True

    def flush(self) -> None:
        if self._overlap is not None:
            self._overlap.flush_as_asked()

    def _delivered(self, name: str) -> None:
        self._pending[name].count_down()

    def _fail(self, error: TacitError) -> None:
        for pending in set(self._pending.values()):
            pending.fail(error)

    def no_sync(self) -> AbstractContextManager[None]:
        ddp = self._ddp()
        assert ddp is not None, "the handle outlived its DDP module"
        context: AbstractContextManager[None] = ddp.no_sync()
        return context

    def close(self) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            try:
                if self._overlap is not None:
                    self._overlap.close()
            finally:
                exchange.close()
                leave(self.channel)


def _gradients_of(
    parameters: Callable[[], Mapping[str, nn.Parameter]],
) -> Callable[[Sequence[str]], Mapping[str, Tensor]]:
    """Gives a pass's own gradients by name: DDP copies them into its buckets, and the means back when the pass is over."""

    def found(names: Sequence[str]) -> Mapping[str, Tensor]:
        gradients = {name: parameters()[name].grad for name in names}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    return found


class _Pending:
    """A DDP bucket that waits for `missing` parameters; its future ends with the buffer, or with the error."""

    def __init__(self, buffer: Tensor, missing: int):
        devices: list[Any] = [] if buffer.device.type == "cpu" else [buffer.device]
        self._buffer, self._missing = buffer, missing
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._start: Future[Tensor] = Future(devices=devices)
        self.future: Future[Tensor] = self._start.then(self._end)

    def count_down(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing != 0:
                return
        self._start.set_result(self._buffer)  # on an accelerator this records when the buffer is ready

    def release(self) -> None:
        """DDP need not wait."""
        with self._lock:
            self._missing = 0
        self._start.set_result(self._buffer)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self._missing <= 0:
                return
            self._missing, self._error = 0, error
        self._start.set_result(self._buffer)

    def _end(self, start: Any) -> Tensor:
        if self._error is not None:
            raise self._error
        return self._buffer


def _hook(attachment: DdpAttachment, bucket: GradBucket) -> Future[Tensor]:
    if attachment.exchange is not None:
        return attachment.take(bucket)
    group = attachment.group  # closed: DDP's hook cannot be taken off, so do what DDP does
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: buffer)
    return future
