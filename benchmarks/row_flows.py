"""All-to-all of rows through an aggregator on loopback, against the process group, in turn in one run. One JSON record a line.

python benchmarks/row_flows.py --ranks 4 --nbytes 1048576

`nbytes` go from each rank to each other one. `ratio` is the median time over that of gloo (`Wire.all_to_all`) in the same run; `goodput_bps` the
bits of messages that a rank sends a second. Loopback has no link to share: both are limited by the processor, and the aggregator's packets
cross it twice.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tacit.aggregator import UserPlane
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.spec import Address
from tacit.records import host_facts
from tacit.transports import Wire
from tacit.transports.row_link import RowLink
from tacit.transports.row_seat import RowPath

SECRET = "of this benchmark"


def serve(answers: Any, threads: int) -> None:
    """A process of its own, as `tacit aggregate`."""
    with UserPlane(("127.0.0.1", 0), slots=256, threads=threads) as plane:
        at = ("127.0.0.1", plane.address[1])
        with ControlServer(plane, at, [SECRET]):
            answers.put(at)
            time.sleep(1e6)


def work(rank: int, world: int, store: str, at: Address, args: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    wire = Wire(dist.new_group())
    wire.measure()
    link = RowLink(wire, RowPath(at, SECRET, args.mtu, args.window))
    ways = {"gloo": wire, "row flows": link}
    parts = [
        torch.randint(
            0, 256, (args.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank)
        )
    ] * world
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name in ways if number % 2 else reversed(ways):
            for step in range(3):
                dist.barrier()
                start = time.perf_counter()
                found = ways[name].all_to_all(parts, [args.nbytes] * world)
                dist.barrier()
                if step and number:
                    took[name].append(time.perf_counter() - start)
                assert len(found) == world
    assert link.round_about == 0, "the aggregator was not there"
    if rank == 0:
        _report(took, world=world, nbytes=args.nbytes, mtu=args.mtu, window_nbytes=args.window)
        if args.stats:
            print(link._seat.socket.stats if link._seat else "")
    link.close()
    dist.barrier()
    dist.destroy_process_group()


def _report(took: dict[str, list[float]], world: int, nbytes: int, **facts: object) -> None:
    for name, found in took.items():
        low, middle, high = quantiles(found, n=4)
        record: dict[str, object] = {"benchmark": "row flows", "way": name, "p50_ms": 1e3 * middle}
        record |= {
            "p25_ms": 1e3 * low,
            "p75_ms": 1e3 * high,
            "ratio": middle / median(took["gloo"]),
            "n": len(found),
        }
        record |= {"goodput_bps": 8 * nbytes * (world - 1) / middle, "ranks": world, "nbytes": nbytes}
        print(json.dumps({**record, **facts, "host": host_facts()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nbytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--window", type=int, default=1 << 18)
    parser.add_argument("--threads", type=int, default=1, help="of the aggregator")
    parser.add_argument("--stats", action="store_true")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    aggregator = context.Process(target=serve, args=(answers, args.threads), daemon=True)
    aggregator.start()
    try:
        at = answers.get(timeout=60)
        with tempfile.TemporaryDirectory() as folder:
            store = f"file://{Path(folder) / 'store'}"
            mp.start_processes(
                work, args=(args.ranks, store, at, args), nprocs=args.ranks, start_method="spawn"
            )
    finally:
        aggregator.kill()


if __name__ == "__main__":
    main()
