"""What tacit costs where nothing can be won: a DDP step on loopback, plain and under each strategy, in turn in one run. One JSON record a line.

python benchmarks/loopback.py --ranks 4 --rounds 8

The model has many parameters and little compute, so a step is communication alone; `ratio` is the median of a strategy's step
over plain DDP's in the same run.
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

from tacit.lab.experiments.baselines import connect, named
from tacit.records import host_facts

STEPS = 3  # of one kind, before the next
BUCKET_NBYTES = 25 << 20  # DDP's own
KINDS = ("fp32", "bf16", "none", "bf16 / allreduce", "int8", "int4", "hush", "thc")


def work(rank: int, world: int, store: str, args: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    links, took = {}, {}
    for kind in args.kinds:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(args.width, args.width), nn.Tanh()) for _ in range(args.layers))
        )
        links[kind] = connect(model, None, named(kind), bucket_nbytes=args.bucket)
        took[kind] = []
    x = torch.randn(args.rows, args.width)
    for number in range(args.rounds + 1):
        for kind in args.kinds if number % 2 else args.kinds[::-1]:
            model = links[kind].model
            dist.barrier()
            for step in range(STEPS):
                start = time.perf_counter()
                model(x).square().mean().backward()
                if (
                    step and number
                ):  # the first waits for the other ranks, the first round for buckets and memory
                    took[kind].append(1e3 * (time.perf_counter() - start))
                model.zero_grad(set_to_none=True)
    numel = sum(p.numel() for p in links[args.kinds[0]].model.parameters())
    if rank == 0:
        _report(took, world=world, numel=numel, bucket_nbytes=args.bucket)
        if args.stats:
            for kind, link in links.items():
                if link.handle:
                    print(kind, link.handle.stats)
    for link in links.values():
        link.close()
    del links, model, link
    dist.barrier()
    dist.destroy_process_group()


def _report(took: dict[str, list[float]], **facts: object) -> None:
    plain = median(next(iter(took.values())))
    for kind, found in took.items():
        low, middle, high = quantiles(found, n=4)
        record = {"benchmark": "loopback", "kind": kind, "p50_ms": middle, "p25_ms": low, "p75_ms": high}
        print(json.dumps({**record, "ratio": middle / plain, "n": len(found), **facts, "host": host_facts()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4, help="of a batch: how much there is to compute")
    parser.add_argument(
        "--bucket", type=int, default=BUCKET_NBYTES, help="bytes of a bucket, DDP's and tacit's"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=list(KINDS),
        help="the first one is what the others are measured against",
    )
    parser.add_argument("--stats", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        mp.start_processes(work, args=(args.ranks, store, args), nprocs=args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
