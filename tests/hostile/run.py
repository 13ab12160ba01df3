"""Runs every attack of this folder in turn, for ten minutes, and counts what was thrown at tacit and what it refused.

    python tests/hostile/run.py --minutes 10 --seed 0 --json

Each module here (`gossip.py`, `aggregator.py`, ...) lists ATTACKS: functions `attack(seconds, seed)` that start a target of their own on
loopback, attack it, assert that it still does its work, and return counts. An attack runs in a process of its own, so that one which
hangs or takes the interpreter down is reported and the next one starts. Exit code: 0 if every target survived, 1 if not, 130 after Ctrl-C.
"""

import argparse
import importlib
import json
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

HERE = Path(__file__).resolve().parent
# As pytest has it, helpers import by name; not from this folder, whose modules are called like those of src and tests.
sys.path[:] = [str(HERE.parents[1]), str(HERE.parent), *(path for path in sys.path if Path(path) != HERE)]

GRACE_S = 120.0  # for a target to start and to stop, on a busy machine


@dataclass
class Result:
    """What one attack came to, over all its rounds."""

    surface: str
    attack: str
    rounds: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failure: str = ""


def attacks() -> Iterator[tuple[str, str]]:
    """(module, function) of every attack."""
    for path in sorted(HERE.glob("*.py")):
        if not path.stem.startswith(("test_", "run")):
            module = importlib.import_module(f"hostile.{path.stem}")
            yield from ((path.stem, attack.__name__) for attack in getattr(module, "ATTACKS", ()))


def attacked(surface: str, name: str, seconds: float, seed: int) -> tuple[Mapping[str, int], str]:
    """The counts of one round and, where the target did not survive it, how it failed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_attack, args=(theirs, surface, name, seconds, seed))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds + GRACE_S):
            return {}, f"no result within {seconds + GRACE_S:.0f} s"
        return ours.recv()
    except EOFError:
        process.join(GRACE_S)
        return {}, f"the process ended with exit code {process.exitcode}"
    finally:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def _attack(result: Connection, surface: str, name: str, seconds: float, seed: int) -> None:
    try:
        attack = getattr(importlib.import_module(f"hostile.{surface}"), name)
        result.send((attack(seconds, seed), ""))
    except BaseException:
        result.send(({}, traceback.format_exc(limit=-4)))


def run(minutes: float, seed: int, only: str, console: Console) -> list[Result]:
    """Every attack for its share of the time, with a new seed each round."""
    chosen = [pair for pair in attacks() if only in "/".join(pair)]
    if not chosen:
        raise SystemExit(
            f"--only {only!r} matches no attack; known are {', '.join(map('/'.join, attacks()))}"
        )
    share_s, results = 60 * minutes / len(chosen), []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("attacking", total=60 * minutes)
        for surface, name in chosen:
            result = Result(surface, name.removeprefix("attack_"))
            results.append(result)
            progress.update(bar, description=f"{surface}: {result.attack}")
            while result.seconds < share_s and not result.failure:
                began = time.monotonic()
                left_s = share_s - result.seconds
                counts, result.failure = attacked(surface, name, left_s, seed + result.rounds)
                result.counts.update(counts)
                result.rounds += 1
                result.seconds += time.monotonic() - began
            progress.advance(bar, share_s)
            if result.failure:
                console.print(f"[red]{surface}: {result.attack} did not survive[/]\n{result.failure}")
    return results


def table(results: list[Result]) -> Table:
    shown = Table("surface", "attack", "rounds", "s", "counts", "target")
    for r in results:
        counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in r.counts.items())
        verdict = "[red]failed[/]" if r.failure else "survived"
        shown.add_row(
            r.surface, r.attack.replace("_", " "), str(r.rounds), f"{r.seconds:.0f}", counts, verdict
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example:\n  python tests/hostile/run.py --minutes 1 --only gossip",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="in all, shared by the attacks (default 10)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first round of each attack (default 0)")
    parser.add_argument("--only", default="", help="only attacks whose surface/name contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object an attack, instead of the table")
    args = parser.parse_args()
    if not 0 < args.minutes <= 24 * 60:
        parser.error(f"--minutes {args.minutes}: more than 0, at most 1440")
    console = Console(stderr=args.json)
    try:
        results = run(args.minutes, args.seed, args.only, console)
    except KeyboardInterrupt:
        print("hostile: interrupted", file=sys.stderr)
        return 130
    if args.json:
        for result in results:
            print(json.dumps(vars(result)))
    else:
        console.print(table(results))
    return int(any(result.failure for result in results))


if __name__ == "__main__":
    sys.exit(main())
