"""Networks as text: `star(nodes=64, rate=10Gbit, latency=5us)` on a command line, or a TOML file of hosts and links.

Every shape also takes `mtu=9000` and `loss=0.01`, for all its links: the lab builds them, the simulator's fluid ignores them.

network = "two_racks(nodes=8, rate=10Gbit, uplink_rate=2.5Gbit)"        # either one line,

[[host]]                                                               # or a graph of one's own
name = "a"
[[switch]]
name = "s"
[[link]]
a = "a"
b = "s"
rate = "10Gbit"        # each way; a rate without a unit is refused
latency = "5us"        # optional, as are mtu (bytes) and loss (a share of the packets)
"""

import inspect
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.grammar import Call, check_names, read, unfit
from tacit.topology import NETWORKS, Link, Network
from tacit.units import parse_rate, parse_time

_LINK_OPTIONS = {
    "mtu": int,
    "loss": float,
}  # of every shape, for all its links: bytes, and a share of the packets
SHAPE = "write for example star(nodes=64, rate=10Gbit, latency=5us), or the name of a .toml file"


def parse_network(text: str | Network) -> Network:
    """The network that `text` names: a builder with its options, or a TOML file."""
    if isinstance(text, Network):
        return text
    if text.strip().endswith(".toml"):
        return read_network(Path(text.strip()))
    call = read(text, "network", SHAPE)
    builder = NETWORKS.find(call.name)
    known = {name.removesuffix("_bps").removesuffix("_s"): p for name, p in _parameters(builder).items()}
    check_options(text, call, (*known, *_LINK_OPTIONS))
    options = dict(_option(key, value, text, known) for key, value in call.options.items())
    links = {key: options.pop(key) for key in _LINK_OPTIONS if key in options}
    network = _call(builder, options, text)
    return network.with_links(**links) if links else network


def check_options(text: str, call: Call, known: Collection[str]) -> None:
    """Refuses options that the network does not have: all of them are named."""
    if call.args:
        raise unfit("network", text, known, f"{call.args[0]!r} is without its option's name and =")
    check_names("network", text, known, call.options)


def read_network(path: Path) -> Network:
    """The network in a TOML file."""
    return network_from(read_toml(path, "network file"), str(path))


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table in a TOML file; what cannot be read is one sentence that begins with `what`."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as cause:
        raise ConfigError(f"{what} {path} cannot be opened: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{what} {path} is not TOML: {cause}") from cause


def network_from(table: Mapping[str, Any], name: str) -> Network:
    """The network in a table of `host`, `switch` and `link` entries, or of one `network` line."""
    unknown = set(table) - {"network", "host", "switch", "link"}
    if unknown:
        raise ConfigError(
            f"{name}: unknown table {min(unknown)!r}; a network has [[host]], [[switch]] and [[link]]"
        )
    if "network" in table:
        if len(table) > 1:
            raise ConfigError(f"{name} has both a network line and tables of its own; keep one")
        return parse_network(str(table["network"]))
    links = [_link(entry, name) for entry in _entries(table, "link", name)]
    return Network.of(_names(table, "host", name), _names(table, "switch", name), links, name)


def _entries(table: Mapping[str, Any], kind: str, name: str) -> list[dict[str, Any]]:
    entries = table.get(kind, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{name}: {kind} is one table; write [[{kind}]], with double brackets, for each")
    return entries


def _names(table: Mapping[str, Any], kind: str, name: str) -> list[str]:
    found = []
    for entry in _entries(table, kind, name):
        if set(entry) != {"name"} or not isinstance(entry["name"], str) or not entry["name"]:
            raise ConfigError(f'{name}: [[{kind}]] {entry} must say name = "..." and nothing else')
        found.append(entry["name"])
    return found


def _link(entry: dict[str, Any], name: str) -> Link:
    where = f"{name}: the link {entry.get('a', '?')} - {entry.get('b', '?')}"
    unknown = set(entry) - {"a", "b", "rate", "latency", "mtu", "loss"}
    missing = {"a", "b", "rate"} - set(entry)
    if unknown or missing:
        problem = f"has the unknown key {min(unknown)!r}" if unknown else f"lacks {min(missing)!r}"
        raise ConfigError(f"{where} {problem}; a link has a, b and rate, and may have latency, mtu and loss")
    mtu, loss = entry.get("mtu", 1500), entry.get("loss", 0.0)
    if type(mtu) is not int or type(loss) not in (int, float):
        raise ConfigError(
            f"{where}: mtu={mtu!r}, loss={loss!r}: mtu is a whole number, loss a share such as 0.01"
        )
    try:
        rate_bps, latency_s = parse_rate(entry["rate"]), parse_time(entry.get("latency", "0us"))
    except ConfigError as cause:
        raise ConfigError(f"{where}: {cause}") from cause
    return Link(str(entry["a"]), str(entry["b"]), rate_bps, latency_s, mtu, float(loss))


# ---- one line ----


def _option(key: str, value: str, text: str, known: Mapping[str, inspect.Parameter]) -> tuple[str, Any]:
    """One `key=value`, read as the builder's parameter of that name: rates and times carry a unit."""
    try:
        if key in _LINK_OPTIONS:
            return key, _LINK_OPTIONS[key](value)
        name, kind = known[key].name, known[key].annotation
        if name.endswith("_bps"):
            return name, parse_rate(value)
        if name.endswith("_s"):
            return name, parse_time(value)
        if name == "dims":
            return name, tuple(int(size) for size in value.split("x"))
        return name, kind(value)
    except ValueError as cause:
        example = {"dims": "4x4", "oversubscription": "2", "mtu": "9000", "loss": "0.01"}.get(key, "64")
        raise ConfigError(
            f"network {text!r}: {key}={value} is no number; write for example {key}={example}"
        ) from cause


def _call(builder: Callable[..., Network], options: dict[str, Any], text: str) -> Network:
    needed = [n for n, p in _parameters(builder).items() if p.default is p.empty and n not in options]
    if needed:
        raise ConfigError(f"network {text!r} lacks {needed[0]}=...; {SHAPE}")
    return builder(**options)


def _parameters(builder: Callable[..., Network]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder, eval_str=True).parameters  # a package may write its annotations as text
