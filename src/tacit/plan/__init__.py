"""Measure, predict, advise. So far: codecs driven with shapes only, and a model's step recorded as a workload."""

from tacit.plan.recorder import record_workload
from tacit.plan.shapes import Asked, requests_of

__all__ = ["Asked", "record_workload", "requests_of"]
