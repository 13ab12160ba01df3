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
otherwise never be seen, however much of it waits in e (arXiv 2509.11254 has a counterexample). With rank=auto the matrices of the
bucket first get new ranks, by the spectrum that R has shown (spectrum.py), within the bytes of rank 8 or within `budget`.
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
from tacit.codecs.spectrum import allocate, energies_of, uniform
from tacit.errors import CheckpointError, ConfigError, PairingError
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
_AUTO = "auto"
_AUTO_RANK = (
    8  # rank=auto treats as matrices what this rank does, and spends its bytes unless there is a budget
)
_MANY = 2**20  # elements of which the bytes are counted
_INT4 = Int4(rounding="nearest")  # under error feedback a small error is worth more than an unbiased one


@dataclass(frozen=True, slots=True)
class LowRank:
    """`lowrank(8)`; with p=hush, q=hush, rest=hush it sends integers that an aggregator can add."""

    rank: int | str = _AUTO_RANK
    p: Codec = _INT4
    q: Codec = _INT4
    rest: Codec = _INT4
    embeddings: bool = False
    start: int = 0
    refresh: int = 64
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.rank != _AUTO and not (_is_whole(self.rank) and 1 <= self.first_rank <= _MOST_RANK):
            raise ConfigError(
                f"lowrank(rank={self.rank}): a whole number from 1 to {_MOST_RANK}, or auto; try 8"
            )
        self._check_budget()
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

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        if self.rank != _AUTO:
            raise ConfigError(f"lowrank({self.rank}, budget={self.budget}): a budget needs rank=auto")
        if not isinstance(self.budget, float) or not 0 < self.budget < 1:
            raise ConfigError(
                f"lowrank(budget={self.budget}): the share of a matrix's float32 bytes that its factors may take, "
                f"above 0 and below 1; try 0.01"
            )

    def __str__(self) -> str:
        options = ["rank=auto" if self.rank == _AUTO else str(self.rank)]
        for field in fields(self)[1:]:
            if (chosen := getattr(self, field.name)) != field.default:
                options.append(f"{field.name}={chosen}")
        return f"lowrank({', '.join(options)})"

    @property
    def first_rank(self) -> int:
        """The rank; with rank=auto the one that decides what is a matrix."""
        return _AUTO_RANK if isinstance(self.rank, str) else self.rank

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
            varies=any(each.varies for each in parts),
            absolute=any(each.absolute for each in parts),
        )

    def nbytes(self, numel: int) -> int:
        return self.nbytes_of(Layout.flat(numel))

    def nbytes_of(self, layout: Layout) -> int:
        """Of a step after the first `start`."""
        plan = _plan(layout, self._start(layout))
        r, rest = plan.q.numel, plan.rest.layout.numel
        second = self.q.nbytes(r + rest) if self._together else self.q.nbytes(r) + self.rest.nbytes(rest)
        return self.p.nbytes(plan.p.numel) + second

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x, residual, kernel = x.float(), context.memory.vector("residual"), kernels(x)
        sent = () if context.step < self.start else self._start(context.layout)
        kept = {m.name: self._basis(m, context) for m in sent}
        plan = _plan(context.layout, sent)
        if self.rank == _AUTO:
            plan = plan.with_ranks(context.layout, {name: len(basis) for name, basis in kept.items()})
        q, threads = plan.q.join(kept, x), threads_for(x.numel())

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

    def _start(self, layout: Layout) -> "tuple[_Matrix, ...]":
        """What is sent by factors, with the ranks of the first step."""
        return _starting(self, layout)

    def costs(self, matrices: "Sequence[_Matrix]") -> list[float]:
        """Bytes of one more rank of each."""
        p, q = (codec.nbytes(_MANY) / _MANY for codec in (self.p, self.q))
        return [p * m.rows + q * m.columns for m in matrices]

    def _basis(self, matrix: "_Matrix", context: Context) -> Tensor:
        """Q, by columns: orthonormal, the same on all ranks."""

        def noise() -> Tensor:
            made = torch.zeros(matrix.rank, matrix.columns)
            kernels(made).low_rank_orthonormalize(made, seed_of(context.shared_seed, "start", matrix.name))
            return made

        auto = self.rank == _AUTO
        count = None if auto else matrix.rank
        kept = context.memory.tensor("q", matrix.name, (count, matrix.columns), rule="first", init=noise)
        if auto and not 1 <= len(kept) <= matrix.most:
            raise CheckpointError(
                f"memory 'q' of parameter {matrix.name!r} has {len(kept)} columns and a matrix of {matrix.rows} x {matrix.columns} has "
                f"from 1 to {matrix.most}; the checkpoint is damaged: load another, or leave tacit's state out"
            )
        return kept

    def _keep(
        self, plan: "_Plan", kept: Mapping[str, Tensor], q: Tensor, r: Tensor, context: Context
    ) -> None:
        """Q of the next step, from R; a matrix whose R is not finite keeps its own."""
        refreshed = seed_of(context.shared_seed, "refresh") % self.refresh == 0
        fresh, before = r.clone(), plan.q.split(q)
        if refreshed and self.rank == _AUTO and not r.is_meta and bool(r.isfinite().all()):
            ranks = self._allocate(context.layout, plan.q.split(r))
            for name, columns in before.items():
                kept[name].resize_(ranks[name], columns.shape[1])
                before[name] = _of_rank(columns, ranks[name])
            factors = [_of_rank(part, ranks[name]) for name, part in plan.q.split(r).items()]
            fresh = torch.cat([fresh.new_empty(0), *(part.reshape(-1) for part in factors)])
            plan = plan.with_ranks(context.layout, ranks)
        if refreshed:
            for columns in plan.q.split(fresh).values():
                columns[-1] = 0  # zeros become noise
        kernels(fresh).low_rank_orthonormalize_all(fresh, plan.q_shapes, seed_of(context.shared_seed, "q"))
        for name, columns in plan.q.split(fresh).items():
            kept[name].copy_(torch.where(columns.isfinite(), columns, before[name]))

    def _allocate(self, layout: Layout, factors: Mapping[str, Tensor]) -> dict[str, int]:
        """The ranks from now on, by what the columns of R carry."""
        matrices = self._start(layout) if factors else ()
        found = [
            energies_of(factors[m.name]).tolist() for m in matrices
        ]  # read from the device now and then only
        costs = self.costs(matrices)
        budget = sum(cost * m.rank for cost, m in zip(costs, matrices, strict=True))
        ranks = allocate(found, costs, [m.most for m in matrices], budget)
        return {m.name: rank for m, rank in zip(matrices, ranks, strict=True)}


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter, or a part of one, that is sent by its factors."""

    name: str
    start: int
    rows: int
    columns: int
    rank: int

    @property
    def most(self) -> int:
        """The rank at which its factors are half as large as itself."""
        return min(_MOST_RANK, self.rows * self.columns // (2 * (self.rows + self.columns)))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which parameters of a vector are sent as P and R, and where those lie; `rest` are all others."""

    p: Layout  # rank x m of every matrix: its columns, one behind the other
    q: Layout  # rank x n, of Q and of R
    rest: SubVector
    sent: "tuple[_Matrix, ...]"
    matrices: Tensor  # start, m, n and rank of each, as the kernels want them
    p_shapes: Tensor
    q_shapes: Tensor

    def with_ranks(self, layout: Layout, ranks: Mapping[str, int]) -> "_Plan":
        return _plan(layout, tuple(replace(m, rank=ranks[m.name]) for m in self.sent))


@lru_cache(maxsize=4096)
def _matrices(layout: Layout, rank: int, embeddings: bool) -> tuple[_Matrix, ...]:
    """Those parameters of a vector that become half as small at this rank."""
    found = [
        _Matrix(span.name, span.start, rows, columns, min(rank, rows, columns))
        for span in layout.spans
        if len(span.full_shape) > 1 and span.numel and (embeddings or not span.outer)
        for rows, columns in [(span.shape[0], prod(span.shape[1:]))]
    ]
    return tuple(m for m in found if m.rank <= m.most)


@lru_cache(maxsize=4096)
def _starting(codec: LowRank, layout: Layout) -> tuple[_Matrix, ...]:
    """The matrices with the ranks of the first step; with a budget one rank for all, the largest that fits, and 1 at least."""
    matrices = _matrices(layout, codec.first_rank, codec.embeddings)
    if codec.budget is None:
        return matrices
    whole = sum(4.0 * m.rows * m.columns for m in matrices)
    ranks = uniform(codec.costs(matrices), [m.most for m in matrices], codec.budget * whole)
    return tuple(replace(m, rank=rank) for m, rank in zip(matrices, ranks, strict=True))


def _of_rank(columns: Tensor, rank: int) -> Tensor:
    """The first `rank` columns, and zeros for those that are not there."""
    found = columns.new_zeros(rank, columns.shape[1])
    count = min(rank, len(columns))
    found[:count] = columns[:count]
    return found


@lru_cache(maxsize=4096)
def _plan(layout: Layout, sent: tuple[_Matrix, ...]) -> _Plan:
    """Where the factors lie; what is not in `sent` is rest."""
    names = {m.name for m in sent}
    return _Plan(
        p=Layout.of({m.name: (m.rank, m.rows) for m in sent}),
        q=Layout.of({m.name: (m.rank, m.columns) for m in sent}),
        rest=SubVector.of_spans(span for span in layout.spans if span.name not in names),
        sent=sent,
        matrices=_table([(m.start, m.rows, m.columns, m.rank) for m in sent], 4),
        p_shapes=_table([(m.rank, m.rows) for m in sent], 2),
        q_shapes=_table([(m.rank, m.columns) for m in sent], 2),
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
