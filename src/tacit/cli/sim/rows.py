"""`tacit sim rows`: what a step of sparse tables takes, scheme by scheme, and whether hot rows in the network pay."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common
from tacit.errors import ConfigError
from tacit.units import rate_text, size_text, time_text

if TYPE_CHECKING:
    from tacit.sim import RowsEstimate
    from tacit.sim.popularity import Popularity
    from tacit.sim.row_packets import SwitchNeed
    from tacit.sim.rows import HotChoice, RowsTime


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "rows",
        "the time of a step of sparse tables, scheme by scheme, and whether hot rows added in the network pay",
        "tacit sim rows --popularity 'zipf(s=1.05, rows=5000000)' --world 8 --servers 2 --rate 200Mbit --batch 4096 --features 26 --width 16\n"
        "  tacit sim rows --popularity clicks.npy --world 16 --rate 10Gbit --mtu 9000 --width 64 --plot gain.svg",
    )
    parser.add_argument(
        "--popularity",
        default="zipf(s=1.05, rows=5000000)",
        help="how often rows are looked up: zipf(s=1.05, rows=5000000) (default), criteo(s=1.05), ngrams, or a .txt or .npy file with a key a look-up",
    )
    numbers = {
        "--world": (8, "ranks (default 8)"),
        "--servers": (None, "hosts that hold the shards and do not train (default: a quarter of the ranks)"),
        "--batch": (4096, "samples a rank and step (default 4096)"),
        "--features": (26, "look-ups a sample (default 26)"),
        "--width": (16, "numbers a row, d (default 16)"),
        "--mtu": (1500, "bytes of a packet without its Ethernet header (default 1500)"),
        "--hot": (32_768, "hot rows to look at beside the best number (default 32768, what a Tofino holds)"),
        "--hot-steps": (1, "numbers of hot rows that are tried in every doubling (default 1: powers of two)"),
        "--arrays": (64, "register arrays of a switch that reaches each once a packet (default 64)"),
    }
    for option, (default, text) in numbers.items():
        parser.add_argument(option, type=int, metavar="N", default=default, help=text)
    parser.add_argument("--rate", default="200Mbit", help="a rank's link, each way (default 200Mbit)")
    parser.add_argument("--server-rate", metavar="RATE", help="a server's link (default: as a rank's)")
    parser.add_argument(
        "--codec",
        default="int8",
        help="of the replicated tables over sharded, as in a strategy (default int8)",
    )
    parser.add_argument("--wide", action="store_true", help="keys of 8 bytes in packets of rows, not of 4")
    parser.add_argument("--payload-only", action="store_true", help="count no headers")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the gain over servers and over skew: .svg, .html or .png",
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.sim import rows_cost

    if args.plot is not None:
        _check_plot(args.plot)
    found = rows_cost(
        _popularity(args.popularity),
        world=args.world,
        servers=args.servers,
        rate=args.rate,
        server_rate=args.server_rate,
        mtu=args.mtu,
        batch=args.batch,
        features=args.features,
        width=args.width,
        key_nbytes=8 if args.wide else 4,
        codec=args.codec,
        hot=args.hot,
        headers=not args.payload_only,
        hot_steps=args.hot_steps,
        arrays=args.arrays,
    )
    if args.plot is not None:
        _plot(found, args.plot)
    if args.json:
        common.print_json(found.as_record() | {"plot": str(args.plot) if args.plot else None})
    else:
        _print(found)
        if args.plot is not None:
            print(args.plot)
    return 0


def _check_plot(path: Path) -> None:
    """Before anything that takes seconds."""
    from tacit.extras import require

    if path.suffix not in (".svg", ".html", ".png"):
        raise ConfigError(f"--plot {path}: name a .svg, .html or .png file")
    require("report")


def _popularity(text: str) -> Popularity:
    from tacit.sim.traces import parse_popularity

    with _progress("reading") as advance:
        return parse_popularity(text, advance)


def _plot(found: RowsEstimate, path: Path) -> None:
    from tacit.sim.drawing.pictures import render
    from tacit.sim.drawing.rows import draw_gain

    with common.waiting("drawing"):
        figure = draw_gain(found.popularity, found.job)
        common.write_whole(path, render(figure, path.suffix, title="gain of hot rows over plain shards"))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal from the first call on, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _print(found: RowsEstimate) -> None:
    common.print_facts(_facts(found))
    heads = [
        "scheme",
        "time",
        "to\nDDP",
        "busiest",
        "a rank\nsends",
        "and\nreceives",
        "a server\nsends",
        "and\nreceives",
    ]
    rows = [_row(time, found.ddp) for time in dict.fromkeys(found.times)]
    common.print_table(common.console(), heads, rows, left=(0, 3))
    for choice in (found.on_ranks, found.on_servers):
        print(choice.verdict)
        print(f"  {_against_ceiling(choice)}")
    fastest = min(found.times, key=lambda time: time.time_s)
    print(f"fastest of all: {fastest.scheme}, {time_text(fastest.time_s)}")
    print(_switch_text(found.switch, found.job.width))


def _against_ceiling(choice: HotChoice) -> str:
    told = [
        (choice.best.hot, choice.gain, choice.ceiling),
        (choice.given.hot, choice.given_gain, choice.given_ceiling),
    ]
    texts = [
        f"{hot:,} hot rows gain {gain:.2f}x of at most {most:.2f}x"
        for hot, gain, most in dict.fromkeys(told)
        if hot
    ]
    return "; ".join(texts) or "no hot rows to look at"


def _facts(found: RowsEstimate) -> list[tuple[str, str]]:
    job, law, touched = found.job, found.popularity, found.touched
    unique, union = float(touched.unique[-1]), float(touched.union[-1])
    share, hot_unique, _ = touched.of_hottest(found.on_servers.given.hot)
    skew = f", skew {law.skew:.2f}" if law.skew is not None else ""
    trace = f" in {law.look_ups:,} look-ups" if law.look_ups is not None else ""
    counted = f"MTU {job.framing.mtu:,}, headers counted" if job.framing.headers else "payload only"
    return [
        ("rows", f"{law.text}: {law.row_count:,} rows in {common.some(law.tables, 'table')}{trace}{skew}"),
        (
            "ranks",
            f"{job.world:,}, batch {job.batch:,} x {job.features:,} look-ups, rows of {job.width} float32; {counted}",
        ),
        (
            "links",
            f"{rate_text(job.rate_bps)} a rank, {rate_text(job.server_rate_bps)} a server, each way; r = {job.ratio:.3g}",
        ),
        (
            "a step",
            f"{job.look_ups:,} look-ups a rank, {unique:,.0f} unique rows; the union has {union:,.0f} ({union / unique:.2f}x)",
        ),
        (
            "hot rows",
            f"the hottest {found.on_servers.given.hot:,} have {share:.0%} of the look-ups and {hot_unique / unique:.0%} of the unique rows",
        ),
    ]


def _row(time: RowsTime, ddp: RowsTime) -> list[str]:
    sizes = [time.nbytes(column) for column in ("rank_out", "rank_in", "server_out", "server_in")]
    ratio = f"{ddp.time_s / time.time_s:.2f}x" if time.time_s else "-"
    return [
        time.scheme,
        time_text(time.time_s),
        ratio,
        time.limit,
        *(size_text(n) if n else "-" for n in sizes),
    ]


def _switch_text(need: SwitchNeed, width: int) -> str:
    start = f"a switch with {need.arrays:,} register arrays, each reached once: a packet of {common.some(need.rows_in_packet, 'row')} passes"
    if need.passes == 1:
        return f"{start} once"
    start += f" {need.passes:,} times (ceil(rows x {width} / {need.arrays:,}))"
    if need.one_pass_nbytes_ratio is None:
        return f"{start}, and a row alone {need.passes_of_one_row:,} times"
    fit = common.some(need.rows_in_one_pass, "row")
    return f"{start}; in one pass it adds {fit} a packet, for {need.one_pass_nbytes_ratio:.2f}x the bytes"
