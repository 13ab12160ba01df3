"""The demo's trainings of one run side by side: the rows of every table, and the verdict over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import asdict

from tacit.record_types import TrainingRecord, fit
from tacit.records import Record

LINKS = {"100 Mbit": 1e8, "1 Gbit": 1e9}  # bits a second
LOSS_TOLERANCE = 0.02  # of the baseline's loss
ACCURACY_TOLERANCE = 0.01  # one point


class TrainingRow(TrainingRecord, frozen=True, kw_only=True):
    """A training against the baseline of its task.

    `ratio` is how many times fewer bytes it sends, None where nothing is sent at all. `step_ratio` is how many times
    longer its steps took, the median over pairs measured in turn.
    """

    ratio: float | None
    keeps_quality: bool
    wire_s: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON has it."""
        return {key: value for key, value in asdict(self).items() if key not in ("time", "run", "version")}


def wire_time_s(nbytes: float, rate_bps: float) -> float:
    """The time `nbytes` need to leave over a link of `rate_bps`, its latency not counted."""
    return 8 * nbytes / rate_bps


def last_run(records: Sequence[Record]) -> list[Record]:
    """The records of the run that wrote last."""
    return [record for record in records if record["run"] == records[-1]["run"]]


def summarise(records: Iterable[Record]) -> dict[str, list[TrainingRow]]:
    """The rows of each task, in the order they were trained, each against the baseline of its task."""
    trainings: dict[str, list[TrainingRecord]] = {}
    for record in records:
        if record["kind"] == TrainingRecord.kind():
            training, _ = fit(record, TrainingRecord)
            trainings.setdefault(training.task, []).append(training)
    return {task: _rows(of_task) for task, of_task in trainings.items()}


def _rows(trainings: Sequence[TrainingRecord]) -> list[TrainingRow]:
    """Version 1 marks no baseline: there it is the first training of a task."""
    baseline = next((training for training in trainings if training.baseline), trainings[0])
    return [_row(training, baseline) for training in trainings]


def _row(training: TrainingRecord, baseline: TrainingRecord) -> TrainingRow:
    sent = training.sent_nbytes_a_step
    return TrainingRow(
        **asdict(training),
        ratio=baseline.sent_nbytes_a_step / sent if sent else None,
        keeps_quality=_keeps_quality(training, baseline),
        wire_s={link: wire_time_s(sent, rate) for link, rate in LINKS.items()},
    )


def _keeps_quality(training: TrainingRecord, baseline: TrainingRecord) -> bool:
    if training.final is None or baseline.final is None:
        return False
    if training.higher_is_better:
        return training.final >= baseline.final - ACCURACY_TOLERANCE
    return training.final <= baseline.final * (1 + LOSS_TOLERANCE)


def verdict(rows: dict[str, list[TrainingRow]]) -> str:
    """One sentence: the configuration that sends least and still trains as well on every task of the run."""
    if not rows:
        return "Nothing was trained to its end in this run."
    saving = [
        name for name in _trained_in_all(rows) if all(_of(name, r).keeps_quality for r in rows.values())
    ]
    saving = [name for name in saving if all((_of(name, r).ratio or 0) > 1 for r in rows.values())]
    if not saving:
        return "No strategy sent fewer bytes than plain DDP and trained as well on every task of this run."
    best = max(saving, key=lambda name: min(_of(name, r).ratio or 0 for r in rows.values()))
    each = "; ".join(_against(r[0], _of(best, r)) for r in rows.values())
    return f"“{best}” sends least among the strategies that trained as well as plain DDP: {each}."


def _trained_in_all(rows: dict[str, list[TrainingRow]]) -> list[str]:
    first, *rest = ([row.configuration for row in of_task] for of_task in rows.values())
    return [name for name in first if all(name in names for names in rest)]


def _of(configuration: str, rows: list[TrainingRow]) -> TrainingRow:
    return next(row for row in rows if row.configuration == configuration)


def _against(baseline: TrainingRow, best: TrainingRow) -> str:
    ends = f"{best.metric} {final_text(best)} against {final_text(baseline)}"
    return f"on {best.task}, {best.ratio:.1f}× fewer bytes, {ends}, {best.step_ratio:.2f}× the time a step on loopback"


def final_text(row: TrainingRow) -> str:
    """The final metric for people: 96.7 % or 2.418; 'diverged' where it is not a number."""
    if row.final is None:
        return "diverged"
    return f"{100 * row.final:.1f} %" if row.higher_is_better else f"{row.final:.3f}"


def ratio_text(row: TrainingRow) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f}×"
