"""A model's step without an exchange, as every rank computes it at the same time: from a module and an example batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.plan.recorder import timed_layers
from tacit.plan.values import RecordedStep
from tacit.sim.workloads import Layer, Workload

REPEATS = 5
_MEETINGS = 5  # barriers that are timed


def record_step(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    name: str = "",
    repeats: int = REPEATS,
    group: dist.ProcessGroup | None = None,
) -> RecordedStep:
    """The step of `model`, the slowest rank's layers; all ranks of `group` call it together.

    Args:
        model: The module, not wrapped in DDP.
        inputs: The example batch: what a forward pass takes.
        loss: Makes a scalar of the output; by default the mean of it.
        optimizer: Its state and the parameters are put back; None: the optimizer's time is left out.
        name: The model's; by default its class.
        repeats: Steps after one to warm up.
        group: The ranks; None: the default process group, if there is one.

    Returns:
        The step.

    Raises:
        ConfigError: The model has no trainable parameter, or returns what nobody can make a loss of.

    Example:
        >>> step = record_step(nn.Linear(4, 2), [torch.ones(3, 4)], repeats=2)
        >>> step.workload.parameters
        10
    """
    stopwatch = CommonStopwatch(group)
    cpu, start = time.process_time(), time.perf_counter()
    work, totals = timed_layers(model, inputs, loss=loss, name=name, repeats=repeats, timed=stopwatch.seconds)
    share = (time.process_time() - cpu) / max(1e-9, time.perf_counter() - start)
    other_s = 0.0 if optimizer is None else _optimizer_s(optimizer, repeats, stopwatch)
    return slowest(RecordedStep(work, other_s, cpu=share), group, totals=totals)


def slowest(
    step: RecordedStep, group: dist.ProcessGroup | None = None, *, totals: Sequence[float] = ()
) -> RecordedStep:
    """The step that everybody waits for: of each layer the slowest rank's time. All ranks call it, if their models are alike.

    `totals`, this rank's whole passes one by one, as many on all ranks, scale the layers to the median of the slowest rank's.
    """
    layers = step.workload.layers
    own = [*(layer.forward_s for layer in layers), *(layer.backward_s for layer in layers)]
    own += [step.other_s, step.cpu, -step.low, step.high, *totals]
    if _grouped(group):
        sizes = torch.tensor([len(own), -len(own)])
        dist.all_reduce(sizes, dist.ReduceOp.MAX, group=group)
        if int(sizes[0]) == -int(sizes[1]):  # else: different models, which the probe refuses
            found = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            own = found.tolist()
    count = len(layers)
    other_s, cpu, low, high, *steps_s = own[2 * count :]
    low, factor, order = -low, 1.0, sorted(steps_s)
    if order:
        middle_s = median(order)
        factor = middle_s / max(1e-12, sum(own[: 2 * count]))
        low, high = order[len(order) // 10] / middle_s, order[-1 - len(order) // 10] / middle_s
    made = tuple(
        Layer(layer.name, layer.parameters, factor * own[i], factor * own[count + i])
        for i, layer in enumerate(layers)
    )
    return RecordedStep(Workload(step.workload.name, made, step.workload.source), other_s, low, high, cpu)


class CommonStopwatch:
    """Times what all ranks begin together, until the last has ended. All of them call it.

    Where ranks share cores, one may leave a barrier only when another has computed: no rank's own clock shows what all of them take.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._grouped = group, _grouped(group)
        self._meeting_s = 0.0
        self._meeting_s = median(self.seconds(lambda: None) for _ in range(_MEETINGS))

    def seconds(self, run: Callable[[], object]) -> float:
        """From the common beginning to the last end, as this rank sees it, without what the ranks take to meet."""
        self._meet()
        start_s = time.perf_counter()
        run()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        own_s = time.perf_counter() - start_s
        self._meet()
        return max(own_s, time.perf_counter() - start_s - self._meeting_s)

    def _meet(self) -> None:
        if self._grouped:
            dist.barrier(self._group)


def _grouped(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _optimizer_s(optimizer: torch.optim.Optimizer, repeats: int, stopwatch: CommonStopwatch) -> float:
    """Seconds of a step with gradients of zero; parameters and state are put back."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p, p.detach().clone(), p.grad) for p in parameters]
    state = optimizer.state_dict()
    took = []
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for _ in range(repeats):
            took.append(stopwatch.seconds(optimizer.step))
    finally:
        for p, value, grad in kept:
            p.data.copy_(value)
            p.grad = grad
        optimizer.load_state_dict(state)
    return sorted(took)[len(took) // 2]
