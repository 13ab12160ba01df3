"""`rank1`, a codec that uses shapes: of every matrix M one step of power iteration (PowerSGD, Vogels 2019), the rest as it is.

p = unit(sum_i M_i q);   r = sum_i M_i^T p;   total = p r^T;   q = unit(r), kept for the next step
"""

from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from tacit.codecs import CODECS
from tacit.layout import Layout
from tacit.requests import Payload, Reduced, Sum, Traits


def _sides(span):
    return prod(span.shape[:1]), prod(span.shape[1:])


def _unit(v):
    v = v / v.abs().amax().clamp_min(1e-38)  # or the squares of 1e-30 would vanish
    return v / v.norm().clamp_min(1e-38)


def _sum(parts, like):
    batch = Layout.of({name: part.shape for name, part in parts.items()})
    return batch.split((yield Sum(Payload.dense(batch.join(parts, like)), to_all=True)).value)


@dataclass(frozen=True)
class RankOne:
    traits = Traits(rounds=2, summable=True, contracting=True, stateful=True)

    def __str__(self):
        return "rank1"

    def nbytes(self, numel):
        return 4 * numel

    def nbytes_of(self, layout):
        return 4 * sum(min(sum(_sides(span)), span.numel) for span in layout.spans)

    def reduce(self, x, context):
        x, layout, rng = x.float(), context.layout, torch.Generator().manual_seed(context.shared_seed)
        rest, q = layout.split(x), {}
        m = {s.name: rest.pop(s.name).view(_sides(s)) for s in layout.spans if sum(_sides(s)) < s.numel}
        for n in m:
            init = partial(torch.randn, m[n].shape[1], generator=rng)
            q[n] = context.memory.tensor("q", n, m[n].shape[1:], rule="first", init=init)
        rests = yield from _sum(rest | {n: m[n] @ q[n] for n in m}, x)
        p = {n: _unit(rests.pop(n)) for n in m}
        own = {n: m[n].T @ p[n] for n in m}
        r = yield from _sum(own, x)
        for n in m:
            q[n].copy_(torch.where((unit := _unit(r[n])).norm() > 0.5, unit, q[n]))  # no zeros, no NaN
        total = layout.join(rests | {n: p[n].outer(r[n]) for n in m}, x)
        return Reduced(total, lambda: layout.join(rest | {n: p[n].outer(own[n]) for n in m}, x))


CODECS.register("rank1", RankOne)
