"""overlap="forward": the next forward pass begins while gradients are still exchanged, and waits for each module's own.

    backward      returns when the last gradient has been handed over; `p.grad` is a PendingGradient until its mean is there
    step()        updates the parameters whose means are there, and notes what it owes to the others
    forward       before a module runs, its parameters' means are awaited and the step that is owed to them is taken
    zero_grad()   drops what stands in `p.grad`; what is owed is kept here

A step that is taken later has the learning rate and all other options of its own time, and every optimizer that is allowed here treats
each parameter by itself: the bits are those of a step that waited. What comes between (a checkpoint, an evaluation, a second step)
completes everything first. Who reads parameters outside of a forward pass calls `handle.flush()`.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tacit.attachments.handle import weak_parameters, weakly
from tacit.attachments.order import by_need
from tacit.attachments.pending import PendingGradient
from tacit.buckets import Bucket
from tacit.errors import ConfigError, TransportError
from tacit.exchange import Exchange, Reduction
from tacit.requests import Max

_EACH_ALONE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "Adafactor",
)  # fmt: skip
_WARMUP_PASSES = 2  # DDP cuts its buckets anew after the first
_MEASURED_PASSES = 5
_READ_BEFORE = "gradients are read before optimizer.step(), as clipping by their norm and loss scaling do"
_READ_AFTER = "gradients are read after optimizer.step(), as zero_grad(set_to_none=False) does"


@dataclass(eq=False, slots=True)
class Flight:
    """A bucket between the backward pass that computed it and the moment when somebody needs it."""

    bucket: Bucket
    submitted_s: float
    job: Reduction | None = None
    mean: Tensor | None = None
    means: dict[str, Tensor] = field(default_factory=dict)  # the same, by parameter, once it is settled
    finished_s: float = 0.0
    pending: dict[str, PendingGradient] = field(default_factory=dict)
    owed: "OwedStep | None" = None  # what its parameters have not been given yet

    @property
    def landed(self) -> bool:
        return self.job is not None and self.job.done.is_set()

    def land(self, mean: Tensor) -> None:
        """In the codec thread."""
        self.mean, self.finished_s = mean.to(self.bucket.dtype), time.perf_counter()


@dataclass(frozen=True, slots=True)
class OwedStep:
    """A step of the optimizer that some parameters have not taken yet: its options, group by group, at its own time."""

    options: list[dict[str, Any]]
    group_of: Mapping[int, int]  # of a parameter, by id

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Self:
        groups = optimizer.param_groups
        options = [
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            for group in groups
        ]
        return cls(options, {id(p): at for at, group in enumerate(groups) for p in group["params"]})

    def take(self, optimizer: torch.optim.Optimizer, means: Mapping[nn.Parameter, Tensor]) -> None:
        """Takes it for the parameters in `means`; whatever stands in their `.grad` stays there."""
        found, groups = [(p, p.grad) for p in means], optimizer.param_groups
        chosen: dict[int, list[nn.Parameter]] = {}
        for parameter, mean in means.items():
            parameter.grad = mean
            chosen.setdefault(self.group_of[id(parameter)], []).append(parameter)
        optimizer.param_groups = [{**self.options[at], "params": some} for at, some in chosen.items()]
        step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # the step alone, without its hooks
        try:
            # as if nobody were in a forward pass: not as inference, and in its own precision
            with torch.inference_mode(False), torch.autocast(next(iter(means)).device.type, enabled=False):
                step(optimizer)
        finally:
            optimizer.param_groups = groups
            for parameter, grad in found:
                parameter.grad = grad


class Keeper:
    """Holds an optimizer while a step is owed, for a script that has dropped it. It lives as long as the model, whose hooks hold it: what
    is held from here the garbage collector can see, and a parameter's own hooks it cannot."""

    def __init__(self) -> None:
        self.optimizer: torch.optim.Optimizer | None = None


class ForwardOverlap:
    """What is on its way after a backward pass, and what is owed to the parameters. All methods run in the training thread."""

    def __init__(
        self,
        exchange: Exchange,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        buckets: list[Bucket],
        *,
        in_memory_order: bool = False,
    ):
        """`in_memory_order`: gradients are handed over as DDP keeps them, a dense one in the order of its parameter's memory."""
        self._exchange, self._optimizer = (
            exchange,
            ref(optimizer),
        )  # a parameter's hooks, in C++, may hold this one
        self._in_memory_order = in_memory_order
        self._parameters, self._buckets = weak_parameters(parameters), buckets
        self._flights: dict[int, Flight] = {}
        self._gates = Gates(model, {id(p): name for name, p in parameters.items()}, buckets)
        self._hidden: list[Flight] = []
        self._owes = False
        self._warned = False
        self._clock = PassClock(buckets)
        self._agreeing: Callable[[], Tensor] | None = None
        self.order = list(range(len(buckets)))
        flush = weakly(self.flush_as_asked)
        self._pre_hook = optimizer.register_step_pre_hook(weakly(self._before_step))
        self._post_hook = optimizer.register_step_post_hook(weakly(self._after_step))
        self._hooks: list[Any] = [
            self._pre_hook,
            self._post_hook,
            optimizer.register_state_dict_pre_hook(lambda *_: flush()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: flush()),
        ]
        before, after = weakly(self._before_forward), weakly(self._after_forward)
        keeper = Keeper()
        self._keeper = ref(keeper)
        for module in model.modules():
            self._hooks += [
                # before hooks that make a weight from its parameters, as pruning and the norms of weights do
                module.register_forward_pre_hook(
                    lambda module, _, before=before, keeper=keeper: before(module), prepend=True
                ),
                module.register_state_dict_pre_hook(lambda *_: flush()),
                module.register_load_state_dict_pre_hook(lambda *_: flush()),
            ]
        self._hooks.append(model.register_forward_hook(lambda *_: after()))

    # ---- the backward pass

    def begin(self) -> None:
        """Before the first bucket of a pass leaves."""
        self.flush()
        self._exchange.most_started = 2
        self._clock.start()
        if self._agreeing is not None:
            agreed, self._agreeing = self._agreeing().view(3, -1).tolist(), None
            self.order = by_need(*agreed)

    def launched(self, bucket: Bucket) -> Flight:
        """A bucket is about to leave."""
        flight = self._flights[bucket.index] = Flight(bucket, time.perf_counter())
        return flight

    def computed(self, bucket: Bucket) -> None:
        """All gradients of a bucket have been computed, whether it leaves now or later."""
        self._clock.ready(bucket.index)

    def handed_over(self) -> None:
        """When backward has computed everything and nobody else writes gradients any more."""
        self._exchange.most_started = 1  # what the forward pass needs first must not share the wire
        parameters = self._parameters()
        for flight in self._flights.values():
            for name in flight.bucket.names:
                parameter = parameters[name]
                if parameter.grad is not None:
                    pending = PendingGradient(parameter.detach(), self._comes(flight, name))
                    flight.pending[name] = parameter.grad = pending

    def _comes(self, flight: Flight, name: str) -> Callable[[], Tensor]:
        def come() -> Tensor:
            if not flight.landed:
                self._warn(_READ_AFTER if self._owes else _READ_BEFORE)
            self.settle(flight)
            return flight.means[name]

        return come

    # ---- the step

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise ConfigError(
                "overlap='forward' cannot take optimizer.step(closure): the closure computes gradients inside of the step; leave overlap= out"
            )
        if self._owes or not self._gates.known or self._others_look(optimizer):
            self.flush()
        for flight in list(self._flights.values()):
            if flight.landed or flight.bucket.index not in self._gates.gated:
                self.settle(flight)
        parameters = self._parameters()
        for flight in self._flights.values():
            self._hidden.append(flight)
            for name, pending in flight.pending.items():
                if parameters[name].grad is pending:
                    parameters[name].grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        hidden, self._hidden = self._hidden, []
        if not hidden:
            return
        parameters, owed = self._parameters(), OwedStep.of(optimizer)
        self._owes = True
        if (keeper := self._keeper()) is not None:
            keeper.optimizer = optimizer
        for flight in hidden:
            flight.owed = owed
            for name, pending in flight.pending.items():
                if parameters[name].grad is None:
                    parameters[name].grad = pending

    def _others_look(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether somebody else's hooks run at a step: they would find gradients missing, or parameters that are not updated yet."""
        own = {self._pre_hook.id, self._post_hook.id}
        found = {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks} - own
        if found or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            self._warn("the optimizer has step hooks, which see whole steps")
            return True
        return False

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"overlap='forward' gains nothing here: {why}; leave it out", stacklevel=2)

    # ---- whoever needs a parameter

    def settle(self, flight: Flight) -> None:
        """Waits for the mean of a bucket; its parameters then have it, and the step that is owed to them is taken."""
        if self._flights.get(flight.bucket.index) is not flight:
            return
        assert flight.job is not None
        self._exchange.wait([flight.job])
        del self._flights[flight.bucket.index]
        assert flight.mean is not None
        if flight.mean.device.type != "cpu":
            flight.mean.record_stream(torch.accelerator.current_stream())
        parameters = self._parameters()
        parts = flight.bucket.layout.split(flight.mean)
        parts = flight.means = {name: self._shaped(parts[name], parameters[name]) for name in flight.pending}
        optimizer = self._optimizer()
        if flight.owed is not None and optimizer is not None:
            flight.owed.take(optimizer, {parameters[name]: part for name, part in parts.items()})
        for name, pending in flight.pending.items():
            if parameters[name].grad is pending:
                parameters[name].grad = parts[name]
        self._clock.landed(flight)
        if not self._flights:
            self._owes = False
            if (keeper := self._keeper()) is not None:
                keeper.optimizer = None
            self._clock.complete()

    def _shaped(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """A mean, 1-D, in its parameter's shape, and in its memory order too: fused optimizers take both to have the same."""
        own = parameter.detach()
        if own.is_contiguous():
            return part.view(own.shape)
        alike = torch.empty_like(own)  # with the same strides where these are dense and do not overlap
        if self._in_memory_order and alike.stride() == own.stride():
            return part.as_strided(own.shape, own.stride())
        return alike.copy_(part.view(own.shape))

    def flush(self) -> None:
        """Waits for everything; all parameters are then what they would be had every step waited."""
        for flight in list(self._flights.values()):
            self.settle(flight)

    def flush_as_asked(self) -> None:
        """The same for who saves, reads or closes, at the end of a script perhaps, where other ranks may have left already."""
        try:
            self.flush()
        except TransportError as cause:
            raise TransportError(
                f"{cause}; if the other ranks had come to their end: with overlap='forward' all ranks call handle.flush() or handle.close() "
                f"before the first one leaves"
            ) from cause

    def _before_forward(self, module: nn.Module) -> None:
        self._gates.called(module)
        if not self._flights:
            return
        if (
            not torch.is_grad_enabled()
        ):  # an evaluation may use parameters past their modules, as torch's fast paths do
            self.flush()
            return
        for index in self._gates.needed_by(module):
            if index in self._flights:
                self.settle(self._flights[index])

    def _after_forward(self) -> None:
        self._gates.complete()
        self.flush()
        if self._clock.measured and self._gates.known:
            figures = [*self._clock.figures(), self._gates.need]
            self._agreeing = self._exchange.start(Max(torch.tensor(figures, dtype=torch.float64).view(-1)))

    def close(self) -> None:
        """Completes everything, unless the exchange has ended with an error, which was raised before."""
        try:
            if self._exchange.error is None:
                self.flush_as_asked()
        finally:
            for hook in self._hooks:
                hook.remove()


class Gates:
    """Which module's forward needs which buckets: found in the first forward pass. A parameter whose own module is never called (as the
    output projection of torch's attention) belongs to the nearest module around it that is."""

    def __init__(self, model: nn.Module, name_of: Mapping[int, str], buckets: Iterable[Bucket]):
        bucket_of = {name: bucket.index for bucket in buckets for name in bucket.names}
        self._count = 1 + max(bucket_of.values())
        self._paths: list[
            tuple[list[int], int]
        ] = []  # modules from a parameter's own one outwards, and its bucket
        modules = dict(model.named_modules(remove_duplicate=False))
        for path, module in modules.items():
            names = path.split(".") if path else []
            around = [id(modules[".".join(names[:depth])]) for depth in range(len(names), -1, -1)]
            for parameter in module._parameters.values():
                if id(parameter) in name_of and name_of[id(parameter)] in bucket_of:
                    self._paths.append((around, bucket_of[name_of[id(parameter)]]))
        self._places: dict[int, int] = {}
        self._gates: dict[int, list[int]] = {}
        self.known = False
        self.gated: set[int] = set()
        self.need = [0.0] * self._count

    def called(self, module: nn.Module) -> None:
        if not self.known and torch.is_grad_enabled():
            self._places.setdefault(id(module), len(self._places))

    def complete(self) -> None:
        """The first forward pass is over."""
        if self.known or not self._places:
            return
        self.known = True
        need: dict[int, int] = {}
        for around, bucket in self._paths:
            gate = next((module for module in around if module in self._places), None)
            if gate is not None:
                self._gates.setdefault(gate, []).append(bucket)
                need[bucket] = min(need.get(bucket, len(self._places)), self._places[gate])
        self.gated = set(need)
        self.need = [float(need.get(bucket, -1)) for bucket in range(self._count)]

    def needed_by(self, module: nn.Module) -> list[int]:
        return self._gates.get(id(module), [])


class PassClock:
    """When buckets are ready, and how long the wire takes for all of them, in some passes near the start."""

    def __init__(self, buckets: Sequence[Bucket]):
        self._shares = [bucket.layout.numel * bucket.dtype.itemsize for bucket in buckets]
        self._ready_s: list[list[float]] = [[] for _ in buckets]
        self._busy_s: list[float] = []
        self._passes = 0
        self._start_s = 0.0
        self._landed: list[tuple[float, float]] = []
        self._given = False

    @property
    def _on(self) -> bool:
        return _WARMUP_PASSES < self._passes <= _WARMUP_PASSES + _MEASURED_PASSES

    def start(self) -> None:
        self._passes += 1
        self._start_s = time.perf_counter()

    def ready(self, index: int) -> None:
        if self._on:
            self._ready_s[index].append(time.perf_counter() - self._start_s)

    def landed(self, flight: Flight) -> None:
        self._landed.append((flight.finished_s, flight.submitted_s))

    def complete(self) -> None:
        """All buckets of a pass have landed, whoever waited for them."""
        landed, self._landed, busy_s, free_s = sorted(self._landed), [], 0.0, 0.0
        for finished_s, submitted_s in landed:
            busy_s += max(0.0, finished_s - max(free_s, submitted_s))
            free_s = finished_s
        if self._on:
            self._busy_s.append(busy_s)

    @property
    def measured(self) -> bool:
        """True once, after the last of these passes."""
        if self._given or self._passes < _WARMUP_PASSES + _MEASURED_PASSES:
            return False
        self._given = True
        return True

    def figures(self) -> tuple[list[float], list[float]]:
        """Medians: when each bucket is ready, and its share, by size, of the time that all of them take."""
        busy_s, all_of_them = median(self._busy_s or [0.0]), sum(self._shares)
        return (
            [median(found or [0.0]) for found in self._ready_s],
            [busy_s * share / all_of_them for share in self._shares],
        )


def refuse_what_forbids_it(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer; ConfigError where its steps cannot be taken parameter by parameter, or where modules cannot be watched."""
    if optimizer is None:
        raise ConfigError("overlap='forward' takes part in the optimizer's steps: pass optimizer= to attach")
    kind = type(optimizer)
    if kind.__module__.split(".")[0] != "torch" or kind.__name__ not in _EACH_ALONE:
        raise ConfigError(
            f"overlap='forward' steps parameter by parameter, and {kind.__name__} may not allow it; torch's {', '.join(_EACH_ALONE)} do"
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if odd := next((name for name, p in parameters.items() if id(p) not in stepped), None):
        raise ConfigError(
            f"parameter {odd!r} is not in this optimizer, and overlap='forward' takes steps for all of them; leave overlap= out"
        )
    if any("_orig_mod" in m._modules or m._compiled_call_impl for m in model.modules()):
        raise ConfigError(
            "overlap='forward' waits before each module, and a compiled model has none; leave overlap= or torch.compile out"
        )
    return optimizer


def refuse_sparse(buckets: Iterable[Bucket]) -> None:
    """ConfigError where a bucket is of tables with sparse gradients."""
    if table := next((bucket.names[0] for bucket in buckets if bucket.sparse), None):
        raise ConfigError(
            f"table {table!r} has sparse gradients, which overlap='forward' does not take; leave overlap= out"
        )
