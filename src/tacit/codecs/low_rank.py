"""Low rank with quantised factors: PowerSGD (Vogels et al. 2019, arXiv 1905.13727), its two factors in few bits.

    M = g + e                                 a matrix of the bucket, m x n; e is what was not sent before
    P = orthonormal(sum over ranks of M Q)    sent with codec `p`
    R = sum over ranks of M^T P               sent with codec `q`, and the rest of the bucket with it
    total = P R^T;   e = M - P (own part of R)^T;   Q = orthonormal(R), for the next step

r (m + n) numbers travel instead of m n. P may be coarse: R is taken relative to whatever P is, so P's rounding only tilts the
subspace. R's rounding is an error of the update, and it stays in e. So bits are better spent on rank than on precision.

What is no matrix, what would not become half as small, and embeddings and the head (unless embeddings=True) travel with `rest`.
The first `start` steps send everything with `rest`. Error feedback covers all of the bucket.

Every `refresh` exchanges, on average, the last column of Q starts again from noise: a direction orthogonal to all of Q would
otherwise never be seen, however much of it waits in e (arXiv 2509.11254 has a counterexample).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from tacit.codecs.blocks import Int4
from tacit.codecs.by_shape import SubVector
from tacit.codecs.in_torch import kernels
from tacit.errors import ConfigError, PairingError
from tacit.layout import Layout
from tacit.requests import (
    Codec,
    Context,
    Conversation,
    LocalMemory,
    Reduced,
    Request,
    Sum,
    TableSum,
    Traits,
    as_reduced,
    seed_of,
    threads_for,
)

_MOST_RANK = 256
_INT4 = Int4(rounding="nearest")  # under error feedback a small error is worth more than an unbiased one


@dataclass(frozen=True, slots=True)
class LowRank:
    """`lowrank(8)`; with p=hush, q=hush, rest=hush it sends integers that an aggregator can add."""

    rank: int = 8
    p: Codec = _INT4
    q: Codec = _INT4
    rest: Codec = _INT4
    embeddings: bool = False
    start: int = 0
    refresh: int = 64

    def __post_init__(self) -> None:
        if not _is_whole(self.rank) or not 1 <= self.rank <= _MOST_RANK:
            raise ConfigError(f"lowrank(rank={self.rank}): a whole number from 1 to {_MOST_RANK}; try 8")
        for name in ("p", "q", "rest"):
            codec = getattr(self, name)
            if not hasattr(codec, "reduce"):  # a number, or a text in quotes
                raise ConfigError(f"lowrank({name}={codec!r}): a codec is needed, for example {name}=int4")
            if codec.traits.remembers or codec.traits.stateful:
                raise PairingError(
                    f"lowrank({name}={codec}): lowrank itself remembers what was not sent; name a codec without memory"
                )
        if not isinstance(self.embeddings, bool):
            raise ConfigError(f"lowrank(embeddings={self.embeddings}): True or False")
        for name, least in (("start", 0), ("refresh", 1)):
            if not _is_whole(steps := getattr(self, name)) or steps < least:
                raise ConfigError(f"lowrank({name}={steps}): a whole number of steps, {least} or more")

    def __str__(self) -> str:
        options = [str(self.rank)]
        for field in fields(self)[1:]:
            if (chosen := getattr(self, field.name)) != field.default:
                options.append(f"{field.name}={chosen}")
        return f"lowrank({', '.join(options)})"

    @property
    def _together(self) -> bool:
        """Whether R and the rest are one vector, in one request."""
        return self.q == self.rest

    @property
    def traits(self) -> Traits:
        parts = [self.p.traits, self.q.traits, *([] if self._together else [self.rest.traits])]
        lanes = [each.lanes for each in parts if each.lanes is not None]
        return Traits(
            rounds=sum(each.rounds for each in parts),
            summable=all(each.summable for each in parts),
            remembers=True,
            lanes=min(lanes, key=lambda each: each.most_ranks) if lanes else None,
            stateful=True,
        )

    def nbytes(self, numel: int) -> int:
        return self.nbytes_of(Layout.flat(numel))

    def nbytes_of(self, layout: Layout) -> int:
        """Of a step after the first `start`."""
        plan = _plan(layout, self.rank, self.embeddings)
        r, rest = plan.q.numel, plan.rest.layout.numel
        second = self.q.nbytes(r + rest) if self._together else self.q.nbytes(r) + self.rest.nbytes(rest)
        return self.p.nbytes(plan.p.numel) + second

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x, residual, kernel = x.float(), context.memory.vector("residual"), kernels(x)
        plan = _plan(context.layout, 0 if context.step < self.start else self.rank, self.embeddings)
        threads = threads_for(x.numel())
        kept = {name: self._basis(name, shape, context) for name, shape in plan.q.shapes.items()}
        q = plan.q.join(kept, x)

        p = x.new_empty(plan.p.numel)
        kernel.low_rank_lefts(x, residual, plan.matrices, q, p, threads)
        p = (yield from _sum(self.p, p, context, "p", to_all=p.numel() > 0)).total.float().clone()
        kernel.low_rank_orthonormalize_all(p, plan.p_shapes, seed_of(context.shared_seed, "p"))

        r = x.new_empty(plan.q.numel)
        kernel.low_rank_rights(x, residual, plan.matrices, p, r, threads)
        owed = plan.rest.of(residual)
        rest = plan.rest.of(x) + owed
        (r_total, r_own), (rest_total, rest_own) = yield from self._second(r, rest, context)

        total = x.new_zeros(x.numel())  # padding stays zero
        kernel.low_rank_finishes(x, residual, plan.matrices, p, r_own, r_total, total, threads)
        plan.rest.write(rest_total, total)
        left = rest - rest_own
        plan.rest.write(torch.where(left.isfinite(), left, owed), residual)
        self._keep(plan, kept, q, r_total, context)

        def contribution() -> Tensor:
            share, none = torch.zeros_like(total), torch.zeros_like(total)
            kernel.low_rank_finishes(none, none.clone(), plan.matrices, p, r_own, r_own, share, threads)
            plan.rest.write(rest_own, share)
            return share

        return Reduced(total, contribution)

    def _second(
        self, r: Tensor, rest: Tensor, context: Context
    ) -> Generator[Request, Any, list[tuple[Tensor, Tensor]]]:
        """(Total, own part) of R, and of the rest."""
        if not self._together:
            both = [
                (yield from _sum(self.q, r, context, "q", to_all=r.numel() > 0)),
                (yield from _sum(self.rest, rest, context, "rest", to_all=False)),
            ]
            return [(each.total, _own(each, x)) for each, x in zip(both, (r, rest), strict=True)]
        x = torch.cat([r, rest])
        reduced = yield from _sum(self.q, x, context, "q", to_all=r.numel() > 0)
        cut = [r.numel(), rest.numel()]
        return list(zip(reduced.total.split(cut), _own(reduced, x).split(cut), strict=True))

    def _basis(self, name: str, shape: tuple[int, ...], context: Context) -> Tensor:
        """Q, by columns: orthonormal, the same on all ranks."""

        def noise() -> Tensor:
            made = torch.zeros(shape)
            kernels(made).low_rank_orthonormalize(made, seed_of(context.shared_seed, "start", name))
            return made

        return context.memory.tensor("q", name, shape, rule="first", init=noise)

    def _keep(
        self, plan: "_Plan", kept: Mapping[str, Tensor], q: Tensor, r: Tensor, context: Context
    ) -> None:
        """Q of the next step, from R; a matrix whose R is not finite keeps its own."""
        fresh = r.clone()
        if seed_of(context.shared_seed, "refresh") % self.refresh == 0:
            for columns in plan.q.split(fresh).values():
                columns[-1] = 0  # zeros become noise
        kernels(fresh).low_rank_orthonormalize_all(fresh, plan.q_shapes, seed_of(context.shared_seed, "q"))
        for name, columns in plan.q.split(torch.where(fresh.isfinite(), fresh, q)).items():
            kept[name].copy_(columns)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which parameters of a vector are sent as P and R, and where those lie; `rest` are all others."""

    p: Layout  # rank x m of every matrix: its columns, one behind the other
    q: Layout  # rank x n, of Q and of R
    rest: SubVector
    matrices: Tensor  # start, m, n and rank of each, as the kernels want them
    p_shapes: Tensor
    q_shapes: Tensor


@lru_cache(maxsize=4096)
def _plan(layout: Layout, rank: int, embeddings: bool) -> _Plan:
    """The plan of one bucket; with rank 0 all of it is rest."""
    sent = [
        (span, m, n, min(rank, m, n))
        for span in layout.spans
        if rank and len(span.full_shape) > 1 and span.numel and (embeddings or not span.outer)
        for m, n in [(span.shape[0], prod(span.shape[1:]))]
        if 2 * min(rank, m, n) * (m + n) <= m * n
    ]
    names = {span.name for span, *_ in sent}
    return _Plan(
        p=Layout.of({span.name: (r, m) for span, m, _, r in sent}),
        q=Layout.of({span.name: (r, n) for span, _, n, r in sent}),
        rest=SubVector.of_spans(span for span in layout.spans if span.name not in names),
        matrices=_table([(span.start, m, n, r) for span, m, n, r in sent], 4),
        p_shapes=_table([(r, m) for _, m, _, r in sent], 2),
        q_shapes=_table([(r, n) for _, _, n, r in sent], 2),
    )


def _table(rows: Sequence[tuple[int, ...]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), width)


def _sum(
    codec: Codec, x: Tensor, context: Context, part: str, *, to_all: bool
) -> Generator[Request, Any, Reduced]:
    """The conversation about one vector. The sum of factors goes to all ranks, also under FSDP2."""
    seeds = [seed_of(seed, part) for seed in (context.own_seed, context.shared_seed)]
    talk = codec.reduce(x, replace(context, memory=LocalMemory(x), own_seed=seeds[0], shared_seed=seeds[1]))
    answer = None
    while True:
        try:
            request = talk.send(answer)
        except StopIteration as end:
            return as_reduced(end.value)
        if to_all and isinstance(request, Sum | TableSum):
            request = replace(request, to_all=True)
        answer = yield request


def _own(reduced: Reduced, x: Tensor) -> Tensor:
    return x if reduced.contribution is None else reduced.contribution()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
