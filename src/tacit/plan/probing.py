"""What a step is made of here: operations of the process group, costs of the codecs, and exchanges alone. All ranks call it together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from tacit.errors import ConfigError, PairingError
from tacit.plan.calibrate import calibrated
from tacit.plan.candidates import every_choice, parsed_choices
from tacit.plan.costs import copy_cost, cost_of, measurable
from tacit.plan.exchanges import Gradients
from tacit.plan.models import digest_of_model, machine_here
from tacit.plan.operations import Bench, Reference, alone, measured, pair_rates, reference
from tacit.plan.predicting import length_name, numels_of, predict
from tacit.plan.steps import CommonStopwatch
from tacit.plan.values import (
    BASELINES,
    BucketSizes,
    Probe,
    ProbedMachine,
    RecordedStep,
    StrategyCost,
    TouchedTable,
    share_of,
)
from tacit.requests import seed_of
from tacit.sim.workloads import Workload
from tacit.transports import Wire
from tacit.units import size_text, time_text

log = logging.getLogger("tacit")
MOST_S = 60.0
BUDGET_S = 30.0
FINALISTS = 3
_REFERENCE_NBYTES = 1 << 20
_DRIFT_STEPS = 3
_CHANGED = 1.6  # the reference at the end over that at the start, or the other way round ...
_CHANGED_S = 0.01  # ... and as much longer: less is what other programs on the machine do to it
_PAIR_NBYTES = 1 << 20
_EVERY_PAIR_NBYTES = 1 << 18
_UNKNOWN_NUMEL = 1 << 20  # the largest bucket where no model is given: attach's own


def probe(
    step: RecordedStep | Workload | None = None,
    strategies: Sequence[str] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    buckets: BucketSizes | None = None,
    gradients: Gradients | None = None,
    compute: Callable[[], object] | None = None,
    tables: Sequence[TouchedTable] = (),
    finalists: int = FINALISTS,
    budget_s: float = BUDGET_S,
) -> Probe:
    """Measures what `predict` needs, among all ranks of `group`; every rank returns the same values.

    Args:
        step: The model's step. With it the likeliest choices are calibrated: each exchanges the whole model once, alone.
        strategies: Choices to measure: strategies, or names of BASELINES; None: all that are valid here.
        group: The ranks; None: all of the default process group. Nothing else may use it meanwhile.
        device: Where gradients are; None: the CPU.
        buckets: How gradients are cut, for the calibration.
        gradients: The model's own by layer, for the errors of lossy choices.
        compute: Runs the model's forward and backward pass: some exchanges are then run beside it, to see how they disturb each other.
        tables: Sparse tables of the model, as `touched_tables` finds them.
        finalists: How many choices are calibrated beside DDP and bf16; 0: none.
        budget_s: After so many seconds nothing more is begun; at most 60.

    Returns:
        The probe.

    Raises:
        ConfigError: No process group, an option out of range, or links that changed meanwhile.
        PairingError: The ranks have different models.

    Example:
        >>> # found = tacit.plan.probe(tacit.plan.record_step(model, inputs))      # on all ranks
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("a probe measures a process group and there is none; start the ranks with torchrun")
    if not 1.0 <= budget_s <= MOST_S:
        raise ConfigError(f"budget_s={budget_s:g}: a probe takes 1 to {MOST_S:g} seconds")
    start_s = time.perf_counter()
    group = group or dist.group.WORLD
    assert group is not None
    wire = Wire(group)
    if wire.world < 2:
        raise ConfigError(
            "one rank alone exchanges nothing; start two ranks or more, as torchrun --nproc-per-node=4 does"
        )
    bench = Bench(wire, device or torch.device("cpu"), start_s + budget_s)
    recorded = RecordedStep(step) if isinstance(step, Workload) else step
    model = check_alike(group, recorded)
    choices = every_choice(wire.world) if strategies is None else parsed_choices(strategies, wire.world)
    wire.measure()
    if strategies is None:
        choices = _measurable(bench, choices)
    before = reference(bench, _REFERENCE_NBYTES)
    costs = tuple(
        cost_of(choice, wire.world, device=bench.device, together=bench.together, worst=bench.worst)
        for choice in choices
    )
    sizes = buckets or BucketSizes()
    operations = measured(bench, _needed(costs, recorded, sizes))
    copy = copy_cost(bench.device, together=bench.together, worst=bench.worst)
    found = Probe(
        wire.world,
        str(group._get_backend(bench.device).name()),
        bench.device.type,
        *_machines(group),
        operations,
        costs,
        model=model,
        copy=copy,
    )
    found = _with_links(bench, found)
    found = replace(found, tables=tuple(tables))
    if recorded is not None and finalists:
        chosen = _finalists(found, recorded, choices, sizes, finalists)
        calibrations, errors = calibrated(
            bench, found, recorded, chosen, buckets=sizes, gradients=gradients, compute=compute
        )
        found = replace(found, calibrations=calibrations, errors=errors)
    if recorded is not None and compute is not None:
        found = replace(found, drift=_drift(bench, recorded, compute))
    check_steady(before, reference(bench, _REFERENCE_NBYTES))
    return replace(found, took_s=bench.worst([time.perf_counter() - start_s])[0])


def _measurable(bench: Bench, choices: Sequence[str]) -> tuple[str, ...]:
    """Those that every rank can measure; of the others this rank's own are noted."""
    reasons = measurable(choices, bench.wire.world, bench.device)
    for reason in filter(None, reasons.values()):
        log.warning("%s", reason)
    failed = bench.worst([float(bool(reasons[choice])) for choice in choices])
    return tuple(choice for choice, fails in zip(choices, failed, strict=True) if not fails)


def check_steady(before: Reference, after: Reference) -> None:
    """Raises ConfigError where an all-reduce took much longer, or shorter, at the end of a probe, and a computation did not."""
    first, last = before.reduced_s, after.reduced_s
    a, b = median(first), median(last)
    busier = median(after.computed_s) / median(before.computed_s)
    share = _CHANGED * max(busier, 1 / busier)
    apart = min(last) > share * max(first) or min(first) > share * max(last)
    if apart and abs(a - b) > _CHANGED_S:
        raise ConfigError(
            f"the links changed during the probe: an all-reduce of {size_text(_REFERENCE_NBYTES)} took {time_text(a)} at the start and "
            f"{time_text(b)} at the end; probe again when nothing else uses them"
        )


def _drift(bench: Bench, step: RecordedStep, compute: Callable[[], object]) -> float:
    """The computation now over the recorded one."""
    stopwatch = CommonStopwatch(bench.wire.group)
    took = [stopwatch.seconds(compute) for _ in range(_DRIFT_STEPS)]
    then_s = step.workload.forward_s + step.workload.backward_s
    return median(bench.worst(took)) / then_s if then_s else 1.0


def check_alike(group: dist.ProcessGroup, step: RecordedStep | None) -> str:
    """The model's digest; raises PairingError, on every rank, where ranks have different models."""
    own = "" if step is None else digest_of_model(step.workload)
    world = dist.get_world_size(group)
    number = torch.tensor([int(own, 16) if own else 0], dtype=torch.int64)
    all_numbers = [torch.zeros_like(number) for _ in range(world)]
    dist.all_gather(all_numbers, number, group=group)
    values = [int(each) for each in all_numbers]
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise PairingError(
            f"rank 0 and rank {other} probe with different models; build the same model, with the same sizes, on all ranks"
        )
    return own


def _machines(group: dist.ProcessGroup) -> tuple[float, ProbedMachine]:
    """CPU cores for each rank where they are fewest, and the machine of this rank 0."""
    here = seed_of(os.uname().nodename, _boot_id()) >> 2
    number = torch.tensor([here, machine_here().cores], dtype=torch.int64)
    everyone = [torch.zeros_like(number) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, number, group=group)
    nodes = [int(each[0]) for each in everyone]
    cores = min(int(each[1]) / nodes.count(int(each[0])) for each in everyone)
    return cores, machine_here(len(set(nodes)))


def _boot_id() -> str:
    """One for all containers and namespaces of a machine that is running."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _needed(costs: Sequence[StrategyCost], step: RecordedStep | None, sizes: BucketSizes) -> dict[str, float]:
    """The operations that the answers use, each with the most bytes; and the one by which links are described."""
    largest = {"send": float(_PAIR_NBYTES)}
    for cost in costs:
        numel = _UNKNOWN_NUMEL if step is None else max(numels_of(step.workload, cost, sizes))
        for use in (use for request in cost.requests for use in request.uses):
            nbytes = share_of(cost.numels, use.nbytes, numel)
            for name in (
                (use.operation, length_name(nbytes))
                if use.operation.startswith("all_to_all")
                else (use.operation,)
            ):
                largest[name] = max(largest.get(name, 0.0), nbytes)
    return largest


def _with_links(bench: Bench, found: Probe) -> Probe:
    """The links as people describe them; a message alone against all at once shows an uplink that ranks share."""
    send = found.operation("send")
    at_once_s, alone_s = send.at(_PAIR_NBYTES), alone(bench, _PAIR_NBYTES)
    bits = 8 * _PAIR_NBYTES
    return replace(
        found,
        latency_s=send.at(0),
        at_once_bps=bits / at_once_s,
        alone_bps=bits / alone_s,
        pairs=pair_rates(bench, _EVERY_PAIR_NBYTES),
    )


def _finalists(
    found: Probe, step: RecordedStep, choices: Sequence[str], sizes: BucketSizes, count: int
) -> list[str]:
    """The fastest by their pieces, and what they are compared with."""
    every_step = [choice for choice in choices if found.cost(choice).period == 1]
    order = [each.choice for each in predict(found, step, every_step, buckets=sizes)]
    compared = [each for each in (*BASELINES, "every / bf16 / allreduce") if each in choices]
    first = [each for each in order if each not in BASELINES][:count]
    return list(dict.fromkeys([*first, *compared]))
