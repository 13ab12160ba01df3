"""What no all-reduce on an optical ring can beat that sets up light before every stage, printed beside every result.

N nodes, w wavelengths a direction, T senders and T receivers a node (2 w if there is no limit), x = d / rate. A stage costs a
set-up, so a ring whose light stands still, set up once, is not bound by this: it can be faster (docs/optical.md counts it).
The light's time on its way is left out, and so are sums.

    latency     a node receives from at most T others in a stage, so after k stages it knows (T + 1)^k: k >= log_(T+1) N set-ups
    node        a rank sends, and receives, 2 (N - 1) / N of the vector on average, over T wavelengths: 2 (N - 1) / N  x / T
    bisection   the vector must cross from each half of the ring to the other, over two arcs: x / (2 w)
    combined    min over k of k set-ups + the larger of the node bound and (S(N, k) + N - 1) / (2 N)  x / w; S is the length of
                the shortest tree of depth k (schedules/braid.py)

Proof of the last. Follow one element of the vector through a schedule of k stages. Let rank z be the first (or one of them)
to hold its full sum, after stage t <= k. The transfers that brought it there contain a tree to z over all ranks; along it stages
increase, so it is at most k deep, and its paths cross at least S(N, k) arcs. Every other rank completes its sum in stage t or later,
by a transfer that came too late to be in that tree: N - 1 more, of at least one arc. So each element crosses S + N - 1 arcs,
while the ring moves 2 N w rate bytes over one arc each in a second: the stages must transmit for that long altogether,
and each is set up first. Striping, sub-stages and both directions are covered; only sums are sent, no codes.
"""

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from tacit.errors import ConfigError
from tacit.schedules.braid import shortest_length
from tacit.topology import OpticalRing


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of an all-reduce's time, in seconds; `combined_s` is at least each of the others.

    They hold where light is set up before every stage.
    """

    latency_s: float
    node_s: float
    bisection_s: float
    combined_s: float
    stages: int  # at which the combined bound is lowest

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


ASSUMES = "light is set up before every stage; a standing ring, set up once, can undercut it"


def fewest_stages(world: int, senders: int) -> int:
    """ceil(log_(senders+1) world): a node receives from so many others in a stage at most."""
    stages, reached = 0, 1
    while reached < world:
        stages, reached = stages + 1, reached * (senders + 1)
    return stages


def lower_bounds(world: int, nbytes: float, ring: OpticalRing) -> Bounds:
    """The bounds for an all-reduce of `nbytes` among `world` nodes, all of the ring."""
    if world < 1 or not 0 <= nbytes < inf:
        raise ConfigError(f"{world} ranks, {nbytes} bytes: give 1 rank or more, and no negative size")
    if world == 1:
        return Bounds(0.0, 0.0, 0.0, 0.0, 0)
    share_s = 8 * nbytes / ring.rate_bps / ring.wavelengths  # x / w
    first = fewest_stages(world, ring.senders)
    node_s = (world - 1) / world * share_s * 2 * ring.wavelengths / ring.senders
    combined_s, stages = _combined(world, share_s, node_s, first, ring.setup_s)
    return Bounds(first * ring.setup_s, node_s, share_s / 2, combined_s, stages)


def _combined(world: int, share_s: float, node_s: float, first: int, setup_s: float) -> tuple[float, int]:
    """The lowest over stages from `first` on: S falls to world - 1 at half the world, and what stages cost only grows."""
    last = max(first, world // 2)
    if setup_s == 0:
        return node_s, last
    best_s, at, stages = inf, first, first
    while stages <= last and stages * setup_s + node_s < best_s:
        # a few at a time: set-ups of the first, the length of the last, which is least
        beyond = stages + 1 + stages // 512
        arcs = shortest_length(world, beyond - 1) + world - 1
        total_s = stages * setup_s + max(node_s, arcs / (2 * world) * share_s)
        if total_s < best_s:
            best_s, at = total_s, stages
        stages = beyond
    return best_s, at
