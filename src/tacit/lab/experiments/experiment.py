"""An experiment file: a network, and what is run on it. Checked as a whole before anything is built.

network = "star(nodes=4, rate=100Mbit, latency=0us)"   # or [[network.host]], [[network.switch]], [[network.link]]

[run]                       # all optional
ranks_per_host = 1
limit = "30min"             # of one launch of ranks
realtime = true             # ranks before ordinary processes, where this user may (root)

[aggregator]                # optional: for strategies that end in `/ star`
at = "switch"               # a switch, or a host with a link of its own
plane = "user"              # or "kernel", in a switch and as root
slots = 1024

[[job]]
kind = "limits"             # the kinds are in tacit.lab.experiments.jobs
name = "limits"             # in records; default: the kind, numbered
rates = ["100Mbit"]         # every link at each of these in turn; default: the network as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.lab.experiments import jobs
from tacit.lab.experiments.aggregating import Aggregator
from tacit.lab.experiments.tables import check_keys, read_fields
from tacit.topology import Network, check_positive
from tacit.topology_files import network_from, parse_network, read_toml
from tacit.units import parse_rate


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How ranks are started."""

    ranks_per_host: int = 1
    limit_s: float = 1800.0
    realtime: bool = False


@dataclass(frozen=True, slots=True)
class ExperimentJob:
    """A kind's spec, and the rates at which it is run; no rates: the network as it is."""

    kind: str
    name: str
    rates_bps: tuple[float, ...]
    spec: jobs.JobSpec


@dataclass(frozen=True, slots=True)
class Experiment:
    """All that an experiment file holds."""

    name: str
    path: Path
    network: Network
    run: LaunchOptions
    jobs: tuple[ExperimentJob, ...]
    aggregator: Aggregator | None = None

    @property
    def hosts(self) -> int:
        """Those that ranks run on: an aggregator's own host is left to it."""
        return len(self.network.hosts) - (
            self.aggregator is not None and self.aggregator.at in self.network.hosts
        )

    @property
    def ranks(self) -> int:
        return self.hosts * self.run.ranks_per_host


def read(path: Path) -> Experiment:
    """The experiment in a TOML file; raises `ConfigError`, one sentence, about the first thing that is wrong."""
    return experiment_from(read_toml(path, "experiment"), path)


def experiment_from(table: Mapping[str, Any], path: Path) -> Experiment:
    """The experiment in a table; `path` is for messages, and network files are looked for beside it."""
    check_keys(table, ("network", "run", "aggregator", "job"), str(path))
    if "network" not in table:
        raise ConfigError(f'{path} has no network; add for example network = "star(nodes=4, rate=100Mbit)"')
    network = _network(table["network"], path)
    entries = table.get("job", [])
    entries = [entries] if isinstance(entries, Mapping) else entries
    if not isinstance(entries, list) or not entries or not all(isinstance(e, Mapping) for e in entries):
        raise ConfigError(f'{path} has no job; add a table [[job]] with a line kind = "limits"')
    found = tuple(_job(entry, index, entries, path) for index, entry in enumerate(entries))
    twice = next((job.name for i, job in enumerate(found) if job.name in [j.name for j in found[:i]]), None)
    if twice is not None:
        raise ConfigError(f"{path}: two jobs are called {twice!r}; give each a name of its own")
    aggregator = _aggregator(table["aggregator"], network, path) if "aggregator" in table else None
    return Experiment(path.stem, path, network, _run(table.get("run", {}), path), found, aggregator)


def _network(given: Any, path: Path) -> Network:
    if isinstance(given, Mapping):
        return network_from(given, f"{path}: network")
    if not isinstance(given, str):
        raise ConfigError(
            f"{path}: network = {given!r} is no text; write for example star(nodes=4, rate=100Mbit)"
        )
    beside = path.parent / given.strip()
    try:
        return parse_network(str(beside) if given.strip().endswith(".toml") and beside.exists() else given)
    except ConfigError as cause:
        raise ConfigError(f"{path}: {cause}") from cause


def _run(table: Any, path: Path) -> LaunchOptions:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: run = {table!r} is no table; write [run], and its keys below")
    options = read_fields(LaunchOptions, table, f"{path}: run")
    if not 1 <= options.ranks_per_host <= 64:
        raise ConfigError(
            f"{path}: ranks_per_host = {options.ranks_per_host}; write a whole number from 1 to 64"
        )
    return options


def _aggregator(table: Any, network: Network, path: Path) -> Aggregator:
    where = f"{path}: aggregator"
    if not isinstance(table, Mapping) or "at" not in table:
        raise ConfigError(f'{where} does not say where it is; write [aggregator], and below it at = "switch"')
    aggregator = read_fields(Aggregator, table, where)
    at, plane, slots = aggregator.at, aggregator.plane, aggregator.slots
    nodes = (*network.switches, *network.hosts)
    if at not in nodes:
        raise ConfigError(f"{where}: at = {at!r} is no node of the network; its nodes are {', '.join(nodes)}")
    if at == network.hosts[0]:
        raise ConfigError(f"{where}: at = {at!r} is where rank 0 runs; choose another host, or a switch")
    if plane not in ("user", "kernel"):
        raise ConfigError(f"{where}: plane = {plane!r}; write user or kernel")
    if slots < 2:
        raise ConfigError(f"{where}: slots = {slots}; write a whole number of 2 or more")
    return aggregator


def _job(entry: Mapping[str, Any], index: int, entries: list[Any], path: Path) -> ExperimentJob:
    table = dict(entry)
    where = f"{path}: job {index + 1}"
    name = table.pop("kind", None)
    kind = jobs.kind_named(name, where)
    same = [other for other in entries if other.get("kind") == name]
    default = name if len(same) == 1 else f"{name} {index + 1}"
    own = str(table.pop("name", table.pop("job", default)))
    rates = table.pop("rates", [])
    if not isinstance(rates, list):
        raise ConfigError(f"{where}: rates = {rates!r} is no list; write for example ['100Mbit', '200Mbit']")
    try:
        rates_bps = tuple(parse_rate(rate) for rate in rates)
        for rate_bps in rates_bps:
            check_positive("rate", rate_bps)
    except ConfigError as cause:
        raise ConfigError(f"{where}: {cause}") from cause
    try:
        return ExperimentJob(str(name), own, rates_bps, kind.read(table | {"job": own}, where))
    except ConfigError as cause:
        raise (cause if str(cause).startswith(where) else ConfigError(f"{where}: {cause}")) from cause
