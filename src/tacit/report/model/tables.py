"""The page's tables as plain rows: what JSON and CSV hold, and what the HTML tables show."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from msgspec.structs import asdict

from tacit.record_types import (
    AccuracyRecord,
    CalibrationRecord,
    CostRecord,
    CountersRecord,
    LimitsRecord,
    SimRecord,
    TimingRecord,
)
from tacit.report.model import summary
from tacit.report.model.comparisons import Comparison
from tacit.report.model.runs import Run
from tacit.report.text import rate_text

TableRow = dict[str, Any]


def standing_rows(comparisons: Sequence[Comparison]) -> list[TableRow]:
    """A row a configuration of each comparison: what was measured, and what follows from it."""
    rows = []
    for comparison in comparisons:
        for standing in comparison.standings:
            spread, final = standing.to_target, standing.final
            rows.append(
                {
                    "run": comparison.run,
                    **_timing_row(standing.timing),
                    "trusted": comparison.trusted,
                    "speedup": standing.speedup,
                    "against_bf16": comparison.step_ratio(standing, comparison.bf16),
                    "codec_s": standing.timing.codec_s,
                    "codec_full_s": standing.timing.codec_full_s,
                    "seeds": len(standing.seeds),
                    "seeds_reached": standing.reached,
                    "to_target_s": spread.p50 if spread else None,
                    "to_target_least_s": spread.least if spread else None,
                    "to_target_most_s": spread.most if spread else None,
                    "to_target_against_fp32": comparison.ratio(standing, comparison.fp32) if spread else None,
                    "to_target_against_bf16": comparison.ratio(standing, comparison.bf16) if spread else None,
                    "final": final.p50 if final else None,
                    "final_least": final.least if final else None,
                    "final_most": final.most if final else None,
                }
            )
    return rows


def _timing_row(timing: TimingRecord) -> TableRow:
    row = {
        key: value for key, value in asdict(timing).items() if key not in ("time", "run", "version", "split")
    }
    return row | {"network": timing.network_text} | asdict(timing.split)


def accuracy_rows(run: Run) -> list[TableRow]:
    return [
        {"run": run.label, **{key: getattr(record, key) for key in _ACCURACY}}
        for record in run.typed(AccuracyRecord)
    ]


_ACCURACY = (
    "workload",
    "configuration",
    "seed",
    "ranks",
    "steps",
    "metric",
    "target",
    "steps_to_target",
    "final",
    "curve",
)


def prediction_rows(comparisons: Sequence[Comparison]) -> list[TableRow]:
    """Measured against predicted step times; `error` is predicted over measured, less one."""
    return [
        {
            "run": comparison.run,
            "workload": comparison.workload,
            "link": comparison.link,
            "configuration": standing.name,
            "measured_s": timing.step_p50_s,
            "predicted_s": timing.predicted_step_s,
            "error": timing.predicted_step_s / timing.step_p50_s - 1,
        }
        for comparison in comparisons
        for standing in comparison.standings
        if (timing := standing.timing).predicted_step_s
    ]


def limit_rows(run: Run) -> list[TableRow]:
    """Collectives against theory; `unexplained` is the share of the interface's bytes that neither payload nor headers are."""
    rows = []
    for record in run.typed(LimitsRecord):
        measured, theory = record.measured_s, record.theory_s
        interface, sent, headers = record.interface_nbytes, record.counted_nbytes, record.headers_nbytes or 0
        ratio = record.ratio or (measured / theory if measured and theory else None)
        rows.append(
            {
                "run": run.label,
                "rate_bps": record.rate_bps,
                "nbytes": record.nbytes,
                "ranks": record.ranks,
                "measured_s": measured,
                "theory_s": theory,
                "ratio": ratio,
                "counted_nbytes": sent,
                "headers_nbytes": headers,
                "interface_nbytes": interface,
                "unexplained": interface / (sent + headers) - 1 if interface and sent else None,
            }
        )
    return rows


def calibration_rows(run: Run) -> list[TableRow]:
    """What was timed before a job ran, as its last attempt found it; a row passed between `least_s` and `most_s`.

    `network_passed` is the judgement over all rows of a job and rate.
    """
    return [
        {
            "run": run.label,
            "job": record.job,
            "rate_bps": record.rate_bps,
            "what": row.what or row.name,
            "nbytes": row.nbytes,
            "measured_s": row.measured_s,
            "theory_s": row.theory_s,
            "ratio": row.measured_s / row.theory_s if row.measured_s and row.theory_s else None,
            "least_s": row.least_s,
            "most_s": row.most_s,
            "passed": bool(record.passed if row.passed is None else row.passed),
            "network_passed": bool(record.passed),
            "attempts": record.attempts,
        }
        for record in run.typed(CalibrationRecord)
        for row in record.rows
    ]


def drop_rows(run: Run) -> list[TableRow]:
    """Links whose queue had no room for packets, of each job and rate."""
    return [
        {
            "run": run.label,
            "job": record.job,
            "rate_bps": record.rate_bps,
            "link": f"{node} {device}",
            "drops": round(drops),
            "packets": counted.get("qdisc_packets"),
        }
        for record in run.typed(CountersRecord)
        for node, devices in record.nodes.items()
        for device, counted in devices.items()
        if (drops := counted.get("qdisc_drops", 0)) > 0
    ]


def drops_text(rows: Sequence[TableRow]) -> str:
    """One sentence on the drops of one job at one rate; empty where there were none."""
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row["drops"])
    at = f" at {rate_text(worst['rate_bps'])}" if worst["rate_bps"] else ""
    total = sum(row["drops"] for row in rows)
    packets = f"{total:,} packets were" if total > 1 else "1 packet was"
    return (
        f"{packets} dropped{at} (most on {worst['link']}: {worst['drops']:,}): a queue had no room for them, "
        "and steps waited until they were sent again"
    )


def cost_rows(run: Run) -> list[TableRow]:
    """Simulated times of schedules, of a case simulated twice the last; `bound_s` is what no schedule can beat, where known."""
    rows: dict[tuple[Any, ...], TableRow] = {}
    for record in (*run.typed(CostRecord), *run.typed(SimRecord)):
        if record.time_s is None:
            continue  # the simulator refused it
        row = {
            "run": run.label,
            "network": record.network_text,
            "model": record.model_name,
            "schedule": record.schedule,
            "world": record.world,
            "nbytes": record.nbytes,
            "time_s": record.time_s,
            "bound_s": record.bound_s or record.lower_bound_s,
        }
        rows[row["network"], row["schedule"], row["world"], row["nbytes"]] = row
    return list(rows.values())


def training_rows(run: Run) -> list[TableRow]:
    """The demo's trainings."""
    rows = summary.summarise(run.records)
    return [{"run": run.label, **row.as_dict()} for of_task in rows.values() for row in of_task]


def compared_rows(comparisons: Sequence[Comparison]) -> list[TableRow]:
    """Configurations that more than one run measured on the same workload, world and link: median steps side by side.

    `step_s` and `to_target_s` hold a value for each run; `change` is the last run's step over the first one's.
    """
    cases: dict[tuple[Any, ...], dict[str, TableRow]] = {}
    for comparison in comparisons:
        for standing in comparison.standings:
            t, spread = standing.timing, standing.to_target
            case = t.workload, comparison.link, t.ranks, t.scale, t.replayed, standing.name
            value = {"step_s": t.step_p50_s, "to_target_s": spread.p50 if spread else None}
            cases.setdefault(case, {})[comparison.run] = value
    return [
        {
            "workload": case[0],
            "link": case[1],
            "configuration": case[-1],
            "step_s": {run: value["step_s"] for run, value in by_run.items()},
            "to_target_s": {run: value["to_target_s"] for run, value in by_run.items()},
            "change": list(by_run.values())[-1]["step_s"] / next(iter(by_run.values()))["step_s"],
        }
        for case, by_run in cases.items()
        if len(by_run) > 1
    ]


def compared_text(rows: Sequence[TableRow]) -> str:
    """One sentence over the runs that were compared; empty where no workload matches."""
    if not rows:
        return ""
    first, *_, last = rows[0]["step_s"]
    changes = [row["change"] for row in rows if {first, last} <= row["step_s"].keys()]
    return (
        f"Where the runs match ({len(changes)} configurations on one workload and link), steps of “{last}” took "
        f"{median(changes):.2f}× those of “{first}” (median; {min(changes):.2f} to {max(changes):.2f})."
    )
