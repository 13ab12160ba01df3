"""Aggregators in processes of their own, and models that train through them."""

import json
import subprocess
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from toys import deep

import tacit
from tacit.schemes import Star
from tacit.strategy import Strategy

SECRET = "a secret that tests share"

_PROGRAM = """
import json, sys, threading
from contextlib import ExitStack
from tacit.aggregator import LaneType, UserPlane
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.parent import Parent
port, secret, above, rack, lease_s, full, slots = json.loads(sys.argv[1])
parent = Parent(("127.0.0.1", above), rack, 2) if above else None
with ExitStack() as opened:
    plane = opened.enter_context(UserPlane(("127.0.0.1", port), slots=slots))
    at = ("127.0.0.1", plane.address[1])
    opened.enter_context(ControlServer(plane, at, [secret], parent=parent, lease_s=lease_s))
    for number in range(4 if full else 0):
        terms = Terms(f"another run {number}", 1, LaneType.I32, 40, 64)
        opened.enter_context(Membership(at, secret, terms, 0, 4000 + number))
    print(plane.address[1], flush=True)
    threading.Event().wait()
"""


class Aggregator:
    """A process that can be killed, and started again at the same port."""

    def __init__(
        self, above: int = 0, rack: int = 0, *, lease_s: float = 10.0, full: bool = False, slots: int = 256
    ) -> None:
        self.port, self.above, self.rack, self.lease_s, self.slots = 0, above, rack, lease_s, slots
        self.start(full=full)

    def start(self, *, secret: str = SECRET, full: bool = False) -> None:
        """At the same port again; another socket of this machine may hold it for a moment. `full`: other runs have all slots."""
        arguments = json.dumps([self.port, secret, self.above, self.rack, self.lease_s, full, self.slots])
        for _ in range(20):
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, arguments], stdout=subprocess.PIPE, text=True
            )
            assert self.process.stdout is not None
            if told := self.process.stdout.readline():
                self.port = int(told)
                return
            self.process.wait()
            self.process.stdout.close()
        raise AssertionError(f"port {self.port} did not become free")

    @property
    def at(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def strategy_of(codec: str, at: str | None, **options: Any) -> Any:
    """Through the aggregator `at` that address, or over the process group."""
    if at is None:
        return f"every / {codec} / sharded"
    who = Star(at=at, secret=options.pop("secret", SECRET), **options)
    return Strategy(Strategy.parse("none").when, Strategy.parse(codec).what, who)


def attached(codec: str, at: str | None, **options: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer and the handle; at least five buckets."""
    model = DDP(deep())
    handle = tacit.attach(model, None, strategy_of(codec, at, **options), bucket="20kB")
    return model, torch.optim.SGD(model.parameters(), lr=0.1), handle


def link_of(handle: Any) -> Any:
    return handle._attachment.channel.scheme.link
