"""What a schedule is costed on, parsed from text: an electrical network or an optical ring, behind one interface.

    star(nodes=64, rate=10Gbit, latency=5us)              any network of topology.py, or a .toml file
    optical(wavelengths=64, rate=40GB/s, setup=25us)      an optical ring; the rate is one wavelength's

The option that gives the number of nodes may be left out: then there are as many as ranks. An optical ring also takes hop=5ns (the
light's time from node to node), transceivers=4 (senders of a node, and as many receivers; all: as many as wavelengths), and how far
light goes: most_hops=100, or the losses that decide it: budget=30dB, fixed=5dB, pass=0.01dB, resonators=64 (passed at every
node), propagation=0dB.
"""

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import inf, isqrt
from pathlib import Path
from typing import Any

import numpy as np

from tacit.errors import ConfigError
from tacit.grammar import Call, read
from tacit.registry import unknown_name
from tacit.schedules.schedule import Schedule
from tacit.sim import electrical, optical
from tacit.sim.bounds import lower_bounds
from tacit.sim.costs import Cost
from tacit.sim.wavelengths import check_schedule
from tacit.topology import NETWORKS, Floats, Network, OpticalRing
from tacit.topology_files import SHAPE, check_options, parse_network
from tacit.units import parse_rate, parse_time, time_text


@dataclass(frozen=True, slots=True, eq=False)
class Fabric:
    """A network, and how it is used: `stripe` spreads transfers over idle wavelengths."""

    network: Network | OpticalRing
    stripe: bool = False
    aggregators_on: str = "switches"

    @property
    def ring(self) -> OpticalRing | None:
        """The optical ring, if it is one."""
        return self.network if isinstance(self.network, OpticalRing) else None

    @property
    def nodes(self) -> int:
        """How many ranks find room."""
        return self.network.nodes if isinstance(self.network, OpticalRing) else len(self.network.hosts)

    @property
    def text(self) -> str:
        """What it is, in a line, rates in bytes and in bits."""
        ring = self.ring
        if ring is None:
            return _network_text(self.network)  # type: ignore[arg-type]
        words = [
            f"optical ring of {ring.nodes:,} nodes",
            f"{ring.wavelengths} wavelengths a direction",
            f"{rate_words(ring.rate_bps)} a wavelength",
            f"set-up {time_text(ring.setup_s)} a stage",
        ]
        words += [f"light goes {ring.most_hops} hops"] if ring.most_hops is not None else []
        words += [f"{time_text(ring.hop_s)} a hop"] if ring.hop_s else []
        words += (
            [f"{ring.transceivers} senders and receivers a node"] if ring.transceivers is not None else []
        )
        words += ["transfers striped over idle wavelengths"] if self.stripe else []
        return ", ".join(words)

    def as_record(self) -> dict[str, Any]:
        """The network as values, for JSON; `text` is the same for people.

        `rate_bps` and `latency_s` of an electrical network are those of its slowest and its shortest link; `most_` is the other
        end. `transceivers` null: no limit.
        """
        ring = self.ring
        if ring is not None:
            return {"kind": "optical", **asdict(ring), "stripe": self.stripe, "text": self.text}
        assert isinstance(self.network, Network)
        return {
            "kind": self.network.kind,
            "name": str(self.network),
            "nodes": len(self.network.hosts),
            "switches": len(self.network.switches),
            "links": len(self.network.ends),
            **_extremes("rate_bps", self.network.rate_bps),
            **_extremes("latency_s", self.network.latency_s),
            "aggregators_on": self.aggregators_on,
            "text": self.text,
        }

    def cost(self, schedule: Schedule, nbytes: float) -> Cost:
        """What `schedule` takes here for a vector of `nbytes`."""
        if isinstance(self.network, OpticalRing):
            return optical.cost(schedule, nbytes, self.network, stripe=self.stripe)
        return electrical.cost(schedule, nbytes, self.network, aggregators_on=self.aggregators_on)

    def prove(self, schedule: Schedule) -> None:
        """Raises ScheduleError unless every transfer has light of its own, if there is light."""
        if self.ring is None:
            return
        for fault in optical.too_long(schedule, self.ring):
            raise ConfigError(
                f"{fault}; take a schedule with shorter paths, such as ring, or raise the budget"
            )
        check_schedule(schedule, self.ring, stripe=self.stripe)

    def alpha_beta_s(self, schedule: Schedule, cost: Cost) -> float:
        """The check beside a cost, by formula. Electrical: the ranks' own links alone (`electrical.alpha_beta`), the slowest
        of them, with the longest latency of a stage. Optical: stages x (set-up + longest transfer on one wavelength).
        """
        if not cost.stages:
            return 0.0
        if isinstance(self.network, OpticalRing):
            rate_bps, setup_s = self.network.rate_bps, self.network.setup_s
            return sum(stage.times * (setup_s + 8 * stage.nbytes / rate_bps) for stage in cost.stages)
        at_ranks = (self.network.ends < schedule.world).any(axis=1)
        latency_s = max(stage.latency_s for stage in cost.stages)
        slowest_bps = float(self.network.rate_bps[at_ranks].min())
        return electrical.alpha_beta(schedule, cost.nbytes, slowest_bps, latency_s)

    def lower_bound_s(self, schedule: Schedule, nbytes: float) -> float | None:
        """What nothing that ends in a sum can beat here, by arguments and not by search; None where none is known.

        Optical: bounds.py. Electrical: the least latency, and the larger of two times: the slowest rank sends its vector
        and receives the sum; all ranks together send 2 (n - 1) vectors, if none is added on the way.
        """
        if schedule.goal != "sum":
            return None
        if schedule.world == 1:
            return 0.0
        if isinstance(self.network, OpticalRing):
            whole = schedule.world == self.network.nodes and not schedule.aggregators
            return lower_bounds(schedule.world, nbytes, self.network).combined_s if whole else None
        return _electrical_bound_s(self.network, schedule, nbytes)


def parse_fabric(
    text: str, world: int | None = None, *, stripe: bool = False, aggregators_on: str = "switches"
) -> Fabric:
    """The fabric that `text` names, with as many nodes as `world` where the text does not give their number."""
    text = _line_of(text.strip())
    call = read(text, "network", SHAPE) if not text.endswith(".toml") else None
    if call is not None and call.name == "optical":
        return Fabric(_optical(text, call, world), stripe)
    if call is not None and call.name not in NETWORKS:
        raise unknown_name("network", call.name, (*NETWORKS, "optical"))
    if stripe:
        raise ConfigError(f"striping is over wavelengths, and {text} has none; give an optical(...) ring")
    network = parse_network(_sized(call, text, world) if call is not None and world else text)
    return Fabric(network, aggregators_on=aggregators_on)


def rate_words(rate_bps: float) -> str:
    """A rate in bytes and in bits, so that nobody takes one for the other: `40 GB/s (320 Gbit/s)`."""
    steps = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))

    def part(value: float, unit: str) -> str:
        factor, prefix = next(step for step in steps if value >= step[0])
        return f"{value / (factor or 1):.4g} {prefix}{unit}/s"

    return f"{part(rate_bps / 8, 'B')} ({part(rate_bps, 'bit')})"


def _line_of(text: str) -> str:
    """The `network = "..."` line of a TOML file, if it has one; otherwise the text itself."""
    if text.endswith(".toml"):
        try:
            line = tomllib.loads(Path(text).read_text(encoding="utf-8")).get("network")
        except (OSError, ValueError):
            return text  # parse_network raises the better error
        if isinstance(line, str):
            return line.strip()
    return text


def _sized(call: Call, text: str, world: int) -> str:
    """`text` with the option that sets the number of hosts, where it was left out."""
    missing = {
        "fat_tree": ("k", str(next(k for k in range(2, 4 * world + 4, 2) if k**3 // 4 >= world))),
        "torus": ("dims", "x".join(map(str, _squarest(world)))),
    }
    hosts = call.options.get("hosts", "")
    if hosts.isdecimal() and len(hosts) <= 15 and int(hosts) > 0:
        missing["leaf_spine"] = ("leaves", str(-(-world // int(hosts))))
    if "nodes" in inspect.signature(NETWORKS[call.name]).parameters:
        missing[call.name] = ("nodes", str(world))
    if call.name not in missing or missing[call.name][0] in call.options:
        return text
    return str(Call(call.name, call.args, dict([missing[call.name]]) | dict(call.options)))


def _squarest(world: int) -> tuple[int, int]:
    rows = next(rows for rows in range(isqrt(world), 0, -1) if world % rows == 0)
    return rows, world // rows


def _network_text(network: Network) -> str:
    rates, latencies = np.unique(network.rate_bps), np.unique(network.latency_s)
    words = [str(network), f"{len(network.hosts):,} hosts"]
    if len(rates):
        words.append("links of " + _span(rates, rate_words))
        words.append("latency " + _span(latencies, time_text) + " a link")
    return ", ".join(words)


def _electrical_bound_s(network: Network, schedule: Schedule, nbytes: float) -> float:
    world, links = schedule.world, len(network.ends)
    rates, least_s = np.zeros(world), np.full(world, np.inf)
    for end in network.ends.T:  # both ends of a link: full duplex, so a rank receives as fast as it sends
        mine = end < world
        np.add.at(rates, end[mine], network.rate_bps[mine])
        np.minimum.at(least_s, end[mine], network.latency_s[mine])
    one_s = 8 * nbytes / float(rates.min())
    all_s = 16 * (world - 1) * nbytes / float(rates.sum()) if not schedule.aggregators else 0.0
    return max(one_s, all_s) + (float(least_s.min()) if links else 0.0)


def _extremes(name: str, values: Floats) -> dict[str, float | None]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (None, None)
    return {name: low, f"most_{name}": high}


def _span(values: Any, words: Callable[[float], str]) -> str:
    return words(values[0]) if len(values) == 1 else f"{words(values[0])} to {words(values[-1])}"


# ---- optical rings ----


def _whole(text: str) -> int:
    return int(text)


def _all_or_whole(text: str) -> int | None:
    return None if text == "all" else int(text)


def _decibels(text: str) -> float:
    number, unit = text[:-2].strip(), text[-2:]
    if unit != "dB":
        raise ConfigError(f"loss {text!r} has no unit; write for example 30dB")
    loss = float(number)
    if not 0 <= loss < inf:
        raise ConfigError(f"loss {text!r} must be 0 or more, and finite")
    return loss


_RING: dict[str, tuple[str, Callable[[str], Any]]] = {
    "nodes": ("nodes", _whole),
    "wavelengths": ("wavelengths", _whole),
    "rate": ("rate_bps", parse_rate),
    "setup": ("setup_s", parse_time),
    "most_hops": ("most_hops", _whole),
    "hop": ("hop_s", parse_time),
    "transceivers": ("transceivers", _all_or_whole),
}
_LOSS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "budget": ("budget_db", _decibels),
    "fixed": ("fixed_db", _decibels),
    "pass": ("pass_db", _decibels),
    "resonators": ("resonators", _whole),
    "propagation": ("propagation_db", _decibels),
}

OPTICAL_OPTIONS = (*_RING, *_LOSS)


def _optical(text: str, call: Call, world: int | None) -> OpticalRing:
    ring: dict[str, Any] = {}
    loss: dict[str, Any] = {}
    known = _RING | _LOSS
    check_options(text, call, known)
    for key, value in call.options.items():
        name, reader = known[key]
        try:
            (ring if key in _RING else loss)[name] = reader(value)
        except ValueError as cause:
            raise ConfigError(
                f"network {text!r}: {key}={value} is no number; write for example {key}=64"
            ) from cause
    if "nodes" not in ring and world is None:
        raise ConfigError(f"network {text!r} does not say how many nodes; give --world, or nodes=...")
    if loss:
        ring["most_hops"] = _most_hops(loss, text)
    if ring.get("most_hops") is not None and ring["most_hops"] < 1:
        raise ConfigError(
            f"network {text!r}: most_hops={ring['most_hops']}: light that reaches a neighbour goes 1 hop or more"
        )
    return OpticalRing(**({"nodes": world} | ring))


def _most_hops(loss: dict[str, Any], text: str) -> int | None:
    if "budget_db" not in loss:
        raise ConfigError(f"network {text!r} gives losses but no budget; write for example budget=30dB")
    return optical.PowerBudget(**({"fixed_db": 0.0, "pass_db": 0.0, "resonators": 0} | loss)).most_hops
