"""`tacit serve-rows`: a row server, a rank of a job that keeps rows of its tables and trains nothing."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from typing import Any

from tacit import environment
from tacit.errors import ConfigError
from tacit.units import parse_time, size_text

WAIT = "30min"


def add_parser(subparsers: Any) -> None:
    """Adds `serve-rows` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve-rows",
        help="keep the rows of a training's sparse tables, on a rank that trains nothing",
        description="Joins a job as one of its last ranks, keeps the rows of the tables that the other ranks shard with "
        "tacit.rows.shard(..., servers=S), and ends when they close their tables. It learns tables, optimizer and options from them. "
        "It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as every rank does, and listens where torch.distributed does "
        "(GLOO_SOCKET_IFNAME names the interface); whoever reaches the job's store is in the job, so keep both on a private network.",
        epilog="example, 4 ranks that train and 2 that serve rows, which are the last ones:\n"
        "  export WORLD_SIZE=6 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500\n"
        "  RANK=4 tacit serve-rows --servers 2      # on one host\n"
        "  RANK=5 tacit serve-rows --servers 2      # on another\n"
        "  RANK=0 python train.py                   # and RANK=1, 2, 3; train.py shards with servers=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--servers",
        type=int,
        default=1,
        metavar="S",
        help="row servers of the job, its last ranks (default 1)",
    )
    parser.add_argument(
        "--wait",
        default=WAIT,
        metavar="TIME",
        help=f"for the ranks to join, and for their next exchange, at most (default {WAIT})",
    )
    parser.add_argument("--json", action="store_true", help="print what was sent as JSON, at the end")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 when the ranks have closed their tables."""
    wait_s = parse_time(args.wait)
    if wait_s <= 0:
        raise ConfigError(f"--wait {args.wait}: a time above 0, such as {WAIT}")
    if args.servers < 1:
        raise ConfigError(f"--servers {args.servers}: at least 1")
    if missing := environment.missing_of_a_job():
        raise ConfigError(
            f"{' and '.join(missing)} not set: a row server is a rank of a job, started with the variables that torchrun sets; "
            f"see tacit serve-rows --help"
        )
    service = _Service(args.servers, wait_s)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        service.start()
        while service.is_alive():
            service.join(0.2)  # torch waits without listening to signals, in a thread of its own
    except KeyboardInterrupt:
        print("tacit: interrupted; the ranks lose this row server, and end", file=sys.stderr, flush=True)
        os._exit(130)  # the thread is in an exchange, which nothing can end
    if service.error is not None:
        raise service.error
    figures = service.figures
    if args.json:
        print(json.dumps(figures))
    else:
        print(f"the ranks have closed their tables; {size_text(figures['sent_nbytes'])} were sent from here")
    return 0


class _Service(threading.Thread):
    """Joins the job and serves; `error` is what ended it before its time."""

    def __init__(self, servers: int, wait_s: float) -> None:
        super().__init__(name="tacit-serve-rows", daemon=True)
        self._servers, self._wait_s = servers, wait_s
        self.error: BaseException | None = None
        self.figures: dict[str, int] = {}

    def run(self) -> None:
        try:
            self.figures = _served(self._servers, self._wait_s)
        except BaseException as error:  # for the thread that waits
            self.error = error


def _served(servers: int, wait_s: float) -> dict[str, int]:
    from datetime import timedelta

    import torch.distributed as dist

    from tacit import rows

    timeout = timedelta(seconds=wait_s)
    try:
        dist.init_process_group("gloo", timeout=timeout)
    except (RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"the job was not joined within {wait_s:g} s, or not with this RANK and WORLD_SIZE ({' '.join(str(cause).split())[:200]}); start all "
            f"of its ranks with the same MASTER_ADDR and MASTER_PORT"
        ) from cause
    try:
        return rows.serve(servers, timeout=timeout).as_dict()
    finally:
        dist.destroy_process_group()
