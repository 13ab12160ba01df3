"""A rank of benchmarks/auto.py: `auto` goes its course, and then takes turns with every fixed choice. One JSON record a set-up."""

import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tacit.demo.tasks import BUILDERS
from tacit.lab.experiments.baselines import connect, named
from tacit.lab.experiments.jobs.common import Contender, Progress, interleave, joined, say, slowest
from tacit.lab.experiments.jobs.replay import ReplaySetup, parts
from tacit.sim.workloads import workload

LOOPBACK_SCALE_BPS = 600e6  # replays on loopback are as large as on a link of this rate
WARMUP = 3  # DDP cuts its buckets anew after the first step
MOST_STEPS = 200  # of the course of auto
BUCKET_NBYTES = 4 << 20


def replayed(name: str, rate_bps: float | None) -> Callable[[str], Contender]:
    """A known model, scaled so that plain DDP's exchange takes about half a second on this link."""
    whole = workload(name)
    scale = min(1.0, 0.45 * (rate_bps or LOOPBACK_SCALE_BPS) / (8 * 1.5 * 4 * whole.parameters))
    stage = ReplaySetup(parts(whole, scale), 0, dist.get_rank())
    return lambda choice: stage.contender(named(choice), min(BUCKET_NBYTES, 4 * stage.numel // 5), choice)


def trained(task_name: str) -> Callable[[str], Contender]:
    """A task of the demo: real computation, on cores that the ranks share."""
    task = BUILDERS[task_name]()
    x, y = task.batch(torch.Generator().manual_seed(1000 * dist.get_rank()))

    def contender(choice: str) -> Contender:
        torch.manual_seed(0)
        model = task.model()
        optimizer = task.optimizer(model)
        nbytes = min(BUCKET_NBYTES, 4 * sum(p.numel() for p in model.parameters()) // 5)
        link = connect(model, optimizer, named(choice), bucket_nbytes=nbytes)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(link.model(x), y).backward()
            optimizer.step()

        return Contender(choice, step, link)

    return contender


def compared(name: str, make: Callable[[str], Contender], order: dict[str, Any]) -> dict[str, Any]:
    auto = make(order["auto"])
    assert auto.link is not None
    assert auto.link.handle is not None
    handle = auto.link.handle
    dist.barrier()
    start, steps = time.perf_counter(), 0
    while not handle.stats.chosen and steps < MOST_STEPS:  # alike on all ranks
        auto.step()
        steps += 1
    course_s = time.perf_counter() - start
    everyone = [auto, *(make(choice) for choice in order["fixed"])]
    progress = Progress(name, "steps", len(everyone) * (WARMUP + order["steps"]))
    interleave(everyone, steps=order["steps"], warmup=WARMUP, progress=progress, transmitted=lambda: 0)
    steps_s = {each.name: median(slowest(each.step_s)) for each in everyone}
    own_s = steps_s.pop(auto.name)
    for each in everyone:
        assert each.link is not None
        each.link.close()
    return {
        "rate_bps": order["rate_bps"],
        "model": name,
        "strategy": str(handle.strategy),
        "chosen": handle.stats.chosen,
        "course_steps": steps,
        "start_up_s": course_s - steps * own_s,
        "behind": own_s / min(steps_s.values()) - 1,
        "steps_p50_s": {**steps_s, order["auto"]: own_s},
    }


def main() -> None:
    order = json.loads(sys.argv[1])
    with joined():
        say("ready")
        for name in order["models"]:
            make = partial(trained, name) if name in BUILDERS else partial(replayed, name, order["rate_bps"])
            say("setup", **compared(name, make(), order))
            gc.collect()  # models of a set-up must not outlive the process group
        dist.barrier()


if __name__ == "__main__":
    main()
