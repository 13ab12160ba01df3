"""What a lab can run. A kind of job is two things, named here and nowhere else:

- an **order**: a frozen value read from a `[[job]]` table, in a module that loads without torch. It has
  `read(table, where)`, a class method that raises `ConfigError` in one sentence; `as_table()`, which `read` reads again;
  and may have `check_here(ranks)`, which raises before anything is started if this machine cannot do it.
  `kind`, `name` and `rates` are the runner's; every other key of the table is the order's, which is also told `job`, its name;
- a **worker**: a module that every rank runs as

      python -m MODULE --order JSON --network JSON

  in torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ..., GLOO_SOCKET_IFNAME). `--order` is the order's table,
  `--network` says `text`, `rate_bps` (None: nothing limits it), `shaped`, and `interface`, whose bytes are this rank's
  alone (None where several ranks share it); `tacit.lab.inside.traffic(interface)` reads them. It is run once a rate.

What a rank prints as a JSON object with a `kind` becomes a record; `{"kind": "progress", "job", "phase", "step", "steps"}` moves
the bar instead. All else is in its log. A rank that ends with an error ends the run, and its last lines are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from tacit.errors import ConfigError, did_you_mean


class Order(Protocol):
    """What a job's table says, checked."""

    @property
    def timed(self) -> bool:
        """Whether its figures are times, which need a network that is what it claims."""
        ...

    def as_table(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Where the two parts of a kind are: `order` as module:Class, `worker` as a module."""

    order: str
    worker: str

    def read(self, table: Mapping[str, Any], where: str) -> Order:
        module, _, name = self.order.partition(":")
        order: Order = getattr(import_module(module), name).read(table, where)
        return order


KINDS = {
    "limits": Kind("tacit.lab.jobs.limits:Limits", "tacit.lab.jobs.limits"),
    "replay": Kind("tacit.lab.jobs.orders:Replay", "tacit.lab.jobs.replay"),
    "train": Kind("tacit.lab.jobs.orders:Train", "tacit.lab.jobs.train"),
    "rounds": Kind("tacit.lab.jobs.orders:Rounds", "tacit.lab.jobs.rounds"),
}


def kind_named(name: Any, where: str) -> Kind:
    """The kind that a job's table names."""
    if isinstance(name, str) and name in KINDS:
        return KINDS[name]
    hint = did_you_mean(str(name), KINDS)
    said = f"kind = {name!r} is unknown" if name is not None else "it has no kind"
    raise ConfigError(f"{where}: {said}; {hint}known are {', '.join(KINDS)}")


def check_here(order: Order, ranks: int) -> None:
    """Raises if this machine cannot run the job with `ranks`; may load torch."""
    for check, args in (("check_names", ()), ("check_memory", (ranks,)), ("check_here", (ranks,))):
        if hasattr(order, check):
            getattr(order, check)(*args)
