"""Which links a transfer crosses: shortest paths, the same on every run; regular networks by arithmetic, others searched.

Where several shortest paths exist, the destination chooses (D-mod-k, Zahavi 2010): in a full fat tree every shift and every
exchange with rank ^ 2^i then crosses it without two transfers on one link. A torus is crossed one dimension after the
other, the short way round; half-way round, even coordinates go up and odd ones down. In a searched graph hosts forward too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ConfigError
from tacit.topology import Floats, Ints, Network

_MOST_HOPS = 200_000_000  # of all transfers of a stage together: 3.2 GB
_BLOCK = 4_000_000  # cells of a search table


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Flow `flow[i]` crosses directed link `link[i]`; sorted by flow. Link 2 i goes from ends[i, 0] on, 2 i + 1 back."""

    flow: Ints
    link: Ints
    weight: Floats  # of the flow's rate, what it takes from this link: 1, but for acknowledgements
    flows: int

    @staticmethod
    def of(flow: Ints, link: Ints, flows: int, weight: Floats | None = None) -> "Routes":
        """From pairs in any order."""
        weight = np.ones(len(flow)) if weight is None else weight
        order = np.argsort(flow, kind="stable")
        return Routes(flow[order], link[order], weight[order], flows)

    def only(self, which: Ints) -> "Routes":
        """These flows alone, numbered anew."""
        if len(which) == self.flows:
            return self
        number = np.full(self.flows, -1)
        number[which] = np.arange(len(which))
        kept = number[self.flow] >= 0
        return Routes(number[self.flow[kept]], self.link[kept], self.weight[kept], len(which))

    def hops(self) -> Ints:
        return np.bincount(self.flow[self.weight == 1], minlength=self.flows)

    def along(self, value: Floats) -> Floats:
        """The sum of a link's `value` over the path of every flow."""
        return np.asarray(np.bincount(self.flow, value[self.link >> 1], minlength=self.flows), float)


def route(network: Network, src: Ints, dst: Ints) -> Routes:
    """The links between nodes src[i] and dst[i], for all i."""
    regular, hosts = _REGULAR.get(network.kind), len(network.hosts)
    if regular is None:
        return _search(network, src, dst)
    # only a star's arithmetic knows its switch
    direct = ((src < hosts) & (dst < hosts)) | (network.kind == "star")
    if direct.all():
        return regular(network, src, dst)
    return _both(network, src, dst, direct) if direct.any() else _search(network, src, dst)


def link_text(network: Network, link: int) -> str:
    a, b = network.ends[link >> 1][:: -1 if link & 1 else 1]
    return f"{network.node_name(a)} -> {network.node_name(b)}"


def _both(network: Network, src: Ints, dst: Ints, direct: NDArray[np.bool_]) -> Routes:
    """Flows between hosts by arithmetic, flows from or to a switch searched."""
    parts = []
    for which in (np.flatnonzero(direct), np.flatnonzero(~direct)):
        found = route(network, src[which], dst[which])
        parts.append((which[found.flow], found.link))
    return Routes.of(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), len(src))


def _from_columns(columns: list[Ints]) -> Routes:
    """Routes from one column a hop; -1: no such hop."""
    table = np.stack(columns, axis=1)
    flow, hop = np.nonzero(table >= 0)
    return Routes(flow, table[flow, hop], np.ones(len(flow)), len(table))


def _star(network: Network, src: Ints, dst: Ints) -> Routes:
    hosts, apart = len(network.hosts), src != dst
    up, down = apart & (src < hosts), apart & (dst < hosts)
    return _from_columns([np.where(up, 2 * src, -1), np.where(down, 2 * dst + 1, -1)])


def _leaf_spine(network: Network, src: Ints, dst: Ints) -> Routes:
    leaves, hosts, spines = network.sizes
    first, spine = leaves * hosts, dst % spines
    apart, far = src != dst, src // hosts != dst // hosts
    return _from_columns(
        [
            np.where(apart, 2 * src, -1),
            np.where(far, 2 * (first + src // hosts * spines + spine), -1),
            np.where(far, 2 * (first + dst // hosts * spines + spine) + 1, -1),
            np.where(apart, 2 * dst + 1, -1),
        ]
    )


def _fat_tree(network: Network, src: Ints, dst: Ints) -> Routes:
    half, hosts = network.sizes[0] // 2, len(network.hosts)
    middle, top = hosts, hosts + 2 * half * half * half  # where the links of each layer begin
    second, core = dst % half, dst // half % half
    edge_from, edge_to = src // half, dst // half
    pod_from, pod_to = edge_from // half, edge_to // half
    apart, far, farthest = src != dst, edge_from != edge_to, pod_from != pod_to
    return _from_columns(
        [
            np.where(apart, 2 * src, -1),
            np.where(far, 2 * (middle + edge_from * half + second), -1),
            np.where(farthest, 2 * (top + (pod_from * half + second) * half + core), -1),
            np.where(farthest, 2 * (top + (pod_to * half + second) * half + core) + 1, -1),
            np.where(far, 2 * (middle + edge_to * half + second) + 1, -1),
            np.where(apart, 2 * dst + 1, -1),
        ]
    )


def _torus(network: Network, src: Ints, dst: Ints) -> Routes:
    sizes = network.sizes
    flows, links, first = [], [], 0
    at = src.copy()
    for axis, size in enumerate(sizes):
        unit = prod(sizes[axis + 1 :])
        x, target = at // unit % size, dst // unit % size
        ahead = (target - x) % size
        forward = (2 * ahead < size) | ((2 * ahead == size) & (x % 2 == 0))
        steps = np.where(forward, ahead, (size - ahead) % size)
        _check_hops(int(steps.sum()), network)
        flow = np.repeat(np.arange(len(src)), steps)
        step = np.arange(len(flow)) - np.repeat(np.cumsum(steps) - steps, steps)
        origin = at - x * unit  # the node of this line at coordinate 0
        x_here = (x[flow] + np.where(forward[flow], step, -step - 1)) % size  # where the link crossed begins
        if size > 2:
            link = first + origin[flow] + x_here * unit
            back = ~forward[flow]
        else:  # one link, from coordinate 0 to 1
            link = first + origin[flow] // (2 * unit) * unit + origin[flow] % unit
            back = x[flow] == 1
        flows.append(flow)
        links.append(2 * link + back)
        at = at + (target - x) * unit
        first += {1: 0, 2: len(network.hosts) // 2}.get(size, len(network.hosts))
    return Routes.of(np.concatenate(flows), np.concatenate(links), len(src))


_REGULAR: dict[str, Callable[[Network, Ints, Ints], Routes]] = {
    "star": _star,
    "leaf_spine": _leaf_spine,
    "fat_tree": _fat_tree,
    "torus": _torus,
}


# ---- any graph ----


def _search(network: Network, src: Ints, dst: Ints) -> Routes:
    """Breadth first from every destination, in blocks of destinations. O(destinations x links x depth).

    A path from a switch to a host is the way back of the path from the host: one search for all hosts of an aggregator.
    """
    hosts = len(network.hosts)
    swapped = (src >= hosts) & (dst < hosts)
    start, end = np.where(swapped, dst, src), np.where(swapped, src, dst)
    edges = _Edges.of(network)
    order = np.argsort(end, kind="stable")
    targets, firsts = np.unique(end[order], return_index=True)
    block = max(1, _BLOCK // max(1, len(edges.link)))
    flows, links = [], []
    for low in range(0, len(targets), block):
        some = targets[low : low + block]
        stop = firsts[low + block] if low + block < len(targets) else len(order)
        which = order[firsts[low] : stop]
        flow, link = _walk(edges, some, start[which], np.searchsorted(some, end[which]))
        flows.append(which[flow])
        links.append(np.where(swapped[which[flow]], link ^ 1, link))
        _check_hops(sum(map(len, flows)), network)
    return Routes.of(np.concatenate(flows), np.concatenate(links), len(src))


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Directed links, sorted by the node they leave."""

    nodes: int
    tail: Ints
    head: Ints
    link: Ints
    first: Ints  # of each node's edges, and one past the last

    @staticmethod
    def of(network: Network) -> "_Edges":
        links = np.arange(len(network.ends))
        tail, head = network.ends.T
        tails, heads = np.concatenate([tail, head]), np.concatenate([head, tail])
        order = np.argsort(tails, kind="stable")
        first = np.searchsorted(tails[order], np.arange(network.nodes + 1))
        return _Edges(
            network.nodes,
            tails[order],
            heads[order],
            np.concatenate([2 * links, 2 * links + 1])[order],
            first,
        )


def _walk(edges: _Edges, targets: Ints, start: Ints, row: Ints) -> tuple[Ints, Ints]:
    """(flow, link) pairs of the paths from start[i] to targets[row[i]]."""
    onward = _onward(edges, targets)
    at, flow = start.copy(), np.arange(len(start))
    flows, links = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    while True:
        moving = at != targets[row]
        at, flow, row = at[moving], flow[moving], row[moving]
        if not len(at):
            return np.concatenate(flows), np.concatenate(links)
        edge = onward[row, at]
        flows.append(flow)
        links.append(edges.link[edge])
        at = edges.head[edge]


def _onward(edges: _Edges, targets: Ints) -> Ints:
    """For every target and node, the edge to take: of the shortest ways, number (target mod their count)."""
    rows = np.arange(len(targets))
    distance = np.full((len(targets), edges.nodes), -1)
    distance[rows, targets] = 0
    depth = 0
    while (distance < 0).any():
        new = (distance[:, edges.head] == depth) & (distance[:, edges.tail] < 0)
        row, edge = np.nonzero(new)
        depth += 1
        distance[row, edges.tail[edge]] = depth
    good = distance[:, edges.tail] == distance[:, edges.head] + 1
    counted = np.concatenate([np.zeros((len(targets), 1), np.int64), np.cumsum(good, axis=1)], axis=1)
    before, after = counted[:, edges.first[:-1]], counted[:, edges.first[1:]]
    wanted = before + targets[:, None] % np.maximum(after - before, 1)
    row, edge = np.nonzero(good & (counted[:, :-1] == wanted[:, edges.tail]))
    onward = np.full((len(targets), edges.nodes), -1)
    onward[row, edges.tail[edge]] = edge
    return onward


def _check_hops(hops: int, network: Network) -> None:
    if hops > _MOST_HOPS:
        raise ConfigError(
            f"{network}: the transfers of one stage cross {hops:,} links, more than the {_MOST_HOPS:,} that fit in memory; "
            f"take fewer nodes or a schedule between neighbours"
        )
