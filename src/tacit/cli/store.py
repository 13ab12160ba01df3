"""`tacit store`: the store in which ranks that gossip find one another, in a process that outlives any of them."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from typing import Any

from tacit.errors import ConfigError

PORT = 29400


def add_parser(subparsers: Any) -> None:
    """Adds `store` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "store",
        help="host the store of ranks that gossip, so that any of them may die",
        description="Hosts torch's TCPStore, in which ranks that gossip find one another, until Ctrl-C or SIGTERM. It is not on the way of models, "
        "and serves one run after another. It answers at any address of this machine and asks nobody who they are, as in all of torch: "
        "keep its port to your cluster.",
        epilog="example:\n  tacit store --port 29400 &\n"
        "  RANK=2 WORLD_SIZE=4 TACIT_STORE=10.0.0.1:29400 python train.py      # on each machine; again, when it has died",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any that is free (default {PORT})")
    parser.add_argument("--json", action="store_true", help="tell the port as JSON")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 if it was asked to stop."""
    import torch.distributed as dist

    c10d: Any = dist  # it does not name its stores for type checkers
    if not 0 <= args.port < 1 << 16:
        raise ConfigError(f"--port {args.port}: 0 to 65535; the default is {PORT}")
    try:
        store = c10d.TCPStore("0.0.0.0", args.port, is_master=True, wait_for_workers=False)
    except RuntimeError as cause:  # torch's own text is a page long
        raise ConfigError(f"port {args.port} cannot be had; choose another with --port, or 0") from cause
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    told = {"port": store.port}
    print(json.dumps(told) if args.json else f"the store is at port {store.port}; Ctrl-C ends it", flush=True)
    while not stopped.wait(3600):
        pass
    return 0
