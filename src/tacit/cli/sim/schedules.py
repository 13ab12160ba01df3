"""`tacit sim schedules`: what can be costed, verified, run and drawn, and on what."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from typing import Any

from tacit.cli.sim import common


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions, "schedules", "known schedules and networks, with their options", "tacit sim schedules"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.schedules import SCHEDULES, SHAPES
    from tacit.sim.fabric import OPTICAL_OPTIONS
    from tacit.topology import NETWORKS

    schedules = [_about(name, maker, "sum") for name, maker in SCHEDULES.items()]
    schedules += [_about(name, maker, maker(2).goal) for name, maker in SHAPES.items()]
    networks = [{"name": name, "options": _network_options(maker)} for name, maker in NETWORKS.items()]
    networks.append({"name": "optical", "options": list(OPTICAL_OPTIONS)})
    if args.json:
        common.print_json({"schedules": schedules, "networks": networks})
        return 0
    out = common.console()
    rows = [[s["name"], s["goal"], ", ".join(s["options"]) or "-", s["about"]] for s in schedules]
    common.print_table(out, ["schedule", "ends in", "options", "what it is"], rows, left=(0, 1, 2, 3))
    rows = [[str(n["name"]), ", ".join(n["options"])] for n in networks]
    common.print_table(out, ["network", "options"], rows, left=(0, 1))
    return 0


def _about(name: str, maker: Callable[..., Any], goal: str) -> dict[str, Any]:
    """The first line of the file that makes it."""
    doc = sys.modules[maker.__module__].__doc__ or ""
    _, *parameters = inspect.signature(maker).parameters.values()
    options = [f"{option.name}={option.default}" for option in parameters]
    return {"name": name, "goal": goal, "options": options, "about": doc.strip().partition("\n")[0]}


def _network_options(maker: Callable[..., Any]) -> list[str]:
    return [name.removesuffix("_bps").removesuffix("_s") for name in inspect.signature(maker).parameters]
