"""Measure, predict, advise. So far: a model's step recorded as a workload. Plan imports sim, never the other way."""

from tacit.plan.recorder import record_workload

__all__ = ["record_workload"]
