"""One process of benchmarks/chaos.py: a rank that trains and writes down what it did, or the switch with the store and the links.

A rank's file has one JSON object a line. `ready`: it can begin when told. `began`: where this life starts. `steps`: a run of steps, with when each ended and the
checksum of the model then. `met`: a meeting that was concluded, with what both sides must agree on. `end`: the books, closed.

The books: a model is where it began, plus every local step, plus what every meeting moved it by. All three are added up here beside
the training, in float64; what the model lacks of their sum is lost.
"""

import json
import os
import sys
import threading
import time
import warnings
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

RUN = 25  # steps in a line


def rank(order: dict[str, Any]) -> None:
    """Trains from wherever this life begins to the last step, merges, judges."""
    import torch
    from torch.nn import functional as F

    import tacit
    from tacit.demo.tasks import BUILDERS, learning_rates

    torch.set_num_threads(1)
    place, life, steps, seed = int(os.environ["RANK"]), order["life"], order["steps"], order["seed"]
    task = BUILDERS[order["task"]]()
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model)
    schedule = learning_rates(optimizer, steps)
    book = Book(Path(order["book"]), optimizer)
    book.write("ready")
    sys.stdin.readline()  # the driver says when this life begins: importing torch is no part of it
    handle = tacit.attach(model, optimizer, order["strategy"], seed=seed, records=order["records"])
    attached: Any = handle._attachment
    book.begin(attached._replica, rank=place, life=life, incarnation=attached._peers.incarnation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a schedule that goes on where a peer is takes no step of ours
        for _ in range(handle.step):
            schedule.step()
    rng = torch.Generator().manual_seed(seed + 1000 * place + 100_000 * life)
    while handle.step < steps:
        x, y = task.batch(rng)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        book.before()
        optimizer.step()
        book.after(handle.step)
        schedule.step()
        time.sleep(max(0.0, book.last_s + order["pace_s"] - time.monotonic()))
    book.close_run()
    lost = book.lost()
    with torch.no_grad():
        own = task.evaluate(model)
        handle.merge()
        merged = task.evaluate(model)
    digest = book.digest(book.flat())
    book.write("end", step=handle.step, lost=lost, own_accuracy=own, accuracy=merged, digest=digest)
    handle.close()


class Book:
    """What a rank writes down. `before` and `after` stand round the optimizer's step, in the training thread."""

    def __init__(self, path: Path, optimizer: Any) -> None:
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._replica: Any = None
        self._digests: list[int] = []
        self._times: list[float] = []
        self._first, self._torn, self._longest_s, self._kept_s = 0, 0, 0.0, 0.0
        self.last_s, self._waited_s = time.monotonic(), waited_s()
        # before tacit's, which adds what peers said
        optimizer.register_step_post_hook(lambda *_: self._learned())
        self._watch()

    def write(self, kind: str, **what: Any) -> None:
        line = json.dumps({"kind": kind, "time": time.monotonic(), **what})
        with self._lock:
            self._file.write(line.encode() + b"\n")

    def digest(self, flat: Any) -> int:
        return zlib.crc32(flat.contiguous().numpy())

    def flat(self) -> Any:
        return self._replica.flat()

    def begin(self, replica: Any, **what: Any) -> None:
        self._replica = replica
        with replica.lock:
            now, self._moved = self.flat(), replica.snapshot.double() * 0
            self._start, self._local = now.double(), now.double() * 0
            self._add_pending(self._moved)  # met before the first step
        self._now = now
        self._first = replica.step
        self.last_s, self._waited_s = time.monotonic(), waited_s()
        self.write("began", step=replica.step, digest=self.digest(now), **what)

    def before(self) -> None:
        """Nobody but this thread may have touched the model since the last step."""
        self._before = self.flat()
        self._torn += not self._before.equal(self._now)

    def _learned(self) -> None:
        self._local += self.flat() - self._before

    def after(self, step: int) -> None:
        """What peers see of the model is the model, to the bit."""
        replica = self._replica
        self._now = self.flat()
        with replica.lock:
            seen, whole = replica.snapshot, self._add_pending(self._now.clone())
        self._torn += not seen.equal(whole)
        self._digests.append(self.digest(self._now))
        now, waited = time.monotonic(), waited_s()
        if now - self.last_s > self._longest_s:
            self._longest_s, self._kept_s = now - self.last_s, waited - self._waited_s
        self.last_s, self._waited_s = now, waited
        self._times.append(round(now, 4))
        if step - self._first == RUN:
            self.close_run()

    def close_run(self) -> None:
        last = self._first + len(self._digests)
        what: dict[str, Any] = {
            "first": self._first + 1,
            "last": last,
            "torn": self._torn,
            "digests": self._digests,
        }
        what["times"] = self._times
        self.write("steps", **what, longest_s=self._longest_s, kept_s=self._kept_s)
        self._first, self._digests, self._times = last, [], []
        self._torn, self._longest_s, self._kept_s = 0, 0.0, 0.0

    def lost(self) -> float:
        """What the model lacks of the sum of its parts, relative to its length."""
        replica = self._replica
        with replica.lock:
            whole = self._add_pending(self.flat().double())
            lack = whole - self._start - self._local - self._moved
        return float(lack.norm() / whole.norm())

    def _add_pending(self, flat: Any) -> Any:
        """What peers have added since the last step."""
        for layer, delta in self._replica._pending.items():
            self._replica.layers.add(flat, (layer,), delta)
        return flat

    def _watch(self) -> None:
        """Every meeting that is concluded is written down, by whichever thread concludes it."""
        from tacit.gossip.replica import Replica

        conclude = Replica.conclude

        def watched(
            replica: Any, peer: int, meeting: str, layers: Any, delta: Any, middle: Any, **how: Any
        ) -> None:
            with replica.lock:
                conclude(replica, peer, meeting, layers, delta, middle, **how)
                if self._replica is replica and delta is not None:
                    replica.layers.add(self._moved, layers, delta)
                after = self.digest(replica.snapshot)
            # None: it waits, and holds its model
            gained = None if delta is None else float(delta.double().sum())
            self.write(
                "met", meeting=meeting, peer=peer, middle=self.digest(middle), gained=gained, after=after
            )

        Replica.conclude = watched  # type: ignore[method-assign]


def waited_s() -> float:
    """How long the kernel has kept the thread that asks from a core while it wanted one."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def switch(order: dict[str, Any]) -> None:
    """Hosts the store, and sets links up and down as it is told, a line each: {"device": "port1", "state": "down"}."""
    from pyroute2 import IPRoute

    from tacit.authentication import run_secret
    from tacit.gossip.store import StoreServer

    store = StoreServer((order["address"], order["port"]), run_secret())
    with IPRoute() as netlink, closing(store):
        print("ready", flush=True)
        for line in sys.stdin:
            told = json.loads(line)
            index = netlink.link_lookup(ifname=told["device"])[0]
            netlink.link("set", index=index, state=told["state"])
            print("done", flush=True)


if __name__ == "__main__":
    {"rank": rank, "switch": switch}[sys.argv[1]](json.loads(sys.argv[2]))
