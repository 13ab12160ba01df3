"""Networks as values, shared by the simulator, the lab and the planner.

- `Network`: hosts and switches joined by links, each with a rate and a latency (electrical, packet-switched);
- `OpticalRing`: nodes on a two-way fibre ring, `wavelengths` a direction; light paths are set up before every stage.

Rates are bits a second, times are seconds: text such as "10Gbit" or "40GB/s" is parsed at the edge (units.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from tacit.errors import ConfigError, did_you_mean
from tacit.registry import Registry
from tacit.units import rate_text

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MOST_NODES = 10_000_000  # of an optical ring
MOST_HOSTS, MOST_LINKS = (
    1_000_000,
    5_000_000,
)  # of an electrical network: hosts have names, about 200 MB of them
MOST_WAVELENGTHS = 100_000
MOST_MTU = 65_536  # that of loopback


@dataclass(frozen=True, slots=True)
class OpticalRing:
    """`nodes` on a ring of two fibres, one a direction; a wavelength can be used again on a disjoint arc.

    A node has `transceivers` senders and as many receivers, each tuned to one wavelength of one direction while a stage lasts;
    None: one for every wavelength of both directions, as a ring of micro-resonators gives it.
    """

    nodes: int
    wavelengths: int = 64  # a direction
    rate_bps: float = 40e9 * 8  # of one wavelength
    setup_s: float = 25e-6  # before every stage: reconfiguration and conversion
    most_hops: int | None = None  # the longest light path that the power budget allows; None: unlimited
    hop_s: float = 0.0  # the light's time from node to node: 5 ns a metre of fibre; the papers count 0
    transceivers: int | None = None  # senders of a node, and as many receivers; None: all that it can use

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        check_count("wavelengths", self.wavelengths, most=MOST_WAVELENGTHS)
        check_positive("rate of a wavelength", self.rate_bps)
        check_duration("set-up", self.setup_s)
        check_duration("time a hop", self.hop_s)
        if self.most_hops is not None:
            check_count("most_hops", self.most_hops)
        if self.transceivers is not None:
            check_count("transceivers", self.transceivers)

    @property
    def senders(self) -> int:
        """Wavelengths that a node can send on at the same time, both directions together; it can receive on as many."""
        every = 2 * self.wavelengths
        return every if self.transceivers is None else min(self.transceivers, every)


# ---- electrical networks ----


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex link between two named nodes: `rate_bps` each way."""

    a: str
    b: str
    rate_bps: float
    latency_s: float = 0.0
    mtu: int = 1500  # bytes of a packet; the lab builds it, the simulator's fluid ignores it
    loss: float = 0.0  # share of packets lost each way; likewise


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Hosts and switches joined by full-duplex links; rank r sits on host r.

    Nodes are numbered hosts first, then switches; link i joins nodes ends[i]. `kind` and `sizes` record how it was built, so
    that a regular network is routed by arithmetic; a "graph" is searched.
    """

    name: str  # the text it was built from: `star(nodes=64, rate=10Gbit, latency=5us)`, or a file
    hosts: tuple[str, ...]
    switches: tuple[str, ...]
    ends: Ints  # (links, 2)
    rate_bps: Floats
    latency_s: Floats
    mtu: Ints
    loss: Floats
    kind: str = "graph"
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def of(
        hosts: Iterable[str], switches: Iterable[str], links: Iterable[Link], name: str = "network"
    ) -> "Network":
        """Any graph. Refused with one sentence: a name twice, a link to nobody, a part that cannot be reached."""
        hosts, switches, links = tuple(hosts), tuple(switches), tuple(links)
        _check_names(hosts, switches, name)
        number = {node: i for i, node in enumerate((*hosts, *switches))}
        for link in links:
            _check_link(link, number, name)
        ends = np.array([(number[link.a], number[link.b]) for link in links], np.int64).reshape(-1, 2)
        _check_joined(ends, tuple(number), name)
        rates, latencies, mtus, losses = (
            np.array([getattr(link, field) for link in links])
            for field in ("rate_bps", "latency_s", "mtu", "loss")
        )
        return Network(name, hosts, switches, ends, rates, latencies, mtus, losses)

    @property
    def nodes(self) -> int:
        return len(self.hosts) + len(self.switches)

    def node_name(self, node: int) -> str:
        return self.hosts[node] if node < len(self.hosts) else self.switches[node - len(self.hosts)]

    def node(self, name: str) -> int:
        """The number of the host or switch called `name`."""
        if name in self.hosts:
            return self.hosts.index(name)
        if name in self.switches:
            return len(self.hosts) + self.switches.index(name)
        raise ConfigError(
            f"{self.name} has no node {name!r}; its nodes are {_some((*self.hosts, *self.switches))}"
        )

    @property
    def links(self) -> Iterator[Link]:
        """The links one by one, as the lab builds them."""
        for i, (a, b) in enumerate(self.ends.tolist()):
            yield Link(
                self.node_name(a), self.node_name(b), float(self.rate_bps[i]), float(self.latency_s[i]),
                int(self.mtu[i]), float(self.loss[i]),
            )  # fmt: skip

    def scaled(self, *, rate: float = 1.0, latency: float = 1.0) -> "Network":
        """The same network with every rate and every latency multiplied."""
        check_positive("factor of the rates", rate)
        if not 0 <= latency < inf:
            raise ConfigError(f"factor of the latencies is {latency:g}; it must be 0 or more, and finite")
        return replace(self, rate_bps=self.rate_bps * rate, latency_s=self.latency_s * latency)

    def with_links(self, *, mtu: int = 1500, loss: float = 0.0) -> "Network":
        """The same network, every link with this MTU and this share of lost packets."""
        if not 68 <= mtu <= MOST_MTU or not 0 <= loss < 1:
            raise ConfigError(
                f"{self.name}: mtu={mtu}, loss={loss:g}; mtu is at least 68 bytes, at most {MOST_MTU}, loss from 0 to below 1"
            )
        said = f"mtu={mtu}" * (mtu != 1500), f"loss={loss:g}" * (loss > 0)
        name = f"{self.name[:-1]}, {', '.join(filter(None, said))})" if any(said) else self.name
        return replace(self, mtu=0 * self.mtu + mtu, loss=0 * self.loss + loss, name=name)

    def slowed(self, host: str, rate_bps: float, name: str | None = None) -> "Network":
        """The same network with the links of one host at another rate."""
        check_positive("slow rate", rate_bps)
        at_host = (self.ends == self.node(host)).any(axis=1)
        changed = np.where(at_host, rate_bps, self.rate_bps)
        return replace(
            self, rate_bps=changed, name=name or f"{self.name} with {host} at {rate_text(rate_bps)}"
        )


def star(nodes: int, rate_bps: float = 10e9, latency_s: float = 5e-6) -> Network:
    """`nodes` hosts on one switch that never blocks; `latency_s` is a link's, and a path crosses two."""
    host = np.arange(check_count("nodes", nodes, most=MOST_HOSTS))
    ends = np.stack([host, np.full(nodes, nodes)], axis=1)
    name = _text("star", nodes=nodes, rate_bps=rate_bps, latency_s=latency_s)
    return _uniform(name, nodes, ["switch"], ends, rate_bps, latency_s, "star", (nodes,))


def one_slow_host(
    nodes: int, rate_bps: float = 10e9, slow_rate_bps: float = 1e9, latency_s: float = 5e-6
) -> Network:
    """A star whose last host has a slow link."""
    name = _text(
        "one_slow_host", nodes=nodes, rate_bps=rate_bps, slow_rate_bps=slow_rate_bps, latency_s=latency_s
    )
    return star(nodes, rate_bps, latency_s).slowed(f"h{nodes - 1}", slow_rate_bps, name)


def two_racks(
    nodes: int, rate_bps: float = 10e9, uplink_rate_bps: float = 10e9, latency_s: float = 5e-6
) -> Network:
    """Two switches joined by one link, half of the hosts at each (the first half has one more if the number is odd)."""
    host = np.arange(check_count("nodes", nodes, 2, MOST_HOSTS))
    first = nodes - nodes // 2
    ends = np.concatenate([np.stack([host, nodes + (host >= first)], axis=1), [[nodes, nodes + 1]]])
    name = _text(
        "two_racks", nodes=nodes, rate_bps=rate_bps, uplink_rate_bps=uplink_rate_bps, latency_s=latency_s
    )
    made = _uniform(name, nodes, ["rack0", "rack1"], ends, rate_bps, latency_s, "graph", ())
    check_positive("uplink rate", uplink_rate_bps)
    return replace(made, rate_bps=np.append(made.rate_bps[:-1], uplink_rate_bps))


def leaf_spine(
    leaves: int,
    hosts: int,
    spines: int = 1,
    rate_bps: float = 10e9,
    oversubscription: float = 1.0,
    latency_s: float = 5e-6,
) -> Network:
    """`leaves` switches with `hosts` hosts each, every leaf joined to every spine.

    A leaf's uplinks carry together what its hosts can send, divided by `oversubscription`.
    """
    for what, value in (("leaves", leaves), ("hosts", hosts), ("spines", spines)):
        check_count(what, value)
    check_positive("oversubscription", oversubscription)
    _check_size("leaf_spine", leaves * hosts, leaves * (hosts + spines))
    total, leaf, spine = leaves * hosts, np.arange(leaves), np.arange(spines)
    down = np.stack([np.arange(total), total + np.arange(total) // hosts], axis=1)
    up = np.stack([np.repeat(total + leaf, spines), np.tile(total + leaves + spine, leaves)], axis=1)
    name = _text(
        "leaf_spine", leaves=leaves, hosts=hosts, spines=spines, rate_bps=rate_bps,
        oversubscription=oversubscription, latency_s=latency_s,
    )  # fmt: skip
    names = [f"leaf{i}" for i in leaf] + [f"spine{i}" for i in spine]
    sizes = (leaves, hosts, spines)
    made = _uniform(name, total, names, np.concatenate([down, up]), rate_bps, latency_s, "leaf_spine", sizes)
    uplink_rate_bps = hosts * rate_bps / (spines * oversubscription)
    return replace(made, rate_bps=np.where(np.arange(len(made.ends)) < total, rate_bps, uplink_rate_bps))


def fat_tree(k: int, rate_bps: float = 10e9, latency_s: float = 5e-6) -> Network:
    """The k-ary fat tree (Al-Fares 2008): k pods, k^3 / 4 hosts, three layers of k-port switches, full bisection.

    Switch a of a pod's second layer is joined to the k/2 cores from a k/2 on.
    """
    if check_count("k", k, 2) % 2:
        raise ConfigError(
            f"k={k}: a fat tree is made of switches with an even number of ports; give 4, 6, 8, ..."
        )
    half, edges, total = k // 2, k * k // 2, k**3 // 4
    _check_size("fat_tree", total, 3 * total)
    switch = np.arange(edges)  # as many edge switches as aggregating ones
    host = np.arange(total)
    down = np.stack([host, total + host // half], axis=1)
    middle = [np.repeat(total + switch, half), total + edges + _spread(switch // half * half, half)]
    top = [np.repeat(total + edges + switch, half), total + 2 * edges + _spread(switch % half * half, half)]
    ends = np.concatenate([down, np.stack(middle, axis=1), np.stack(top, axis=1)])
    names = (
        [f"edge{i}" for i in switch] + [f"agg{i}" for i in switch] + [f"core{i}" for i in range(half * half)]
    )
    name = _text("fat_tree", k=k, rate_bps=rate_bps, latency_s=latency_s)
    return _uniform(name, total, names, ends, rate_bps, latency_s, "fat_tree", (k,))


def torus(dims: Sequence[int], rate_bps: float = 10e9, latency_s: float = 5e-6) -> Network:
    """Hosts on a grid that closes on itself in every dimension, joined directly; the last dimension counts fastest.

    A dimension of 2 has one link between the two, not two.
    """
    sizes = tuple(check_count("a dimension", size) for size in dims)
    if not 1 <= len(sizes) <= 16:
        raise ConfigError(f"torus of {len(sizes)} dimensions; give 1 to 16 of them, for example dims=4x4")
    _check_size("torus", prod(sizes), prod(sizes) * len(sizes))
    grid = np.arange(prod(sizes)).reshape(sizes)
    ends = [np.zeros((0, 2), np.int64)]
    for axis, size in enumerate(sizes):
        pairs = np.stack([grid, np.roll(grid, -1, axis)], axis=-1)
        if size > 1:
            ends.append((pairs if size > 2 else pairs.take([0], axis)).reshape(-1, 2))
    name = _text("torus", dims="x".join(map(str, sizes)), rate_bps=rate_bps, latency_s=latency_s)
    return _uniform(name, grid.size, [], np.concatenate(ends), rate_bps, latency_s, "torus", sizes)


def ring(nodes: int, rate_bps: float = 10e9, latency_s: float = 5e-6) -> Network:
    """Hosts joined to their two neighbours: a torus of one dimension."""
    name = _text("ring", nodes=nodes, rate_bps=rate_bps, latency_s=latency_s)
    return replace(torus((check_count("nodes", nodes, most=MOST_HOSTS),), rate_bps, latency_s), name=name)


_BUILT_IN: dict[str, Callable[..., Network]] = {
    builder.__name__: builder
    for builder in (star, one_slow_host, two_racks, leaf_spine, fat_tree, torus, ring)
}
NETWORKS: Registry[Callable[..., Network]] = Registry("network", "tacit.topologies", _BUILT_IN)


def _uniform(
    name: str, hosts: int, switches: list[str], ends: Ints, rate_bps: float, latency_s: float,
    kind: str, sizes: tuple[int, ...],
) -> Network:  # fmt: skip
    """A regular network: hosts h0, h1, ..., all links alike."""
    check_positive("rate", rate_bps)
    check_duration(f"latency of {name}", latency_s)
    links = len(ends)
    return Network(
        name, tuple(f"h{i}" for i in range(hosts)), tuple(switches), ends, np.full(links, float(rate_bps)),
        np.full(links, float(latency_s)), np.full(links, 1500), np.zeros(links), kind, sizes,
    )  # fmt: skip


def _spread(first: Ints, width: int) -> Ints:
    """first[i], first[i] + 1, ..., width of them for every i."""
    return (first[:, None] + np.arange(width)).reshape(-1)


def _check_names(hosts: tuple[str, ...], switches: tuple[str, ...], name: str) -> None:
    if not hosts:
        raise ConfigError(f"{name} has no host; give at least one")
    seen: set[str] = set()
    for node in (*hosts, *switches):
        if node in seen:
            raise ConfigError(
                f"{name} has two nodes called {node!r}; every host and switch needs a name of its own"
            )
        seen.add(node)


def _check_link(link: Link, number: dict[str, int], name: str) -> None:
    for node in (link.a, link.b):
        if node not in number:
            hint = did_you_mean(node, number).strip() or f"its nodes are {_some(tuple(number))}"
            raise ConfigError(
                f"{name}: the link {link.a} - {link.b} names {node!r}, which is no host or switch; {hint}"
            )
    if link.a == link.b:
        raise ConfigError(f"{name}: a link joins {link.a!r} to itself; join two nodes")
    check_positive(f"{name}: rate of the link {link.a} - {link.b}", link.rate_bps)
    if not 0 <= link.latency_s < inf or not 0 <= link.loss < 1 or not 68 <= link.mtu <= MOST_MTU:
        raise ConfigError(
            f"{name}: the link {link.a} - {link.b} has latency {link.latency_s:g} s, loss {link.loss:g}, mtu {link.mtu}; "
            f"latency is 0 or more, loss from 0 to below 1, mtu at least 68, at most {MOST_MTU}"
        )


def _check_joined(ends: Ints, names: tuple[str, ...], name: str) -> None:
    near: list[list[int]] = [[] for _ in names]
    for a, b in ends.tolist():
        near[a].append(b)
        near[b].append(a)
    found, waiting = {0}, [0]
    while waiting:
        new = set(near[waiting.pop()]) - found
        found |= new
        waiting += new
    if len(found) < len(names):
        parts = [tuple(n for i, n in enumerate(names) if (i in found) == there) for there in (True, False)]
        raise ConfigError(
            f"{name} is in two parts: {_some(parts[0])} and {_some(parts[1])}; join them with a link"
        )


def check_positive(what: str, value: float) -> None:
    if not 0 < value < inf:
        raise ConfigError(f"{what} is {value:g}; it must be above 0, and finite")


def check_duration(what: str, seconds: float) -> None:
    if not 0 <= seconds < inf:
        raise ConfigError(f"{what} is {seconds:g} s; it must be 0 or more, and finite")


def check_count(what: str, value: int, least: int = 1, most: int = MOST_NODES) -> int:
    """`value` as a plain int; refuses what is no whole number from `least` to `most`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{what}={value}; give {least} or more, a whole number up to {most:,}")
    return int(value)


def _check_size(name: str, hosts: int, links: int) -> None:
    """Refuses a network before its arrays are made: `fat_tree(k=1500)` would have 844 million hosts."""
    if hosts > MOST_HOSTS or links > MOST_LINKS:
        raise ConfigError(
            f"{name} has {hosts:,} hosts and {links:,} links; "
            f"the limits are {MOST_HOSTS:,} and {MOST_LINKS:,}: make it smaller"
        )


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")


def _text(builder: str, **options: object) -> str:
    """A network's text form, which topology_files.parse_network reads back."""
    written = []
    for key, value in options.items():
        if key.endswith("_bps") and isinstance(value, int | float):
            written.append(f"{key.removesuffix('_bps')}={rate_text(value)}")
        elif key.endswith("_s") and isinstance(value, int | float):
            written.append(f"{key.removesuffix('_s')}={value * 1e6:.12g}us")
        else:
            written.append(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}")
    return f"{builder}({', '.join(written)})"
