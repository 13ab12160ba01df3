"""The click model of examples/ctr.py, trained side by side in every way: plain DDP with sparse gradients, tacit's codecs, rows in shards.

    make bench-clicks                   # or: python benchmarks/click_model.py --rate 200Mbit --seeds 0 1 2 --json

Four ranks on a star of the lab. All ways take the same batches, a step each in turn, and start from the same weights; a step's time is the slowest
rank's. After the last step each is scored on samples that nobody trained on: the AUC of a seed, and what it differs by from plain DDP's.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit import lab, launch
from tacit.records import host_facts
from tacit.topology import star
from tacit.units import parse_rate

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
PLAIN, SHARDS = "plain DDP", "shards"
WARMUP = 5


@dataclass
class Way:
    """One model in training."""

    name: str
    model: nn.Module
    end_step: Callable[[], None]
    sent: Callable[[], int]
    close: Callable[[], None]
    took_s: list[float] = field(default_factory=list)

    def step(self, keys: torch.Tensor, numbers: torch.Tensor, clicked: torch.Tensor) -> None:
        binary_cross_entropy_with_logits(self.model(keys, numbers), clicked).backward()
        self.end_step()


def way(name: str, seed: int) -> Way:
    """The model as `examples/ctr.py` builds it, under plain DDP, in shards, or with a codec."""
    import ctr

    torch.manual_seed(seed)
    model = ctr.Clicks(sparse=name != SHARDS)
    tables = None
    if name == SHARDS:
        tables = tacit.rows.shard(model, optimizer=tacit.rows.Adagrad(lr=ctr.RATE), keys=ctr.by_table)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(wrapped.parameters(), lr=ctr.RATE)
    handle = None if name == PLAIN else tacit.attach(wrapped, optimizer, "bf16" if tables else name)

    def end_step() -> None:
        optimizer.step()
        if tables:
            tables.step()
        optimizer.zero_grad()

    def sent() -> int:
        return (handle.stats.sent_nbytes if handle else 0) + (tables.stats.sent_nbytes if tables else 0)

    return Way(name, wrapped, end_step, sent, handle.close if handle else lambda: None)


def work(options: argparse.Namespace) -> None:
    """One rank; rank 0 prints a line a way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from click_log import ClickLog, auc

    log, rank, world = ClickLog(), dist.get_rank(), dist.get_world_size()
    ways = [way(name, options.seed) for name in (PLAIN, *options.strategies, SHARDS)]
    for step in range(options.steps):
        rng = torch.Generator().manual_seed(1000 * options.seed + step + 1)
        batch = [part[rank::world] for part in log.draw(options.batch, rng)]
        first = step % len(ways)
        for each in (*ways[first:], *ways[:first]):
            dist.barrier()
            start = time.perf_counter()
            each.step(*batch)
            each.took_s.append(time.perf_counter() - start)
        if rank == 0 and step % 20 == 0:
            print(json.dumps({"kind": "progress", "step": step}), flush=True)
    keys, numbers, clicked = log.draw(50_000, torch.Generator().manual_seed(0))
    for each in ways:
        slowest = torch.tensor(each.took_s[WARMUP:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        with torch.no_grad():
            found = auc(each.model(keys, numbers), clicked)
        if rank == 0:
            line = {
                "kind": "clicks", "seed": options.seed, "name": each.name, "auc": found,
                "step_ms": 1e3 * median(slowest.tolist()), "sent_nbytes": each.sent() // options.steps,
            }  # fmt: skip
            print(json.dumps(line), flush=True)
    for each in ways:
        each.close()
    ways.clear()
    del each  # a DDP model that outlives its group can hang gloo
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200Mbit", help="of every link")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8192, help="samples a step, of all ranks")
    parser.add_argument("--strategies", nargs="+", default=["bf16 / sharded", "int4 / sharded"])
    parser.add_argument("--json", action="store_true", help="one line a measurement")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)  # of a rank
    options = parser.parse_args()
    if options.seed is not None:
        work(options)
        return
    lines = [line for seed in options.seeds for line in measured(seed, options)]
    if options.json:
        for line in lines:
            print(json.dumps({**line, "rate": options.rate, "host": host_facts()}))
    else:
        report(lines, options)


def measured(seed: int, options: argparse.Namespace) -> list[launch.Message]:
    """What rank 0 has printed about one seed."""
    found: list[launch.Message] = []

    def note(rank: int, message: launch.Message) -> None:
        if message["kind"] == "progress":
            print(f"\rseed {seed}, step {message['step']} of {options.steps} ", end="", file=sys.stderr)
        else:
            found.append(message)

    words = [
        "--seed", seed, "--steps", options.steps, "--batch", options.batch, "--strategies", *options.strategies,
    ]  # fmt: skip
    with lab.up(star(4, rate_bps=parse_rate(options.rate))) as network, tempfile.TemporaryDirectory() as logs:
        specs = [
            replace(spec, env={**spec.env, "PYTHONPATH": f"{HERE}:{EXAMPLES}"})
            for spec in network.rank_specs(realtime=True)
        ]
        launch.run(
            "click_model", [str(word) for word in words], ranks=4, on_message=note, log_dir=Path(logs), rank_specs=specs
        )  # fmt: skip
    print(file=sys.stderr)
    return found


def report(lines: list[launch.Message], options: argparse.Namespace) -> None:
    plain = {line["seed"]: line for line in lines if line["name"] == PLAIN}
    print(f"4 ranks at {options.rate}, {options.batch} samples a step, {options.steps} steps; by seed")
    for name in dict.fromkeys(line["name"] for line in lines):
        own = [line for line in lines if line["name"] == name]
        aucs = " ".join(
            f"{line['auc']:.4f} ({line['auc'] - plain[line['seed']]['auc']:+.4f})" for line in own
        )
        times = " ".join(f"{line['step_ms']:.1f}" for line in own)
        gain = median(plain[line["seed"]]["step_ms"] / line["step_ms"] for line in own)
        print(f"{name:16} AUC {aucs}   step {times} ms, {gain:.2f} x   sent {own[0]['sent_nbytes']:,} bytes")


if __name__ == "__main__":
    main()
