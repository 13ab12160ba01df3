"""`tacit lab`: a network on this machine. `check` whether it can, `run` an experiment, a `shell` on a host, `list`, `clean`."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit import environment
from tacit.cli.files import recording
from tacit.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tacit.lab.experiments.experiment import Experiment
    from tacit.lab.experiments.session import OnRecord, SessionOutcome
    from tacit.lab.network.lab_list import LabEntry
    from tacit.records import Record

FIGURES = ("limits", "timing", "accuracy", "replay_check", "rounds")


def add_parser(subparsers: Any) -> None:
    """Adds `lab` and its actions to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lab",
        help="build a slow network on this machine, and run experiments on it",
        description="Networks from Linux namespaces with shaped links, as root or as anybody.",
        epilog="examples:\n  tacit lab check\n  tacit lab run experiments/limits.toml\n"
        "  tacit lab shell h0 --network 'star(nodes=4, rate=100Mbit)'",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    checked = actions.add_parser(
        "check",
        help="can this machine do it, what is missing, and how to get it",
        epilog="example: tacit lab check",
    )
    checked.add_argument("--json", action="store_true", help="print JSON instead of a table")
    ran = actions.add_parser(
        "run",
        help="run an experiment file on a network built for it",
        epilog="example: tacit lab run experiments/limits.toml --out runs/limits",
    )
    ran.add_argument("file", type=Path, help="an experiment, such as experiments/limits.toml")
    ran.add_argument("--out", type=Path, help="folder for records and logs (runs/ and the file's name)")
    ran.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    shell = actions.add_parser(
        "shell",
        help="a shell, or a command, on a host of a lab that runs, or of one made for it",
        epilog="example: tacit lab shell h0 --network 'star(nodes=4, rate=100Mbit)' -c 'ip route'",
    )
    shell.add_argument("host", help="a host's name")
    shell.add_argument("--lab", type=int, metavar="ID", help="which lab, as `tacit lab list` numbers them")
    shell.add_argument("--network", help="make a lab of this network for the shell: text, or a .toml file")
    shell.add_argument(
        "-c", "--command", metavar="LINE", help="a line for the shell to run instead of asking for one"
    )
    listed = actions.add_parser(
        "list", help="the labs of this user that run now", epilog="example: tacit lab list"
    )
    listed.add_argument("--json", action="store_true", help="print JSON instead of a table")
    cleaned = actions.add_parser(
        "clean",
        help="end labs, by number or all, and forget dead ones",
        epilog="example: tacit lab clean --all",
    )
    cleaned.add_argument(
        "ids", nargs="*", type=int, metavar="ID", help="labs to end, as `tacit lab list` numbers them"
    )
    cleaned.add_argument("--all", action="store_true", help="end every lab of this user")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0; 1 if the machine cannot, a network was refused or a limit was missed; the command's own."""
    return {"check": _check, "run": _run, "shell": _shell, "list": _list, "clean": _clean}[args.action](args)


# ---- check ----


def _check(args: argparse.Namespace) -> int:
    from tacit.lab.network.machine import check

    machine = check()
    if args.json:
        values = asdict(machine) | {"able": machine.able, "verdict": machine.verdict}
        print(json.dumps(values, indent=1))
        return 0 if machine.able else 1
    from rich.table import Table

    console = _console()
    table = Table("what", "here", "for", "if it is not here")
    for f in machine.findings:
        here = "yes" if f.there else f"no: {f.why}"
        table.add_row(f.name + (" *" if f.needed else ""), here, f.what_for, "" if f.there else f.way_out)
    console.print(table)
    console.print(f"* needed\n\n{machine.verdict}", markup=False)
    return 0 if machine.able else 1


# ---- run ----


def _run(args: argparse.Namespace) -> int:
    from tacit.lab.experiments import experiment

    planned = experiment.read(args.file)
    out: Path = args.out or Path("runs") / planned.name
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: this is a file; name a folder")
    outcome = perform(planned, out, shlex.join(["tacit", "lab", "run", str(args.file), "--out", str(out)]))
    if args.json:
        print(json.dumps(_document(outcome, out)))
    else:
        show(outcome)
        paths = f"records  {out / 'records.jsonl'}\nreport   tacit report {out}"
        _console().print(paths, markup=False, soft_wrap=True)
    return 0 if outcome.passed else 1


def perform(planned: Experiment, out: Path, command: str) -> SessionOutcome:
    """Runs an experiment with its progress on stderr; the records of what was seen stay in `out`, however it ends."""
    from tacit.lab.experiments import session

    with recording(out / "records.jsonl") as recorder, _view() as on_record:
        try:
            return session.run(planned, out=out, recorder=recorder, command=command, on_record=on_record)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(f"the records so far are in {recorder.path}") from interrupt


def _document(outcome: SessionOutcome, out: Path) -> dict[str, Any]:
    return {
        "passed": outcome.passed,
        "shaped": outcome.shaped,
        "refused": outcome.refused,
        "results": [r for r in outcome.records if r["kind"] in FIGURES or _is_outside(r)],
        "calibrations": [record for record in outcome.records if record["kind"] == "calibration"],
        "records": str(out / "records.jsonl"),
    }


def show(outcome: SessionOutcome) -> None:
    """The figures as tables, and what was refused."""
    console = _console()
    for kind, show in (("limits", _show_limits), ("timing", _show_timings), ("rounds", _show_rounds)):
        if records := [record for record in outcome.records if record["kind"] == kind]:
            show(console, records)
    for record in filter(_is_outside, outcome.records):
        console.print(", ".join(f"{key}: {value}" for key, value in record.items()), markup=False)
    for sentence in outcome.refused:
        console.print(f"refused: {sentence}", markup=False, style="red")
    if not outcome.shaped:
        console.print("unshaped: this ran on loopback, so times say nothing about a network.", markup=False)


def _is_outside(record: Record) -> bool:
    """Whether it is a figure of a job that another package adds: a kind that tacit has no type for."""
    from tacit.record_types import TYPES

    return record["kind"] not in TYPES


def _show_limits(console: Console, records: Sequence[Record]) -> None:
    from rich.table import Table

    from tacit.units import size_text, time_text

    heads = (
        "rate",
        "all-reduce of",
        "took",
        "2(n-1)/n S/R",
        "ratio",
        "with headers",
        "bytes, seen : counted",
        "kept",
    )
    table = Table(*heads)
    for r in records:
        theory = time_text(r["theory_s"]) if r["theory_s"] else "-"
        kept = {True: "yes", False: "NO", None: "-"}[r["passed"]]
        ratios = (
            "-" if (v := r[name]) is None else f"{v:.3f}"
            for name in ("ratio", "ratio_with_headers", "bytes_ratio")
        )
        table.add_row(_rate(r), size_text(r["nbytes"]), time_text(r["measured_s"]), theory, *ratios, kept)
    console.print(table)
    share = f"{100 * records[0]['payload_share']:.2f} %"
    console.print(
        f"The ratio must be within 10 %. Headers leave {share} of a rate to payload; 'with headers' is against that limit.\n",
        markup=False,
    )


def _show_timings(console: Console, records: Sequence[Record]) -> None:
    from rich.table import Table

    from tacit.units import size_text, time_text

    table = Table("job", "rate", "configuration", "step", "speed-up", "sent a step")
    for r in records:
        row = (time_text(r["step_p50_s"]), f"{r['speedup']:.2f}", size_text(r["sent_nbytes_a_step"]))
        table.add_row(str(r["job"]), _rate(r), r["configuration"], *row)
    console.print(table)


def _show_rounds(console: Console, records: Sequence[Record]) -> None:
    """A table a job and rate: means over the seeds, and how far the farthest seed is from its mean."""
    from rich.table import Table

    from tacit.report.model.rounds import Over, trials
    from tacit.report.model.runs import Run
    from tacit.report.text import duration_text
    from tacit.units import size_text

    def spread(over: Over | None, show: str, factor: float = 100) -> str:
        if over is None:
            return "-"
        off = factor * max(over.most - over.mean, over.mean - over.least)
        return f"{factor * over.mean:{show}}" + (f" ±{off:{show.lstrip('+')}}" if over.n > 1 else "")

    for trial in trials([Run("", "", "", tuple(records))]):
        first = trial.first
        heads = ("sent", "% of it", "took", "% of it", "% talking", "exchanges")
        against = "points" if first.higher_is_better else "% more"
        table = Table(title=f"{first.job}: {trial.title}", title_justify="left")
        table.add_column("strategy", no_wrap=True)
        for head in ("seeds", first.metric, against, *heads):
            table.add_column(head, justify="right")
        for rule in trial.strategies:
            sent, took = rule.over(lambda own: own.nbytes), rule.over(lambda own: own.seconds)
            begun = rule.over(lambda own: own.exchanges)
            table.add_row(
                rule.name,
                str(len(rule.pairs)),
                spread(rule.over(lambda own: own.final), ".4f", 1),
                spread(rule.difference, "+.2f"),
                size_text(sent.mean) if sent else "-",
                spread(rule.bytes_share, ".1f"),
                duration_text(took.mean) if took else "-",
                spread(rule.time_ratio, ".1f"),
                spread(rule.over(lambda own: own.communicating), ".0f"),
                f"{begun.mean:,.0f}" if begun else "-",
            )
        console.print(table)
    seen = "at the interfaces" if records[0].get("interface_nbytes") else "as counted where they leave"
    console.print(
        f"Means over the seeds, ± the farthest one. Bytes are a rank's, {seen}, without the final merge. Points and % of it are\n"
        "against the first strategy with the same seed. Talking: what a step takes longer than compute alone.\n",
        markup=False,
    )


def _rate(record: Record) -> str:
    from tacit.units import rate_text

    return rate_text(record["rate_bps"]) if record.get("rate_bps") else "unshaped"


@contextmanager
def _view() -> Iterator[OnRecord]:
    """Shows on stderr what is being done: a bar on a terminal, a line for each phase otherwise."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        seen: list[tuple[str, str]] = []

        def line(message: Record) -> None:
            _warn(message)
            phase = (str(message.get("job")), str(message.get("phase")))
            if message["kind"] == "progress" and phase not in seen[-1:]:
                seen.append(phase)
                print(f"{phase[0]}: {phase[1]}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=None)

        def move(message: Record) -> None:
            _warn(message)
            if message["kind"] == "progress":
                doing = f"{message['job']}: {message['phase']}"
                progress.update(bar, description=doing, completed=message["step"], total=message["steps"])

        yield move


def _warn(message: Record) -> None:
    if message["kind"] == "start" and not message["network"]["shaped"]:
        notice = "this user may not build networks; running on loopback, unshaped (see `tacit lab check`)"
        print(f"tacit: {notice}", file=sys.stderr, flush=True)


# ---- labs that run ----


def _shell(args: argparse.Namespace) -> int:
    from tacit.lab.network import exec_in_host
    from tacit.lab.network.lab import unknown_host, up
    from tacit.topology_files import parse_network

    command = [environment.shell(), *(["-c", args.command] if args.command else [])]
    if args.network:
        network = parse_network(args.network)
        if args.host not in network.hosts:
            raise ConfigError(unknown_host(args.host, network.hosts))
        with up(network) as lab:
            return lab.command(args.host, command).returncode
    found = _chosen(args.lab)
    if args.host not in found.hosts:
        raise ConfigError(unknown_host(args.host, found.hosts))
    return subprocess.run([*exec_in_host.prefix(found.init, args.host), *command]).returncode


def _list(args: argparse.Namespace) -> int:
    from tacit.lab.network import lab_list

    labs = lab_list.all_running(lab_list.default_folder())
    if args.json:
        print(json.dumps([{"id": lab.pid} | asdict(lab) for lab in labs]))
        return 0
    if not labs:
        print("no lab of this user runs now")
        return 0
    from rich.table import Table

    table = Table("id", "network", "hosts", "built", "by process")
    for lab in labs:
        table.add_row(str(lab.pid), lab.network, " ".join(lab.hosts), f"as {lab.how}", str(lab.parent))
    _console().print(table)
    return 0


def _clean(args: argparse.Namespace) -> int:
    from tacit.lab.network import lab_list

    labs = lab_list.all_running(lab_list.default_folder())  # forgets dead ones
    known = [lab.pid for lab in labs]
    for number in args.ids:
        if number not in known:
            raise ConfigError(f"no lab {number} of this user runs; those that do: {_numbers(labs)}")
    ended = [lab for lab in labs if args.all or lab.pid in args.ids]
    for lab in ended:
        lab_list.end(lab)
    left = len(labs) - len(ended)
    print(
        f"{len(ended)} ended, {left} left running" + ("; `tacit lab clean --all` ends them" if left else "")
    )
    return 0


def _chosen(number: int | None) -> LabEntry:
    from tacit.lab.network import lab_list

    labs = lab_list.all_running(lab_list.default_folder())
    if not labs:
        raise ConfigError(
            "no lab of this user runs now; make one with --network 'star(nodes=4, rate=100Mbit)'"
        )
    if number is None and len(labs) > 1:
        raise ConfigError(f"{len(labs)} labs run; choose one with --lab: {_numbers(labs)}")
    chosen = [lab for lab in labs if number in (None, lab.pid)]
    if not chosen:
        raise ConfigError(f"no lab {number} of this user runs; those that do: {_numbers(labs)}")
    return chosen[0]


def _numbers(labs: Sequence[LabEntry]) -> str:
    return ", ".join(f"{lab.pid} ({lab.network})" for lab in labs) or "none"


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)
