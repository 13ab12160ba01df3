"""What comparing ranks costs: a DDP step without notes, with them, and with a checksum in each, in turn in one run. One JSON record a line.

python benchmarks/guard.py --ranks 2 --rounds 40
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import tacit
from tacit.attachments.guard import CHECK_EVERY
from tacit.records import host_facts

STEPS = 5  # of one kind, before the next
KINDS = ("no notes", "notes", "a checksum in each")


def work(rank: int, world: int, store: str, rounds: int, width: int, layers: int, rows: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    handle = tacit.attach(model, optimizer, "every / int8 / sharded")
    attachment = handle._attachment
    guard, silent = attachment._guard, _Silent()
    x = torch.randn(rows, width)
    took: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            attachment._guard = silent if kind == KINDS[0] else guard
            guard._guard._every = int(kind == KINDS[2])
            dist.barrier()
            for step in range(STEPS):
                start = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if step:  # the first waits for the other ranks
                    took[kind].append(1e3 * (time.perf_counter() - start))
    handle.close()
    if rank == 0:
        numel = sum(p.numel() for p in model.parameters())
        _report(took, world=world, parameters=len(list(model.parameters())), numel=numel, rows=rows)
    dist.barrier()
    dist.destroy_process_group()


class _Silent:
    def begin(self) -> None: ...
    def end(self) -> None: ...


def _report(took: dict[str, list[float]], **facts: object) -> None:
    for kind, found in took.items():
        low, _, high = quantiles(found, n=4)
        record = {"benchmark": "guard", "kind": kind, "p50_ms": median(found), "p25_ms": low, "p75_ms": high}
        print(json.dumps({**record, "n": len(found), **facts, "host": host_facts()}))
    none, notes, checks = (median(took[kind]) for kind in KINDS)
    shares = {"notes": notes / none - 1, "checksums": (checks - notes) / CHECK_EVERY / none}
    print(json.dumps({"benchmark": "guard", "share_of_a_step": shares, "check_every": CHECK_EVERY, **facts}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=64)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        arguments = (asked.ranks, store, asked.rounds, asked.width, asked.layers, asked.rows)
        mp.spawn(work, arguments, nprocs=asked.ranks)


if __name__ == "__main__":
    main()
