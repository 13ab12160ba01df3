"""How long a message should take, from the plan alone: what the lab is held to."""

from __future__ import annotations

from collections import defaultdict
from math import ceil

from tacit.lab.network.plan import HEADER_NBYTES, Cable, NetworkPlan, crossed


def segment_nbytes(mtu: int) -> int:
    """Payload of a full TCP segment: the MTU less the headers of IP and TCP (the 14 bytes of Ethernet are beside it)."""
    return mtu - (HEADER_NBYTES - 14)


def wire_nbytes(nbytes: float, mtu: int = 1500) -> float:
    """What a shaper is charged for `nbytes` of payload: every segment has its headers."""
    return nbytes + HEADER_NBYTES * ceil(nbytes / segment_nbytes(mtu))


def payload_share(mtu: int = 1500) -> float:
    """The most of a link's rate that payload can have: 95.64 % at an MTU of 1500."""
    segment = segment_nbytes(mtu)
    return segment / (segment + HEADER_NBYTES)


def path_mtu(cables: list[Cable]) -> int:
    return min(cable.mtu for cable in cables)


def one_way_s(plan: NetworkPlan, src: str, dst: str, nbytes: int) -> float:
    """A message alone on its way: its bytes at the slowest link's rate, and the delays added on the path."""
    cables = crossed(plan, src, dst)
    wire = wire_nbytes(nbytes, path_mtu(cables))
    return 8 * wire / min(c.shaper.rate_bps for c in cables) + sum(c.shaper.delay_s for c in cables)


def free_nbytes(plan: NetworkPlan, src: str, dst: str) -> int:
    """What the slowest link of a path lets pass at once, after a pause."""
    slowest = min(crossed(plan, src, dst), key=lambda cable: cable.shaper.rate_bps)
    return slowest.shaper.burst_nbytes + plan.gso_nbytes


def ring_s(plan: NetworkPlan, nbytes: int) -> float:
    """A ring all-reduce in host order, 2(n-1) stages of 1/n of the payload, each as long as its busiest link needs."""
    names = [host.name for host in plan.hosts]
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))
    load: defaultdict[tuple[str, str], float] = defaultdict(float)  # seconds, by the port it leaves
    for src, dst in pairs:
        node, path = src, crossed(plan, src, dst)
        sent = wire_nbytes(nbytes / len(names), path_mtu(path))
        for cable in path:
            port = cable.a if cable.a.node == node else cable.b
            load[port.node, port.device] += 8 * sent / cable.shaper.rate_bps
            node = cable.b.node if port is cable.a else cable.a.node
    stage_s = max(load.values())
    late_s = max(sum(c.shaper.delay_s for c in crossed(plan, src, dst)) for src, dst in pairs)
    return 2 * (len(names) - 1) * (stage_s + late_s)
