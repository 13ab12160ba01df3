"""`tacit watch RUN`: a training that runs, in the terminal, from the records that it writes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import ConfigError, one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from tacit.report.model.live import RankView, TrainingView

MOST_ROWS = 16  # ranks that are shown; of more those that lag, or are silent, come first
LEAST_S, MOST_S = 0.1, 3600.0


def add_parser(subparsers: Any) -> None:
    """Adds `watch` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "watch",
        help="show a running training from its records",
        description="Shows a training that runs, from the records that attach(records=...) writes: steps a second, bytes, where its time "
        "goes, what was predicted, and which ranks lag. It only reads, and follows the files as they grow; Ctrl-C ends it.",
        epilog="examples:\n  tacit watch runs/mine            # a folder with a record file of each rank\n"
        "  tacit watch runs/mine/rank0.jsonl --once --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="a record file (JSONL), or the folder of the ranks' files"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="print the training as it stands, and end; so too where the output is no terminal",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="seconds between two looks (default 1)"
    )


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 also where Ctrl-C ended it."""
    from tacit.report.following import RecordFollower
    from tacit.report.model.live import LiveTraining

    if not LEAST_S <= args.every <= MOST_S:
        raise ConfigError(f"--every {args.every:g}: give {LEAST_S:g} to {MOST_S:g} seconds")
    follower, training = RecordFollower(args.run), LiveTraining()

    def look() -> TrainingView:
        training.add(follower.new())
        return training.view(time.time())

    first = look()
    if not training.begun:
        raise ConfigError(
            f"{args.run}: it holds no record of a training; attach(records={str(args.run / 'rank0.jsonl' if args.run.is_dir() else args.run)!r}) "
            f"writes one a step"
        )
    try:
        if args.json:
            _print_json(first)
            while not args.once:
                time.sleep(args.every)
                _print_json(look())
        elif args.once or not sys.stdout.isatty():
            _console().print(_shown(first))
        else:
            _live(first, look, args.every)
    except KeyboardInterrupt:
        pass
    return 0


def _print_json(view: TrainingView) -> None:
    from tacit.record_types import plain

    predicted = view.predicted
    values = {
        **{key: value for key, value in asdict(view).items() if key != "predicted"},
        "predicted": None
        if predicted is None
        else {f: getattr(predicted, f) for f in predicted.__struct_fields__},
        "off": view.off,
        "lagging": view.lagging,
        "silent": view.silent,
    }
    print(json.dumps(plain(values), allow_nan=False), flush=True)


def _live(first: TrainingView, look: Any, every_s: float) -> None:
    from rich.live import Live

    with Live(_shown(first), console=_console(), auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(_shown(look()), refresh=True)


def _shown(view: TrainingView) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    lines = [Text(one_line(line)) for line in _head(view)]  # of records, which may hold anything
    lines += [Text(one_line(f"The plan no longer holds: {text}"), style="yellow") for text in view.drifts]
    if view.lagging:
        lines.append(Text(_lagging(view), style="yellow"))
    if view.silent:
        lines.append(Text(_silent(view), style="red"))
    return Group(*lines, _table(view))


def _head(view: TrainingView) -> list[str]:
    """What holds for the whole training, in lines."""
    from tacit.report.text import counted
    from tacit.units import size_text, time_text

    lines = [f"{view.strategy or 'no step yet'}, {counted(view.world, 'rank')}, step {view.step:,}"]
    if view.step_s and view.steps_a_s:
        lines[0] += f": {view.steps_a_s:.3g} steps/s, {time_text(view.step_s)} a step"
    if view.sent_nbytes_a_step is not None:
        lines.append(
            f"sent: {size_text(view.sent_nbytes_a_step)} a step and rank, {size_text(view.sent_nbytes)} so far"
        )
    if view.step_s and (own := view.parts.get("own_s")) is not None:
        wait = view.parts.get("wait_s", 0.0)
        beside = ", ".join(
            f"{name} {time_text(view.parts[f'{name}_s'])}"
            for name in ("encode", "wire", "decode")
            if f"{name}_s" in view.parts
        )
        lines.append(
            f"a step: computes {time_text(own)} ({100 * own / view.step_s:.0f} %), waits {time_text(wait)} "
            f"({100 * wait / view.step_s:.0f} %); beside it {beside}"
        )
    if view.chunks:
        share = view.partial_chunks / view.chunks
        lines.append(
            f"left out: {view.partial_chunks:,} of {view.chunks:,} chunks ({100 * share:.2g} %) went without some rank"
        )
    predicted = view.predicted
    if predicted is not None and predicted.step_s and view.off is not None and view.step_s:
        between = (
            f" ({time_text(float(predicted.low_s))} to {time_text(float(predicted.high_s))})"
            if predicted.low_s is not None and predicted.high_s is not None
            else ""
        )
        lines.append(
            f"predicted: {time_text(float(predicted.step_s))}{between}, measured {time_text(view.step_s)}: {100 * view.off:+.0f} %"
        )
    return [*lines, *([f"chosen: {view.chosen}"] if view.chosen else [])]


def _lagging(view: TrainingView) -> str:
    from tacit.report.text import counted, listed
    from tacit.units import time_text

    slow = [f"rank {r.rank} by {time_text(r.lag_s)} a step" for r in view.ranks if r.lags]
    shown = slow[:MOST_ROWS] + (
        [counted(len(slow) - MOST_ROWS, "more rank")] if len(slow) > MOST_ROWS else []
    )
    return f"lag behind the median of ranks, which wait for them: {listed(shown)}"


def _silent(view: TrainingView) -> str:
    from tacit.report.text import counted, duration_text, listed

    silent = [f"rank {r.rank} for {duration_text(r.silent_s)}" for r in view.ranks if r.silent_s]
    shown = silent[:MOST_ROWS]
    shown += [counted(len(silent) - MOST_ROWS, "more rank")] if len(silent) > MOST_ROWS else []
    return f"no record of {listed(shown)}: ended, or stuck"


def _table(view: TrainingView) -> RenderableType:
    from rich.table import Table

    from tacit.units import time_text

    table = Table("rank", *("step", "computes", "waits", "encode", "wire", "decode", "lag"))
    for column in table.columns:
        column.justify = "right"
    ranks = sorted(view.ranks, key=lambda r: (-r.silent_s, -r.lag_s))[:MOST_ROWS]

    def cell(value: float | None) -> str:
        return "-" if value is None else time_text(value)

    def lag(rank: RankView) -> str:
        return time_text(rank.lag_s) if rank.lags else ""

    for r in sorted(ranks, key=lambda r: r.rank):
        parts = (r.own_s, r.wait_s, r.encode_s, r.wire_s, r.decode_s)
        table.add_row(str(r.rank), f"{r.step:,}", *map(cell, parts), lag(r))
    return table


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)
