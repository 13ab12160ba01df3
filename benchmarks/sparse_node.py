"""One member of benchmarks/sparse.py, a rank or a row server, on its own host of the lab.

Ranks take turns: a step of every configuration, round by round. Keys of a step are drawn and coalesced beforehand, and gradients are noise: what
is timed is the exchange with its lookups and optimizer, and no model. A row server does its part of the steps that are its own.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tacit
from tacit import rows
from tacit.lab.network.counters import traffic
from tacit.rows.owners import _SERVED, owners_of
from tacit.rows.serving import RowServer

SCATTER = 2654435761  # a prime: rows that are looked up often lie anywhere, as hashed keys do
TIMEOUT = timedelta(seconds=300)
BURST = 2  # steps of rows in shards, one after another: sums of one run beside the pull of the next
ANSWERS = (
    2 * BURST + 1
)  # of a row server in a burst: pulls, pushes, and a pull of nothing that ends the last sums


@dataclass
class Timed:
    """One configuration on this member, and what its timed steps took and sent."""

    name: str
    step: Callable[
        [int], float | None
    ]  # from a number on; back come seconds of one, if it is not all that is timed
    counted: Callable[[], float] = lambda: 0.0  # payload bytes sent so far
    hot: Callable[[], int] = lambda: 0  # rows
    burst: int = 1  # steps that are taken together
    close: Callable[[], object] = lambda: None
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    interface_nbytes: list[float] = field(default_factory=list)
    payload_nbytes: list[float] = field(default_factory=list)


class Keys:
    """The different keys of each step of this rank, ascending."""

    def __init__(self, law: Any, lookups: int, steps: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        ends, total = np.cumsum(law["chance"] * law["rows"]), int(law["rows"].sum())
        firsts = np.cumsum(law["rows"]) - law["rows"]
        self.rows = total
        self.steps: list[Tensor] = []
        for _ in range(steps):
            group = np.searchsorted(ends, rng.random(lookups) * ends[-1]).clip(max=len(ends) - 1)
            row = firsts[group] + (rng.random(lookups) * law["rows"][group]).astype(np.int64)
            self.steps.append(torch.from_numpy(np.unique(row * SCATTER % total)))

    @property
    def unique(self) -> float:
        return float(np.mean([len(each) for each in self.steps]))


def table(keys: int, width: int, plain: bool) -> nn.Module:
    """One table: of zeros that take no memory until somebody writes, or for shards."""
    if plain:
        zeros = torch.from_numpy(np.zeros((keys, width), np.float32))  # torch.zeros would write them
        return nn.Embedding(keys, width, sparse=True, _weight=zeros)
    return nn.Sequential(nn.Embedding(keys, width, device="meta"))


def configurations(
    spec: dict[str, Any], cell: dict[str, Any], keys: Keys, group: Any, noise: Tensor
) -> list[Timed]:
    """What is compared, on a rank."""
    width, found = cell["width"], list[Timed]()

    def trains(model: nn.Module, end: Callable[[], object]) -> Callable[[int], None]:
        def step(number: int) -> None:
            own = keys.steps[number]
            model(own).backward(noise[: len(own), :width])
            end()

        return step

    if "ddp" in cell["compare"]:
        inner = table(keys.rows, width, True)
        ddp = nn.parallel.DistributedDataParallel(inner, process_group=group, init_sync=False)
        found.append(Timed("DDP sparse", trains(ddp, lambda i=inner: i.zero_grad())))  # which counts nothing
    if "star" in cell["compare"]:
        inner = table(keys.rows, width, True)
        ddp = nn.parallel.DistributedDataParallel(inner, process_group=group, init_sync=False)
        handle = tacit.attach(ddp, None, f"every / thc / star(mtu={spec['mtu']}, slots={spec['slots']})")
        found.append(
            Timed(
                "thc / star",
                trains(ddp, lambda i=inner: i.zero_grad()),
                lambda h=handle: float(h.stats.sent_nbytes),
                close=handle.close,
            )
        )
    for name, options in placed(spec, cell["compare"], group):
        model = table(keys.rows, width, False)
        tables = rows.shard(model, optimizer=rows.SGD(lr=0.1), **options)
        _SERVED.clear()  # row servers here answer to several tables in turn
        found.append(
            Timed(
                name,
                in_a_burst(model, trains(model, tables.step)),
                lambda t=tables: float(t.stats.sent_nbytes),
                lambda t=tables: t.stats.hot_rows,
                BURST,
                tables.close,
            )
        )
    return found


def in_a_burst(model: nn.Module, step: Callable[[int], None]) -> Callable[[int], float]:
    """A step from the end of a push to the end of the next one: with the sums of the one before, and not its own."""

    def burst(number: int) -> float:
        step(number)
        start = time.perf_counter()
        for at in range(1, BURST):
            step(number + at)
        took_s = (time.perf_counter() - start) / (BURST - 1)
        with torch.no_grad():
            model(torch.empty(0, dtype=torch.int64))
        return took_s

    return burst


def placed(spec: dict[str, Any], compare: Sequence[str], group: Any) -> list[tuple[str, dict[str, Any]]]:
    """The configurations of rows in shards: names, and what shard() takes."""
    servers = spec["servers"]
    hot = rows.Hot(every=spec["hot_every"], mtu=spec["mtu"], slots=spec["hot_slots"])
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "shards": ("shards on ranks", {"group": group}),
        "shards+hot": ("shards on ranks, Hot()", {"group": group, "hot": hot}),
        "servers": ("servers", {"servers": servers, "adding": "exact"}),
        "servers+hot": ("servers, Hot()", {"servers": servers, "hot": hot}),
    }
    return [known[name] for name in known if name in compare]


def served(spec: dict[str, Any], cell: dict[str, Any]) -> list[Timed]:
    """The same on a row server, in the same order."""
    found = [
        Timed(name, lambda _: None)
        for key, name in (("ddp", "DDP sparse"), ("star", "thc / star"))
        if key in cell["compare"]
    ]
    for name, options in placed(spec, cell["compare"], None):
        if "servers" not in options:
            found.append(Timed(name, lambda _: None))
            continue
        server = RowServer(owners := owners_of(None, spec["servers"]))

        def step(_: int, server: RowServer = server) -> float:
            for _ in range(ANSWERS):
                server.answer()
            return 1e-9  # ranks have the time

        def close(server: RowServer = server) -> None:
            while server.answer():
                pass

        found.append(
            Timed(name, step, lambda o=owners: float(o.traffic.sent_nbytes), burst=BURST, close=close)
        )
    return found


def measure(
    spec: dict[str, Any], every: Sequence[Timed], tell: Callable[[str], None], fast: Callable[[bool], None]
) -> dict[str, float]:
    """Hot rows are found first, on links without a limit until they are agreed on; then all take turns. Back come seconds of the burst in
    which they are agreed on."""
    agreed: dict[str, float] = {}
    for each in every:
        if each.name.endswith("Hot()"):
            fast(True)
            for number in range(0, spec["hot_every"], BURST):
                if number + BURST == spec["hot_every"]:
                    fast(False)
                    start = time.perf_counter()
                each.step(number)
            dist.barrier()
            agreed[each.name] = time.perf_counter() - start
            tell(f"{each.name}: {each.hot():,} hot rows")
    for turn in range(spec["steps"] + 1):  # the first warms up
        start_at = turn % len(every)
        for each in [*every[start_at:], *every[:start_at]]:
            dist.barrier()
            before, sent, cpu_s = traffic("eth0").tx_nbytes, each.counted(), time.process_time()
            start = time.perf_counter()
            own_s = each.step(spec["hot_every"] + BURST * turn)
            took_s, cpu_s = own_s or time.perf_counter() - start, time.process_time() - cpu_s
            dist.barrier()
            if turn:
                each.step_s.append(took_s)
                each.cpu_s.append(cpu_s / each.burst)
                each.interface_nbytes.append((traffic("eth0").tx_nbytes - before) / each.burst)
                each.payload_nbytes.append((each.counted() - sent) / each.burst)
        tell(f"round {turn} of {spec['steps']}")
    return agreed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", required=True, type=json.loads)
    spec = parser.parse_args().spec
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world, servers = dist.get_rank(), spec["world"], spec["servers"]
    group = dist.new_group(list(range(world)), timeout=TIMEOUT)  # all make it: servers know of it
    serves = rank >= world

    def tell(text: str) -> None:
        if rank == 0:
            print(json.dumps({"kind": "progress", "text": text}), flush=True)

    asked = iter(range(1 << 30))

    def fast(wanted: bool) -> None:
        """Has the links' limit taken away, or put back."""
        dist.barrier()
        if rank == 0:
            done = Path(spec["folder"], f"rate-{next(asked)}")
            print(json.dumps({"kind": "rate", "fast": wanted, "done": str(done)}), flush=True)
            while not done.exists():
                time.sleep(0.01)
        dist.barrier()

    steps = spec["hot_every"] + BURST * (spec["steps"] + 1)
    noise = torch.randn(spec["most_lookups"], max(cell["width"] for cell in spec["cells"]))
    kept: list[Timed] = []
    for cell in spec["cells"]:
        with np.load(cell["law_file"]) as law:
            keys = Keys(law, cell["lookups"] if not serves else 1, steps, 1000 * cell["seed"] + rank)
        every = served(spec, cell) if serves else configurations(spec, cell, keys, group, noise)
        agreed = measure(spec, every, lambda text, cell=cell: tell(f"{cell['name']}: {text}"), fast)
        figures = [
            {
                "name": each.name,
                "step_s": each.step_s,
                "cpu_s": each.cpu_s,
                "interface_nbytes": each.interface_nbytes,
                "payload_nbytes": each.payload_nbytes,
                "hot": each.hot(),
                "agreed_s": agreed.get(each.name, 0.0),
            }
            for each in every
        ]
        gathered: list[Any] = [None] * (world + servers)
        dist.all_gather_object(gathered, {"unique": keys.unique, "figures": figures})
        if rank == 0:
            print(json.dumps({"kind": "cell", "cell": cell["name"], "members": gathered}), flush=True)
        kept += every  # groups that end and begin again get names that torch has given before
    for each in kept:
        dist.barrier()
        each.close()
    dist.barrier()
    os._exit(0)  # the groups of all ranks have ended; nothing else is worth a minute


if __name__ == "__main__":
    main()
