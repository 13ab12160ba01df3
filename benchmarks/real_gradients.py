"""Error of the codecs on real gradients: two models, three points of training, 4 and 10 ranks. One JSON record a line.

    make bench-error            # or: python benchmarks/real_gradients.py --table

Each rank's gradient is of its own batch at the same weights. NMSE = |mean - estimate|^2 / mean |x_i|^2, one shot, no
error feedback. `against_thc` is the ratio to thc as published, with full rotation, on the same gradients.
"""

import argparse
import json
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.demo.tasks import BUILDERS, Task
from tacit.requests import loop_back
from tacit.strategy import parse_codec
from tacit.testing import nmse

BASE = "thc(bits=4, granularity=30)"
CODECS = (
    BASE,
    "hush",
    "hush(dither=0)",
    "thc(bits=4, granularity=30, block=1024)",
    "int4(block=64)",
    "int8",
    "bf16",
)
POINTS = (5, 20, 100, 400)  # the first is still at the start, where the ranks' norms differ most
WORLDS = (4, 10)


def gradient(task: Task, model: nn.Module, rng: torch.Generator) -> Tensor:
    x, y = task.batch(rng)
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([g.reshape(-1) for g in grads])


def points(name: str, steps: tuple[int, ...]) -> Iterator[tuple[int, list[Tensor]]]:
    """At each of `steps`, the gradients of ten ranks on their own batches."""
    task = BUILDERS[name]()
    torch.manual_seed(0)
    model = task.model()
    optimizer, rng = task.optimizer(model), torch.Generator().manual_seed(1)
    for step in range(max(steps) + 1):
        if step in steps:
            yield step, [gradient(task, model, rng) for _ in range(max(WORLDS))]
        x, y = task.batch(rng)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def measure(
    name: str, steps: tuple[int, ...] = POINTS, codecs: tuple[str, ...] = CODECS
) -> Iterator[dict[str, object]]:
    for step, gradients in points(name, steps):
        for world in WORLDS:
            errors = {}
            for text in codecs:
                trials = [loop_back(parse_codec(text), gradients[:world], step=t)[0].total for t in range(3)]
                errors[text] = sum(nmse(total, gradients[:world]) for total in trials) / len(trials)
                yield {
                    "benchmark": "real gradients",
                    "task": name,
                    "parameters": gradients[0].numel(),
                    "step": step,
                    "world": world,
                    "codec": text,
                    "nmse": errors[text],
                    "against_thc": round(errors[text] / errors[codecs[0]], 3),
                }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="fashion,bytes")
    parser.add_argument("--table", action="store_true", help="a table for people instead of JSON")
    args = parser.parse_args()
    worst: dict[str, dict[str, float]] = {}
    for name in args.tasks.split(","):
        for row in measure(name):
            own = worst.setdefault(str(row["codec"]), {})
            at = f"step {row['step']}"
            own[at] = max(own.get(at, 0.0), float(str(row["against_thc"])))
            if args.table:
                print(
                    "{task:<8} step {step:<4} n={world:<3} {codec:<40} {nmse:.6f}  {against_thc:>7} x thc".format(
                        **row
                    )
                )
            else:
                print(json.dumps(row))
    print(json.dumps({"benchmark": "real gradients summary", "largest_against_thc": worst}))


if __name__ == "__main__":
    main()
