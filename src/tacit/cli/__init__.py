"""The `tacit` command. One file a verb, each with `add_parser(subparsers)` and `run(args) -> int`.

Building the parser imports every verb's file and nothing heavy: torch and rich are imported inside `run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from tacit.errors import TacitError

VERBS = {
    "demo": "tacit.cli.demo",
    "codecs": "tacit.cli.codecs",
    "report": "tacit.cli.report",
    "sim": "tacit.cli.sim",
    "lab": "tacit.cli.lab",
    "aggregate": "tacit.cli.aggregate",
    "store": "tacit.cli.store",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 2 something the user can correct, 130 interrupted."""
    args = build_parser().parse_args(argv)
    try:
        return int(import_module(VERBS[args.verb]).run(args))
    except TacitError as error:
        print(f"tacit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("; ".join(["tacit: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command, every verb in it."""
    parser = argparse.ArgumentParser(
        prog="tacit",
        description="Distributed PyTorch training on the network you have, by saying less.",
        epilog="examples:\n  tacit demo --ranks 4\n  tacit sim cost ring --on 'star(rate=10Gbit, latency=5us)' --world 64 --model VGG16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tacit {_version()}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in VERBS.values():
        import_module(module).add_parser(subparsers)
    return parser


def _version() -> str:
    try:
        return metadata.version("tacit")
    except metadata.PackageNotFoundError:
        return "(not installed)"
