"""The part of `tacit plan` that every rank runs: the model's step, then the probe."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tacit import environment
from tacit.cli.sim import common
from tacit.errors import ConfigError
from tacit.plan import BucketSizes, Probe, RecordedStep, probe, record_step
from tacit.plan.candidates import with_baselines
from tacit.sim.texts import parse_model
from tacit.sim.workloads import Workload
from tacit.units import parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tacit.plan.exchanges import Gradients
    from tacit.plan.values import TouchedTable


@contextmanager
def measured(
    args: argparse.Namespace, step: RecordedStep | None, sizes: BucketSizes
) -> Iterator[tuple[Probe, RecordedStep]]:
    """Joins the process group that the launcher describes, and measures."""
    if args.link or args.world:
        raise ConfigError(
            "--link and --world are for plans without ranks; these ranks are probed as they are"
        )
    device = _device()
    dist.init_process_group()
    try:
        found = _OwnModel(step)
        if args.model is not None:
            found = _model(args.model, device)
        if found.step is None:
            raise ConfigError(
                "there is no model to plan for; name one with --model module:name, or read a recorded step with --from"
            )
        world = dist.get_world_size()
        strategies = None if args.strategies is None else with_baselines(args.strategies, world)
        with common.waiting("probing"):
            made = probe(
                found.step,
                strategies,
                device=device,
                buckets=sizes,
                gradients=found.gradients,
                compute=found.compute,
                tables=found.tables,
                budget_s=parse_time(args.budget),
            )
        yield made, found.step
    finally:
        dist.destroy_process_group()


class _OwnModel:
    """A model's step, and where it is a torch model what runs it."""

    def __init__(
        self,
        step: RecordedStep | None = None,
        gradients: Gradients | None = None,
        compute: Callable[[], object] | None = None,
        tables: Sequence[TouchedTable] = (),
    ) -> None:
        self.step, self.gradients, self.compute, self.tables = step, gradients, compute, tables


def _model(text: str, device: torch.device) -> _OwnModel:
    """What `text` names; a torch model with inputs is timed on all ranks."""
    from tacit.plan.recorder import gradients_of, mean_of
    from tacit.plan.tables import touched_tables

    found: list[_OwnModel] = []

    def record(model: Any, inputs: Any, name: str) -> Workload:
        model = model.to(device)
        inputs = [each.to(device) if isinstance(each, torch.Tensor) else each for each in inputs]
        step = record_step(model, inputs, name=name)

        def compute() -> None:
            model.zero_grad()
            mean_of(model(*inputs)).backward()

        compute()
        found.append(_OwnModel(step, gradients_of(model), compute, touched_tables(model)))
        return step.workload

    work = parse_model(text, record=record)
    return found[0] if found else _OwnModel(RecordedStep(work))


def _device() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    torch.accelerator.set_device_index(environment.local_rank() % torch.accelerator.device_count())
    return torch.device(kind.type, torch.accelerator.current_device_index())
