"""Probes and steps in files: typed records, one JSON object a line, read on any machine and by the report."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tacit.errors import ConfigError
from tacit.plan.values import SPARSE_ALONE, Advice, Probe, ProbedMachine, RecordedStep
from tacit.record_types import AdviceRecord, PlanStepRecord, ProbeRecord, fit
from tacit.records import Recorder, read
from tacit.sim.workloads import Layer, Workload


def check_writable(path: Path) -> None:
    """Raises ConfigError where records could not be added to the file; it leaves no empty one behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as cause:
        raise _unwritable(path, cause) from cause


def _unwritable(path: str | Path, cause: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written ({cause.strerror}); name a file in a folder of yours")


def save(path: str | Path, *values: Probe | RecordedStep | Advice) -> None:
    """Adds a record for each value to the file, which is made if missing."""
    try:
        recorder = Recorder(path)
    except OSError as cause:
        raise _unwritable(path, cause) from cause
    with recorder:
        for value in values:
            recorder.record(_kind(value), **as_record(value))


def _kind(value: Probe | RecordedStep | Advice) -> str:
    if isinstance(value, Probe):
        return ProbeRecord.kind()
    return PlanStepRecord.kind() if isinstance(value, RecordedStep) else AdviceRecord.kind()


def as_record(value: Probe | RecordedStep | Advice) -> dict[str, Any]:
    """The value as plain JSON types."""
    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def load(path: str | Path, *, here: ProbedMachine | None = None) -> tuple[Probe | None, RecordedStep | None]:
    """The last probe and the last step in a file; `here` refuses a probe of another machine.

    Args:
        path: What `save` wrote, or the records of a run with TACIT_PLAN=record.
        here: The machine that the probe must have been made on; None: any.

    Returns:
        The probe and the step; None for what the file has not.

    Raises:
        ConfigError: The file cannot be read, has neither, or the probe is another machine's.

    Example:
        >>> # probe, step = load("runs/plan/probe.jsonl")
    """
    try:
        entries = read(path)
    except OSError as cause:
        raise ConfigError(f"probe file {path} cannot be opened: {cause.strerror}") from cause
    except ValueError as cause:
        raise ConfigError(
            f"probe file {path} is no record file ({cause}); `tacit plan --out` writes one"
        ) from cause
    probe = _last(entries, ProbeRecord, path)
    step = _last(entries, PlanStepRecord, path)
    found = None if probe is None else _whole(_value(probe, Probe, path), path)
    recorded = None if step is None else _step(step, path)
    if found is None and recorded is None:
        raise ConfigError(
            f"{path} holds neither a probe nor a recorded step; write one with `tacit plan --out`, or run your script with TACIT_PLAN=record"
        )
    if found is not None and here is not None and (differs := found.machine.differs(here)):
        raise ConfigError(
            f"{path} was probed on another machine ({differs}); probe again here, or add --elsewhere to predict for that one"
        )
    return found, recorded


def _last(entries: list[dict[str, Any]], kind: Any, path: str | Path) -> Any:
    """The last record of a kind, as a value; None where there is none."""
    for entry in reversed(entries):
        if isinstance(entry, dict) and entry.get("kind") == kind.kind():
            record, unfit = fit(entry, kind)
            if unfit:
                raise ConfigError(f"{path}: {unfit[0]}; it was cut off or edited: probe again")
            return record
    return None


def _value(record: Any, as_type: Any, path: str | Path) -> Any:
    try:
        return msgspec.convert(record, as_type, from_attributes=True)
    except msgspec.ValidationError as cause:
        raise ConfigError(f"{path}: its {record.kind()} is not whole ({cause}); probe again") from cause


def _whole(probe: Probe, path: str | Path) -> Probe:
    """The probe, if every curve of it can be read off; raises ConfigError."""
    curves = [each.curve for each in probe.operations] + ([probe.copy] if probe.copy else [])
    for cost in probe.costs:
        curves += [cost.decode, *(curve for each in cost.requests for curve in (each.encode, each.owner))]
        bytes_fit = all(len(use.nbytes) == len(cost.numels) for each in cost.requests for use in each.uses)
        if not cost.requests or not cost.numels or not bytes_fit or len(cost.sent_nbytes) != len(cost.numels):
            raise ConfigError(f"{path}: its probe of {cost.choice!r} is not whole; probe again")
    for curve in curves:
        columns = (curve.p50_s, curve.low_s, curve.high_s, curve.cpu_s)
        rising = all(a < b for a, b in pairwise(curve.sizes))
        if not curve.sizes or not rising or any(len(each) != len(curve.sizes) for each in columns):
            raise ConfigError(f"{path}: a curve of its probe is not whole; probe again")
    if probe.world < 2 or not probe.costs or not probe.cores > 0:
        raise ConfigError(
            f"{path}: its probe has {probe.world} ranks and {len(probe.costs)} choices; probe again"
        )
    return probe


def _step(record: PlanStepRecord, path: str | Path) -> RecordedStep:
    work = record.workload
    layers = tuple(Layer(e.name, int(e.parameters), e.forward_s, e.backward_s) for e in work.layers)
    try:
        workload = Workload(work.name, layers, work.source)
    except ConfigError as cause:
        raise ConfigError(f"{path}: {cause}") from cause
    if not workload.parameters:
        raise ConfigError(f"{path}: {work.name or 'its model'} {SPARSE_ALONE}")
    return RecordedStep(workload, record.other_s, record.low, record.high, record.cpu)
