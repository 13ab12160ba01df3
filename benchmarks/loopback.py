"""What tacit costs where nothing can be won: a DDP step on loopback, plain and under each strategy, in turn in one run. One JSON record a line.

python benchmarks/loopback.py --ranks 4 --rounds 8
python benchmarks/loopback.py --model bytes                # a task of the demo: real computation
python benchmarks/loopback.py --realtime                   # as root: before all other processes of a machine that is not idle

The model has many parameters and little compute, so a step is communication alone; `ratio` is the median of a strategy's step
over plain DDP's in the same run. A step takes as long as it does on the slowest rank. `cpu_ratio` is the same of the CPU time of all ranks.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from tacit.demo.tasks import BUILDERS
from tacit.lab.experiments.baselines import ConnectedModel, connect, named
from tacit.records import host_facts

STEPS = 3  # of one kind, before the next
BUCKET_NBYTES = 25 << 20  # DDP's own
KINDS = ("fp32", "bf16", "none", "bf16 / allreduce", "int8", "int4", "hush", "thc")


Passes = tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.Tensor]]


def wide(args: argparse.Namespace) -> Passes:
    """Many parameters and little compute: a model, and its loss."""
    x = torch.randn(args.rows, args.width)

    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(args.width, args.width), nn.Tanh()) for _ in range(args.layers))
        )

    return make, lambda model: model(x).square().mean()


def trained(name: str) -> Passes:
    """A task of the demo."""
    task = BUILDERS[name]()
    x, y = task.batch(torch.Generator().manual_seed(1000 * dist.get_rank()))
    return task.model, lambda model: F.cross_entropy(model(x), y)


def work(rank: int, world: int, store: str, args: argparse.Namespace) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if args.realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    make, loss = wide(args) if args.model == "wide" else trained(args.model)
    links: dict[str, ConnectedModel] = {}
    took: dict[str, list[tuple[float, float]]] = {}
    for kind in args.kinds:
        torch.manual_seed(0)
        links[kind] = connect(make(), None, named(kind), bucket_nbytes=args.bucket)
        took[kind] = []
    for number in range(args.rounds + 1):
        for kind in args.kinds if number % 2 else args.kinds[::-1]:
            model = links[kind].model
            for step in range(STEPS + 1):
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                loss(model).backward()
                if step and number:  # the first of a turn finds other memory, the first turn cuts buckets
                    took[kind].append((time.perf_counter() - start, time.process_time() - cpu))
                model.zero_grad(set_to_none=True)
    own = torch.tensor([took[kind] for kind in args.kinds], dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(everyone, own)
    numel = sum(p.numel() for p in links[args.kinds[0]].model.parameters())
    if rank == 0:
        facts = {"model": args.model, "world": world, "numel": numel, "bucket_nbytes": args.bucket}
        _report(args.kinds, torch.stack(everyone), **facts)
        if args.stats:
            for kind, link in links.items():
                if link.handle:
                    print(kind, link.handle.stats)
    for link in links.values():
        link.close()
    del links, model, link
    dist.barrier()
    dist.destroy_process_group()


def _report(kinds: Sequence[str], took_s: torch.Tensor, **facts: object) -> None:
    """`took_s`: of each rank, kind and step, by the clock and of the CPU."""
    wall_ms, cpu_ms = 1e3 * took_s[..., 0].amax(0), 1e3 * took_s[..., 1].sum(0)
    plain, plain_cpu = median(wall_ms[0].tolist()), median(cpu_ms[0].tolist())
    for kind, wall, cpu in zip(kinds, wall_ms.tolist(), cpu_ms.tolist(), strict=True):
        low, middle, high = quantiles(wall, n=4)
        record = {"benchmark": "loopback", "kind": kind, "p50_ms": middle, "p25_ms": low, "p75_ms": high}
        ratios = {"ratio": middle / plain, "cpu_ratio": median(cpu) / plain_cpu, "n": len(wall)}
        print(json.dumps({**record, **ratios, **facts, "host": host_facts()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--model", default="wide", help="wide, or a task of the demo")
    parser.add_argument(
        "--realtime", action="store_true", help="before all other processes of this machine (root)"
    )
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
