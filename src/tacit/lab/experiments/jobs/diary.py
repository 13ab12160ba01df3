"""What a rank notes while it trains: every exchange with its reason and its end, and its model at some steps.

Nothing here waits for another rank, so what is noted does not disturb a method that never waits. A model is kept as a flat copy
in memory, which costs a pass over it; what the ranks' copies of one step amount to is computed after the training.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from tacit.lab.experiments.jobs.common import deciles

DONE = ("met", "merged", "summed")  # two models that gossip, all models, all gradients
TIMES = 400  # of a rank's exchanges are kept, evenly chosen where there were more
_MOVED = re.compile(r"moved ([\d.e+-]+) %")


@dataclass(frozen=True, slots=True)
class Noted:
    """An exchange that this rank began, and how it ended."""

    step: int
    at_s: float
    why: str
    outcome: str
    seconds: float | None = None

    @property
    def moved(self) -> float | None:
        """How far the model had come since the last exchange, relative to its length, where that was the reason."""
        found = _MOVED.fullmatch(self.why)
        return float(found[1]) / 100 if found else None


@dataclass(frozen=True, slots=True)
class Mark:
    """Where this rank stood after a step; time and bytes count from the start of the training."""

    step: int
    seconds: float
    sent_nbytes: float
    interface_nbytes: int
    model: Tensor


@dataclass(slots=True)
class Diary:
    """`record` takes a handle's records, on any thread; all else is the training thread's."""

    steps: frozenset[int]  # after which the model is kept
    transmitted: Callable[[], int]
    began_s: float = 0.0
    before_nbytes: int = 0
    marks: list[Mark] = field(default_factory=list)
    noted: list[Noted] = field(default_factory=list)

    def begin(self) -> None:
        self.before_nbytes, self.began_s = self.transmitted(), time.monotonic()

    def record(self, kind: str, **fields: Any) -> None:
        now = time.monotonic() - self.began_s
        if kind == "exchange":
            outcome, seconds = str(fields["outcome"]), float(fields["seconds"])
            self.noted.append(Noted(int(fields["step"]), now, str(fields["why"]), outcome, seconds))
        elif kind == "round":
            self.noted.append(Noted(int(fields["step"]), now, str(fields["why"]), "merged"))

    def stepped(self, step: int, model: nn.Module, sent_nbytes: float, *, summed: bool) -> None:
        """After every step; `summed` where its gradients were everybody's."""
        now = time.monotonic() - self.began_s
        if summed:
            self.noted.append(Noted(step, now, "every step", "summed"))
        if step in self.steps:
            flat = parameters_to_vector(model.parameters()).detach().float().cpu()
            self.marks.append(Mark(step, now, sent_nbytes, self.transmitted() - self.before_nbytes, flat))

    def told(self) -> dict[str, Any]:
        """What rank 0 needs of it, without the models."""
        done = sorted((n for n in self.noted if n.outcome in DONE), key=lambda n: n.step)
        steps, kept = [n.step for n in done], done[:: -(-len(done) // TIMES) or 1]
        ends = [0, *(bisect_right(steps, mark.step) for mark in self.marks)]
        moved = [[n.moved for n in done[a:b] if n.moved is not None] for a, b in pairwise(ends)]
        return {
            "seconds": [mark.seconds for mark in self.marks],
            "sent_nbytes": [mark.sent_nbytes for mark in self.marks],
            "interface_nbytes": [mark.interface_nbytes for mark in self.marks],
            "exchanges": ends[1:],
            "drift": [fmean(part) if part else None for part in moved],
            "times_s": [round(n.at_s, 3) for n in kept],
            "done": len(done),
            "outcomes": Counter(n.outcome for n in self.noted),
            "why": Counter("moved" if n.moved is not None else n.why for n in self.noted),
            "meetings_s": [n.seconds for n in done if n.seconds is not None],
        }


def marked_steps(steps: int, evaluations: int) -> frozenset[int]:
    """So many steps, evenly spread; the last is one of them."""
    return frozenset(max(1, round(steps * k / evaluations)) for k in range(1, evaluations + 1))


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' exchanges as fields of a record: in how many a rank took part (a mean), why, how they ended, and when.

    Who is called notes nothing: a meeting is in the caller's diary, and counts for both.
    """
    meetings = sorted(s for rank in ranks for s in rank["meetings_s"])
    _, p50, p90 = deciles(meetings) if meetings else (None, None, None)
    return {
        "exchanges": fmean(rank["done"] + rank["outcomes"]["met"] for rank in ranks),
        "outcomes": dict(sum((rank["outcomes"] for rank in ranks), Counter[str]())),
        "why": dict(sum((rank["why"] for rank in ranks), Counter[str]())),
        "meeting_p50_s": p50,
        "meeting_p90_s": p90,
        "exchange_times_s": [rank["times_s"] for rank in ranks],
    }
