"""`tacit doctor`: what of tacit works on this machine, and how to get the rest."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from tacit.errors import ConfigError, did_you_mean

UNMET = 3  # of a part that --require names


def add_parser(subparsers: Any) -> None:
    """Adds `doctor` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="what works on this machine, and how to get the rest",
        description="Tries every part of tacit on this machine for a few seconds, and names what is missing and the way to get it. "
        f"The exit code is 0 whatever it finds, and {UNMET} where a part that --require names does not work.",
        epilog="examples:\n  tacit doctor\n  tacit doctor --require lab,kernel-plane --json      # in a script",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--require", default="", metavar="PARTS", help="parts that must work, with commas in between"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or UNMET."""
    from tacit import doctor

    required = [name.strip() for name in args.require.split(",") if name.strip()]
    for name in required:
        if name not in doctor.PARTS:
            raise ConfigError(
                f"--require {name!r:.40}: no such part; {did_you_mean(name, doctor.PARTS)}there are {', '.join(doctor.PARTS)}"
            )
    parts = list(doctor.examine())
    unmet = [part.name for part in parts if part.name in required and not part.works]
    if args.json:
        print(json.dumps({"parts": [asdict(part) for part in parts], "unmet": unmet}))
    else:
        _show(parts)
    if unmet:
        print(f"tacit doctor: does not work here, and is required: {', '.join(unmet)}", file=sys.stderr)
    return UNMET if unmet else 0


def _show(parts: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("part", "", "found", "needed for", "to get it, or to make it better")
    for part in parts:
        mark = Text("works", "green") if part.works else Text("no", "red")
        table.add_row(part.name, mark, Text(part.finding), Text(part.what_for), Text(part.way_out))
    Console().print(table)
