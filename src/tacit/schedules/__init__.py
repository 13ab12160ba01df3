"""WHO tells whom: one file a schedule, each opens with its stages and bytes in closed form. Pure numpy."""

from collections.abc import Callable

from tacit.schedules.ring import ring
from tacit.schedules.schedule import Goal, Phase, Schedule, Stage

SCHEDULES: dict[str, Callable[..., Schedule]] = {"ring": ring}

__all__ = ["SCHEDULES", "Goal", "Phase", "Schedule", "Stage", "ring"]
