"""An experiment file: a network, and what is run on it. Checked as a whole before anything is built.

network = "star(nodes=4, rate=100Mbit, latency=0us)"   # or [[network.host]], [[network.switch]], [[network.link]]

[run]                       # all optional
ranks_per_host = 1
limit = "30min"             # of one launch of ranks
realtime = true             # ranks before ordinary processes, where this user may (root)

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

    @property
    def ranks(self) -> int:
        return len(self.network.hosts) * self.run.ranks_per_host


def read(path: Path) -> Experiment:
    """The experiment in a TOML file; raises `ConfigError`, one sentence, about the first thing that is wrong."""
    return experiment_from(read_toml(path, "experiment"), path)


def experiment_from(table: Mapping[str, Any], path: Path) -> Experiment:
    """The experiment in a table; `path` is for messages, and network files are looked for beside it."""
    _known(table, ("network", "run", "job"), str(path))
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
    return Experiment(path.stem, path, network, _run(table.get("run", {}), path), found)


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
