"""`tacit sim verify`: the proof that a schedule reaches its goal, and the counts of what it sends."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common
from tacit.errors import ConfigError

if TYPE_CHECKING:
    from tacit.schedules import Schedule

MOST_WORDS = 10_000_000_000  # sets of 64 contributors, moved or added: about 6 minutes
PROVEN = {
    "sum": "every rank ends with every rank's contribution to every chunk, exactly once",
    "gather": "every rank ends with the chunk of every rank",
    "exchange": "every chunk ends at the rank it is for",
    "meet": "in every stage ranks pair off, and both of a pair end with the sum of the two",
}


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "verify",
        "prove that a schedule does what it says, on an optical ring also that no light collides; exit code 2 names the fault",
        "tacit sim verify 'wrht(wavelengths=4)' --world 27 --on 'optical(wavelengths=4)'",
    )
    parser.add_argument(
        "schedule", metavar="SCHEDULE", help="a name, name(option=value), or a file of your own"
    )
    common.add_where(parser, needed=False)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.sim.texts import parse_schedule, parse_world

    if args.on is None:
        fabric, schedule = None, parse_schedule(args.schedule, parse_world(args.world))
    else:
        (schedule,), fabric = common.schedules_on(args, [args.schedule])
    check_effort(schedule)
    with common.waiting("proving"):
        schedule.verify()
    sent = schedule.sent_chunks()[: schedule.world] / schedule.chunks
    facts: dict[str, Any] = {
        "schedule": args.schedule,
        "world": schedule.world,
        "proven": PROVEN[schedule.goal],
        "stages": schedule.stage_count,
        "chunks": schedule.chunks,
        "transfers": schedule.transfer_count,
        "vectors_a_rank_sends": [float(sent.min(initial=0)), float(sent.max(initial=0))],
        "vectors_in_all": float(schedule.sent_chunks().sum() / schedule.chunks),
    }
    if fabric is not None:
        fabric.prove(schedule)
        facts["network"] = fabric.as_record()
        facts["light"] = None if fabric.ring is None else _light(fabric.cost(schedule, 1.0))
    if args.json:
        common.print_json(facts)
    else:
        _print(facts)
    return 0


def check_effort(schedule: Schedule) -> None:
    """The proof moves every contribution with every transfer; refuses what would take hours."""
    words = (
        schedule.transfer_count * -(-schedule.world // 64)
        if schedule.goal == "sum"
        else schedule.transfer_count
    )
    if words > MOST_WORDS:
        raise ConfigError(
            f"{schedule.name}: the proof for {schedule.world:,} ranks has {schedule.transfer_count:,} transfers to follow, which "
            f"takes hours; verify a smaller world, built by the same rule"
        )


def _light(cost: Any) -> dict[str, Any]:
    stages = cost.stages
    return {
        "proven": "no wavelength is used twice on an arc of one direction",
        "wavelengths": [stage.wavelengths for stage in stages],
        "parts": [stage.parts for stage in stages],
        "hops": max((stage.hops for stage in stages), default=0),
    }


def _print(facts: dict[str, Any]) -> None:
    low, high = facts["vectors_a_rank_sends"]
    sends = f"{high:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
    lines = [
        ("proven", f"{facts['schedule']} among {facts['world']:,} ranks: {facts['proven']}"),
        ("stages", f"{facts['stages']:,}"),
        ("chunks", f"{facts['chunks']:,}"),
        ("transfers", f"{facts['transfers']:,}"),
        ("a rank sends", f"{sends} vectors; all together {facts['vectors_in_all']:.6g}"),
    ]
    light = facts.get("light")
    if light:
        parts = f", in {_series(light['parts'])} parts" if max(light["parts"], default=1) > 1 else ""
        lines.append(("on", facts["network"]["text"]))
        lines.append(("light", f"proven: {light['proven']}"))
        lines.append(
            (
                "wavelengths",
                f"{_series(light['wavelengths'])} by stage{parts}; longest path {light['hops']} hops",
            )
        )
    common.print_facts(lines)


def _series(values: list[int], most: int = 24) -> str:
    return "[" + ", ".join(map(str, values[:most])) + (", ..." if len(values) > most else "") + "]"
