"""How long a barrier takes: one record, with the median of `repeats`. Its spec and its worker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tacit.errors import ConfigError
from tacit.lab.experiments.jobs import JobKind

BARRIERS = JobKind("tacit_outside.job:Barriers", "tacit_outside.job")


@dataclass(frozen=True, slots=True)
class Barriers:
    job: str = "barriers"
    repeats: int = 5
    timed = False  # the links need not be calibrated

    @classmethod
    def read(cls, table: Mapping[str, Any], where: str = "job") -> Barriers:
        if set(table) - {"job", "repeats"} or type(table.get("repeats", 5)) is not int:
            raise ConfigError(
                f"{where}: a job of kind barriers has repeats, a whole number, and nothing else"
            )
        return cls(**table)

    def as_table(self) -> dict[str, Any]:
        return asdict(self)


def main() -> None:
    import torch.distributed as dist

    from tacit.lab.experiments.jobs.common import arguments, joined, say

    table, network = arguments(__doc__ or "")
    spec, times_s = Barriers.read(table), []
    with joined():
        for _ in range(spec.repeats):
            start = time.monotonic()
            dist.barrier()
            times_s.append(time.monotonic() - start)
        found = {"ranks": dist.get_world_size(), "n": spec.repeats, "median_s": median(times_s)}
        say("barriers", job=spec.job, network=network.text, **found)


if __name__ == "__main__":
    main()
