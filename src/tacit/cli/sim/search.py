"""`tacit sim search`: the fastest schedule found for a vector on an optical ring, beside its rivals and the lower bound."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common, verify
from tacit.errors import ConfigError
from tacit.units import time_text

if TYPE_CHECKING:
    from tacit.sim.bounds import Bounds
    from tacit.sim.costs import Cost
    from tacit.sim.fabric import Fabric
    from tacit.sim.studies.rivals import Rival


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "search",
        "search the fastest schedule for a vector on an optical ring: braids, and every rival with its best options",
        "tacit sim search --world 1024 --model VGG16 --on 'optical(wavelengths=64, rate=40GB/s, setup=25us)'",
    )
    parser.add_argument(
        "--on", metavar="NETWORK", default="optical", help="an optical ring (default: optical, the paper's)"
    )
    parser.add_argument("--world", metavar="N", help="ranks (default: as many as the ring has nodes)")
    common.add_vector(parser)
    parser.add_argument(
        "--finalists", type=int, default=4, help="braids that are built and costed (default 4)"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.sim.fabric import parse_fabric
    from tacit.sim.studies.rivals import FAMILIES, Rival, tuned
    from tacit.sim.studies.search import search
    from tacit.sim.texts import parse_world

    world = parse_world(args.world)
    nbytes, vector = common.vector_of(args)
    fabric = parse_fabric(args.on, world)
    if fabric.ring is None:
        raise ConfigError(f"--on {args.on}: the search is for optical rings; give optical(...)")
    with common.waiting("searching"):
        found = search(world or fabric.nodes, nbytes, fabric.ring, finalists=args.finalists, proven=False)
        rows = [tuned(family, nbytes, fabric.ring) for family in FAMILIES]
    rows = sorted([Rival(found.text, True, found.cost), *rows], key=lambda row: row.time_s)
    fabric = replace(fabric, stripe=rows[0].stripe)
    with common.waiting("proving"):
        proof = _proven(rows[0], fabric)
    if args.json:
        common.print_json(_record(rows, fabric, proof, found.bounds))
    else:
        _print(rows, fabric, proof, found.bounds, vector)
    return 0


def _proven(best: Rival, fabric: Fabric) -> str:
    """What was proven of the winner; raises ScheduleError if it fails verification."""
    from tacit.sim.texts import parse_schedule

    schedule = parse_schedule(best.schedule, fabric.nodes, fabric.ring)
    fabric.prove(schedule)
    try:
        verify.check_effort(schedule)
    except ConfigError:
        return "no wavelength is used twice on an arc; the sum is too long to follow at this size"
    schedule.verify()
    return "every rank ends with every contribution exactly once; no wavelength is used twice on an arc"


def _cost(row: Rival) -> Cost:
    assert row.cost is not None, "the fastest of all was not refused"
    return row.cost


def _record(rows: list[Rival], fabric: Fabric, proof: str, bounds: Bounds) -> dict[str, Any]:
    from tacit.sim.bounds import ASSUMES

    best = rows[0]
    cost = _cost(best)
    return {
        "schedule": best.schedule,
        "stripe": best.stripe,
        "network": fabric.as_record(),
        "nbytes": cost.nbytes,
        "proven": proof,
        "ratio_to_bound": cost.time_s / bounds.combined_s if bounds.combined_s else 1.0,
        "bounds": bounds.as_record() | {"assumes": ASSUMES},
        "cost": cost.as_record(),
        "rivals": [_rival(row) for row in rows[1:]],
    }


def _rival(row: Rival) -> dict[str, Any]:
    record: dict[str, Any] = {"schedule": row.schedule, "stripe": row.stripe}
    if row.cost is None:
        return record | {"time_s": None, "refused": row.refused}
    return record | {"time_s": row.time_s, "stage_count": row.cost.stage_count}


def _print(rows: list[Rival], fabric: Fabric, proof: str, bounds: Bounds, vector: str) -> None:
    from tacit.sim.bounds import ASSUMES

    best, cost = rows[0], _cost(rows[0])
    ratio = f"; the total is {cost.time_s / bounds.combined_s:.3f}x" if bounds.combined_s else ""
    common.print_facts(
        [
            ("found", f"{best.schedule} among {cost.world:,} ranks"),
            ("on", fabric.text),
            ("vector", vector),
            ("", ""),
            (
                "total",
                f"{time_text(cost.time_s)} in {cost.stage_count:,} stages; {time_text(cost.latency_s)} of it is set-up and propagation",
            ),
            ("lower bound", f"{time_text(bounds.combined_s)} (at {bounds.stages} stages){ratio}"),
            (
                "its parts",
                f"latency {time_text(bounds.latency_s)}, node {time_text(bounds.node_s)}, bisection {time_text(bounds.bisection_s)}",
            ),
            ("it assumes", ASSUMES),
            ("proven", proof),
        ]
    )
    table = []
    for row in rows:
        if row.cost is None:
            table.append([row.name, "refused", "-", "-", "-"])
            continue
        to_bound = f"{row.time_s / bounds.combined_s:.2f}x" if bounds.combined_s else "-"
        to_best = f"{row.time_s / cost.time_s:.2f}x" if cost.time_s else "-"
        table.append([row.name, time_text(row.time_s), to_best, to_bound, f"{row.cost.stage_count:,}"])
    common.print_table(
        common.console(), ["schedule", "time", "to the\nfound", "to the\nbound", "stages"], table
    )
    for row in rows:
        if not isfinite(row.time_s):
            print(f"refused: {row.refused}")
