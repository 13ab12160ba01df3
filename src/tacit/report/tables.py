"""The page's tables as plain rows: what JSON and CSV hold, and what the HTML tables show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from tacit.records import Record
from tacit.report import summary
from tacit.report.contests import Contest, number
from tacit.report.runs import SIMULATED, Run
from tacit.report.text import rate_text

TableRow = dict[str, Any]


def standing_rows(contests: Sequence[Contest]) -> list[TableRow]:
    """A row a configuration of each contest: what was measured, and what follows from it."""
    rows = []
    for contest in contests:
        for standing in contest.standings:
            spread, final = standing.to_target, standing.final
            rows.append(
                {
                    "run": contest.run,
                    **asdict(standing.timing),
                    "trusted": contest.trusted,
                    "speedup": standing.speedup,
                    "against_bf16": contest.step_ratio(standing, contest.bf16),
                    "codec_s": standing.timing.codec_s,
                    "codec_full_s": standing.timing.codec_full_s,
                    "seeds": len(standing.seeds),
                    "seeds_reached": standing.reached,
                    "to_target_s": spread.p50 if spread else None,
                    "to_target_least_s": spread.least if spread else None,
                    "to_target_most_s": spread.most if spread else None,
                    "to_target_against_fp32": contest.ratio(standing, contest.fp32) if spread else None,
                    "to_target_against_bf16": contest.ratio(standing, contest.bf16) if spread else None,
                    "final": final.p50 if final else None,
                    "final_least": final.least if final else None,
                    "final_most": final.most if final else None,
                }
            )
    return rows


def accuracy_rows(run: Run) -> list[TableRow]:
    keys = [
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
    ]
    return [{"run": run.label, **{key: record.get(key) for key in keys}} for record in run.of("accuracy")]


def prediction_rows(contests: Sequence[Contest]) -> list[TableRow]:
    """Measured against predicted step times; `error` is predicted over measured, less one."""
    return [
        {
            "run": contest.run,
            "workload": contest.workload,
            "link": contest.link,
            "configuration": standing.name,
            "measured_s": timing.step_p50_s,
            "predicted_s": timing.predicted_step_s,
            "error": timing.predicted_step_s / timing.step_p50_s - 1,
        }
        for contest in contests
        for standing in contest.standings
        if (timing := standing.timing).predicted_step_s
    ]


def limit_rows(run: Run) -> list[TableRow]:
    """Collectives against theory; `unexplained` is the share of the interface's bytes that neither payload nor headers are."""
    rows = []
    for record in run.of("limits"):
        measured, theory = number(record, "measured_s"), number(record, "theory_s")
        interface, sent = number(record, "interface_nbytes"), number(record, "counted_nbytes")
        headers = number(record, "headers_nbytes") or 0
        ratio = number(record, "ratio") or (measured / theory if measured and theory else None)
        rows.append(
            {
                "run": run.label,
                "rate_bps": number(record, "rate_bps"),
                "nbytes": number(record, "nbytes"),
                "ranks": number(record, "ranks"),
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
    rows = []
    for record in run.of("calibration"):
        listed = record.get("rows")
        for row in listed if isinstance(listed, list) else []:
            if not isinstance(row, dict):
                continue
            measured, theory = number(row, "measured_s"), number(row, "theory_s")
            rows.append(
                {
                    "run": run.label,
                    "job": str(record.get("job") or ""),
                    "rate_bps": number(record, "rate_bps"),
                    "what": str(row.get("what") or row.get("name") or ""),
                    "nbytes": number(row, "nbytes"),
                    "measured_s": measured,
                    "theory_s": theory,
                    "ratio": measured / theory if measured and theory else None,
                    "least_s": number(row, "least_s"),
                    "most_s": number(row, "most_s"),
                    "passed": row.get("passed", record.get("passed")) is True,
                    "network_passed": record.get("passed") is True,
                    "attempts": number(record, "attempts"),
                }
            )
    return rows


def drop_rows(run: Run) -> list[TableRow]:
    """Links whose queue had no room for packets, of each job and rate."""
    return [
        {
            "run": run.label,
            "job": str(record.get("job") or ""),
            "rate_bps": number(record, "rate_bps"),
            "link": f"{node} {device}",
            "drops": round(drops),
            "packets": number(counted, "qdisc_packets"),
        }
        for record in run.of("counters")
        for node, devices in _items(record.get("nodes"))
        for device, counted in _items(devices)
        if isinstance(counted, dict) and (drops := number(counted, "qdisc_drops") or 0) > 0
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
    for record in run.of(*SIMULATED):
        time_s = number(record, "time_s")
        if time_s is None:
            continue  # the simulator refused it
        row = {
            "run": run.label,
            "network": _text(record.get("network") or record.get("on")),
            "model": _model(record),
            "schedule": str(record.get("schedule") or "?"),
            "world": number(record, "world"),
            "nbytes": number(record, "nbytes"),
            "time_s": time_s,
            "bound_s": number(record, "bound_s") or number(record, "lower_bound_s"),
        }
        rows[row["network"], row["schedule"], row["world"], row["nbytes"]] = row
    return list(rows.values())


def _model(record: Record) -> str:
    """Whose gradients travel; nothing where the sweep named a size, which stands beside it anyway."""
    name = _text(record.get("model") or record.get("vector"))
    return "" if name[:1].isdigit() else name


def training_rows(run: Run) -> list[TableRow]:
    """The demo's trainings."""
    rows = summary.summarise(run.records)
    return [{"run": run.label, **row.as_dict()} for of_task in rows.values() for row in of_task]


def compared_rows(contests: Sequence[Contest]) -> list[TableRow]:
    """Configurations that more than one run measured on the same workload, world and link: median steps side by side.

    `step_s` and `to_target_s` hold a value for each run; `change` is the last run's step over the first one's.
    """
    cases: dict[tuple[Any, ...], dict[str, TableRow]] = {}
    for contest in contests:
        for standing in contest.standings:
            t, spread = standing.timing, standing.to_target
            case = t.workload, contest.link, t.ranks, t.scale, t.replayed, standing.name
            value = {"step_s": t.step_p50_s, "to_target_s": spread.p50 if spread else None}
            cases.setdefault(case, {})[contest.run] = value
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


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("label") or value.get("text") or value.get("name") or "")
    return "" if value is None else str(value)
