"""`tacit aggregate`: a node that adds what ranks send. Serves until it is stopped; `status` queries a running one."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from tacit import environment
from tacit.errors import ConfigError, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tacit.aggregator.control.parent import Parent
    from tacit.aggregator.control.server import AnyPlane, ControlServer
    from tacit.aggregator.control.status import AggregatorStatus
    from tacit.aggregator.spec import Address

SECRET = "TACIT_AGGREGATOR_SECRET"
LEAST_SECRET = 16  # characters: who records a greeting can try secrets at leisure
MAKE_ONE = "`openssl rand -hex 16` makes one"
MOST_FILES = 8192
EVERYWHERE = "0.0.0.0"


def add_parser(subparsers: Any) -> None:
    """Adds `aggregate` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "aggregate",
        help="be the node that adds what ranks send, or ask one how it is",
        description="Adds the payloads of jobs for `every / thc / star` and the like, until Ctrl-C or SIGTERM. Packets come by UDP, "
        "control by TCP, on the same port. The secret that ranks must know comes from "
        f"--key-file or {SECRET}; without one it serves this machine only.",
        epilog=f"examples:\n  {SECRET}=... tacit aggregate --listen 0.0.0.0:4800 --metrics :9100\n"
        "  tacit aggregate --listen 127.0.0.1:4800\n  tacit aggregate --listen 0.0.0.0:4800 --parent 10.0.0.1:4800 --rack 0/2\n  tacit aggregate status --at 10.0.0.1:4800 --watch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--plane",
        choices=("user", "kernel"),
        default="user",
        help="who adds: a process of this user, or the kernel (root) (default user)",
    )
    parser.add_argument(
        "--listen",
        default="0.0.0.0:4800",
        metavar="HOST:PORT",
        help="where packets and control come in (default 0.0.0.0:4800)",
    )
    parser.add_argument(
        "--control",
        metavar="HOST:PORT",
        help="where control comes in, if not there: a switch's plane may have an address that is no host's",
    )
    parser.add_argument(
        "--parent",
        metavar="HOST:PORT",
        help="another aggregator, which adds the sums of this one to those of other racks; it must know the same secret",
    )
    parser.add_argument(
        "--rack", metavar="N/OF", help="with --parent: which rack this is, such as 0/2 and 1/2 for two"
    )
    parser.add_argument(
        "--slots",
        type=int,
        default=1024,
        help="chunks that can be on their way at once, of all jobs together (default 1024)",
    )
    parser.add_argument(
        "--jobs", type=int, default=4, help="jobs that always find an equal share of the slots (default 4)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the user plane (default 1)")
    parser.add_argument(
        "--interfaces", metavar="NAMES", help="of the kernel plane: ports to the ranks, such as eth1,eth2"
    )
    parser.add_argument(
        "--entry",
        choices=("tc", "xdp"),
        default="tc",
        help="of the kernel plane: where in the path (default tc)",
    )
    parser.add_argument(
        "--lease", default="10s", help="a rank that is silent for so long is lost (default 10s)"
    )
    parser.add_argument(
        "--metrics", metavar="HOST:PORT", help="answer Prometheus at /metrics, and /health, such as :9100"
    )
    parser.add_argument("--json", action="store_true", help="print where it listens as JSON")
    _add_key(parser)
    actions = parser.add_subparsers(dest="action", metavar="status")
    asked = actions.add_parser(
        "status",
        help="jobs, slots, rates, drops by reason, and who is waited for",
        epilog="example: tacit aggregate status --at 10.0.0.1:4800 --watch",
    )
    asked.add_argument(
        "--at", default="127.0.0.1:4800", metavar="HOST:PORT", help="the aggregator (default 127.0.0.1:4800)"
    )
    asked.add_argument(
        "--over", default="1s", help="time between the two readings that rates come from (default 1s)"
    )
    asked.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    asked.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON instead of tables"
    )
    _add_key(asked, default=argparse.SUPPRESS)  # or else it would undo what stands before `status`


def _add_key(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    parser.add_argument(
        "--key-file",
        default=default,
        type=Path,
        metavar="FILE",
        help=f"secrets, one a line, readable by its owner (otherwise {SECRET})",
    )
    parser.add_argument(
        "--secret", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )  # so that no error quotes it


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 if it was asked to stop, or has printed a status."""
    if "secret" in args:
        raise ConfigError(
            f"--secret is no option, since `ps` shows the command line to everybody on the machine; set {SECRET}, or name a --key-file"
        )
    return _status(args) if args.action == "status" else _serve(args)


# ---- serve ----


class _Stopped(BaseException):
    """SIGTERM came."""


def _serve(args: argparse.Namespace) -> int:
    from tacit.aggregator.addresses import parse_address
    from tacit.aggregator.control.server import ControlServer
    from tacit.units import parse_time

    listen = parse_address(args.listen, host=EVERYWHERE)
    control_at = parse_address(args.control, host=EVERYWHERE) if args.control else None
    metrics = parse_address(args.metrics, host=EVERYWHERE) if args.metrics else None
    lease_s = parse_time(args.lease)
    keys = _keys(args.key_file) or _no_keys(listen, control_at or listen)
    parent = _parent(args)
    signal.signal(signal.SIGTERM, _stop)
    _allow_files()
    listen = listen if control_at else _free(listen)
    with closing(_plane(args, listen)) as plane:
        at = control_at or (listen[0], plane.address[1])
        options = {"kind": args.plane, "jobs": args.jobs, "lease_s": lease_s, "metrics": metrics}
        with ControlServer(plane, at, keys, **options, parent=parent, log=_log) as control:
            try:
                _announce(args, control)
                while True:
                    time.sleep(3600)
            except _Stopped:
                _print_last(f"stopped; {_closing_line(control)}")
                return 0
            except KeyboardInterrupt:
                _print_last(f"interrupted; {_closing_line(control)}")
                return 130


def _stop(number: int, frame: object) -> Never:
    raise _Stopped


def _parent(args: argparse.Namespace) -> Parent | None:
    """The aggregator above, and our number there."""
    if not args.parent and not args.rack:
        return None
    if not args.parent or not args.rack:
        raise ConfigError(
            "--parent and --rack go together: where the aggregator above is, and which rack this is, such as 0/2"
        )
    if args.plane != "user":
        raise ConfigError(
            "--parent is for --plane user; the kernel plane can be above such aggregators, not below"
        )
    from tacit.aggregator.addresses import PORT, parse_address
    from tacit.aggregator.control.parent import Parent

    rack, _, racks = args.rack.partition("/")
    if not rack.isdecimal() or not racks.isdecimal():
        raise ConfigError(f"--rack {args.rack}: a number from 0 on and how many there are, such as 0/2")
    return Parent(parse_address(args.parent, port=PORT), int(rack), int(racks))


def _plane(args: argparse.Namespace, listen: Address) -> AnyPlane:
    from tacit.aggregator.wire import MOST_SLOTS

    if args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs}: at least one")
    if not 1 <= args.slots <= MOST_SLOTS:
        raise ConfigError(f"--slots {args.slots}: a plane has 1 to {MOST_SLOTS}")
    if not 1 <= args.threads <= 64:
        raise ConfigError(f"--threads {args.threads}: a plane has 1 to 64")
    if args.plane == "user":
        if args.interfaces:
            raise ConfigError("--interfaces is for --plane kernel; the user plane serves all of them")
        from tacit.aggregator.planes.user_plane import UserPlane

        return UserPlane(listen, slots=args.slots, threads=args.threads)
    if not args.interfaces:
        raise ConfigError(
            "--plane kernel needs --interfaces, the ports that ranks are behind, such as eth1,eth2"
        )
    try:
        from tacit.aggregator.planes.kernel_plane import KernelPlane
    except ImportError as cause:
        raise ConfigError(f"the kernel plane is not in this build ({cause}); use --plane user") from cause
    interfaces = [name.strip() for name in args.interfaces.split(",") if name.strip()]
    plane: AnyPlane = KernelPlane(listen, interfaces, slots=args.slots, entry=args.entry)
    return plane


def _announce(args: argparse.Namespace, control: ControlServer) -> None:
    from tacit.aggregator.addresses import address_text

    now = control.status()
    values = {
        "plane": args.plane,
        "listen": address_text(control.address),
        "slots": now.slots,
        "share": now.share,
    }
    values["parent"] = f"{args.parent}, rack {args.rack}" if args.parent else None
    values["metrics"] = (
        f"http://{address_text(control.metrics_address)}/metrics" if control.metrics_address else None
    )
    if args.json:
        print(json.dumps(values), flush=True)
        return
    metrics = f", metrics at {values['metrics']}" if values["metrics"] else ""
    above = f", below {values['parent']}" if values["parent"] else ""
    print(
        f"the {args.plane} plane serves at {values['listen']} (UDP packets, TCP control){metrics}{above}: "
        f"{now.slots} slots, up to {now.share} a job; Ctrl-C ends it",
        flush=True,
    )


def _log(sentence: str) -> None:
    _write(f"{time.strftime('%H:%M:%S')} {sentence}\n")


def _write(text: str) -> None:
    """OSError if standard error does not take it. Past Python's buffer: what it could not write there would be tried again at exit."""
    if sys.stderr is None:
        raise OSError("there is no standard error")
    os.write(sys.stderr.fileno(), text.encode(errors="backslashreplace"))


def _print_last(sentence: str) -> None:
    """Standard error may be closed, full or unread; that is no reason not to end, nor to end otherwise."""
    from tacit.aggregator.control.notices import Notices

    with closing(Notices(lambda text: _write(f"{text}\n"))) as notices:
        notices.add(f"tacit: {sentence}")


def _closing_line(control: ControlServer) -> str:
    now = control.status()
    control.close()  # logs the jobs that still run
    return (
        f"jobs served: {now.admitted}, chunks summed: {now.counts['completed']}, ranks lost: {now.lost_ranks}"
    )


def _keys(file: Path | None) -> list[str]:
    """The secrets, from the file or the environment: never from the command line, which everybody on the machine can read."""
    if file is None:
        found = [secret] if (secret := environment.aggregator_secret()) else []
    else:
        try:
            others = file.stat().st_mode & 0o007
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as cause:
            raise ConfigError(f"--key-file {file} cannot be read ({cause})") from cause
        if others:
            raise ConfigError(
                f"--key-file {file} can be read by everybody on this machine; run: chmod 600 {file}"
            )
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"--key-file {file} holds no secret; {MAKE_ONE}")
    for secret in found:
        if len(secret) < LEAST_SECRET:
            raise ConfigError(
                f"a secret of {len(secret)} characters can be guessed; take at least {LEAST_SECRET}: {MAKE_ONE}"
            )
    return found


def _free(listen: Address) -> Address:
    """For port 0 a number that is free for UDP and for TCP: packets and control have the same."""
    host, port = listen
    if port:
        return listen
    for _ in range(64):
        with (
            suppress(OSError),  # of the host, too: the plane raises the better error
            socket.create_server((host, 0)) as tcp,
            socket.socket(type=socket.SOCK_DGRAM) as udp,
        ):
            found: int = tcp.getsockname()[1]
            udp.bind((host, found))
            return host, found
    return listen


def _no_keys(*listened: Address) -> list[str]:
    for host, port in listened:
        if host != "localhost" and not host.startswith("127."):
            raise ConfigError(
                f"{host} can be reached by others, and there is no secret; set {SECRET} here and for the ranks "
                f"({MAKE_ONE}), or serve this machine only with --listen 127.0.0.1:{port}"
            )
    return [""]


def _allow_files() -> None:
    """A rank is a file to the kernel, and many systems allow 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))


# ---- status ----


def _status(args: argparse.Namespace) -> int:
    from tacit.aggregator.addresses import PORT, parse_address
    from tacit.aggregator.control.status import StatusClient
    from tacit.units import parse_time

    over_s = parse_time(args.over)
    if not 0 < over_s <= 60:
        raise ConfigError(f"--over {args.over}: a time up to 60s")
    with StatusClient(parse_address(args.at, port=PORT), (_keys(args.key_file) or [""])[0]) as reader:
        earlier = reader.read()
        while True:
            time.sleep(over_s)
            now = reader.read()
            if args.watch and not args.json:
                print(f"\n{time.strftime('%H:%M:%S')}")
            _print_json(now, earlier) if args.json else _print(now, earlier)
            earlier = now
            if not args.watch:
                return 0


def _print_json(now: AggregatorStatus, earlier: AggregatorStatus) -> None:
    from tacit.aggregator.control.diagnosis import diagnose, rates

    findings = diagnose(now, earlier)
    values = {
        "well": all(f.well for f in findings),
        "diagnosis": [f.sentence for f in findings],
        **now.as_dict(),
    }
    for job, of_job in zip(now.jobs, values["jobs"], strict=True):
        moving = rates(job, earlier)
        of_job["rates"] = moving and asdict(moving)
    print(json.dumps(values), flush=True)


def _print(now: AggregatorStatus, earlier: AggregatorStatus) -> None:
    from tacit.aggregator.addresses import address_text
    from tacit.aggregator.control.diagnosis import diagnose
    from tacit.units import time_text

    console = _console()
    for finding in diagnose(now, earlier):
        console.print(
            one_line(finding.sentence), markup=False, style="" if finding.well else "red", soft_wrap=True
        )
    whole = (
        f"{now.plane} plane at {address_text(now.address)}, up {time_text(now.up_s)}, tacit {now.version}: "
        f"{now.slots - now.free_slots} of {now.slots} slots in use, up to {now.share} a job"
    )
    console.print(f"\n{one_line(whole)}", markup=False)
    for table in (_jobs_table(now, earlier), _ranks_table(now), _drops_table(now)):
        if table.row_count:
            console.print(table)


def _jobs_table(now: AggregatorStatus, earlier: AggregatorStatus) -> Table:
    from rich.table import Table

    from tacit.aggregator.control.diagnosis import rates

    table = Table(
        "job", "state", "members", "slots", "lanes", "in", "out", "chunks/s", "rows/s", "chunks", "unfinished"
    )
    for job in now.jobs:
        state = "gathers" if job.id is None else "runs"
        row = [
            _plain(job.name),
            state,
            f"{len(job.members) - len(job.absent) - len(job.lost)} of {len(job.members)}",
            str(job.slots[1]),
            _plain(f"{job.elements} {job.lanes}"),
        ]
        moving = rates(job, earlier)
        row += (
            [
                _rate(moving.received_bps),
                _rate(moving.answered_bps),
                f"{moving.chunks_per_s:,.0f}",
                f"{moving.rows_per_s:,.0f}",
            ]
            if moving
            else ["-"] * 4
        )
        row += [f"{job.stats.counts['completed']:,}", f"{job.stats.unfinished:,}"] if job.stats else ["-"] * 2
        table.add_row(*row)
    return table


def _ranks_table(now: AggregatorStatus) -> Table:
    from rich.table import Table

    from tacit.aggregator.addresses import address_text
    from tacit.units import time_text

    table = Table("job", "rank", "at", "packets", "last packet", "chunks that wait for it")
    for job in now.jobs:
        for rank, member in enumerate(job.members):
            own = job.stats.ranks[rank] if job.stats else None
            gone = "lost" if rank in job.lost else "left" if rank in job.left else ""
            at = gone or (address_text(member) if member else "has not joined")
            last = "never" if own is None or own.idle_s is None else f"{time_text(own.idle_s)} ago"
            figures = (f"{own.packets:,}", last, f"{own.missing:,}") if own else ("-", "-", "-")
            name = str(rank) if rank < job.world else job.text_of(rank)
            table.add_row(_plain(job.name), name, _plain(at), *figures)
    return table


def _drops_table(now: AggregatorStatus) -> Table:
    from rich.table import Table

    from tacit.aggregator.control.diagnosis import REASON_HINTS
    from tacit.aggregator.control.protocol import REASONS
    from tacit.aggregator.control.status import dropped

    table = Table("since the start", "count", "meaning")
    for reason, count in dropped(now.counts).items():
        table.add_row(_plain(f"dropped: {reason}"), f"{count:,}", REASON_HINTS.get(reason, ""))
    for reason, count in now.refused.items():
        if count:
            table.add_row(_plain(f"refused: {reason}"), f"{count:,}", REASONS.get(reason, ""))
    return table


def _rate(rate_bps: float) -> str:
    from tacit.units import rate_text

    return rate_text(float(f"{rate_bps:.3g}")) + "/s"


def _plain(text: str) -> str:
    """A job's name may look like markup, or hold control characters if the aggregator is not ours."""
    from rich.markup import escape

    return escape(one_line(text))


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, highlight=False)
