"""Steps of a model that is an embedding table, whose gradients are sparse: DDP's own all-gather of rows, and every strategy.

[[job]]
kind = "tables"
rates = ["200Mbit"]
rows = 5000000
width = 16
lookups = 106496          # of a rank in a step: 26 features of 4,096 samples
zipf = 1.05               # row i is looked up with a probability in proportion to 1 / i ** zipf
strategies = ["int8 / sharded", "thc / star"]
shards = true             # also in shards on the ranks (tacit.rows), whose step includes the row optimizer

Each step looks rows up anew, the same for every configuration; popular rows lie anywhere in the table, as hashed keys do. Gradients are noise
on the rows that were used. Nothing is trained: all configurations share one table. Plain DDP brings a rank's rows together before it sends
them, with 8 bytes of key, to all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

from tacit.errors import ConfigError
from tacit.lab.experiments.jobs.specs import MOST_MEMORY, ComparisonSpec, free_nbytes
from tacit.units import size_text

if TYPE_CHECKING:
    from torch import Tensor

    from tacit.lab.experiments.jobs.common import WorkerNetwork

WARMUP_STEPS = 3
KEY_NBYTES = 8  # of torch's COO tensors
_SHARDS = "rows in shards: its step looks rows up, sends their gradients and applies the row optimizer"
_HOOKS = "the hooks of torch take no sparse gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseTables(ComparisonSpec):
    """A table of `rows` x `width`, of which every rank looks up `lookups` rows a step."""

    peers: tuple[str, ...] = ("fp32",)
    rows: int = 5_000_000
    width: int = 16
    lookups: int = 4096 * 26
    zipf: float = 1.05
    shards: bool = False

    def check(self, where: str) -> None:
        super(SparseTables, self).check(where)
        if self.peers != ("fp32",):
            raise ConfigError(f"{where}: peers = {list(self.peers)}; {_HOOKS}: leave ['fp32']")
        if min(self.steps, self.rows, self.width, self.lookups) < 1:
            raise ConfigError(
                f"{where}: steps = {self.steps}, rows = {self.rows}, width = {self.width}, lookups = {self.lookups}; each is 1 or more"
            )
        if not 0 <= self.zipf < 10:
            raise ConfigError(f"{where}: zipf = {self.zipf:g}; from 0, all rows alike, to below 10")

    def memory_nbytes(self) -> int:
        """What one rank holds: the table, what error feedback remembers of it, and how often rows are looked up."""
        remembered = sum("ef(" in text or "lowrank" in text for text in self.strategies)
        steps_nbytes = 8 * self.lookups * (WARMUP_STEPS + self.steps)
        return self.rows * (4 * self.width * (1 + remembered) + 4 * 8) + steps_nbytes

    def check_memory(self, ranks: int, available_nbytes: int | None = None) -> None:
        """Raises `ConfigError` if `ranks` on this machine would not fit in what is free now."""
        free = free_nbytes() if available_nbytes is None else available_nbytes
        needed = ranks * self.memory_nbytes()
        if needed > MOST_MEMORY * free:
            raise ConfigError(
                f"{self.job or 'tables'}: {ranks} ranks of a table of {self.rows} x {self.width} need {size_text(needed)} and "
                f"{size_text(free)} are free; set rows = {round(self.rows * MOST_MEMORY * free / needed)} or less"
            )


class Lookups:
    """The rows that this rank looks up, step by step, and the gradients of what was looked up."""

    def __init__(self, spec: SparseTables, rank: int, steps: int) -> None:
        import torch

        common, own = (torch.Generator().manual_seed(spec.seed + offset) for offset in (0, 1 + rank))
        weights = torch.arange(1, spec.rows + 1, dtype=torch.float64) ** -spec.zipf
        below = weights.cumsum(0)
        places = torch.randperm(spec.rows, generator=common)
        self.rows: list[Tensor] = []
        for _ in range(steps):
            drawn = torch.rand(spec.lookups, dtype=torch.float64, generator=own) * below[-1]
            self.rows.append(places[torch.searchsorted(below, drawn).clamp_(max=spec.rows - 1)])
        self.gradient = torch.randn(spec.lookups, spec.width, generator=own)

    @property
    def unique(self) -> float:
        """Rows of a step, each counted once; the mean over steps."""
        return fmean(len(rows.unique()) for rows in self.rows)


def run(spec: SparseTables, network: WorkerNetwork) -> None:
    """Times a step under every configuration; rank 0 records a `timing` for each."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from tacit import rows
    from tacit.lab.experiments.baselines import ConnectedModel, connect
    from tacit.lab.experiments.jobs.common import (
        Contender,
        Progress,
        interleave,
        over_ranks,
        say,
        slowest,
        timing,
    )
    from tacit.lab.experiments.jobs.replay import present

    lookups = Lookups(spec, dist.get_rank(), WARMUP_STEPS + spec.steps)
    storage = torch.zeros(spec.rows, spec.width)

    def table() -> nn.Embedding:
        return nn.Embedding(spec.rows, spec.width, sparse=True, _weight=storage)

    def contender(
        name: str, model: nn.Module, finish: Callable[[], None], link: ConnectedModel | None
    ) -> Contender:
        turns = iter(lookups.rows)

        def step() -> None:
            model(next(turns)).backward(lookups.gradient)
            finish()

        return Contender(name, step, link)

    def forgets(inner: nn.Embedding) -> Callable[[], None]:
        return lambda: inner.zero_grad(set_to_none=True)

    contenders = []
    for configuration in present(spec):
        inner = table()
        link = connect(inner, None, configuration, bucket_nbytes=spec.bucket_nbytes, seed=spec.seed)
        if configuration.plain:
            nbytes = lookups.unique * (KEY_NBYTES + 4 * spec.width) * (dist.get_world_size() - 1)
            link = replace(link, computed_nbytes=nbytes)
        contenders.append(contender(configuration.name, link.model, forgets(inner), link))
    if spec.shards:
        holder = nn.Sequential(nn.Embedding(spec.rows, spec.width, device="meta"))
        tables = rows.shard(holder, optimizer=rows.SGD(lr=0.1))
        link = ConnectedModel(holder, 0, 0.0, counted=lambda: float(tables.stats.sent_nbytes), note=_SHARDS)
        contenders.append(contender("tacit.rows, shards on ranks", holder, tables.step, link))
    inner = table()
    alone = contender("no communication", inner, forgets(inner), None)
    everyone = [*contenders, alone]
    progress = Progress(spec.job, "tables", len(everyone) * (WARMUP_STEPS + spec.steps))
    interleave(
        everyone, steps=spec.steps, warmup=WARMUP_STEPS, progress=progress, transmitted=network.transmitted
    )
    unique = over_ranks([lookups.unique / dist.get_world_size()], dist.ReduceOp.SUM)[0]
    facts = {
        "job": spec.job,
        "workload": f"table of {spec.rows} x {spec.width}, Zipf {spec.zipf:g}, {unique:.0f} rows a step",
        "replayed": False,
        "scale": 1.0,
        "parameters": storage.numel(),
    }
    compute_s = median(slowest(alone.step_s))
    for each in contenders:
        say("timing", **timing(each, contenders[0], network=network, compute_s=compute_s, **facts))
    for each in contenders:
        assert each.link is not None
        each.link.close()


def main() -> None:
    """Joins the group that the environment describes, and times what the arguments specify."""
    from tacit.lab.experiments.jobs.common import arguments, joined

    table, network = arguments(__doc__ or "")
    with joined():
        run(SparseTables.read(table), network)


if __name__ == "__main__":
    main()
