"""`attach(model, optimizer, "auto")`: ten steps without a codec, a probe, a choice that all ranks agree on, and a look at whether it holds."""

from tacit.attachments.auto.options import TRIAL, Auto
from tacit.attachments.auto.planner import AutoPlanner

__all__ = ["TRIAL", "Auto", "AutoPlanner"]
