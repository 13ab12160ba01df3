"""What the trainings of one run say side by side: the rows of every table, and the verdict over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tacit.records import Record

LINKS = {"100 Mbit": 1e8, "1 Gbit": 1e9}  # bits a second
LOSS_TOLERANCE = 0.02  # of the baseline's loss
ACCURACY_TOLERANCE = 0.01  # one point


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration of one task, against the first configuration of that task (the baseline).

    `ratio` is how many times fewer bytes it sends, None where nothing is sent at all; `step_ratio` how many times
    longer its steps took, the median over pairs measured in turn. `final` is None where training diverged.
    """

    task: str
    configuration: str
    ranks: int
    steps: int
    step_p50_s: float
    step_p95_s: float
    step_ratio: float
    step_n: int
    sent_nbytes_a_step: float
    sent_is: str
    ratio: float | None
    metric: str
    higher_is_better: bool
    final: float | None
    keeps_quality: bool
    wire_s: dict[str, float]
    loss: list[float | None]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def wire_time_s(nbytes: float, rate_bps: float) -> float:
    """The time `nbytes` need to leave over a link of `rate_bps`, its latency not counted."""
    return 8 * nbytes / rate_bps


def last_run(records: Sequence[Record]) -> list[Record]:
    """The records of the run that wrote last."""
    return [record for record in records if record["run"] == records[-1]["run"]]


def summarise(records: Iterable[Record]) -> dict[str, list[Row]]:
    """The rows of each task, in the order they were trained; the first is the baseline of its task."""
    trainings: dict[str, list[Record]] = {}
    for record in records:
        if record["kind"] == "training":
            trainings.setdefault(record["task"], []).append(record)
    return {task: [_row(record, of_task[0]) for record in of_task] for task, of_task in trainings.items()}


def _row(record: Record, baseline: Record) -> Row:
    sent = record["sent_nbytes_a_step"]
    taken = {name: record[name] for name in Row.__slots__ if name in record}
    return Row(
        **taken,
        ratio=baseline["sent_nbytes_a_step"] / sent if sent else None,
        keeps_quality=_keeps_quality(record, baseline),
        wire_s={link: wire_time_s(sent, rate) for link, rate in LINKS.items()},
    )


def _keeps_quality(record: Record, baseline: Record) -> bool:
    if record["final"] is None or baseline["final"] is None:
        return False
    if record["higher_is_better"]:
        return bool(record["final"] >= baseline["final"] - ACCURACY_TOLERANCE)
    return bool(record["final"] <= baseline["final"] * (1 + LOSS_TOLERANCE))


def verdict(rows: dict[str, list[Row]]) -> str:
    """One sentence: the configuration that says least and still trains as well on every task of the run."""
    if not rows:
        return "Nothing was trained to its end in this run."
    saving = [
        name for name in _trained_in_all(rows) if all(_of(name, r).keeps_quality for r in rows.values())
    ]
    saving = [name for name in saving if all((_of(name, r).ratio or 0) > 1 for r in rows.values())]
    if not saving:
        return "No strategy sent fewer bytes than plain DDP and trained as well on every task of this run."
    best = max(saving, key=lambda name: min(_of(name, r).ratio or 0 for r in rows.values()))
    told = "; ".join(_told(r[0], _of(best, r)) for r in rows.values())
    return f"“{best}” says least among the strategies that trained as well as plain DDP: {told}."


def _trained_in_all(rows: dict[str, list[Row]]) -> list[str]:
    first, *rest = ([row.configuration for row in of_task] for of_task in rows.values())
    return [name for name in first if all(name in names for names in rest)]


def _of(configuration: str, rows: list[Row]) -> Row:
    return next(row for row in rows if row.configuration == configuration)


def _told(baseline: Row, best: Row) -> str:
    ends = f"{best.metric} {final_text(best)} against {final_text(baseline)}"
    return f"on {best.task}, {best.ratio:.1f}× fewer bytes, {ends}, {best.step_ratio:.2f}× the time a step on loopback"


def final_text(row: Row) -> str:
    """The final metric for people: 96.7 % or 2.418; 'diverged' where it is not a number."""
    if row.final is None:
        return "diverged"
    return f"{100 * row.final:.1f} %" if row.higher_is_better else f"{row.final:.3f}"


def ratio_text(row: Row) -> str:
    return "–" if row.ratio is None else f"{row.ratio:.2f}×"
