"""What the demo runs, as values; no torch here, so the command line can check them at once."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = "plain DDP"
STRATEGIES = (
    "every / none / allreduce",
    "every / fp16 / allreduce",
    "every / bf16 / allreduce",
    "every / int8(block=256) / sharded",
    "every / int4(block=64) / sharded",
    "every / ef(int4(block=64)) / sharded",
    "every / hush / sharded",
)
CONFIGURATIONS = (PLAIN, *STRATEGIES)
SEED = 0
DEFAULT_TASKS = ("digits", "bytes")
FASHION_MNIST = "/usr/share/datasets/fashion-mnist"  # where Debian's dataset-fashion-mnist puts it


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """A task as the tables name it. `higher_is_better` is how its metric is read."""

    name: str
    what: str
    metric: str
    higher_is_better: bool
    steps: int
    needs: str | None = None  # a package that is not among tacit's own dependencies


TASKS = {
    facts.name: facts
    for facts in (
        TaskFacts("digits", "MLP on scikit-learn's digits", "test accuracy", True, 150, needs="sklearn"),
        TaskFacts(
            "bytes", "byte-level transformer on Python's own source text", "validation loss", False, 100
        ),
        TaskFacts("fashion", "CNN on Fashion-MNIST", "test accuracy", True, 1400),
        TaskFacts("fashion_mlp", "MLP on Fashion-MNIST", "test accuracy", True, 1400),
    )
}


def ring_allreduce_nbytes(nbytes: int, ranks: int) -> float:
    """Bytes each rank sends when a ring sums `nbytes` over `ranks`: 2(n-1)/n of them (computed, not counted)."""
    return 2 * (ranks - 1) / ranks * nbytes
