"""Run alone in a network namespace: what leaves four ranks by tacit's count, and by the kernel's. One JSON line a case."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks

CASES = ("none / allreduce", "bf16 / allreduce", "int8 / sharded", "int4 / sharded")


def seen_nbytes() -> int:
    """Sent on loopback in this process's own namespace (/sys shows the namespace it was mounted in)."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split()[9])


def exchange(rank, world, text, numel=2_000_003, times=4):
    import torch
    import torch.distributed as dist

    from tacit.attachments.handle import own_group
    from tacit.exchange import converse
    from tacit.requests import LocalMemory, context_for
    from tacit.schemes import Channel
    from tacit.stats import Stats
    from tacit.strategy import Strategy
    from tacit.transports import Wire

    strategy, stats = Strategy.parse(text), Stats()
    wire = Wire(own_group(None, None))
    x = torch.randn(numel)
    dist.barrier()
    before = seen_nbytes()
    dist.barrier()
    for step in range(times):
        context = context_for(LocalMemory(x), seed=0, step=step, bucket="b", rank=rank, world=world)
        converse(
            Channel(wire, strategy.scheme), strategy.what.reduce(x, context), context.own_seed, stats, "0"
        )
    dist.barrier()
    return stats.sent_nbytes, before, seen_nbytes()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = Ranks()
    for text in CASES:
        found = ranks.run(4, exchange, text)
        counted, before, after = sum(f[0] for f in found), min(f[1] for f in found), max(f[2] for f in found)
        print(json.dumps({"strategy": text, "counted": counted, "seen": after - before}))
    ranks.close()
