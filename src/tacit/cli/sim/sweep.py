"""`tacit sim sweep`: many costs in a row, one record a point; run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common
from tacit.errors import ConfigError
from tacit.units import size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tacit.records import Record
    from tacit.sim.studies.sweep import SweepPoint


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "sweep",
        "cost schedules x worlds x vectors x networks, one record a point; points already in --out are skipped",
        "tacit sim sweep --schedules ring,wrht --worlds 1024,4096,100000 --models VGG16,ResNet50 --on optical --out runs/sweep.jsonl",
    )
    parser.add_argument(
        "--schedules", required=True, help="names with options, or files: ring,wrht(all_to_all=True)"
    )
    parser.add_argument("--worlds", required=True, help="numbers of ranks: 1024,2048")
    parser.add_argument("--models", help="VGG16,ResNet50 (see tacit sim models)")
    parser.add_argument("--sizes", help="bytes of the vector, with units: 1MB,552MB")
    parser.add_argument(
        "--on", metavar="NETWORK", required=True, action="append", help=common.ON_HELP + "; may be repeated"
    )
    parser.add_argument(
        "--stripe", action="store_true", help="spread transfers over idle wavelengths (optical)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/sim/sweep.jsonl"), help="record file (runs/sim/sweep.jsonl)"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.records import Recorder, host_facts
    from tacit.sim.studies.sweep import COMMAND, known, peak_nbytes, points, sweep
    from tacit.sim.texts import parse_world, split_list

    worlds = [parse_world(text, "--worlds") or 1 for text in split_list(args.worlds)]
    todo = points(split_list(args.schedules), worlds, _vectors(args), args.on, args.stripe)
    _check_texts(todo)
    have = known(args.out)
    skipped = sum(point in have for point in todo)
    start_s = time.perf_counter()
    try:
        recorder = Recorder(args.out)
    except OSError as cause:
        raise ConfigError(f"--out {args.out}: cannot write there ({cause.strerror})") from cause
    with recorder, _progress(len(todo)) as advance:
        if skipped < len(todo):
            recorder.record("start", command=COMMAND, host=host_facts())
        found = []
        try:
            for point, record in zip(todo, sweep(todo, recorder, have=have), strict=True):
                found.append(record)
                advance(point, record)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"the records so far are in {args.out}; run it again to go on"
            ) from interrupt
        except OSError as cause:
            raise ConfigError(f"--out {args.out}: cannot write there ({cause.strerror})") from cause
    took_s = time.perf_counter() - start_s
    summary = {
        "points": len(todo),
        "skipped": skipped,
        "took_s": took_s,
        "peak_nbytes": peak_nbytes(),
        "records": str(args.out),
    }
    if args.json:
        common.print_json(summary | {"rows": found})
    else:
        _print(found, summary)
    return 0


def _vectors(args: argparse.Namespace) -> dict[str, int]:
    from tacit.sim.texts import split_list

    vectors = {}
    for text in split_list(args.models) if args.models else []:
        work = common.model_of(text)
        vectors[work.name] = 4 * work.parameters
    for text in split_list(args.sizes) if args.sizes else []:
        vectors[text] = common.size_of(text, "--sizes")
    if not vectors:
        raise ConfigError("there is no vector to exchange; give --models VGG16 or --sizes 552MB")
    return vectors


def _check_texts(todo: list[SweepPoint]) -> None:
    """Refuses text that no world size makes valid before anything is written: parses every schedule and network for 4 ranks."""
    from tacit.sim.fabric import parse_fabric
    from tacit.sim.texts import parse_schedule

    for on in dict.fromkeys(point.on for point in todo):
        fabric = parse_fabric(on, 4, stripe=todo[0].stripe)
        for text in dict.fromkeys(point.schedule for point in todo):
            if not text.endswith((".json", ".toml")):
                parse_schedule(text, 4, fabric.ring)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[SweepPoint, Record], None]]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda point, record: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("sweep"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total)

        def advance(point: SweepPoint, record: Record) -> None:
            doing = f"{point.schedule} among {point.world:,}: {time_text(record['took_s'])}"
            progress.update(bar, advance=1, description=doing.replace("[", r"\["))

        yield advance


def _print(found: list[Record], summary: dict[str, Any]) -> None:
    out = common.console()
    several = len({record["on"] for record in found}) > 1
    best: dict[tuple[Any, ...], float] = {}
    for record in found:
        if record["time_s"] is not None:
            best[_group(record)] = min(record["time_s"], best.get(_group(record), record["time_s"]))
    rows = [_row(record, best, several) for record in found]
    heads = [
        "world",
        "vector",
        *(["on"] if several else []),
        "schedule",
        "time",
        "to the\nfastest",
        "to the\nbound",
        "stages",
        "computed in",
    ]
    common.print_table(out, heads, rows, left=range(1, 4 if several else 3))
    for record in found:
        if record["time_s"] is None:
            out.print(f"refused: {record['refused']}", markup=False, soft_wrap=True)
    skipped = f", {summary['skipped']} of them known before" if summary["skipped"] else ""
    out.print(
        f"{summary['points']} points{skipped}, in {time_text(summary['took_s'])}, peak memory {size_text(summary['peak_nbytes'])}; "
        f"records in {summary['records']}",
        markup=False,
        soft_wrap=True,
    )


def _group(record: Record) -> tuple[Any, ...]:
    return record["world"], record["vector"], record["on"]


def _row(record: Record, best: dict[tuple[Any, ...], float], several: bool) -> list[str]:
    start = [
        f"{record['world']:,}",
        record["vector"],
        *([record["on"]] if several else []),
        record["schedule"],
    ]
    if record["time_s"] is None:
        return [*start, "refused", "-", "-", "-", time_text(record["took_s"])]
    bound_s, best_s = record.get("lower_bound_s"), best[_group(record)]
    return [
        *start,
        time_text(record["time_s"]),
        f"{record['time_s'] / best_s:.2f}x" if best_s else "-",
        f"{record['time_s'] / bound_s:.2f}x" if bound_s else "-",
        f"{record['stage_count']:,}",
        time_text(record["took_s"]),
    ]
