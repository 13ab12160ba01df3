"""`tacit store`: the store in which ranks that gossip find one another, in a process that outlives any of them."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from typing import Any

from tacit.authentication import MAKE_ONE, SECRET, run_secret
from tacit.errors import ConfigError

LISTEN = "127.0.0.1:29400"


def add_parser(subparsers: Any) -> None:
    """Adds `store` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "store",
        help="host the store of ranks that gossip, so that any of them may die",
        description="Hosts the store in which ranks that gossip find one another, until Ctrl-C or SIGTERM. Models do not pass through it, "
        f"and it serves one run after another. Ranks must prove the secret in {SECRET}; without one it serves loopback only.",
        epilog=f"example:\n  {MAKE_ONE}      # the same for the store and all ranks\n  tacit store --listen 10.0.0.1:29400 &\n"
        "  RANK=2 WORLD_SIZE=4 TACIT_STORE=10.0.0.1:29400 python train.py      # on each machine; again, when it has died",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--listen", default=LISTEN, help=f"HOST:PORT; port 0: any that is free (default {LISTEN})"
    )
    parser.add_argument("--json", action="store_true", help="print the address as JSON")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 if it was asked to stop."""
    from tacit.gossip.store import StoreServer

    secret = run_secret()
    server = StoreServer(_parsed(args.listen), secret)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    host, port = server.address
    try:
        text = f"the store is at {host}:{port}; Ctrl-C ends it"
        if not secret:
            text += f"\nwithout {SECRET} it serves loopback only; for ranks of other machines: {MAKE_ONE}, here and for all ranks, and --listen"
        print(json.dumps({"host": host, "port": port}) if args.json else text, flush=True)
        while not stopped.wait(3600):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


def _parsed(text: str) -> tuple[str, int]:
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen {text!r:.80} is no address; write a host and a port from 0 to 65535, such as {LISTEN}"
        )
    return host.strip("[]"), int(port)
