"""The steps of a user's own script, recorded while it trains: `TACIT_PLAN=record`, or a context manager. The loop stays as it is.

    with recording(model, optimizer, "tacit-plan.jsonl"):
        for x, y in loader: ...

Hooks note when each layer's forward and backward pass ends; the medians of some steps go to a file as a `plan_step` record, and the hooks are
removed. An exchange that is attached meanwhile shares the cores: record with plain DDP, or `every / none`, for times of the model alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

from tacit.errors import ConfigError
from tacit.plan.files import save
from tacit.plan.recorder import exchanged, layers_of
from tacit.plan.values import RecordedStep
from tacit.sim.workloads import Layer, Workload

STEPS = 10
WARMUP = 3  # DDP regroups its buckets after the first step, allocators fill
FILE = "tacit-plan.jsonl"
_RECORD = "record"
log = logging.getLogger("tacit")


def file_asked(text: str) -> Path | None:
    """The file that TACIT_PLAN names; None for nothing. Raises ConfigError for another word."""
    word, _, file = text.partition(":")
    if not text:
        return None
    if word != _RECORD:
        raise ConfigError(
            f"TACIT_PLAN={text!r}: write record, or record:FILE, to record steps for `tacit plan`"
        )
    return Path(file or FILE)


@contextmanager
def recording(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    path: str | Path = FILE,
    *,
    steps: int = STEPS,
) -> Iterator[None]:
    """Records the steps that are taken inside of the block.

    Args:
        model: The module, wrapped or not.
        optimizer: Its step is timed too.
        path: The record file.
        steps: Steps that are recorded, after some to warm up.

    Raises:
        ConfigError: No step was taken, or the file cannot be written.

    Example:
        >>> # with recording(model, optimizer): train()
    """
    recorder = StepRecorder(model, optimizer, path, steps=steps)
    try:
        yield
    except BaseException:
        recorder.close()
        raise
    recorder.finish()


class StepRecorder:
    """Hooks on a model that record so many steps, write them, and are gone. It holds no parameter."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        path: str | Path,
        *,
        steps: int = STEPS,
        clock: Callable[[], float] = perf_counter,
    ):
        layers = layers_of(model)
        if not layers:
            raise ConfigError("the model has no trainable parameter; there is no step to plan for")
        if steps < 1:
            raise ConfigError(f"steps={steps}: record 1 step or more")
        self._sizes = {_clean(name): exchanged(*each) for name, each in layers.items()}
        self._name = type(
            model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        ).__name__
        self._path, self._steps, self._clock = Path(path), steps, clock
        self._last_s = 0.0
        self._forward: dict[str, list[float]] = {}
        self._backward: dict[str, list[float]] = {}
        self._totals: list[float] = []
        self._other_s: list[float] = []
        self._order: list[str] = []
        self._own: tuple[dict[str, float], dict[str, float]] = ({}, {})
        self._seen, self._cpu_s, self._began_s = 0, 0.0, 0.0
        self._hooks: list[Any] = [model.register_forward_pre_hook(lambda *_: self._begin())]
        for path_, (module, parameters) in layers.items():
            name = _clean(path_)
            self._hooks.append(module.register_forward_hook(lambda *_, name=name: self._end(0, name)))
            for parameter in parameters:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._end(1, name))
                self._hooks.append(hook)
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._start_optimizer()))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._end_optimizer()))

    def _now(self) -> float:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return self._clock()

    def _begin(self) -> None:
        """A forward pass begins: the last step is complete."""
        self._book()
        if self._hooks and len(self._totals) >= self._steps:
            self._finish_in_training()
            return
        self._seen += 1
        self._own = ({}, {})
        self._last_s = self._now()
        if self._seen == WARMUP + 1:
            self._cpu_s, self._began_s = process_time(), self._last_s

    def _end(self, backward: int, name: str) -> None:
        now_s = self._now()
        spent = self._own[backward]
        before_s = spent.pop(name, 0.0)
        spent[name] = before_s + now_s - self._last_s
        self._last_s = now_s

    def _start_optimizer(self) -> None:
        self._last_s = self._now()

    def _end_optimizer(self) -> None:
        if self._seen > WARMUP:
            self._other_s.append(self._now() - self._last_s)

    def _book(self) -> None:
        """Adds the step that has ended to the others, unless it warmed up or had no backward pass."""
        forward, backward = self._own
        if self._seen <= WARMUP or not backward:
            return
        for into, found in ((self._forward, forward), (self._backward, backward)):
            for name, seconds in found.items():
                into.setdefault(name, []).append(seconds)
        self._totals.append(sum(forward.values()) + sum(backward.values()))
        self._order = [name for name in reversed(backward) if name in self._sizes]
        self._own = ({}, {})

    def step(self) -> RecordedStep:
        """What was recorded; raises ConfigError where no whole step was."""
        if not self._totals:
            raise ConfigError(
                f"no step was recorded: {WARMUP + 1} steps, forward and backward, are the least; train longer with TACIT_PLAN=record"
            )
        names = [*self._order, *(name for name in self._sizes if name not in self._order)]
        layers = tuple(
            Layer(
                name, self._sizes[name], _median(self._forward.get(name)), _median(self._backward.get(name))
            )
            for name in names
        )
        work = Workload(self._name, layers, f"recorded: median of {len(self._totals)} steps of the script")
        middle_s, order = median(self._totals), sorted(self._totals)
        cpu = (process_time() - self._cpu_s) / max(1e-9, self._clock() - self._began_s)
        return RecordedStep(work, _median(self._other_s), order[0] / middle_s, order[-1] / middle_s, cpu)

    def finish(self) -> None:
        """Writes what was recorded, and removes the hooks."""
        self._book()
        self.close()
        save(self._path, self.step())
        log.info("the step of %s is recorded in %s: tacit plan --from %s", self._name, self._path, self._path)

    def _finish_in_training(self) -> None:
        """A file that cannot be written, or a full disk, costs the record and not the training, which would lose one rank."""
        try:
            self.finish()
        except (ConfigError, OSError) as cause:
            log.warning("the recorded step is lost, and training goes on: %s", cause)

    def close(self) -> None:
        """Removes the hooks; safe to call twice."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()


def _clean(name: str) -> str:
    """A layer's own name, whatever wraps the model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod").removeprefix("module.")


def _median(values: list[float] | None) -> float:
    return median(values) if values else 0.0
