"""What a vector becomes on the wire: one sum of its own bytes, or what a codec requests, each request costed on its own.

A codec's payloads are added in flight as they stand, indices as the lanes they are looked up in (as schemes/scheduled.py
sends them). Where a node that adds for all stands between (sharded, server, star), indices go to it and lanes come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tacit.errors import ConfigError, PairingError
from tacit.schedules.schedule import Phase, Schedule
from tacit.sim.costs import Cost
from tacit.sim.fabric import Fabric

_DECODES = ("sharded", "server")  # whoever adds there may decode first: any codec
_LOOKS_UP = (*_DECODES, "star")


@dataclass(frozen=True, slots=True)
class PayloadSize:
    """One collective: the bytes a rank sends, and the bytes it receives."""

    kind: str
    up_nbytes: float
    down_nbytes: float


def plain(nbytes: float) -> tuple[PayloadSize, ...]:
    """A vector as it is."""
    return (PayloadSize("Sum", nbytes, nbytes),)


def of_codec(codec_text: str, elements: int, schedule: Schedule) -> tuple[PayloadSize, ...]:
    """What the codec requests for `elements` float32 numbers, found by driving it with shapes only. Imports torch."""
    from tacit.layout import Layout
    from tacit.requests import declared_nbytes
    from tacit.shapes import requests_of
    from tacit.strategy import parse_codec

    codec = parse_codec(codec_text)
    if declared_nbytes(codec, Layout.of({"matrix": (1024, 1024)})) != codec.nbytes(1024**2):
        raise PairingError(
            f"{codec} sends by the shapes of parameters, and a workload has only their number; measure it with tacit lab"
        )
    if schedule.goal != "sum":
        raise PairingError(
            f"{schedule.name} ends in a {schedule.goal}, not in a sum; codecs need a sum, as ring ends in"
        )
    if codec.traits.varies:
        raise PairingError(
            f"what {codec} sends depends on the numbers, and a workload has only their count; measure it with tacit lab"
        )
    asked = requests_of(codec, elements, schedule.world)
    if any(request.kind == "Merge" for request in asked):
        if schedule.name != "tree":
            raise PairingError(f"{codec} merges partial sums on the way up a tree; take tree")
        return tuple(PayloadSize(r.kind, r.up_nbytes, r.down_nbytes) for r in asked)
    if not codec.traits.summable and schedule.name not in _DECODES:
        raise PairingError(
            f"{codec} payloads cannot be added in flight by {schedule.name}; take sharded or server"
        )
    if any(request.kind == "Gather" for request in asked):
        raise PairingError(f"{codec} gathers instead of adding; no schedule that ends in a sum can carry it")
    looks_up = schedule.name in _LOOKS_UP
    return tuple(
        PayloadSize(r.kind, r.up_nbytes if looks_up or r.kind != "TableSum" else r.down_nbytes, r.down_nbytes)
        for r in asked
    )


def costs(schedule: Schedule, payloads: Sequence[PayloadSize], fabric: Fabric) -> tuple[Cost, ...]:
    """One cost a payload, in the order of the requests."""
    return tuple(_cost(schedule, payload, fabric) for payload in payloads)


def _cost(schedule: Schedule, payload: PayloadSize, fabric: Fabric) -> Cost:
    if payload.up_nbytes == payload.down_nbytes:
        return fabric.cost(schedule, payload.up_nbytes)
    adds = tuple(phase for phase in schedule.phases if _adds(phase))
    copies = tuple(phase for phase in schedule.phases if not _adds(phase))
    if schedule.phases != adds + copies or "optical" in schedule.notes:
        raise ConfigError(
            f"{schedule.name} mixes adding and copying; a payload that changes its size takes sharded, server or star"
        )
    up = fabric.cost(replace(schedule, phases=adds), payload.up_nbytes)
    down = fabric.cost(replace(schedule, phases=copies), payload.down_nbytes)
    return replace(up, stages=up.stages + down.stages)


def _adds(phase: Phase) -> bool:
    return bool(phase.stage.add.all())
