"""A plain module, made to behave like a DDP one: same start on all ranks, means after every backward pass.

Gradients leave while the pass runs. Which parameters took part is agreed with one tiny Max a step: a parameter that
no rank used keeps its gradient as it was (None at first), one that only others used gets their mean. The note of guard.py
rides along with it. Where ranks may be at different steps nothing is agreed: all parameters get a mean in every step.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.attachments.agreement import agree
from tacit.attachments.ahead import ForwardOverlap, refuse_sparse, refuse_what_forbids_it
from tacit.attachments.backward import Backward, call_after_outermost_backward, is_behind, zeroed
from tacit.attachments.guard import BackgroundGuard, Guard, Watch
from tacit.attachments.handle import (
    Handle,
    leave,
    leave_with,
    left_on_failure,
    open_channel,
    start_alike,
    switched_off,
    weak_parameters,
    weakly,
    when_dropped,
)
from tacit.attachments.sizing import DEFAULT_NBYTES, settled_nbytes
from tacit.attachments.target import Target
from tacit.buckets import Bucket, cutter, digest_of, outer_names, sparse_names
from tacit.errors import ConfigError
from tacit.exchange import Exchange
from tacit.requests import Codec, Max
from tacit.schemes import Channel
from tacit.sparse import no_rows
from tacit.strategy import Strategy


def attach_plain(handle: Handle, target: Target) -> None:
    model, parameters, check_every = target.module, target.parameters, target.check_every
    group, timeout = target.group, target.timeout
    if dist.get_world_size(group) == 1:
        return
    outer, sparse = outer_names(model, parameters), sparse_names(model, parameters)
    cut = cutter(weak_parameters(parameters), target.groups, outer, sparse)
    buckets = cut(target.bucket_nbytes or DEFAULT_NBYTES)
    optimizer = None
    if target.overlap == "forward":
        refuse_sparse(buckets)
        optimizer = refuse_what_forbids_it(target.optimizer, model, parameters)
    facts = ["plain", digest_of(buckets), handle.seed, check_every, target.bucket_nbytes, target.overlap]
    agree(group, handle.strategy, facts, timeout, asked=target.asked)
    with left_on_failure(open_channel(handle.strategy, group, timeout)) as channel:
        start_alike(channel.wire, model)
        nbytes = settled_nbytes(handle, channel, parameters, target.bucket_nbytes)
        buckets = cut(nbytes)
        guard = Guard(
            handle,
            Watch(model),
            weak_parameters(parameters),
            check_every,
            buckets[0].device,
            sparing=channel.scheme.losses is not None,
        )
        attachment = PlainAttachment(
            handle, channel, handle.strategy.what, parameters, buckets, guard, cut=cut
        )
        if optimizer is not None:
            attachment.go_on_in_forward(model, optimizer)
        leave_with(attachment, channel)
    handle.fasten(attachment)


class PlainAttachment:
    """Hooks on every parameter; a pass begins with the first gradient and ends when the outermost backward returns."""

    def __init__(
        self,
        handle: Handle,
        channel: Channel,
        codec: Codec,
        parameters: Mapping[str, nn.Parameter],
        buckets: list[Bucket],
        guard: Guard,
        *,
        held: bool = True,
        cut: Callable[[int], list[Bucket]] | None = None,
    ):
        """`held`: the parameters' hooks keep it alive, for those who drop the handle and train on. `cut`: buckets of another size,
        for those who switch."""
        self.channel, self.wire = channel, channel.wire
        self._handle, self._guard, self._cut = handle, guard, cut
        self._parameters = weak_parameters(parameters)
        arrive = self._arrive if held else weakly(self._arrive)
        self.exchange = self._opened(codec, buckets)
        self._overlap: ForwardOverlap | None = None
        self._note: BackgroundGuard | None = None
        self._unused: Callable[[], Tensor] | None = None
        self._sync = True
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: arrive(name, p.grad))
            for name, parameter in parameters.items()
        ]

    def _opened(self, codec: Codec, buckets: list[Bucket]) -> Exchange:
        """An exchange of these buckets, over the channel as it is now."""
        self._codec = codec
        exchange = Exchange(self.channel, codec, self._handle.stats, device=buckets[0].device)
        self._keep = when_dropped(self, exchange.drop)
        self._backward = Backward(self._handle, exchange, buckets)
        return exchange

    def switch(self, strategy: Strategy, bucket_nbytes: int) -> None:
        """Between two steps, on all ranks alike: as DdpAttachment.switch."""
        assert self._cut is not None, "this attachment switches nothing"
        self._keep()
        self.exchange.close()
        self.channel.scheme = strategy.scheme
        self.exchange = self._opened(strategy.what, self._cut(bucket_nbytes))

    def hold(self, held: Callable[[Mapping[str, Tensor]], None] | None) -> None:
        self._backward.held = held

    def settle(self) -> None:
        """Nothing is left in the exchange between two steps."""

    def go_on_in_forward(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Before the first pass: exchanges then go on beside the next forward pass of `model` too."""
        buckets, parameters = self._backward.buckets, self._parameters()
        self._overlap = ForwardOverlap(self.exchange, model, optimizer, parameters, buckets)
        self._note = BackgroundGuard(self._guard, self.exchange, buckets[0].device)
        self._backward.overlap = self._overlap

    @property
    def numels(self) -> dict[str, int]:
        return self._backward.numels

    def _arrive(self, name: str, gradient: Tensor | None) -> None:
        if not self._sync:
            return
        if not self._backward.started:
            if self._overlap is not None:
                self._begin_ahead(self._overlap)
            call_after_outermost_backward(self._finish)
        assert gradient is not None
        self._backward.arrive(name, _flat(gradient))

    def _finish(self) -> None:
        arrived, parameters = self._backward.arrived, self._parameters()
        used = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.uint8)
        for name, parameter in parameters.items():
            if name not in arrived:
                unused = no_rows if name in self._backward.sparse else torch.zeros_like
                kept = parameter.grad if parameter.grad is not None else unused(parameter.detach())
                self._backward.arrive(name, _flat(kept))
        means, offered = dict(arrived), self._backward.offered
        self._backward.finish()
        if self._overlap is not None and self._note is not None:
            self._note.end()
            self._unused = self.exchange.start(Max(1 - used.to(self._backward.buckets[0].device)))
            self._overlap.handed_over()
            return
        anywhere = self._used_anywhere(used)
        for (name, parameter), somewhere in zip(parameters.items(), anywhere, strict=True):
            if somewhere or name in offered:  # a momentum goes on where no rank has a gradient
                _write(parameter, means[name])
            elif self._codec.traits.remembers and name not in self._backward.sparse:  # no row was sent
                self._handle.memory.give_back(name, means[name])
        self._handle.step_ended()

    def missed(self) -> bool:
        if self._overlap is not None or self._backward.sparse or not is_behind(self.exchange):
            return False
        zeroed(self._parameters().values())
        self._finish()
        return True

    def _used_anywhere(self, used: Tensor) -> list[int]:
        """By parameter, whether some rank's pass used it."""
        lossy = self.channel.scheme.losses is not None
        if lossy and self._guard.rests:
            return [1] * len(used)
        note = self._guard.note()
        answer = self.exchange.ask(Max(torch.cat([used.to(note.own.device), note.sent])))
        self._guard.judge(note, answer[len(used) :], self.exchange.ask)
        return [1] * len(used) if lossy else answer[: len(used)].tolist()

    def _begin_ahead(self, overlap: ForwardOverlap) -> None:
        overlap.begin()
        if self._unused is not None:
            unused, self._unused = self._unused().tolist(), None
            names = [name for name, odd in zip(self._parameters(), unused, strict=True) if odd]
            if names:
                raise ConfigError(
                    f"parameter {names[0]!r} took no part in the last backward pass of some rank, and overlap='forward' takes a step for all; "
                    f"leave overlap= out"
                )
        assert self._note is not None
        self._note.begin()

    def flush(self) -> None:
        if self._overlap is not None:
            self._overlap.flush_as_asked()

    def no_sync(self) -> AbstractContextManager[None]:
        return switched_off(self._set_sync)

    def _set_sync(self, on: bool) -> None:
        self._sync = on

    def release(self) -> None:
        """Leaves the gradients alone from now on; the wire stays open."""
        for hook in self._hooks:
            hook.remove()
        try:
            if self._overlap is not None:
                self._overlap.close()
        finally:
            self.exchange.close()

    def close(self) -> None:
        try:
            self.release()
        finally:
            leave(self.channel)


def _flat(gradient: Tensor) -> Tensor:
    """1-D; a sparse gradient as it is."""
    return gradient.detach() if gradient.is_sparse else gradient.detach().reshape(-1)


def _write(parameter: nn.Parameter, mean: Tensor) -> None:
    """The mean becomes the gradient; most often it already is, in place."""
    if mean.is_sparse:
        parameter.grad = mean
    elif parameter.grad is None:
        parameter.grad = mean.view(parameter.shape).clone()
    elif parameter.grad.data_ptr() != mean.data_ptr():
        parameter.grad.copy_(mean.view(parameter.shape))
