"""What a disturbed run of ranks that gossip must keep, checked on what the ranks wrote down; a broken promise is a sentence.

- a rank that lives never pauses longer than the deadline, cut off or not, whatever else the kernel runs on its core meanwhile;
- no step is missing from a count, and no local step from a model (`lost`: what a model lacks of the sum of its parts);
- no model is torn: nobody writes to it but its own thread, peers see it whole, and who comes back takes one that somebody had;
- a meeting happens to both or to none, of those that live; both call the same middle, and what one gains the other loses;
- all end with the same bits, and an accuracy near the undisturbed one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LOST = 1e-5  # relative: float32 rounds a model a little each time a peer moves it
POINTS = 0.5

Line = dict[str, Any]


@dataclass(slots=True)
class Life:
    """One process's lines, from its beginning to its end or its death."""

    rank: int
    life: int
    lines: Sequence[Line]
    killed: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f", life {self.life}" if self.life > 1 else "")

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def incarnation(self) -> str:
        return str(next((line["incarnation"] for line in self.of("began")), ""))

    @property
    def step(self) -> int:
        """The last step that was written down."""
        return max((int(line["last"]) for line in self.of("steps")), default=0)


@dataclass(slots=True)
class Run:
    """All lives of one run, and when a link was cut."""

    lives: list[Life]
    steps: int
    world: int
    cut: int | None = None  # the rank whose link it was
    cut_s: tuple[float, float] = (0.0, 0.0)
    facts: Line = field(default_factory=dict)

    @property
    def longest_pause(self) -> Line:
        """Of any rank that lives, in steps written down: `longest_s`, and how much of it the training waited for a core (`kept_s`)."""
        found = [line | {"rank": life.rank} for life in self.lives for line in life.of("steps")]
        nothing = {"longest_s": 0.0, "kept_s": 0.0, "rank": None, "first": 0, "last": 0}
        return max(found, key=lambda line: float(line["longest_s"]), default=nothing)

    @property
    def accuracy(self) -> float | None:
        """Of the merged model."""
        found = [line["accuracy"] for life in self.lives for line in life.of("end")]
        return float(min(found)) if found else None

    @property
    def lost(self) -> float:
        return float(max((line["lost"] for life in self.lives for line in life.of("end")), default=0.0))

    @property
    def meetings(self) -> dict[str, list[tuple[Life, Line]]]:
        found: dict[str, list[tuple[Life, Line]]] = {}
        for life in self.lives:
            for line in life.of("met"):
                found.setdefault(line["meeting"], []).append((life, line))
        return found

    def steps_while_cut(self, life: Life) -> int:
        first, last = self.cut_s
        return sum(first < time_s < last for line in life.of("steps") for time_s in line["times"])


def broken(run: Run, *, deadline_s: float, undisturbed: float | None = None) -> list[str]:
    """One sentence for each promise that was not kept."""
    return [
        *_ends(run, undisturbed),
        *_pauses(run, deadline_s),
        *_steps(run),
        *_torn(run),
        *_meetings(run),
    ]


def _ends(run: Run, undisturbed: float | None) -> Iterator[str]:
    ended = {life.rank: line for life in run.lives for line in life.of("end")}
    missing = sorted(set(range(run.world)) - set(ended))
    if missing:
        yield f"ranks {missing} did not come to the end"
    if len({line["digest"] for line in ended.values()}) > 1:
        yield "the merged models differ between ranks"
    for rank, line in ended.items():
        if undisturbed is not None and 100 * (undisturbed - line["accuracy"]) > POINTS:
            yield (
                f"rank {rank} ends at {100 * line['accuracy']:.2f} %, more than {POINTS} points below the undisturbed "
                f"{100 * undisturbed:.2f} %"
            )


def _pauses(run: Run, deadline_s: float) -> Iterator[str]:
    for life in run.lives:
        worst = max(life.of("steps"), key=lambda line: float(line["longest_s"]), default=None)
        if worst is not None and worst["longest_s"] > deadline_s:
            yield (
                f"{life.name} paused for {worst['longest_s']:.2f} s between steps {worst['first']} and {worst['last']}, "
                f"{worst['kept_s']:.2f} s of it for want of a core; the deadline is {deadline_s:g} s"
            )
        if run.cut is not None and not life.killed and life.life == 1 and not run.steps_while_cut(life):
            yield f"{life.name} took no step while the link of rank {run.cut} was cut"


def _steps(run: Run) -> Iterator[str]:
    for life in run.lives:
        at = next((int(line["step"]) for line in life.of("began")), 0)
        for line in life.of("steps"):
            if line["first"] != at + 1 or line["last"] - line["first"] + 1 != len(line["digests"]):
                yield f"{life.name} counts step {line['first']} after step {at}"
            at = line["last"]
        for line in life.of("end"):
            if not at == line["step"] == run.steps:
                yield f"{life.name} ends at step {line['step']}, having written down {at} of {run.steps}"
            if not line["lost"] <= LOST:
                yield f"{life.name} lost local steps: its model lacks {line['lost']:.2g} of the sum of its parts"


def _torn(run: Run) -> Iterator[str]:
    seen = {d for life in run.lives for line in life.of("steps") for d in line["digests"]}
    seen |= {line["after"] for life in run.lives for line in life.of("met")}
    starts = {line["digest"] for life in run.lives if life.life == 1 for line in life.of("began")}
    if len(starts) > 1:
        yield "the ranks began with different models"
    for life in run.lives:
        if torn := sum(line["torn"] for line in life.of("steps")):
            yield f"{life.name} had a torn model after {torn} of its steps"
        if life.life > 1 and any(line["digest"] not in seen | starts for line in life.of("began")):
            yield f"{life.name} came back with a model that nobody had"


def _meetings(run: Run) -> Iterator[str]:
    killed = {life.incarnation for life in run.lives if life.killed}
    dead = {life.rank for life in run.lives if life.killed}
    for meeting, sides in run.meetings.items():
        if len(sides) > 2 or len({life.rank for life, _ in sides}) != len(sides):
            yield f"meeting {meeting} was concluded {len(sides)} times"
        elif len(sides) == 2:
            (one, a), (two, b) = sides
            if a["middle"] != b["middle"]:
                yield f"{one.name} and {two.name} came out of meeting {meeting} with different middles"
            both_moved = a["gained"] is not None and b["gained"] is not None
            if both_moved and abs(a["gained"] + b["gained"]) > 1e-3 * (1 + abs(a["gained"])):
                yield f"{one.name} gained {a['gained']:g} in meeting {meeting}, and {two.name} {b['gained']:g}"
        else:
            life, line = sides[0]
            with_dead = any(name in meeting for name in killed if name) or line["peer"] in dead
            if not life.killed and not with_dead:
                yield f"only {life.name} concluded meeting {meeting}, rank {line['peer']} did not, and both live"
