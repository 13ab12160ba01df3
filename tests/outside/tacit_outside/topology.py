"""Hosts in a line, each joined to the next."""

from __future__ import annotations

from itertools import pairwise

from tacit.topology import Link, Network


def line(nodes: int, rate_bps: float = 10e9, latency_s: float = 5e-6) -> Network:
    hosts = [f"h{i}" for i in range(nodes)]
    links = [Link(a, b, rate_bps, latency_s) for a, b in pairwise(hosts)]
    return Network.of(hosts, [], links, f"line(nodes={nodes})")
