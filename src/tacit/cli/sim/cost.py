"""`tacit sim cost`: the time of one schedule, stage by stage, or of several, side by side."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common
from tacit.units import size_text, time_text

if TYPE_CHECKING:
    from tacit.sim import Estimate, Fabric, StageCost


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "cost",
        "the time of a schedule on a network, stage by stage; of several, side by side",
        "tacit sim cost wrht ring --on 'optical(wavelengths=64, rate=40GB/s, setup=25us)' --world 1024 --model VGG16",
    )
    parser.add_argument(
        "schedules", metavar="SCHEDULE", nargs="+", help="a name, name(option=value), or a file of your own"
    )
    common.add_where(parser)
    common.add_vector(parser)
    parser.add_argument(
        "--codec", help="encode it with a codec, as in a strategy: hush, bf16 (this imports torch)"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.sim import cost

    schedules, fabric = common.schedules_on(args, args.schedules)
    nbytes, vector = common.vector_of(args)
    estimates = [
        replace(cost(schedule, fabric, nbytes, codec=args.codec), name=text)
        for text, schedule in zip(args.schedules, schedules, strict=True)
    ]
    estimates.sort(key=lambda found: found.time_s)
    if args.json:
        common.print_json([found.as_record() for found in estimates])
    elif len(estimates) == 1:
        _print_one(estimates[0], vector)
    else:
        _print_many(estimates, vector)
    return 0


def _print_one(found: Estimate, vector: str) -> None:
    out = common.console()
    common.print_facts(_facts(found, vector))
    light = found.fabric.ring is not None
    heads = ["stages", "times", "parts", "transfers", "bytes each", "latency", "transfer", "time", "share"]
    heads += ["wave-\nlengths", "stripes", "hops"] if light else ["hops"]
    rows, number = [], 0
    for payload, cost in zip(found.payloads, found.costs, strict=True):
        for stage in cost.stages:
            rows.append(
                _row(stage, number, found.time_s, light, payload.kind if len(found.payloads) > 1 else "")
            )
            number += stage.times
    common.print_table(out, [*heads, "what limits"], rows, left=(0, len(heads)))


def _facts(found: Estimate, vector: str) -> list[tuple[str, str]]:
    schedule, fabric = found.schedule, found.fabric
    codec = [("codec", _codec_text(found))] if found.codec else []
    facts = [
        (
            "schedule",
            f"{found.name} among {schedule.world:,} ranks, {common.some(schedule.chunks, 'chunk')}, {common.some(schedule.transfer_count, 'transfer')}",
        ),
        ("on", fabric.text),
        ("vector", vector),
        *codec,
        ("", ""),
        (
            "total",
            f"{time_text(found.time_s)} in {found.stage_count:,} stages; {time_text(found.latency_s)} of it is latency",
        ),
    ]
    if found.alpha_beta_s:
        model = (
            "stages x (set-up + longest transfer on one wavelength)"
            if fabric.ring
            else "stages x latency + busiest rank's bytes over its link"
        )
        ratio = found.time_s / found.alpha_beta_s
        facts.append(
            (
                "alpha-beta",
                f"{time_text(found.alpha_beta_s)}: {model}; the total is {ratio:.3g}x{_why(ratio, fabric)}",
            )
        )
    if found.lower_bound_s:
        facts.append(
            (
                "lower bound",
                f"{time_text(found.lower_bound_s)}: no all-reduce of these bytes is faster here{_assumption(fabric)}; the total is {found.time_s / found.lower_bound_s:.3g}x",
            )
        )
    facts.append(("busiest rank", f"sends {found.vectors:.4g} vectors"))
    if fabric.ring is not None:
        facts.append(("light", "proven: no wavelength is used twice on an arc of one direction"))
    return facts


def _assumption(fabric: Fabric) -> str:
    """What the bound rests on, where there is light."""
    if fabric.ring is None:
        return ""
    from tacit.sim.bounds import ASSUMES

    return f" ({ASSUMES})"


def _why(ratio: float, fabric: Fabric) -> str:
    if fabric.ring is not None:
        return ": sub-stages" if ratio > 1.005 else ": striped" if ratio < 0.995 else ""
    return ": links are shared" if ratio > 1.005 else ": adding in the path" if ratio < 0.995 else ""


def _codec_text(found: Estimate) -> str:
    asked = [f"{p.kind} of {_both(p.up_nbytes, p.down_nbytes)}" for p in found.payloads]
    return f"{found.codec}: {', '.join(asked)}; its own time is not counted"


def _both(up_nbytes: float, down_nbytes: float) -> str:
    if up_nbytes == down_nbytes:
        return size_text(up_nbytes)
    return f"{size_text(up_nbytes)} up and {size_text(down_nbytes)} down"


def _row(stage: StageCost, number: int, total_s: float, light: bool, kind: str) -> list[str]:
    last = number + stage.times - 1
    name = f"{number}" if stage.times == 1 else f"{number}..{last}"
    optical = [str(stage.wavelengths), str(stage.stripes)] if light else []
    return [
        f"{name} {kind}".strip(),
        f"{stage.times:,}",
        str(stage.parts),
        f"{stage.transfers:,}",
        size_text(stage.nbytes),
        time_text(stage.latency_s),
        time_text(stage.transfer_s),
        time_text(stage.time_s),
        f"{100 * stage.time_s / total_s:.1f}%" if total_s else "-",
        *optical,
        str(stage.hops),
        stage.limit,
    ]


def _print_many(estimates: list[Estimate], vector: str) -> None:
    out, first = common.console(), estimates[0]
    best_s = first.time_s
    common.print_facts(
        [("on", first.fabric.text), ("vector", vector), *([("codec", first.codec)] if first.codec else [])]
    )
    rows = [
        [
            found.name,
            time_text(found.time_s),
            f"{found.time_s / best_s:.2f}x" if best_s else "-",
            f"{found.time_s / found.lower_bound_s:.2f}x" if found.lower_bound_s else "-",
            f"{found.stage_count:,}",
            time_text(found.latency_s),
            f"{found.vectors:.4g}",
            time_text(found.alpha_beta_s) if found.alpha_beta_s is not None else "-",
        ]
        for found in estimates
    ]
    heads = [
        "schedule",
        "time",
        "to the\nfastest",
        "to the\nbound",
        "stages",
        "latency",
        "vectors of\nbusiest rank",
        "alpha-beta",
    ]
    common.print_table(out, heads, rows)
    out.print("Name one schedule alone to see its stages.", style="dim")
