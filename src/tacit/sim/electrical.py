"""What a schedule takes on an electrical network: stage by stage, transfers share links by max-min fairness.

    stage = max over its transfers of (latency of the path + overhead + when the last bit has left)
    total = sum over phases of times x stage

A stage begins when the one before has ended everywhere. All its transfers start at once; whenever one ends, the rest share
anew. Links are full duplex and never drop: a fluid, not packets. Chunks count as exactly even (a vector of whole elements
is cut to within one element of that), so the stages of a phase cost the same, and are costed once: a ring of 4096 ranks is
two stages to compute, not 33 million transfers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from tacit.errors import ConfigError
from tacit.schedules.schedule import Schedule, Stage
from tacit.sim.costs import Cost, StageCost
from tacit.sim.fairness import finish
from tacit.sim.routes import Routes, link_text, route
from tacit.topology import Floats, Ints, Network
from tacit.units import rate_text, time_text


@dataclass(frozen=True, slots=True)
class SimGridFactors:
    """What SimGrid's default network model (LV08; Velho and Legrand 2009) puts in, as documented; give it to `cost`.

    Where all paths are alike and data flows both ways, it comes to latency x 13.01 and rate x 0.97 / 1.05.
    """

    latency: float = 13.01  # times every latency: slow start
    rate: float = 0.97  # times every rate: headers
    acknowledgements: float = (
        0.05  # of a flow's rate, sent back on the way from destination to source (cross-traffic)
    )
    weight_nbytes: float = (
        20537  # a flow's penalty is the sum over links of latency + this / rate: TCP favours short ways
    )


def cost(
    schedule: Schedule,
    nbytes: float,
    network: Network,
    *,
    overhead_s: float = 0.0,
    aggregators_on: str | Sequence[str] = "switches",
    simgrid: SimGridFactors | None = None,
) -> Cost:
    """The time of `schedule` for one vector of `nbytes`, with what limits every stage.

    Rank r sits on host r. `aggregators_on`: "switches" puts aggregator i on switch i (it adds in the path, at the links'
    rate), "hosts" on the hosts after the ranks (its own link limits it); or the names of the nodes. Every message costs
    its sender `overhead_s`, one after another. `simgrid`: as SimGrid's model of TCP sees it.
    """
    if not 0 <= nbytes < inf or not 0 <= overhead_s < inf:
        raise ConfigError(f"{nbytes} bytes, {overhead_s} s a message: neither may be negative, or infinite")
    place = _places(schedule, network, aggregators_on)
    chunk_nbytes = nbytes / max(1, schedule.chunks)
    known: dict[tuple[bytes, ...], StageCost] = {}
    stages = []
    for phase in schedule.phases:
        stage = phase.stage
        if not phase.times or not len(stage):
            continue
        key = (stage.src.tobytes(), stage.dst.tobytes(), stage.count.tobytes())
        if key not in known:
            known[key] = _stage_cost(stage, chunk_nbytes, network, place, overhead_s, simgrid)
        stages.append(replace(known[key], times=phase.times))
    return Cost(schedule.name, schedule.world, nbytes, tuple(stages))


def alpha_beta(schedule: Schedule, nbytes: float, rate_bps: float, latency_s: float) -> float:
    """The check beside it, seconds: every stage takes `latency_s` and the busiest rank's bytes, in or out, over its rate.

    What a network takes on which only the ranks' own links count: a star, or a fat tree without collisions.
    """
    total_s, chunk_nbytes = 0.0, nbytes / max(1, schedule.chunks)
    for phase in schedule.phases:
        stage = phase.stage
        if not len(stage):
            continue
        busiest = max(
            np.bincount(end, weights=stage.count, minlength=schedule.nodes)[: schedule.world].max()
            for end in (stage.src, stage.dst)
        )
        total_s += phase.times * (latency_s + 8 * busiest * chunk_nbytes / rate_bps)
    return float(total_s)


def _places(schedule: Schedule, network: Network, aggregators_on: str | Sequence[str]) -> Ints:
    """The node of the network at which each node of the schedule sits."""
    world, count, hosts = schedule.world, schedule.aggregators, len(network.hosts)
    if world > hosts:
        raise ConfigError(
            f"{schedule.name} has {world} ranks, {network} has {hosts} hosts; each rank needs one"
        )
    ranks = np.arange(world)
    if not count:
        return ranks
    if aggregators_on == "switches":
        room, first = len(network.switches), hosts
    elif aggregators_on == "hosts":
        room, first = hosts - world, world
    else:
        names = [aggregators_on] if isinstance(aggregators_on, str) else list(aggregators_on)
        if len(names) != count:
            raise ConfigError(
                f"{schedule.name} has {count} aggregators, {len(names)} places are named; name one for each"
            )
        return np.concatenate([ranks, [network.node(name) for name in names]])
    if count > room:
        raise ConfigError(
            f"{schedule.name} has {count} aggregators, {network} has {room} {aggregators_on} for them; "
            f"name their nodes with aggregators_on, or take a larger network"
        )
    return np.concatenate([ranks, first + np.arange(count)])


def _stage_cost(
    stage: Stage,
    chunk_nbytes: float,
    network: Network,
    place: Ints,
    overhead_s: float,
    simgrid: SimGridFactors | None,
) -> StageCost:
    src, dst, chunks = _messages(stage, len(place))
    routes = route(network, place[src], place[dst])
    latency_s, capacity_bps = routes.along(network.latency_s), np.repeat(network.rate_bps, 2)
    bits = 8 * chunk_nbytes * chunks
    if simgrid is None:
        ended = finish(routes, bits, capacity_bps)
    else:
        penalty = latency_s + routes.along(8 * simgrid.weight_nbytes / network.rate_bps)
        latency_s = simgrid.latency * latency_s
        back = route(network, place[dst], place[src])
        routes = _with_acknowledgements(routes, back, simgrid.acknowledgements)
        ended = finish(routes, bits, simgrid.rate * capacity_bps, penalty, start_s=latency_s)
        ended = replace(ended, time_s=ended.time_s - latency_s)
    latency_s = latency_s + overhead_s * np.bincount(src, minlength=len(place))[src]
    slowest = int(np.argmax(latency_s + ended.time_s))
    hops = routes.hops()
    if latency_s[slowest] > ended.time_s[slowest]:
        ends = f"{network.node_name(place[src[slowest]])} -> {network.node_name(place[dst[slowest]])}"
        limit = f"latency of {ends}, {hops[slowest]} links, {time_text(latency_s[slowest])}"
    else:
        limit = _limit(network, int(ended.full[slowest]), int(ended.sharing[slowest]))
    return StageCost(
        times=1,
        transfers=len(stage),
        nbytes=float(chunks.max() * chunk_nbytes),
        latency_s=float(latency_s[slowest]),
        transfer_s=float(ended.time_s[slowest]),
        limit=limit,
        hops=int(hops.max()),
    )


def _messages(stage: Stage, nodes: int) -> tuple[Ints, Ints, Floats]:
    """(source, destination, chunks): what one node sends another in a stage is one message."""
    pair, which = np.unique(stage.src * nodes + stage.dst, return_inverse=True)
    return pair // nodes, pair % nodes, np.asarray(np.bincount(which, stage.count), float)


def _with_acknowledgements(there: Routes, back: Routes, weight: float) -> Routes:
    return Routes.of(
        np.concatenate([there.flow, back.flow]),
        np.concatenate([there.link, back.link]),
        there.flows,
        np.concatenate([there.weight, weight * back.weight]),
    )


def _limit(network: Network, link: int, sharing: int) -> str:
    if link < 0:
        return "nothing: no link is crossed"
    shared = f", shared by {sharing} transfers" if sharing > 1 else ""
    return f"link {link_text(network, link)}, {rate_text(network.rate_bps[link >> 1])}{shared}"
