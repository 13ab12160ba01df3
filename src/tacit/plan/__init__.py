"""Measure, predict, advise: which exchange pays on these machines with this model, before anything is trained.

    step   = record_step(model, inputs)              # or workload("vgg16"), or a recorded file
    found  = probe(step)                             # all ranks together, some ten seconds
    advice = advise(found, predict(found, step))     # anywhere, also from a file

Values, prediction and advice need no torch; what measures is imported when it is first used. Plan imports sim, never the other way.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tacit.plan.advising import advise
from tacit.plan.files import load, save
from tacit.plan.predicting import predict
from tacit.plan.values import (
    BASELINES,
    Advice,
    BucketSizes,
    Prediction,
    Probe,
    RecordedStep,
)

if TYPE_CHECKING:
    from tacit.plan.probing import probe
    from tacit.plan.recorder import record_workload
    from tacit.plan.step_recorder import recording
    from tacit.plan.steps import record_step

_LAZY = {
    "probe": "tacit.plan.probing",
    "record_step": "tacit.plan.steps",
    "record_workload": "tacit.plan.recorder",
    "recording": "tacit.plan.step_recorder",
}

__all__ = [
    "BASELINES",
    "Advice",
    "BucketSizes",
    "Prediction",
    "Probe",
    "RecordedStep",
    "advise",
    "load",
    "predict",
    "probe",
    "record_step",
    "record_workload",
    "recording",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tacit.plan' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
