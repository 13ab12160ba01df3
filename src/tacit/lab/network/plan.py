"""A network as the lab builds it: who has which interface, address and MAC, and how each link is shaped. Pure values.

Every host and switch is a network namespace, every link a veth pair, every switch a bridge. Nothing is left to
discovery: neighbours, routes and the bridges' tables are written down beforehand, so a network with loops (two spines)
works without a spanning tree, and no packet travels that a rank did not send.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tacit.lab.errors import LabError

if (
    TYPE_CHECKING
):  # numpy would start threads in the keeper, and a process with threads may not make a user namespace
    from tacit.topology import Link, Network

MOST_NODES = 250
ADDED_DELAY_S = 1e-4  # a delay below this is not added: the lab's own path takes about as long
TCP_WMEM_NBYTES = 8 << 20  # a sender must be able to fill the queue of the shaper
LEAST_WINDOW_NBYTES, WINDOW_S = 64 << 10, 8e-3
Near = list[list[tuple[int, int]]]  # for each node its (neighbour, link) pairs

HEADER_NBYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps


@dataclass(frozen=True, slots=True)
class Shaper:
    """One direction of a link. htb lets its class go into debt by one packet, so a burst below a packet's size is right.

    What passes at once on an idle link is at most `free_nbytes`: a message must be many times longer to be timed truly.
    """

    rate_bps: float
    burst_nbytes: int
    gso_nbytes: int  # the longest packet the kernel hands down before it is cut to the MTU
    queue_nbytes: int
    delay_s: float = 0.0

    @property
    def free_nbytes(self) -> int:
        return self.burst_nbytes + self.gso_nbytes


def shaper(rate_bps: float, mtu: int = 1500, loss: float = 0.0, delay_s: float = 0.0) -> Shaper:
    """The shaper of a link at `rate_bps`, by the measurements in docs/decisions/0007-lab-namespaces.md.

    The burst is what the link carries in 64 us, about the delay of a timer, and at least one packet. Packets handed down
    are 262 us long, from 8 kB (cheap enough up to 250 Mbit) to 64 kB; with loss they hold one segment each, so that a
    lost packet is one packet.
    """
    burst = max(round(64e-6 * rate_bps / 8), mtu + 500)
    gso = min(max(round(262e-6 * rate_bps / 8), 8192), 65536) if not loss else 2900
    queue = 1 << 20 if rate_bps <= 250e6 else 4 << 20
    return Shaper(rate_bps, burst, gso, queue, delay_s if delay_s >= ADDED_DELAY_S else 0.0)


@dataclass(frozen=True, slots=True)
class Port:
    """One end of a link: an interface of a node."""

    node: str
    device: str
    mac: str


@dataclass(frozen=True, slots=True)
class Cable:
    """A link, with the same shaper at both ends, each for what leaves there."""

    a: Port
    b: Port
    shaper: Shaper
    mtu: int
    loss: float  # share of packets dropped on arrival, at each end


@dataclass(frozen=True, slots=True)
class Route:
    """What goes to `address` leaves through `device`, for the next host with `mac` (itself, or one that passes it on)."""

    address: str
    device: str
    next_address: str
    mac: str
    mtu: int | None = (
        None  # of the path, where a link on it has a smaller one than the first: bridges send no ICMP about it
    )


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A host: `device` holds its address, and is the interface gloo uses."""

    name: str
    address: str
    device: str
    routes: tuple[Route, ...]
    switches: tuple[
        Route, ...
    ] = ()  # those it is joined to directly: one may have a program that answers, an aggregator


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """A bridge; `table` maps ports to the MACs behind them. Its own address is known to the hosts at its ports."""

    name: str
    table: tuple[tuple[str, str], ...]  # (device, mac)
    address: str = ""
    mac: str = ""
    hosts: tuple[tuple[str, str], ...] = ()  # (address, mac) of those at its ports


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """All that the keeper needs to build a network."""

    hosts: tuple[HostPlan, ...]
    switches: tuple[SwitchPlan, ...]
    cables: tuple[Cable, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """What the kernel must have besides namespaces, veth, bridge and htb."""
        delays, losses = any(c.shaper.delay_s for c in self.cables), any(c.loss for c in self.cables)
        return ("netem",) * delays + ("nft",) * losses

    @property
    def window_nbytes(self) -> int:
        """The most that a receiver lets a sender have on its way: 8 ms of the slowest link and what is on the longest path, twice.

        More would only stand in a queue in the middle, be dropped there, and delay the acknowledgements of the other way.
        """
        rates_bps = [cable.shaper.rate_bps for cable in self.cables] or [0.0]
        far_s = 2 * sum(cable.shaper.delay_s for cable in self.cables)
        return max(LEAST_WINDOW_NBYTES, round((WINDOW_S * min(rates_bps) + 2 * far_s * max(rates_bps)) / 8))

    @property
    def gso_nbytes(self) -> int:
        """One limit for all interfaces, that of the slowest link: a packet is not cut again on its way."""
        return min((cable.shaper.gso_nbytes for cable in self.cables), default=65536)


def plan(network: Network) -> NetworkPlan:
    """How `network` is built; refused here is what no kernel could build."""
    _check(network)
    links = list(network.links)
    cables = tuple(_cable(network, i, link, links) for i, link in enumerate(links))
    near = _near(network)
    everywhere = range(network.nodes)
    towards = [_towards(near, host, everywhere) for host in range(len(network.hosts))]
    hosts = tuple(_host(network, host, cables, near, towards) for host in range(len(network.hosts)))
    tables = _tables(network, cables, near)
    switches = [_switch(network, i, cables, near, tables) for i in range(len(network.switches))]
    made = NetworkPlan(hosts, tuple(switches), cables)
    return made if len({cable.mtu for cable in cables}) < 2 else _with_path_mtus(made)


def _with_path_mtus(built: NetworkPlan) -> NetworkPlan:
    """Every route knows the smallest MTU on its path."""
    address = {host.address: host.name for host in built.hosts}

    def known(host: HostPlan, route: Route) -> Route:
        return replace(
            route, mtu=min(cable.mtu for cable in crossed(built, host.name, address[route.address]))
        )

    hosts = [replace(h, routes=tuple(known(h, route) for route in h.routes)) for h in built.hosts]
    return replace(built, hosts=tuple(hosts))


def crossed(built: NetworkPlan, src: str, dst: str) -> list[Cable]:
    """The cables that a packet crosses from host `src` to host `dst`, in order."""
    hosts = {host.name: host for host in built.hosts}
    tables = {switch.name: {mac: device for device, mac in switch.table} for switch in built.switches}
    at_port = {(port.node, port.device): cable for cable in built.cables for port in (cable.a, cable.b)}
    found, node, mac = list[Cable](), src, ""
    while node != dst:
        if node in hosts:
            route = next(route for route in hosts[node].routes if route.address == hosts[dst].address)
            device, mac = route.device, route.mac
        else:
            device = tables[node][mac]
        cable = at_port[node, device]
        found.append(cable)
        node = cable.b.node if cable.a.node == node else cable.a.node
    return found


def at_rate(network: Network, rate_bps: float) -> Network:
    """The same network with every link at one rate."""
    from tacit.topology import check_positive
    from tacit.units import rate_text

    check_positive("rate", rate_bps)
    name = f"{network.name} at {rate_text(rate_bps)}"
    return replace(network, rate_bps=0 * network.rate_bps + rate_bps, name=name)


def address_of(host: int) -> str:
    """The address of host number `host`."""
    return f"10.77.{host // 250}.{host % 250 + 1}"


def _check(network: Network) -> None:
    if network.nodes > MOST_NODES:
        raise LabError(
            f"{network}: {network.nodes} hosts and switches; the lab builds up to {MOST_NODES} on one machine"
        )
    for name in (*network.hosts, *network.switches):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}", name):
            raise LabError(
                f"{network}: the name {name!r} cannot be a namespace's; use letters, digits, '-', '_' and '.'"
            )


def _near(network: Network) -> Near:
    near: Near = [[] for _ in range(network.nodes)]
    for link, (a, b) in enumerate(network.ends.tolist()):
        near[a].append((b, link))
        near[b].append((a, link))
    return near


def _cable(network: Network, index: int, link: Link, links: list[Link]) -> Cable:
    made = shaper(link.rate_bps, link.mtu, link.loss, link.latency_s)
    ends = [_port(network, node, end, index, links) for end, node in enumerate((link.a, link.b))]
    return Cable(ends[0], ends[1], made, link.mtu, link.loss)


def _port(network: Network, node: str, end: int, index: int, links: list[Link]) -> Port:
    nth = sum(node in (link.a, link.b) for link in links[:index])
    mac = f"02:7a:00:{index >> 8:02x}:{index & 255:02x}:{end:02x}"
    return Port(node, f"{'eth' if node in network.hosts else 'port'}{nth}", mac)


def _end(cable: Cable, node: str) -> Port:
    return cable.a if cable.a.node == node else cable.b


def _towards(near: Near, goal: int, nodes: range) -> dict[int, tuple[int, int]]:
    """For every one of `nodes` that reaches `goal` over them, its next (node, link) on a shortest path.

    Of several shortest ones the goal's number chooses, so that hosts spread over spines.
    """
    far, layer = {goal: 0}, [goal]
    for node in layer:  # grows while it is read
        for other, _ in near[node]:
            if other in nodes and other not in far:
                far[other] = far[node] + 1
                layer.append(other)
    chosen = {}
    for node in layer[1:]:
        closer = [(other, link) for other, link in near[node] if other in far and far[other] < far[node]]
        chosen[node] = closer[goal % len(closer)]
    return chosen


def _tables(network: Network, cables: tuple[Cable, ...], near: Near) -> dict[str, list[tuple[str, str]]]:
    """For every switch the port towards each host's interface that switches alone lead to."""
    hosts, tables = len(network.hosts), {name: list[tuple[str, str]]() for name in network.switches}
    for host, name in enumerate(network.hosts):
        for start, link in near[host]:
            mac = _end(cables[link], name).mac
            if start < hosts:
                continue
            only = [[(other, own) for other, own in pairs if other != host or own == link] for pairs in near]
            for switch, (_, exit_link) in _towards(only, host, range(hosts, network.nodes)).items():
                node = network.node_name(switch)
                tables[node].append((_end(cables[exit_link], node).device, mac))
    return tables


def _host(
    network: Network,
    host: int,
    cables: tuple[Cable, ...],
    near: Near,
    towards: list[dict[int, tuple[int, int]]],
) -> HostPlan:
    name, routes = network.hosts[host], []
    for goal in range(len(network.hosts)):
        if goal == host:
            continue
        node, first = towards[goal][host]
        last = first
        while node >= len(network.hosts):
            node, last = towards[goal][node]
        arrives = _end(cables[last], network.hosts[node])
        routes.append(
            Route(address_of(goal), _end(cables[first], name).device, address_of(node), arrives.mac)
        )
    device = "eth0" if len(near[host]) == 1 else "net0"
    beside = [
        Route(address, _end(cables[link], name).device, address, _switch_mac(node - len(network.hosts)))
        for node, link in near[host]
        if node >= len(network.hosts) and (address := _switch_address(node - len(network.hosts)))
    ]
    return HostPlan(name, address_of(host), device, tuple(routes), tuple(beside))


def _switch(
    network: Network,
    switch: int,
    cables: tuple[Cable, ...],
    near: Near,
    tables: dict[str, list[tuple[str, str]]],
) -> SwitchPlan:
    name, hosts = network.switches[switch], range(len(network.hosts))
    beside = [
        (address_of(node), _end(cables[link], network.hosts[node]).mac)
        for node, link in near[len(hosts) + switch]
        if node in hosts
    ]
    return SwitchPlan(name, tuple(tables[name]), _switch_address(switch), _switch_mac(switch), tuple(beside))


def _switch_address(switch: int) -> str:
    return f"10.78.{switch // 250}.{switch % 250 + 1}"


def _switch_mac(switch: int) -> str:
    return f"02:7a:01:{switch >> 8:02x}:{switch & 255:02x}:00"
