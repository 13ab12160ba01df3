"""What a lab can run. A kind of job is two things, named here and nowhere else:

- a **spec**: a frozen value read from a `[[job]]` table, in a module that loads without torch. It has
  `read(table, where)`, a class method that raises `ConfigError` in one sentence; `as_table()`, which `read` reads again;
  and may have `check_here(ranks)`, which raises before anything is started if this machine cannot do it.
  `kind`, `name` and `rates` are the runner's; every other key of the table is the spec's, which also receives `job`, its name;
- a **worker**: a module that every rank runs as

      python -m MODULE --spec JSON --network JSON

  in torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ..., GLOO_SOCKET_IFNAME). `--spec` is the spec's table,
  `--network` has `text`, `rate_bps` (None: nothing limits it), `shaped`, and `interface`, whose bytes are this rank's
  alone (None where several ranks share it); `tacit.lab.network.counters.traffic(interface)` reads them. It is run once a rate.

What a rank prints as a JSON object with a `kind` becomes a record; `{"kind": "progress", "job", "phase", "step", "steps"}` moves
the bar instead. All else is in its log. A rank that ends with an error ends the run, and its last lines are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from tacit.errors import ConfigError
from tacit.registry import Registry


class JobSpec(Protocol):
    """A job's table, checked."""

    @property
    def timed(self) -> bool:
        """Whether its figures are times, which need a network that is what it claims."""
        ...

    def as_table(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class JobKind:
    """Where the two parts of a kind are: `spec` as module:Class, `worker` as a module."""

    spec: str
    worker: str

    def read(self, table: Mapping[str, Any], where: str) -> JobSpec:
        module, _, name = self.spec.partition(":")
        spec: JobSpec = getattr(import_module(module), name).read(table, where)
        return spec


_BUILT_IN = {
    "limits": JobKind("tacit.lab.experiments.jobs.limits:Limits", "tacit.lab.experiments.jobs.limits"),
    "replay": JobKind("tacit.lab.experiments.jobs.specs:Replay", "tacit.lab.experiments.jobs.replay"),
    "train": JobKind("tacit.lab.experiments.jobs.specs:Train", "tacit.lab.experiments.jobs.train"),
    "accuracy": JobKind("tacit.lab.experiments.jobs.specs:Accuracy", "tacit.lab.experiments.jobs.accuracy"),
    "rounds": JobKind("tacit.lab.experiments.jobs.specs:Rounds", "tacit.lab.experiments.jobs.rounds"),
    "tables": JobKind("tacit.lab.experiments.jobs.tables:SparseTables", "tacit.lab.experiments.jobs.tables"),
}
KINDS: Registry[JobKind] = Registry(
    "job", "tacit.jobs", _BUILT_IN, accepts=lambda value: isinstance(value, JobKind)
)


def kind_named(name: Any, where: str) -> JobKind:
    """The kind that a job's table names."""
    if not isinstance(name, str):
        problem = "it has no kind" if name is None else f"kind = {name!r} is no text"
        raise ConfigError(f"{where}: {problem}; known are {', '.join(KINDS)}")
    try:
        return KINDS.find(name)
    except ConfigError as cause:
        raise ConfigError(f"{where}: {cause}") from cause


def check_here(spec: JobSpec, ranks: int) -> None:
    """Raises if this machine cannot run the job with `ranks`; may load torch."""
    for check, args in (("check_names", ()), ("check_memory", (ranks,)), ("check_here", (ranks,))):
        if hasattr(spec, check):
            getattr(spec, check)(*args)
