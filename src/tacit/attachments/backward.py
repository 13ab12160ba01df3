"""One backward pass: gradients arrive one by one, leave in tacit's own buckets, and are means when backward returns.

Shared by DDP, whose hook brings a whole DDP bucket, and by plain modules, whose hooks bring one parameter.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from tacit import recycled
from tacit.attachments.ahead import ForwardOverlap
from tacit.attachments.handle import Handle, weakly
from tacit.buckets import Bucket, flat_view
from tacit.errors import ConfigError, TacitError
from tacit.exchange import Exchange, Gradients, Reduction


class Backward:
    """Collects the gradients of one pass after another. All methods run in the training thread."""

    def __init__(self, handle: Handle, exchange: Exchange, buckets: list[Bucket]):
        self.handle, self.exchange, self.buckets = handle, exchange, buckets
        self.overlap: ForwardOverlap | None = None
        """Where set, it takes over what is on its way when a pass is over; nobody waits for it here, and no gradient is overwritten."""
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self.numels = {n: k for b in buckets for n, k in zip(b.names, b.layout.numels, strict=True)}
        self.sparse = frozenset(name for bucket in buckets if bucket.sparse for name in bucket.names)
        self.kept: Callable[[Sequence[str]], Mapping[str, Tensor]] | None = None
        """Where set, gradients that arrive are copies, and it gives those with these names as they were, until they are means."""
        self.held: Callable[[Mapping[str, Tensor]], None] | None = None
        """Where set, nothing leaves before all gradients are there, and it is called with them: a step is timed without the exchange."""
        self._reset()

    def _reset(self) -> None:
        self.arrived: dict[str, Tensor] = {}
        self.offered: set[str] = set()  # those whose gradients became momenta
        self._missing = [len(bucket.names) for bucket in self.buckets]
        self._jobs: list[Reduction] = []
        self._delivered: Callable[[str], None] = _nobody

    @property
    def started(self) -> bool:
        return bool(self.arrived)

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.numels)

    def arrive(self, name: str, gradient: Tensor, delivered: Callable[[str], None] | None = None) -> None:
        """`gradient`, 1-D, or COO of a sparse table, will be overwritten with the mean; then `delivered(name)` is called in the codec
        thread."""
        if name in self.arrived:
            raise TacitError(
                f"the gradient of {name!r} came twice in one backward pass: an earlier pass was interrupted, and the ranks "
                f"no longer agree on what comes next; restart from the last checkpoint (or two activation checkpoints share it: "
                f"call them with use_reentrant=False)"
            )
        if gradient.is_sparse != (name in self.sparse):
            raise _wrong_kind(name, gradient)
        if self.handle.offer is not None and self.handle.offer(name, gradient):
            self.offered.add(name)
        self.arrived[name] = gradient
        bucket = self._bucket_of[name]
        self._missing[bucket.index] -= 1
        self._delivered = delivered or self._delivered
        if self.overlap is not None and self._missing[bucket.index] == 0:
            self.overlap.computed(bucket)
        if self.held is not None and self.complete:
            self.held(self.arrived)
        if self.held is None or self.complete:
            self._send_complete()

    def _send_complete(self) -> None:
        while (following := self._following) is not None and self._missing[following.index] == 0:
            self._jobs.append(self._send(following, self._delivered))

    @property
    def _following(self) -> Bucket | None:
        """The next bucket to leave; None when all have."""
        sent = len(self._jobs)
        if sent == len(self.buckets):
            return None
        return self.buckets[sent if self.overlap is None else self.overlap.order[sent]]

    def _send(self, bucket: Bucket, delivered: Callable[[str], None]) -> Reduction:
        if self.overlap is not None:
            return self._send_ahead(bucket, self.overlap)
        return (self._send_rows if bucket.sparse else self._send_flat)(bucket, delivered)

    def _send_ahead(self, bucket: Bucket, overlap: ForwardOverlap) -> Reduction:
        x = recycled.join(
            [self.arrived[name] for name in bucket.names]
        )  # what is theirs may change from now on
        flight = overlap.launched(bucket)
        handle = self.handle
        flight.job = self.exchange.reduce(
            bucket, x, handle.memory, flight.land, seed=handle.seed, step=handle.step, in_place=True
        )
        return flight.job

    def _send_flat(self, bucket: Bucket, delivered: Callable[[str], None]) -> Reduction:
        parts = [self.arrived[name] for name in bucket.names]
        whole = flat_view(parts)
        x = recycled.join(parts) if whole is None else whole

        def deliver(mean: Tensor) -> None:
            if whole is None:
                for part, new in zip(parts, mean.split(bucket.layout.numels), strict=True):
                    part.copy_(new)
            elif mean is not whole:
                whole.copy_(mean)
            for name in bucket.names:
                delivered(name)

        handle = self.handle
        return self.exchange.reduce(
            bucket, x, handle.memory, deliver, seed=handle.seed, step=handle.step,
            in_place=True, elsewhere=self._elsewhere(bucket, parts if whole is None else None),
        )  # fmt: skip

    def _elsewhere(self, bucket: Bucket, parts: Sequence[Tensor] | None) -> Gradients | None:
        """Where this rank's gradients are left while the bucket is reduced in place: in `parts` if it is a copy of those, or with their owner."""
        if parts is not None:
            return lambda: dict(zip(bucket.names, parts, strict=True))
        kept = self.kept
        return None if kept is None else lambda: kept(bucket.names)

    def _send_rows(self, bucket: Bucket, delivered: Callable[[str], None]) -> Reduction:
        parts = [self.arrived[name] for name in bucket.names]

        def deliver(means: Sequence[Tensor]) -> None:
            for name, part, mean in zip(bucket.names, parts, means, strict=True):
                part.copy_(mean)
                delivered(name)

        handle = self.handle
        return self.exchange.reduce_rows(
            bucket, parts, handle.memory, deliver, seed=handle.seed, step=handle.step
        )

    def finish(self) -> None:
        """Waits until every gradient is a mean, unless they are awaited in the next forward; raises what ended the exchange."""
        jobs, means = self._jobs, self.arrived
        self._reset()
        if self.overlap is None:
            self.exchange.wait(jobs)
        self.handle.stepped(
            sum((mean.values() if mean.is_sparse else mean).numel() for mean in means.values())
        )


class _PassMark:
    """Held by autograd alone, for as long as it works on a pass."""


class PassWatch:
    """Whether a backward pass is under way for which `ended` is due, and whether one was broken off, so that it never came."""

    def __init__(self, ended: Callable[[], None]):
        self._ended = ended
        self._mark: weakref.finalize[[], _PassMark] | None = None
        self._broken_off = False

    @property
    def under_way(self) -> bool:
        """Raises TacitError after a pass that was broken off."""
        if self._broken_off:
            raise TacitError(
                "an earlier backward pass was interrupted, and the gradients of some units are not complete; restart from the last checkpoint"
            )
        return self._mark is not None

    def begin(self) -> None:
        """Has `ended` called when autograd has computed everything."""
        mark = _PassMark()
        self._mark = weakref.finalize(mark, weakly(self._break_off))
        call_after_backward(lambda held=mark: self._end())  # type: ignore[misc]

    def _break_off(self) -> None:
        self._broken_off = True

    def _end(self) -> None:
        if self._mark is not None:
            self._mark.detach()
        self._mark = None
        self._ended()


def is_behind(exchange: Exchange) -> bool:
    """Between two steps: whether the others have closed chunks of the next one without this rank. With zeros from here it ends when theirs
    does, so that this rank is in time for the step behind it."""
    return exchange.channel.scheme.ahead > 0


def zeroed(parameters: Iterable[nn.Parameter]) -> None:
    """Makes the gradient of each zeros, in place where it has one."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def _nobody(name: str) -> None:
    """Nobody waits for this gradient."""


def _wrong_kind(name: str, gradient: Tensor) -> ConfigError:
    if gradient.is_sparse:
        return ConfigError(
            f"parameter {name!r} has a sparse gradient and belongs to no nn.Embedding or nn.EmbeddingBag; use one, with sparse=True"
        )
    return ConfigError(
        f"table {name!r} was built with sparse=True and has a dense gradient: something else used it too; build it with sparse=False"
    )


def call_after_backward(function: Callable[[], None]) -> None:
    """Runs `function` when the backward pass that is under way has computed everything, before it returns."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(function)
    except RuntimeError as cause:
        raise ConfigError(
            "gradients came outside of a backward pass; tacit cannot be used with DDP.join()"
        ) from cause


def call_after_outermost_backward(function: Callable[[], None]) -> None:
    """The same, where the pass that is under way may be one within a node of another, as activation checkpoints make them
    (`use_reentrant=True`): runs when the outermost one has computed everything."""

    def ended() -> None:
        # whose backward the pass that ends here was; None for the outermost
        around = torch._C._current_autograd_node()
        if around is None:
            function()
            return
        following = next(node for node, _ in around.next_functions if node is not None)

        def outside(*_: object) -> None:
            """In the pass around it, which has gradients to go on with: those of what was computed again."""
            hook.remove()
            call_after_outermost_backward(function)

        hook = following.register_prehook(outside)

    call_after_backward(ended)
