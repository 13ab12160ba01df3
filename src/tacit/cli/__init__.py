"""The `tacit` command. One file a verb, each with `add_parser(subparsers)` and `run(args) -> int`.

Building the parser imports every verb's file and nothing heavy: torch and rich are imported inside `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module, metadata
from typing import Never

from tacit import environment
from tacit.errors import TacitError
from tacit.redaction import names_secret, without_secrets

VERBS = {
    "demo": "tacit.cli.demo",
    "codecs": "tacit.cli.codecs",
    "report": "tacit.cli.report",
    "watch": "tacit.cli.watch",
    "plan": "tacit.cli.plan",
    "sim": "tacit.cli.sim",
    "lab": "tacit.cli.lab",
    "aggregate": "tacit.cli.aggregate",
    "store": "tacit.cli.store",
    "serve-rows": "tacit.cli.serve_rows",
    "doctor": "tacit.cli.doctor",
}
BROKEN_PIPE = 141  # as a shell counts SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, 1 a bug in tacit, 2 something the user can correct, 130 interrupted, 141 nobody reads the output.

    What a verb returns is its own. With TACIT_DEBUG=1 a bug ends in its traceback.
    """
    args = build_parser().parse_args(_without_secrets(sys.argv[1:] if argv is None else argv))
    try:
        code = int(import_module(VERBS[args.verb]).run(args))
        sys.stdout.flush()
        return code
    except TacitError as error:
        print(f"tacit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("; ".join(["tacit: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except Exception as error:
        if environment.debug():
            raise
        print(f"tacit: {_unexpected(error)}", file=sys.stderr)
        return 1


class Parser(argparse.ArgumentParser):
    """One whose errors quote no secret; its subparsers are of this class too."""

    def error(self, message: str) -> Never:
        super().error(without_secrets(message))


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command, every verb in it."""
    parser = Parser(
        prog="tacit",
        description="Distributed PyTorch training on the network you have, by sending less.",
        epilog="examples:\n  tacit demo --ranks 4\n  tacit sim cost ring --on 'star(rate=10Gbit, latency=5us)' --world 64 --model VGG16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tacit {_version()}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in VERBS.values():
        import_module(module).add_parser(subparsers)
    return parser


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line without the values of options whose name is like `--secret`: none of ours takes one, and an error would
    quote it. --key-file takes a path."""
    found: list[str] = []
    hides = False
    for argument in arguments:
        name, given, _ = argument.partition("=")
        option = name.lstrip("-").replace("-", "_")
        secret = name.startswith("-") and names_secret(option) and not "key_file".startswith(option)
        if hides and not argument.startswith("--"):
            found.append("...")
        else:
            found.append(f"{name}=..." if secret and given else argument)
        hides = secret and not given
    return found


def _unexpected(error: Exception) -> str:
    """One sentence for what no verb foresaw."""
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
    return f"{what}; this is a bug in tacit: run it again with TACIT_DEBUG=1 for the traceback, and report it"


def _drop_output() -> None:
    """Nobody reads standard output any more: what is still buffered must not fail again when Python ends."""
    with suppress(OSError, ValueError):  # what has no file number, as in a test, cannot fail again
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _version() -> str:
    try:
        return metadata.version("tacit")
    except metadata.PackageNotFoundError:
        return "(not installed)"
