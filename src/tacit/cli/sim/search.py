"""`tacit sim search`: the fastest schedule found for a vector on an optical ring, beside its rivals and the lower bound."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common, verify
from tacit.errors import ConfigError
from tacit.units import time_text

if TYPE_CHECKING:
    from tacit.sim.place import Place
    from tacit.sim.search import Found

RIVALS = (
    ("wrht", False),
    ("wrht(all_to_all=True)", False),
    ("wrht(all_to_all=True)", True),
    ("ring", True),
    ("two_way_ring", True),
    ("halving_doubling", True),
)


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "search",
        "search the fastest schedule for a vector on an optical ring, beside its rivals and the lower bound",
        "tacit sim search --world 1024 --model VGG16 --on 'optical(wavelengths=64, rate=40GB/s, setup=25us)'",
    )
    parser.add_argument(
        "--on", metavar="NETWORK", default="optical", help="an optical ring (default: optical, the paper's)"
    )
    parser.add_argument("--world", metavar="N", help="ranks (default: as many as the ring has nodes)")
    common.add_vector(parser)
    parser.add_argument(
        "--finalists", type=int, default=4, help="candidates that are built and costed (default 4)"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.sim.place import parse_place
    from tacit.sim.search import search
    from tacit.sim.texts import parse_world

    world = parse_world(args.world)
    nbytes, vector = common.vector_of(args)
    place = replace(parse_place(args.on, world), stripe=True)
    if place.ring is None:
        raise ConfigError(f"--on {args.on}: the search is for optical rings; give optical(...)")
    with common.waiting("searching"):
        found = search(world or place.nodes, nbytes, place.ring, finalists=args.finalists)
    with common.waiting("proving"):
        proof = _proven(found, place)
    rows = [_rival(text, stripe, nbytes, args.on, found) for text, stripe in RIVALS]
    if args.json:
        common.print_json(_record(found, place, proof, rows, nbytes))
    else:
        _print(found, place, proof, rows, vector)
    return 0


def _proven(found: Found, place: Place) -> str:
    """What was proven of the winner; raises ScheduleError if it is not what it says."""
    schedule = found.schedule()
    place.prove(schedule)
    try:
        verify.check_effort(schedule)
    except ConfigError:
        return "no wavelength is used twice on an arc; the sum is too long to follow at this size"
    schedule.verify()
    return "every rank ends with every contribution exactly once; no wavelength is used twice on an arc"


def _rival(text: str, stripe: bool, nbytes: int, on: str, found: Found) -> dict[str, Any]:
    from tacit.sim.place import parse_place
    from tacit.sim.texts import parse_schedule

    name = f"{text}, striped" if stripe else text
    try:
        place = parse_place(on, found.cost.world, stripe=stripe)
        cost = place.cost(parse_schedule(text, found.cost.world, place.ring), nbytes)
    except ConfigError as refusal:
        return {"schedule": name, "time_s": None, "refused": str(refusal)}
    return {"schedule": name, "time_s": cost.time_s, "stage_count": cost.stage_count}


def _name(found: Found) -> str:
    return f"braid(levels='{found.levels}', strands={found.strands})"


def _record(
    found: Found, place: Place, proof: str, rows: list[dict[str, Any]], nbytes: int
) -> dict[str, Any]:
    return {
        "schedule": _name(found),
        "levels": found.levels,
        "strands": found.strands,
        "network": place.text,
        "nbytes": nbytes,
        "proven": proof,
        "ratio_to_bound": found.ratio,
        "bounds": found.bounds.as_record(),
        "cost": found.cost.as_record(),
        "rivals": rows,
    }


def _print(found: Found, place: Place, proof: str, rows: list[dict[str, Any]], vector: str) -> None:
    bounds, cost = found.bounds, found.cost
    common.print_facts(
        [
            ("found", f"{_name(found)} among {cost.world:,} ranks"),
            ("on", place.text),
            ("vector", vector),
            ("", ""),
            (
                "total",
                f"{time_text(cost.time_s)} in {cost.stage_count:,} stages; {time_text(cost.latency_s)} of it is set-up",
            ),
            (
                "lower bound",
                f"{time_text(bounds.combined_s)} (at {bounds.stages} stages); the total is {found.ratio:.3f}x",
            ),
            (
                "its parts",
                f"latency {time_text(bounds.latency_s)}, node {time_text(bounds.node_s)}, bisection {time_text(bounds.bisection_s)}",
            ),
            ("proven", proof),
        ]
    )
    table = [[_name(found), time_text(cost.time_s), "1.00x", f"{found.ratio:.2f}x", f"{cost.stage_count:,}"]]
    for row in sorted(rows, key=lambda row: row["time_s"] or float("inf")):
        if row["time_s"] is None:
            table.append([row["schedule"], "refused", "-", "-", "-"])
            continue
        to_bound = f"{row['time_s'] / bounds.combined_s:.2f}x" if bounds.combined_s else "-"
        to_best = f"{row['time_s'] / cost.time_s:.2f}x" if cost.time_s else "-"
        table.append(
            [row["schedule"], time_text(row["time_s"]), to_best, to_bound, f"{row['stage_count']:,}"]
        )
    common.print_table(
        common.console(), ["schedule", "time", "to the\nfound", "to the\nbound", "stages"], table
    )
    for row in rows:
        if row["time_s"] is None:
            print(f"refused: {row['refused']}")
