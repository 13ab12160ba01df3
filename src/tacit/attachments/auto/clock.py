"""The model's own step, timed while it trains: when each gradient is there, with the exchange held until all of them are.

Hooks read a clock and nothing else; the loop is the user's own. Forward and loss, the backward pass parameter by parameter, and the
rest of the step (optimizer, data) are the medians of the steps that were recorded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from tacit.errors import ConfigError
from tacit.plan.values import RecordedStep
from tacit.sim.workloads import Layer, Workload


class StepClock:
    """Times the steps between `start` and `stop`. On an accelerator every gradient is waited for, in these few steps alone."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device):
        self._numels = {name: parameter.numel() for name, parameter in parameters.items()}
        self._name, self._device = type(module).__name__, device
        self._steps: list[_Timed] = []
        self._now = _Timed(self._clock(), time.process_time())
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(self._forward_begins),
            module.register_forward_hook(self._forward_ends),
            *(
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))
                for name, parameter in parameters.items()
            ),
        ]

    def _clock(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def _forward_begins(self, *_: Any) -> None:
        self._now.forward_at = self._clock()
        self._now.arrived.clear()  # of a pass that only accumulates

    def _forward_ends(self, *_: Any) -> None:
        self._now.backward_at = self._clock()

    def _arrived(self, name: str) -> None:
        self._now.arrived[name] = self._clock()

    def computed(self) -> None:
        """All gradients are here, and none has left."""
        self._now.computed(self._clock())

    def ended(self) -> None:
        """The step's gradients are means. From here to the next end is a step."""
        self._steps.append(self._now)
        self._now = _Timed(self._clock(), time.process_time())

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def recorded(self) -> tuple[RecordedStep, list[float]]:
        """The step as far as this rank knows it, and forward and backward pass together of each; layers are parameters, in the model's
        order, which all ranks have alike."""
        steps = [step for step in self._steps if step.arrived]
        if not steps:
            raise ConfigError("auto recorded no step: no gradient came in any of them; name a strategy")
        backward = [step.backward_s() for step in steps]
        forward_s = median(step.forward_s for step in steps) / max(1, len(self._numels))
        layers = [
            Layer(name, numel, forward_s, median(each.get(name, 0.0) for each in backward))
            for name, numel in self._numels.items()
        ]
        work = Workload(self._name, tuple(layers), "recorded in training")
        cpu = median(step.cpu_s / max(1e-9, step.computed_at - step.began_at) for step in steps)
        return RecordedStep(work, median(step.other_s for step in steps), cpu=cpu), [
            s.passes_s for s in steps
        ]


class _Timed:
    """Readings of one step; it begins where the last one's gradients were means. A compiled module calls no hooks of its forward pass:
    all before the first gradient then counts as the rest of the step."""

    def __init__(self, began_at: float, began_cpu_s: float):
        self.began_at, self._began_cpu_s = began_at, began_cpu_s
        self.forward_at = self.backward_at = self.computed_at = self.cpu_s = 0.0
        self.arrived: dict[str, float] = {}  # in the order of time

    def computed(self, at: float) -> None:
        self.computed_at, self.cpu_s = at, time.process_time() - self._began_cpu_s

    @property
    def forward_s(self) -> float:
        return max(0.0, self.backward_at - self.forward_at)

    def backward_s(self) -> dict[str, float]:
        """By parameter: from the gradient before, or the end of the forward pass, to its own."""
        found, before = {}, self.backward_at or min(self.arrived.values())
        for name, at in self.arrived.items():
            found[name], before = max(0.0, at - before), at
        return found

    @property
    def other_s(self) -> float:
        """What is neither the last forward pass nor its backward: the optimizer, data, passes that only accumulate."""
        return max(0.0, self.computed_at - self.began_at - self.passes_s)

    @property
    def passes_s(self) -> float:
        """The last forward pass and its backward."""
        return self.forward_s + sum(self.backward_s().values())
