"""Another link, another number of ranks, an aggregator in the switch: a probe as it would be there, before anybody buys it.

    operation(m) = stages(n) x software latency + f(n) m / rate          what of a measured curve is the link's is exchanged for the new link's

What the CPU spends on a byte stays, and is a lower bound. Calibrations do not hold elsewhere and are left out: intervals are wide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tacit.errors import ConfigError
from tacit.plan.values import (
    BASELINES,
    Curve,
    OperationCurve,
    OperationUse,
    Probe,
    ProbedMachine,
    RequestCost,
    StrategyCost,
)
from tacit.units import parse_rate, parse_time, time_text

PAYLOAD_SHARE = 0.9565  # of a rate, in full packets at an MTU of 1500
STAGE_S = 2e-4  # gloo's own time for a stage, where nobody measured it
MOST_WORLD = 1 << 14
_SIZES = (64.0, 65536.0, float(1 << 20), float(1 << 24))
_SPREAD = 0.1
_AGGREGATED = ("thc", "hush", "none", "bf16")


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What is asked; None: as it is."""

    link_bps: float | None = None
    world: int | None = None
    latency_s: float | None = None
    aggregator: bool = False

    def __str__(self) -> str:
        parts = [
            f"links of {self.link_bps / 1e9:g} Gbit/s" if self.link_bps else "",
            f"{self.world} ranks" if self.world else "",
            f"a latency of {time_text(self.latency_s)}" if self.latency_s else "",
            "an aggregator in the switch" if self.aggregator else "",
        ]
        return ", ".join(part for part in parts if part)


def parsed_what_if(text: str) -> WhatIf:
    """`link=25Gbit world=64 latency=5us switch=aggregator`, in any order; raises ConfigError for what it does not know."""
    readers: Mapping[str, tuple[str, Callable[[str], Any]]] = {
        "link": ("link_bps", _rate),
        "world": ("world", _world),
        "latency": ("latency_s", parse_time),
        "switch": ("aggregator", _aggregator),
    }
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name not in readers or not value:
            raise ConfigError(
                f"--what-if {word!r}: write link=25Gbit, world=64, latency=5us or switch=aggregator, several with spaces between"
            )
        field, read = readers[name]
        found[field] = read(value)
    if not found:
        raise ConfigError("--what-if is empty; write for example 'link=25Gbit world=64'")
    return WhatIf(**found)


def _rate(text: str) -> float:
    rate_bps = parse_rate(text)
    if rate_bps < 1:
        raise ConfigError(f"link={text}: a link carries at least 1 bit a second; write for example 10Gbit")
    return rate_bps


def _world(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 2 <= int(text) <= MOST_WORLD:
        raise ConfigError(f"world={text[:20]}: a whole number of ranks from 2 to {MOST_WORLD:,}")
    return int(text)


def _aggregator(text: str) -> bool:
    if text != "aggregator":
        raise ConfigError(
            f"switch={text}: a switch may be an aggregator and nothing else; write switch=aggregator"
        )
    return True


def assumed(
    world: int,
    link_bps: float,
    latency_s: float,
    costs: tuple[StrategyCost, ...],
    cores: float,
    machine: ProbedMachine,
) -> Probe:
    """A probe without a process group: operations by formula, codecs as they were timed here."""
    names = {use.operation for cost in costs for request in cost.requests for use in request.uses}
    lengths = (
        {"all_to_all short", "all_to_all long"} if any(n.startswith("all_to_all") for n in names) else set()
    )
    operations = tuple(
        OperationCurve(name, _formula(name, world, link_bps, latency_s))
        for name in sorted({*names, *lengths, "send"})
    )
    rate_bps = link_bps * PAYLOAD_SHARE
    about = f"operations are {time_text(STAGE_S + latency_s)} a stage and the link's rate, by formula; codecs were timed in this one process"
    return Probe(
        world, "none", "cpu", cores, machine, operations, costs,
        latency_s=STAGE_S + latency_s, at_once_bps=rate_bps, alone_bps=rate_bps, assumed=about,
    )  # fmt: skip


def _formula(name: str, world: int, link_bps: float, latency_s: float) -> Curve:
    stage_s, rate_bps = STAGE_S + latency_s, link_bps * PAYLOAD_SHARE
    p50 = tuple(stages(name, world) * stage_s + 8 * factor(name, world) * size / rate_bps for size in _SIZES)
    return _spread(p50)


def stages(name: str, world: int) -> float:
    """Messages one after the other in an operation."""
    if name.startswith("all_reduce"):
        return 2.0 * (world - 1)
    return float(world - 1) if name == "all_to_all long" else 1.0


def factor(name: str, world: int) -> float:
    """Bytes that leave a rank for each byte of an operation's size."""
    if name.startswith("all_reduce"):
        return 2.0 * (world - 1) / world
    return float(world - 1) if name.startswith("all_to_all") else 1.0


def elsewhere(
    probe: Probe, asked: WhatIf, valid: Callable[[str, int], bool] = lambda choice, world: True
) -> Probe:
    """The probe as it would be there. `valid` leaves out choices that cannot work among so many ranks."""
    world, link_bps = asked.world or probe.world, asked.link_bps
    operations = tuple(
        OperationCurve(
            each.operation,
            _moved(each.operation, each.curve, probe.world, world, link_bps, asked.latency_s or 0.0),
        )
        for each in probe.operations
    )
    costs = [
        _resized(cost, probe.world, world)
        for cost in probe.costs
        if cost.choice in BASELINES or valid(cost.choice, world)
    ]
    rate_bps = link_bps * PAYLOAD_SHARE if link_bps else probe.at_once_bps
    if asked.aggregator:
        added = [star for cost in costs if (star := _through_aggregator(cost, world)) is not None]
        costs += added
        latency_s = 2 * (probe.latency_s + (asked.latency_s or 0.0))
        operations = (*operations, OperationCurve("aggregate", _line(latency_s, 8 / rate_bps)))
    why = "; ".join(filter(None, (probe.assumed, f"{asked}, by formula from what was measured")))
    return replace(
        probe, world=world, operations=operations, costs=tuple(costs), calibrations=(), at_once_bps=rate_bps, pairs=None, tables=(),
        alone_bps=rate_bps, latency_s=probe.latency_s + (asked.latency_s or 0.0), assumed=why,
    )  # fmt: skip


def _moved(name: str, curve: Curve, old: int, new: int, link_bps: float | None, latency_s: float) -> Curve:
    """An operation's curve among other ranks, on another link."""
    last = curve.sizes[-1]
    first_s = curve.at(curve.sizes[0])
    slope_s, cpu_slope_s = (
        (curve.at(last) - first_s) / max(1.0, last - curve.sizes[0]),
        curve.cpu(last) / last,
    )
    grown = factor(name.removesuffix(" x2"), new) / factor(name.removesuffix(" x2"), old)
    alone = name.removesuffix(" x2")
    more_stages = stages(alone, new) / stages(alone, old)
    slope_s = max(
        slope_s * grown if link_bps is None else 8 * factor(alone, new) / (link_bps * PAYLOAD_SHARE),
        cpu_slope_s * grown,
    )
    each_s = first_s * more_stages + stages(alone, new) * latency_s * (0.5 if name.endswith(" x2") else 1.0)
    made = _line(each_s, slope_s)
    return replace(
        made, cpu_s=tuple(curve.cpu(0) * more_stages + cpu_slope_s * grown * size for size in made.sizes)
    )


def _line(first_s: float, slope_s: float) -> Curve:
    p50 = tuple(first_s + slope_s * size for size in _SIZES)
    return _spread(p50)


def _resized(cost: StrategyCost, old: int, new: int) -> StrategyCost:
    """Shards shrink with the number of ranks; what is gathered does not."""
    if old == new or cost.choice.endswith("gossip"):
        return cost
    requests = tuple(
        replace(request, uses=tuple(_use(use, request, old, new) for use in request.uses))
        for request in cost.requests
    )
    share = (new - 1) / new / ((old - 1) / old)
    gathers = any(request.kind == "Gather" for request in cost.requests)
    sent = tuple(nbytes * ((new - 1) / (old - 1) if gathers else share) for nbytes in cost.sent_nbytes)
    return replace(cost, requests=requests, sent_nbytes=sent)


def _use(use: OperationUse, request: RequestCost, old: int, new: int) -> OperationUse:
    if not use.operation.startswith("all_to_all") or request.kind == "Gather":
        return use
    return replace(use, nbytes=tuple(nbytes * old / new for nbytes in use.nbytes))


def _through_aggregator(cost: StrategyCost, world: int) -> StrategyCost | None:
    """The codec of a sharded (or plain) choice with its sums made in the switch; None where an aggregator cannot add it."""
    parts = cost.choice.split(" / ")
    if (
        len(parts) != 3
        or parts[1].partition("(")[0] not in _AGGREGATED
        or parts[2] not in ("sharded", "allreduce")
    ):
        return None
    if parts[1].startswith(("thc", "hush")) != (parts[2] == "sharded"):
        return None
    requests = tuple(
        request
        if request.kind == "Max"
        else replace(request, owner=request.owner.scaled(0.0), uses=_carried(request, cost, world))
        for request in cost.requests
    )
    sent = tuple(max(u) for u in zip(*(use.nbytes for r in requests for use in r.uses), strict=True))
    return replace(
        cost, choice=f"{parts[0]} / {parts[1]} / star", requests=requests, sent_nbytes=sent, in_flight=1
    )


def _carried(request: RequestCost, cost: StrategyCost, world: int) -> tuple[OperationUse, ...]:
    """Up and down at the same time: the longer of both. Indices come down as lanes; floats go as lanes of 32 bits."""
    shards = [use.nbytes for use in request.uses if use.operation.startswith("all_to_all")]
    if shards:
        return (OperationUse("aggregate", tuple(world * max(each) for each in zip(*shards, strict=True))),)
    return (OperationUse("aggregate", tuple(4 * numel for numel in cost.numels)),)


def _spread(p50: tuple[float, ...]) -> Curve:
    """What a formula gives, as if it had been measured so often that it spreads."""
    low, high = (tuple(factor * s for s in p50) for factor in (1 - _SPREAD, 1 + _SPREAD))
    return Curve(_SIZES, p50, low, high, (0.0,) * len(_SIZES))
