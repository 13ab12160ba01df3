"""Max-min fair sharing: no flow can get more without taking from one that has no more than it.

Progressive filling (Bertsekas and Gallager 1992, 6.5): a link's fair share is what is left of it over its flows; a link whose
share is the least on the path of all its flows is full, and fixes them. All such links are fixed at once, so one pass does
for a regular load, and the passes are as many as links wait for one another.

Two generalisations, for the sake of SimGrid's TCP: a flow of penalty p counts 1/p of a flow, and a flow may take only a share
of its rate from a link (`weight`).
"""

from dataclasses import dataclass

import numpy as np

from tacit.sim.routes import Routes
from tacit.topology import Floats, Ints

_SAME = 1e-9  # two rates or times nearer than this are equal: rounding must not make an event


@dataclass(frozen=True, slots=True, eq=False)
class FairShares:
    """What every flow gets, and the full link that keeps it from more."""

    rate_bps: Floats
    full: Ints


def max_min(routes: Routes, capacity_bps: Floats, penalty: Floats | None = None) -> FairShares:
    """The fair rates of flows that all have bytes to send; a flow that crosses no link has an infinite rate."""
    flow, link, weight = routes.flow, routes.link, routes.weight
    penalty = np.ones(routes.flows) if penalty is None else penalty
    rate, full = np.full(routes.flows, np.inf), np.full(routes.flows, -1)
    left = capacity_bps.copy()
    while len(flow):
        load = np.bincount(link, weights=weight / penalty[flow], minlength=len(left))
        share = np.divide(left, load, out=np.full(len(left), np.inf), where=load > 0)[link]
        starts = np.flatnonzero(np.r_[True, flow[1:] != flow[:-1]])
        least = np.repeat(np.minimum.reduceat(share, starts), np.diff(np.r_[starts, len(flow)]))
        tight = np.ones(len(left), bool)
        tight[link[share > least * (1 + _SAME)]] = False
        at_full = tight[link]
        fixed = np.zeros(routes.flows, bool)
        fixed[flow[at_full]] = True
        full[flow[at_full]] = link[at_full]
        done = fixed[flow]
        rate[flow[done]] = least[done] / penalty[flow[done]]
        left -= np.bincount(link[done], weights=weight[done] * rate[flow[done]], minlength=len(left))
        flow, link, weight = flow[~done], link[~done], weight[~done]
    return FairShares(rate, full)


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """When every flow has sent its last bit, and the link that was full for it then, among how many flows."""

    time_s: Floats
    full: Ints
    sharing: Ints


def finish(
    routes: Routes,
    bits: Floats,
    capacity_bps: Floats,
    penalty: Floats | None = None,
    start_s: Floats | None = None,
) -> Finish:
    """All flows start at once, or at `start_s`, and share fairly; whenever some start or end, all share anew."""
    penalty = np.ones(routes.flows) if penalty is None else penalty
    start_s = np.zeros(routes.flows) if start_s is None else start_s
    full, sharing = np.full(routes.flows, -1), np.zeros(routes.flows, np.int64)
    time_s, left, now_s = start_s.astype(float), bits.astype(float), float(start_s.min())
    unfinished = np.flatnonzero(bits > 0)
    while len(unfinished):
        waiting = start_s[unfinished] > now_s * (1 + _SAME)
        going, next_s = unfinished[~waiting], start_s[unfinished[waiting]].min(initial=np.inf)
        some = routes.only(going)
        shares = max_min(some, capacity_bps, penalty[going])
        need_s = left[going] / shares.rate_bps
        step_s = min(need_s.min(initial=np.inf), next_s - now_s)
        ends = need_s <= step_s * (1 + _SAME)
        now_s += step_s
        # one more: -1 is no link
        load = np.bincount(some.link[some.weight == 1], minlength=len(capacity_bps) + 1)
        time_s[going[ends]] = now_s
        full[going[ends]] = shares.full[ends]
        sharing[going[ends]] = load[shares.full[ends]]
        left[going] -= step_s * np.where(ends, 0.0, shares.rate_bps)
        left[going[ends]] = 0.0
        unfinished = unfinished[left[unfinished] > 0]
    return Finish(time_s, full, sharing)
