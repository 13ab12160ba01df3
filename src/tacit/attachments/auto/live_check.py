"""Whether a plan still holds: every so many steps ranks compare what a step takes with what it took when the strategy was chosen.

    step = own + wait         own: forward, backward, optimizer, data; without waiting for others
    wire, codec               what tacit's threads do beside it

A part is named by what grew: every rank's own time (batch), one rank's (that rank), own time and codec (the cores), the wire (the link).
The wire of the rank that waits least for others is the link's: those that wait for a slow rank wait inside of a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tacit.attachments.auto.choice import Expected
from tacit.units import time_text

WINDOW = 20  # steps of which the medians are compared
SKIPPED = 3  # the first steps under a new strategy make memory
CHANGED = 1.25  # a step that takes as many times as long, or as short,
IN_A_ROW = 2  # in as many windows one after the other, is another step
OFF = 1.15  # how far beyond a prediction's interval a step may be
_LEAST_S = 1e-3  # differences below are the clock's and the scheduler's


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of one rank's step, or of all ranks' as they are compared."""

    step_s: float
    own_s: float
    wire_s: float
    codec_s: float

    def as_list(self) -> list[float]:
        return [self.step_s, self.own_s, self.wire_s, self.codec_s]


@dataclass(frozen=True, slots=True)
class Drift:
    """That a plan no longer holds: `part` is compute, wire or codec."""

    part: str
    sentence: str
    expected_s: float
    measured_s: float


class LiveCheck:
    """Collects one rank's steps, and judges windows that all ranks have gathered: all judge alike. It reports once that the first window is
    not as predicted, and once that a later one is not as the first."""

    def __init__(self, expected: Expected | None):
        self._expected = expected
        self._steps: list[StepParts] = []
        self._skip = SKIPPED
        self._in_a_row = 0  # windows that were longer; below zero, shorter
        self.reference: list[StepParts] | None = None
        self.drift: Drift | None = None

    def add(self, parts: StepParts) -> StepParts | None:
        """The medians of a window, once there is one; its ranks' are then for `judge`."""
        if self._skip:
            self._skip -= 1
            return None
        self._steps.append(parts)
        if len(self._steps) < WINDOW:
            return None
        columns = zip(*(step.as_list() for step in self._steps), strict=True)
        self._steps = []
        return StepParts(*(float(median(column)) for column in columns))

    def judge(self, ranks: Sequence[StepParts], step: int) -> Drift | None:
        """What is new: a drift that was not reported before. `ranks`: the window of every rank, in rank order."""
        if self.reference is None:
            self.reference = list(ranks)
            return self._unpredicted(together(ranks), step)
        then, now = together(self.reference), together(ranks)
        apart = abs(now.step_s - then.step_s) > _LEAST_S
        changed = apart and not 1 / CHANGED < now.step_s / max(then.step_s, 1e-9) < CHANGED
        sign = (1 if now.step_s > then.step_s else -1) if changed else 0
        self._in_a_row = self._in_a_row + sign if sign * self._in_a_row > 0 else sign
        if self.drift is not None or abs(self._in_a_row) < IN_A_ROW:
            return None
        self.drift = _drift(self.reference, ranks, step)
        return self.drift

    def _unpredicted(self, now: StepParts, step: int) -> Drift | None:
        """A drift if the first window is not what was predicted."""
        plan = self._expected
        if plan is None or plan.low_s / OFF <= now.step_s <= plan.high_s * OFF:
            return None
        if abs(now.step_s - plan.step_s) < _LEAST_S:
            return None
        slower = now.step_s > plan.step_s
        parts = {
            "compute": (now.own_s, plan.compute_s),
            "wire": (now.wire_s, plan.wire_s),
            "codec": (now.codec_s, plan.codec_s),
        }
        part = max(parts, key=lambda name: (parts[name][0] - parts[name][1]) * (1 if slower else -1))
        measured, expected = parts[part]
        sentence = (
            f"step {step}: a step takes {time_text(now.step_s)} and the plan expected {time_text(plan.step_s)} "
            f"({time_text(plan.low_s)} to {time_text(plan.high_s)}); most of it is {part}: {time_text(measured)} against "
            f"{time_text(expected)}; handle.replan() chooses anew"
        )
        return Drift(part, sentence, plan.step_s, now.step_s)


def together(ranks: Sequence[StepParts]) -> StepParts:
    """The step of all ranks: everybody waits for the slowest that computes; the link is as fast as the one that waits least sees it."""
    return StepParts(
        max(rank.step_s for rank in ranks),
        max(rank.own_s for rank in ranks),
        min(rank.wire_s for rank in ranks),
        max(rank.codec_s for rank in ranks),
    )


def _drift(before: Sequence[StepParts], after: Sequence[StepParts], step: int) -> Drift:
    """Names the part whose seconds changed most in the direction of the step, and what that looks like."""
    then, now = together(before), together(after)
    sign = 1 if now.step_s > then.step_s else -1
    seconds = {
        "compute": (then.own_s, now.own_s),
        "wire": (then.wire_s, now.wire_s),
        "codec": (then.codec_s, now.codec_s),
    }
    part = max(seconds, key=lambda name: sign * (seconds[name][1] - seconds[name][0]))
    was, is_ = seconds[part]
    sentence = (
        f"step {step}: a step takes {time_text(now.step_s)} and took {time_text(then.step_s)} when the strategy was chosen: "
        f"{_cause(part, before, after, sign)} ({part} {time_text(is_)} against {time_text(was)}); handle.replan() chooses anew"
    )
    return Drift(part, sentence, then.step_s, now.step_s)


def _cause(part: str, before: Sequence[StepParts], after: Sequence[StepParts], sign: int) -> str:
    then, now = together(before), together(after)
    if part == "wire":
        return "the link is slower, or somebody shares it" if sign > 0 else "the link is faster"
    if part == "codec":
        return (
            "the codec takes longer, so other work shares the cores"
            if sign > 0
            else "the codec is faster, so cores are free"
        )
    grown = [b.own_s - a.own_s for a, b in zip(before, after, strict=True)]
    *others, most = sorted(grown)
    if sign > 0 and others and most > 2 * others[-1]:
        return f"rank {grown.index(most)} computes longer than it did, and the others wait for it"
    if sign > 0 and now.codec_s > CHANGED * then.codec_s and now.codec_s - then.codec_s > _LEAST_S:
        return "computation and codec both take longer, so other work shares the cores"
    return f"every rank computes {'longer' if sign > 0 else 'shorter'}, as with another batch size"
