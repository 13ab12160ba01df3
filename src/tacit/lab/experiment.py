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
kind = "limits"             # the kinds are in tacit.lab.jobs
name = "limits"             # in records; default: the kind, numbered
rates = ["100Mbit"]         # every link at each of these in turn; default: the network as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.lab import jobs
from tacit.lab.aggregating import Aggregator
from tacit.topology import Network, check_positive
from tacit.topology_files import network_from, parse_network, read_toml
from tacit.units import parse_rate, parse_time


@dataclass(frozen=True, slots=True)
class Run:
    """How ranks are started."""

    ranks_per_host: int = 1
    limit_s: float = 1800.0
    realtime: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A kind's order, and the rates at which it is run; no rates: the network as it is."""

    kind: str
    name: str
    rates_bps: tuple[float, ...]
    order: jobs.Order


@dataclass(frozen=True, slots=True)
class Experiment:
    """All that an experiment file says."""

    name: str
    path: Path
    network: Network
    run: Run
    jobs: tuple[Job, ...]
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
    _known(table, ("network", "run", "aggregator", "job"), str(path))
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


def _run(table: Any, path: Path) -> Run:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: run = {table!r} is no table; write [run], and its keys below")
    _known(table, ("ranks_per_host", "limit", "realtime"), f"{path}: run")
    per_host, realtime = table.get("ranks_per_host", 1), table.get("realtime", False)
    if type(per_host) is not int or not 1 <= per_host <= 64:
        raise ConfigError(f"{path}: ranks_per_host = {per_host!r}; write a whole number from 1 to 64")
    if type(realtime) is not bool:
        raise ConfigError(f"{path}: realtime = {realtime!r}; write true or false")
    try:
        return Run(per_host, parse_time(table.get("limit", "30min")), realtime)
    except ConfigError as cause:
        raise ConfigError(f"{path}: limit: {cause}") from cause


def _aggregator(table: Any, network: Network, path: Path) -> Aggregator:
    where = f"{path}: aggregator"
    if not isinstance(table, Mapping) or "at" not in table:
        raise ConfigError(f'{where} does not say where it is; write [aggregator], and below it at = "switch"')
    _known(table, ("at", "plane", "slots"), where)
    at, plane, slots = table["at"], table.get("plane", "user"), table.get("slots", 1024)
    nodes = (*network.switches, *network.hosts)
    if at not in nodes:
        raise ConfigError(f"{where}: at = {at!r} is no node of the network; its nodes are {', '.join(nodes)}")
    if at == network.hosts[0]:
        raise ConfigError(f"{where}: at = {at!r} is where rank 0 runs; choose another host, or a switch")
    if plane not in ("user", "kernel"):
        raise ConfigError(f"{where}: plane = {plane!r}; write user or kernel")
    if type(slots) is not int or slots < 2:
        raise ConfigError(f"{where}: slots = {slots!r}; write a whole number of 2 or more")
    return Aggregator(at, plane, slots)


def _job(entry: Mapping[str, Any], index: int, entries: list[Any], path: Path) -> Job:
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
        return Job(str(name), own, rates_bps, kind.read(table | {"job": own}, where))
    except ConfigError as cause:
        raise (cause if str(cause).startswith(where) else ConfigError(f"{where}: {cause}")) from cause


def _known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(keys)}")
