"""A training that runs, as its records show it: how fast, where its time goes, which ranks lag, and what was predicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from tacit.record_types import (
    AttachedRecord,
    ChosenRecord,
    DriftRecord,
    PredictedStep,
    RanksRecord,
    StepRecord,
    fit,
)
from tacit.records import Record

WINDOW = 50  # steps that rates and times are taken from
LAGS = 1.15  # a rank that computes this many times as long as the median makes others wait
SILENT_STEPS = 10  # a rank without a record for as many steps,
SILENT_S = 5.0  # and as many seconds more, is silent


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank in its last steps: seconds a step. `own_s` is what it computes without waiting for others; None where unknown."""

    rank: int
    step: int
    own_s: float | None = None
    wait_s: float | None = None
    encode_s: float | None = None
    wire_s: float | None = None
    decode_s: float | None = None
    sent_nbytes_a_step: float | None = None
    lag_s: float = 0.0  # longer than the median computes
    lags: bool = False
    silent_s: float = 0.0  # since its last record, where that is long


@dataclass(frozen=True, slots=True)
class TrainingView:
    """All of it at one time. Means over the last steps; the median of ranks where they differ."""

    strategy: str
    step: int
    world: int
    step_s: float | None
    steps_a_s: float | None
    sent_nbytes: int  # of the rank that sent most, since it was attached
    sent_nbytes_a_step: float | None
    parts: dict[str, float]
    ranks: tuple[RankView, ...]
    predicted: PredictedStep | None
    chosen: str
    drifts: tuple[str, ...]
    chunks: int = 0  # that star(loss=...) has summed, of the rank at the front,
    partial_chunks: int = 0  # and of them those without some rank

    @property
    def lagging(self) -> tuple[int, ...]:
        return tuple(rank.rank for rank in self.ranks if rank.lags)

    @property
    def silent(self) -> tuple[int, ...]:
        return tuple(rank.rank for rank in self.ranks if rank.silent_s)

    @property
    def off(self) -> float | None:
        """How far the measured step is from the predicted one, as a share of that."""
        predicted = self.predicted.step_s if self.predicted else None
        return self.step_s / predicted - 1 if self.step_s and predicted else None


@dataclass(slots=True)
class _RankSeen:
    run: str
    world: int = 0
    attached_at: float = 0.0
    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))
    ranks: RanksRecord | None = None
    chosen: ChosenRecord | None = None
    drifts: list[str] = field(default_factory=list)


class LiveTraining:
    """Collects records as they come. Of a rank that was started again the later run counts."""

    def __init__(self) -> None:
        self._seen: dict[int, _RankSeen] = {}

    def add(self, records: Iterable[Record]) -> None:
        for record in records:
            match record["kind"]:
                case "attached":
                    attached = fit(record, AttachedRecord)[0]
                    if (seen := self._rank(attached)) is not None:
                        seen.world, seen.attached_at = attached.world, float(attached.time)
                case "step":
                    step = fit(record, StepRecord)[0]
                    if (seen := self._rank(step)) is not None:
                        self._step(seen, step)
                case "ranks":
                    ranks = fit(record, RanksRecord)[0]
                    if (seen := self._rank(ranks)) is not None:
                        seen.ranks = ranks
                case "chosen":
                    chosen = fit(record, ChosenRecord)[0]
                    if (seen := self._rank(chosen)) is not None:
                        seen.chosen, seen.drifts = chosen, []
                case "drift":
                    drift = fit(record, DriftRecord)[0]
                    if (seen := self._rank(drift)) is not None and drift.sentence not in seen.drifts:
                        seen.drifts.append(drift.sentence)

    def _rank(
        self, record: AttachedRecord | StepRecord | RanksRecord | ChosenRecord | DriftRecord
    ) -> _RankSeen | None:
        """What is known of the record's rank in the record's run; None for an earlier run than is known."""
        seen = self._seen.get(record.rank)
        if seen is None or (seen.run != record.run and _begun(seen.run) <= _begun(record.run)):
            seen = self._seen[record.rank] = _RankSeen(record.run)
        return seen if seen.run == record.run else None

    @staticmethod
    def _step(seen: _RankSeen, step: StepRecord) -> None:
        if seen.steps and (step.strategy != seen.steps[-1].strategy or step.step <= seen.steps[-1].step):
            seen.steps.clear()  # figures of two strategies have no mean; nor has a step that is taken again
        seen.steps.append(step)

    @property
    def begun(self) -> bool:
        """Whether there is a record of a training at all."""
        return bool(self._seen)

    def view(self, now_s: float) -> TrainingView:
        """The training as it stands; `now_s` is the clock of the records."""
        newest = max(self._seen.values(), key=lambda found: found.attached_at, default=None)
        world = newest.world if newest and newest.world else len(self._seen)
        seen = {rank: found for rank, found in sorted(self._seen.items()) if rank < world}
        stepping = [found for found in seen.values() if found.steps]
        step_s = _median([taken for found in stepping if (taken := _a_step(found, "time"))])
        ranks = _with_lag([_rank_view(rank, found, now_s, step_s) for rank, found in seen.items()])
        ranks = ranks if len(ranks) > 1 else _from_others(ranks, stepping) or ranks
        front = max(stepping, key=lambda found: found.steps[-1].step, default=None)
        chosen = next((found.chosen for found in seen.values() if found.chosen), None)
        parts = {
            name: value
            for name in ("own_s", "wait_s", "encode_s", "wire_s", "decode_s")
            if (value := _median([v for rank in ranks if (v := getattr(rank, name)) is not None])) is not None
        }
        return TrainingView(
            strategy=front.steps[-1].strategy if front else "",
            step=front.steps[-1].step if front else 0,
            world=world,
            step_s=step_s,
            steps_a_s=1 / step_s if step_s else None,
            sent_nbytes=max((found.steps[-1].sent_nbytes for found in stepping), default=0),
            sent_nbytes_a_step=_median([b for r in ranks if (b := r.sent_nbytes_a_step) is not None]),
            parts=parts,
            ranks=tuple(ranks),
            predicted=chosen.predicted if chosen else None,
            chosen=chosen.why if chosen else "",
            drifts=tuple(dict.fromkeys(text for found in seen.values() for text in found.drifts)),
            chunks=front.steps[-1].chunks if front else 0,
            partial_chunks=front.steps[-1].partial_chunks if front else 0,
        )


def _begun(run: str) -> str:
    """When a run began, to the second."""
    return run.partition("-")[0]


def _rank_view(rank: int, seen: _RankSeen, now_s: float, step_s: float | None) -> RankView:
    if not seen.steps:
        return RankView(rank, 0)
    parts = {
        name: _a_step(seen, name) for name in ("wait_s", "encode_s", "wire_s", "decode_s", "sent_nbytes")
    }
    took, wait_s = _a_step(seen, "time"), parts["wait_s"]
    silent_s = now_s - float(seen.steps[-1].time)
    return RankView(
        rank,
        seen.steps[-1].step,
        max(0.0, took - wait_s) if took is not None and wait_s is not None else None,
        wait_s,
        parts["encode_s"],
        parts["wire_s"],
        parts["decode_s"],
        parts["sent_nbytes"],
        silent_s=silent_s if silent_s > SILENT_S + SILENT_STEPS * (step_s or 0.0) else 0.0,
    )


def _a_step(seen: _RankSeen, name: str) -> float | None:
    """How much a field grows in a step, over the steps that are kept."""
    first, last = seen.steps[0], seen.steps[-1]
    if last.step == first.step:
        return None
    return float(getattr(last, name) - getattr(first, name)) / (last.step - first.step)


def _with_lag(ranks: Sequence[RankView]) -> list[RankView]:
    usual = _median([rank.own_s for rank in ranks if rank.own_s is not None])
    if usual is None or len(ranks) < 2:
        return list(ranks)
    return [
        replace(rank, lag_s=rank.own_s - usual, lags=rank.own_s > LAGS * usual)
        if rank.own_s is not None
        else rank
        for rank in ranks
    ]


def _from_others(ranks: Sequence[RankView], stepping: Sequence[_RankSeen]) -> list[RankView]:
    """All ranks out of the records of one, where those hold what each of them computed; none where they do not."""
    exchanged = next((found.ranks for found in stepping if found.ranks is not None), None)
    if exchanged is None or not ranks:
        return []
    known = {rank.rank: rank for rank in ranks}
    return _with_lag(
        [
            replace(known.get(rank, RankView(rank, exchanged.step)), own_s=float(own_s))
            for rank, own_s in enumerate(exchanged.own_s)
        ]
    )


def _median(values: Sequence[float]) -> float | None:
    return float(median(values)) if values else None
