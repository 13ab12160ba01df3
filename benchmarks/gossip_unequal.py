"""Gossip among five ranks of which one is slower, each with digits of its own: accuracy of the merged model against bytes sent.

    python benchmarks/gossip_unequal.py --ends time steps --seeds 0 1 2

Handwritten digits sorted by label: each rank has two of the ten, and rank 4 takes one step while the others take five (`--slowest`). Training ends
for all at the same `time`, or for each after as many `steps`: then the fast ones wait in merge(). The simulation is of one process and has no clock, so
it repeats itself to the bit. The baseline is the first rule; "every / none" without gossip adds gradients in lock step, at the slowest's pace.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from gossip_simulated import LR, MOMENTUM, Sea
from torch import Tensor, nn

from tacit.records import host_facts
from tacit.schemes import Gossip
from tacit.strategy import Strategy

WORLD, SLOW, BATCH, HELD_OUT = 5, 4, 32, 360
RULES = ("every / none / gossip", "adaptive / hush / gossip", "every / none")
Shard = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    """17,226 parameters."""
    layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers)


def digits(seed: int, sort: bool) -> tuple[list[Shard], Shard]:
    """A shard a rank, sorted by label or mixed, and 360 held out by the seed."""
    from sklearn.datasets import load_digits

    data, rng = load_digits(), torch.Generator().manual_seed(seed)
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    mixed = torch.randperm(len(x), generator=rng)
    held_out, kept = mixed[-HELD_OUT:], mixed[:-HELD_OUT]
    kept = kept[torch.argsort(y[kept], stable=True)] if sort else kept
    return [(x[part], y[part]) for part in kept.chunk(WORLD)], (x[held_out], y[held_out])


class CutOff(Gossip):
    """Nobody reaches the slow rank, and it reaches nobody."""

    def partner(self, rank: int, world: int, number: int, live: Sequence[int], seed: int) -> int | None:
        if rank == SLOW:
            return None
        return Gossip.partner(self, rank, world, number, [peer for peer in live if peer != SLOW], seed)


class Training:
    """One training: `ticks` are steps of the fast ranks."""

    def __init__(self, args: argparse.Namespace, text: str, seed: int, end: str) -> None:
        torch.manual_seed(seed)
        strategy = Strategy.parse(text)
        self.lock_step = not isinstance(strategy.who, Gossip)
        given = Strategy.parse(RULES[0]) if self.lock_step else strategy
        self.sea = Sea(mlp(), given, seed, WORLD)
        self.shards, self.held_out = digits(seed, args.data == "sorted")
        self.rng = torch.Generator().manual_seed(seed)
        self.slowest, self.ticks, self.constant, self.cut = (
            args.slowest, args.ticks, args.schedule == "constant", args.cut,
        )  # fmt: skip
        self.steps = args.ticks if end == "steps" else None
        self.alone = 0.0  # accuracy of the fast ranks' models when they had taken their steps

    def run(self) -> None:
        replicas = self.sea.replicas
        for tick in range(self.ticks if self.steps is None else self.ticks * self.slowest):
            if self.cut is not None and tick == int(self.cut * self.ticks):
                replicas.who = CutOff()
            ranks = [rank for rank in range(WORLD) if rank != SLOW or tick % self.slowest == self.slowest - 1]
            if self.lock_step:
                if SLOW in ranks:
                    self._add_gradients(self._lr(tick / self.ticks))
                continue
            for group in ([rank for rank in ranks if rank != SLOW], [rank for rank in ranks if rank == SLOW]):
                done = tick if self.steps is None else replicas.steps[group[0]] if group else 0
                if group and done < self.ticks:
                    self.sea.step(*self._batch(group), self._lr(done / self.ticks), group)
            if self.steps is not None and tick == self.ticks - 1:
                self.alone = fmean(
                    self.sea.accuracy(*self.held_out, model) for model in replicas.models[:SLOW]
                )
                replicas.waiting = set(range(WORLD)) - {SLOW}

    def _lr(self, share: float) -> float:
        return LR if self.constant else LR * 0.5 * (1 + math.cos(math.pi * share))

    def _batch(self, ranks: Sequence[int]) -> Shard:
        picks = [
            (rank, torch.randint(len(self.shards[rank][0]), (BATCH,), generator=self.rng)) for rank in ranks
        ]
        found = [(self.shards[rank][0][pick], self.shards[rank][1][pick]) for rank, pick in picks]
        return torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])

    def _add_gradients(self, lr: float) -> None:
        sea = self.sea
        gradient = sea.gradients(sea.replicas.models, *self._batch(range(WORLD))).mean(0)
        sea.velocity.mul_(MOMENTUM).add_(gradient)
        sea.replicas.models.sub_(sea.velocity, alpha=lr)
        for rank in range(WORLD):
            sea.replicas.steps[rank] += 1
        sea.replicas.sent_nbytes += WORLD * int(2 * (WORLD - 1) / WORLD * 4 * sea.replicas.models.shape[1])

    def record(self) -> dict[str, object]:
        sea, models = self.sea, self.sea.replicas.models
        return {
            "accuracy": 100 * sea.accuracy(*self.held_out),
            "equal_weights": 100 * sea.accuracy(*self.held_out, models.mean(0)),
            "without_slowest": 100 * sea.accuracy(*self.held_out, models[:SLOW].mean(0)),
            "fast_when_done": 100 * self.alone,
            "sent_nbytes": sea.replicas.sent_nbytes,
            "exchanges": sea.replicas.exchanges,
            "differs": fmean(sea.replicas.differs),
        }


def trainings(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One record a training, baseline first for every seed."""
    for end in args.ends:
        for seed in args.seeds:
            base: dict[str, object] | None = None
            for text in args.rules:
                if sys.stderr.isatty():
                    print(f"until the same {end}, seed {seed}: {text:<40}", end="\r", file=sys.stderr)
                began, training = time.perf_counter(), Training(args, text, seed, end)
                training.run()
                record = training.record()
                base = base or record
                yield {
                    "benchmark": "gossip unequal", "ends": end, "strategy": text, "seed": seed, "data": args.data,
                    "slowest": args.slowest, "ticks": args.ticks, "schedule": args.schedule, "cut": args.cut, **record,
                    "points": record["accuracy"] - base["accuracy"],  # type: ignore[operator]
                    "share": 100 * record["sent_nbytes"] / base["sent_nbytes"],  # type: ignore[operator]
                    "seconds": time.perf_counter() - began,
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="example: python benchmarks/gossip_unequal.py --ends time --seeds 0 1 2 --json > unequal.jsonl",
    )
    parser.add_argument("--ends", nargs="+", choices=("time", "steps"), default=["time", "steps"],
                        help="training ends at the same time for all, or after as many steps of each")  # fmt: skip
    parser.add_argument("--data", choices=("sorted", "mixed"), default="sorted", help="by label, or any")
    parser.add_argument(
        "--schedule", choices=("cosine", "constant"), default="cosine", help="of the learning rate"
    )
    parser.add_argument("--slowest", type=int, default=5, metavar="N", help="rank 4 takes one step in N")
    parser.add_argument(
        "--cut", type=float, metavar="SHARE", help="rank 4 meets nobody from this share of the time on"
    )
    parser.add_argument("--ticks", type=int, default=1000, help="steps of a fast rank")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rules", nargs="+", default=list(RULES), help="the first is the baseline")
    parser.add_argument("--json", action="store_true", help="one record a line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.json:
        print(json.dumps({"benchmark": "host", **host_facts()}), flush=True)
    else:
        print(
            f"{'ends':<6}{'rule':<32}{'seed':>4}{'accuracy':>10}{'points':>8}{'bytes':>9}{'differs':>9}{'equal':>8}{'without':>9}{'done':>7}"
        )
    for found in trainings(args):
        if args.json:
            print(json.dumps(found), flush=True)
        else:
            print(
                "{ends:<6}{strategy:<32}{seed:>4}{accuracy:>10.2f}{points:>+8.2f}{share:>8.2f} %{differs:>8.2f}"
                "{equal_weights:>8.2f}{without_slowest:>9.2f}{fast_when_done:>7.1f}".format(**found),
                flush=True,
            )


if __name__ == "__main__":
    main()
