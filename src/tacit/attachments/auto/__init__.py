"""`attach(model, optimizer, "auto")`: ten steps without a codec, a probe, a choice that all ranks agree on, and a look at whether it holds."""

from tacit.attachments.auto.cache import check_folder
from tacit.attachments.auto.options import TRIAL, Auto
from tacit.attachments.auto.planner import check_kind, plan_with

__all__ = ["TRIAL", "Auto", "check_folder", "check_kind", "plan_with"]
