"""`tacit demo`: trains small models under plain DDP and tacit's strategies, here and now, and compares them.

On a slow network that the lab builds, where this user may; on loopback otherwise, which shows the bytes saved, not the time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tacit.cli import demo_network as network
from tacit.cli.files import recording
from tacit.demo.facts import CONFIGURATIONS, DEFAULT_TASKS, PLAIN, TASKS
from tacit.errors import ConfigError
from tacit.extras import MissingExtraError, require
from tacit.units import parse_rate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from tacit.records import Record, Recorder
    from tacit.report import TrainingRow

MAX_RANKS = 64
MAX_STEPS = 10_000_000
MAX_RATE_BPS = 1e12
CAPTION = (
    "* computed, as a ring all-reduce sends 2(n-1)/n of the payload; the other bytes are counted as they leave. "
    "100 Mbit, 1 Gbit: the time one step's bytes would need on such a link, computed. ↓ worse than plain DDP."
)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the user asked for, checked: every value in it can be run."""

    tasks: tuple[str, ...]
    ranks: int
    steps: int | None
    out: Path
    rate: str | None  # of every link; None: loopback, which nothing limits

    @property
    def command(self) -> str:
        steps = ["--steps", str(self.steps)] if self.steps else []
        where = ["--rate", self.rate] if self.rate else ["--loopback"]
        named = ["--tasks", ",".join(self.tasks), "--ranks", str(self.ranks), *steps, "--out", str(self.out)]
        return shlex.join(["tacit", "demo", *where, *named])


def add_parser(subparsers: Any) -> None:
    """Adds `demo` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="train small models under plain DDP and tacit's strategies on a slow network, and compare them",
        description="Trains small models under plain DDP and tacit's strategies, and compares them: on a slow network that "
        "is built on this machine for it, or on loopback where that is not allowed (`tacit lab check` says why).",
        epilog="examples:\n  tacit demo --rate 100Mbit --out runs/demo\n  tacit demo --loopback --tasks digits,bytes",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--rate", default="100Mbit", help="of every machine's link (default 100Mbit)")
    where.add_argument(
        "--loopback", action="store_true", help="without a network: more strategies, no slow link"
    )
    parser.add_argument("--ranks", type=int, default=4, help="training processes to start (default 4)")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each training (default: a number for each task)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for records and report (runs/demo)"
    )
    parser.add_argument(
        "--tasks",
        help=f"which to run, of {', '.join(TASKS)} (default {','.join(network.DEFAULT_TASKS)}; "
        f"on loopback {','.join(DEFAULT_TASKS)})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def run(args: argparse.Namespace) -> int:
    """Trains, prints the tables (or JSON), writes records.jsonl and report.html under --out."""
    options = check(args)
    if options.rate:
        return _on_network(options, options.rate, args.json)

    from rich.console import Console

    from tacit import records
    from tacit.report import last_run, summarise, verdict
    from tacit.report.pages import page

    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    path = options.out / "records.jsonl"
    with recording(path) as recorder:
        _train(options, recorder, Console(stderr=True))
    last = last_run(records.read(path))
    report = page.write(last, options.out / "report.html")
    rows = summarise(last)
    if args.json:
        listed = [row.as_dict() for of_task in rows.values() for row in of_task]
        print(
            json.dumps(
                {"verdict": verdict(rows), "rows": listed, "records": str(path), "report": str(report)}
            )
        )
        return 0
    for task, of_task in rows.items():
        out.print(_table(task, of_task))
    out.print(f"\n{verdict(rows)}\n\n{page.LOOPBACK}\n", markup=False)
    out.print(f"records  {path}\nreport   {report}", markup=False, soft_wrap=True)
    return 0


def _on_network(options: DemoOptions, rate: str, as_json: bool) -> int:
    """The lab's way: a network of `rate`, plain DDP with its best bucket size and bf16 beside tacit, and the page."""
    from tacit.cli.lab import perform, show
    from tacit.report.model import runs
    from tacit.report.pages.files import write_all
    from tacit.report.pages.page import compose

    planned = network.experiment(options.tasks, options.ranks, rate, options.steps)
    print(f"tacit: building a network of {options.ranks} machines at {rate}", file=sys.stderr)
    outcome = perform(planned, options.out, options.command)
    report = compose(runs.load([options.out]))
    page = options.out / "report.html"
    write_all({page: report.html})
    verdicts = [sentence for sentences in report.verdicts.values() for sentence in sentences]
    if as_json:
        paths = {"records": str(options.out / "records.jsonl"), "report": str(page)}
        print(json.dumps({"verdict": " ".join(verdicts), **report.as_dict(), **paths}))
        return 0 if outcome.passed else 1
    show(outcome)
    print("\n".join(("", *verdicts, "", f"records  {options.out / 'records.jsonl'}", f"report   {page}")))
    return 0 if outcome.passed else 1


def check(args: argparse.Namespace) -> DemoOptions:
    """The options that these arguments give; raises `ConfigError` before anything is started or written."""
    rate = None if args.loopback else args.rate
    if rate is not None and not 0 < parse_rate(rate) <= MAX_RATE_BPS:
        raise ConfigError(f"--rate {rate}: choose a rate above 0, up to 1Tbit")
    if not 1 <= args.ranks <= MAX_RANKS:
        raise ConfigError(f"--ranks {args.ranks}: choose 1 to {MAX_RANKS}, each is a process on this machine")
    if args.steps is not None and not 1 <= args.steps <= MAX_STEPS:
        raise ConfigError(f"--steps {args.steps}: at least one step is needed, and at most {MAX_STEPS:,}")
    refusal = _no_network() if rate else None
    rate = rate if refusal is None else None
    named = (
        args.tasks if args.tasks is not None else ",".join(network.DEFAULT_TASKS if rate else DEFAULT_TASKS)
    )
    tasks = tuple(dict.fromkeys(name.strip() for name in named.split(",")))
    for name in tasks:
        if name not in TASKS:
            raise ConfigError(f"--tasks: there is no task {name!r}; choose from {', '.join(TASKS)}")
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out {args.out}: this is a file; name a folder")
    require("report")  # before the training, not after it
    if refusal is not None:
        print(f"tacit: {refusal}", file=sys.stderr)
    return DemoOptions(_runnable(tasks), args.ranks, args.steps, args.out, rate)


def _no_network() -> str | None:
    """Why this user cannot have a network, in one sentence; None: it can be had."""
    from tacit.lab.network.machine import check as check_machine

    try:
        machine = check_machine()
    except MissingExtraError as cause:
        return f"{cause}. The demo runs on loopback: bytes saved, no slow link."
    return (
        None if machine.able else f"{machine.verdict} The demo runs on loopback: bytes saved, no slow link."
    )


def _runnable(tasks: tuple[str, ...]) -> tuple[str, ...]:
    missing = {
        name: need for name in tasks if (need := TASKS[name].needs) and not importlib.util.find_spec(need)
    }
    left = tuple(name for name in tasks if name not in missing)
    for name, need in missing.items():
        message = (
            f"task {name!r} needs the package {need}, which is not installed (pip install 'tacit[demo]')"
        )
        if not left:
            raise ConfigError(f"{message}, and no other task was named")
        print(f"tacit: {message}; running {', '.join(left)} without it", file=sys.stderr)
    return left


def _train(options: DemoOptions, recorder: Recorder, console: Console) -> None:
    """Runs the ranks to their end; records their messages as they arrive, and how the run ended."""
    from tacit import launch
    from tacit.records import host_facts

    about = {name: TASKS[name].what for name in options.tasks}
    recorder.record("start", command=options.command, ranks=options.ranks, tasks=about, host=host_facts())
    args = ["--tasks", ",".join(options.tasks), *(["--steps", str(options.steps)] if options.steps else [])]
    outcome = "failed"
    try:
        with _view(options, console) as view:

            def on_message(rank: int, message: Record) -> None:
                recorder.record(**message)
                view.show(message)

            worker = "tacit.demo.worker"
            launch.run(worker, args, ranks=options.ranks, on_message=on_message, log_dir=options.out / "logs")
        outcome = "done"
    except KeyboardInterrupt as interrupt:
        outcome = "interrupted"
        raise KeyboardInterrupt(f"the records so far are in {recorder.path}") from interrupt
    finally:
        recorder.record("end", outcome=outcome)


class View(Protocol):
    """Shows the ranks' messages while they train."""

    def show(self, message: Record) -> None: ...


@contextmanager
def _view(options: DemoOptions, console: Console) -> Iterator[View]:
    if not console.is_terminal:
        yield Lines(console)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<7}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[doing]}"), console=console) as progress:
        yield Bars(progress, options)


class Lines:
    """A plain line when a task starts and for each finished training: for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.task = ""

    def show(self, message: Record) -> None:
        if message["kind"] == "training":
            figures = f"{message['configuration']}: {1e3 * message['step_p50_s']:.1f} ms a step"
            self._line(f"{message['task']}: {figures}, {message['metric']} {message['final']:.4g}")
        elif message["task"] != self.task:
            self.task = message["task"]
            self._line(
                f"{self.task}: {len(CONFIGURATIONS)} configurations side by side, {message['steps']} steps"
            )

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bars:
    """A bar for each task, over its steps; beside it, the loss of plain DDP."""

    def __init__(self, progress: Progress, options: DemoOptions) -> None:
        self.progress = progress
        totals = {name: options.steps or TASKS[name].steps for name in options.tasks}
        self.bars = {name: progress.add_task(name, total=n, doing="waiting") for name, n in totals.items()}

    def show(self, message: Record) -> None:
        if message["kind"] == "progress":
            doing = f"{len(CONFIGURATIONS)} configurations, loss {message['losses'][PLAIN]:.3f}"
            self.progress.update(self.bars[message["task"]], completed=message["step"], doing=doing)


def _table(task: str, rows: list[TrainingRow]) -> Table:
    from rich import box
    from rich.table import Table

    from tacit.report.model.summary import LINKS, final_text, ratio_text
    from tacit.units import size_text, time_text

    title = f"{task}: {TASKS[task].what}, {rows[0].ranks} ranks, {rows[0].steps} steps"
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=CAPTION,
        caption_justify="left",
    )
    table.add_column("strategy", overflow="fold")
    heads = [
        "time\na step",
        "against\nDDP",
        "bytes\na step\na worker",
        "against\nfp32",
        rows[0].metric.replace(" ", "\n"),
    ]
    for head in [*heads, *(f"{link}\ncomputed" for link in LINKS)]:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        sent = size_text(row.sent_nbytes_a_step) + ("*" if row.sent_is == "computed" else " ")
        final = final_text(row) + ("" if row.keeps_quality else " ↓")
        step = [time_text(row.step_p50_s), f"{row.step_ratio:.2f}×"]
        wire = [time_text(seconds) for seconds in row.wire_s.values()]
        table.add_row(row.configuration, *step, sent, ratio_text(row), final, *wire)
    return table
