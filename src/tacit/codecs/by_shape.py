"""One codec for matrices, another for the rest: biases and norms are few, and a low rank or a sparse pick does not suit them.

    by_shape(matrix=topk(0.01), rest=bf16)

Matrices are parameters of two dimensions or more, as the model has them; under FSDP2 a part of a matrix counts as one. A vector that
belongs to no model (gossip) is all rest. The two conversations run one after the other, each on its own parameters and with
its own seeds; what they keep lies in the bucket's memory under the names of the parameters, as with one codec.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tacit.errors import ConfigError
from tacit.layout import Layout, Span
from tacit.requests import (
    Codec,
    Context,
    Conversation,
    Memory,
    Reduced,
    Traits,
    as_reduced,
    declared_nbytes,
    seed_of,
)


@dataclass(frozen=True, slots=True)
class ByShape:
    """`matrix` for parameters of two dimensions or more, `rest` for all others."""

    matrix: Codec
    rest: Codec

    def __post_init__(self) -> None:
        for name, codec in (("matrix", self.matrix), ("rest", self.rest)):
            if not hasattr(codec, "reduce"):  # a number, or a text in quotes
                raise ConfigError(f"by_shape({name}={codec!r}): a codec is needed, for example {name}=int8")

    def __str__(self) -> str:
        return f"by_shape(matrix={self.matrix}, rest={self.rest})"

    @property
    def traits(self) -> Traits:
        a, b = self.matrix.traits, self.rest.traits
        lanes = [each.lanes for each in (a, b) if each.lanes is not None]
        return Traits(
            rounds=a.rounds + b.rounds,
            summable=a.summable and b.summable,
            unbiased=a.unbiased and b.unbiased,
            contracting=a.contracting and b.contracting,
            remembers=a.remembers or b.remembers,
            exact=a.exact and b.exact,
            lanes=min(lanes, key=lambda each: each.most_ranks) if lanes else None,
            stateful=a.stateful or b.stateful,
            varies=a.varies or b.varies,
            absolute=a.absolute or b.absolute,
        )

    def nbytes(self, numel: int) -> int:
        return self.nbytes_of(Layout.flat(numel))

    def nbytes_of(self, layout: Layout) -> int:
        matrices, rest = parts_of(layout)
        return declared_nbytes(self.matrix, matrices.layout) + declared_nbytes(self.rest, rest.layout)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        found: list[tuple[SubVector, Tensor, Reduced]] = []
        for codec, part in zip((self.matrix, self.rest), parts_of(context.layout), strict=True):
            own, memory = part.of(x), PartMemory(context.memory, part)
            seeds = [seed_of(seed, len(found)) for seed in (context.own_seed, context.shared_seed)]
            told = replace(context, memory=memory, own_seed=seeds[0], shared_seed=seeds[1])
            reduced = as_reduced((yield from codec.reduce(own, told)))
            memory.keep()
            found.append((part, own, reduced))

        def joined(values: Sequence[Tensor]) -> Tensor:
            out = torch.zeros(x.numel(), dtype=values[1].dtype, device=x.device)  # padding stays zero
            for (part, _, _), each in zip(found, values, strict=True):
                part.write(each, out)
            return out

        return Reduced(
            joined([reduced.total for _, _, reduced in found]),
            lambda: joined([own if r.contribution is None else r.contribution() for _, own, r in found]),
        )


@dataclass(frozen=True, slots=True)
class SubVector:
    """Some parameters of a vector: `spans` as they lie there, `layout` as they lie one behind the other."""

    spans: tuple[Span, ...]
    layout: Layout

    @staticmethod
    def of_spans(chosen: Iterable[Span]) -> "SubVector":
        spans = tuple(chosen)
        stops = list(accumulate((span.numel for span in spans), initial=0))
        moved = [replace(s, start=a, stop=a + s.numel) for s, a in zip(spans, stops, strict=False)]
        return SubVector(spans, Layout(tuple(moved), stops[-1]))

    def of(self, x: Tensor) -> Tensor:
        """A copy of their elements."""
        return torch.cat([x.new_empty(0), *(x[span.start : span.stop] for span in self.spans)])

    def write(self, values: Tensor, into: Tensor) -> None:
        """`values`, which lie as in `layout`, at their places of the whole vector."""
        for span, own in zip(self.spans, self.layout.spans, strict=True):
            into[span.start : span.stop] = values[own.start : own.stop].to(into.dtype)


def parts_of(layout: Layout) -> tuple[SubVector, SubVector]:
    """The matrices of a vector, and the rest."""
    matrices = [span for span in layout.spans if len(span.full_shape) > 1]
    return SubVector.of_spans(matrices), SubVector.of_spans(
        span for span in layout.spans if len(span.full_shape) <= 1
    )


@dataclass(slots=True)
class PartMemory:
    """The memory of a part of a bucket. Its vectors are copies, which `keep` writes back at the end of the conversation."""

    whole: Memory
    part: SubVector
    vectors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.part.layout

    def vector(self, slot: str) -> Tensor:
        if slot not in self.vectors:
            self.vectors[slot] = self.part.of(self.whole.vector(slot))
        return self.vectors[slot]

    def tensor(self, slot: str, name: str, shape: Sequence[int | None], **how: Any) -> Tensor:
        return self.whole.tensor(slot, name, shape, **how)

    def keep(self) -> None:
        for slot, values in self.vectors.items():
            self.part.write(values, self.whole.vector(slot))
