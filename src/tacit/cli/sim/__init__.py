"""`tacit sim`: what a schedule costs on a network, whether it is right, and how it looks. One file an action, no torch."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from tacit.errors import ConfigError

ACTIONS = ("cost", "step", "rows", "verify", "search", "paper", "sweep", "draw", "models", "schedules")
EXAMPLES = """\
A schedule is a name with options (see `tacit sim schedules`) or a .json or .toml file of your own. A network is star(...),
ring(...), torus(...), fat_tree(...), leaf_spine(...), two_racks(...), one_slow_host(...), optical(...) or a .toml file. Sizes and
rates carry a unit: 10Gbit is bits a second, 40GB/s is bytes a second.

examples:
  tacit sim cost ring 'wrht(all_to_all=True)' --on 'optical(wavelengths=64, rate=40GB/s, setup=25us)' --world 1024 --model VGG16
  tacit sim cost tree --on 'star(rate=10Gbit, latency=5us)' --world 64 --size 100MB
  tacit sim verify my_algorithm.toml
  tacit sim draw wrht --on 'optical(wavelengths=4)' --world 27 --out wrht.svg"""


def add_parser(subparsers: Any) -> None:
    """Adds the verb and its actions to the command's parser."""
    parser = subparsers.add_parser(
        "sim",
        help="cost, verify, search and draw schedules on simulated networks",
        description="What a schedule costs on a network, stage by stage; whether it is right; how it looks. No torch, no network.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action in ACTIONS:
        _module(action).add_parser(actions)


def run(args: argparse.Namespace) -> int:
    """The exit code of the action."""
    try:
        return int(_module(args.action).run(args))
    except MemoryError as cause:
        raise ConfigError(
            "this does not fit into memory; take fewer ranks, or a schedule with fewer transfers"
        ) from cause


def _module(action: str) -> Any:
    return import_module(f"tacit.cli.sim.{action}")
