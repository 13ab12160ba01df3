"""Where parameters lie in a flat vector: names, shapes and offsets, as a frozen value that codecs, buckets and memory share.

A vector that belongs to no model (loop-back, gossip meeting, conformance kit) has one 1-D parameter: `Layout.flat(numel)`.

FSDP2 cuts a parameter into parts of whole rows, `ceil(rows / ranks)` each: a span then has the shape of the part, and
`full_shape`, `dim` (the dimension that is cut; 0 unless FSDP2 was given another) and `first` (its first row) place it in
the parameter. FSDP2 pads parts to equal size: elements of the vector that belong to no span are that padding, zeros that
nobody reads. The last parts may have fewer rows, or none.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Protocol

from torch import Tensor


class Placement(Protocol):
    """Where the values of parameters lie in a flat vector, whatever their order there."""

    @property
    def key(self) -> str: ...
    @property
    def numel(self) -> int: ...
    def split(self, flat: Tensor) -> dict[str, Tensor]: ...
    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Span:
    """One parameter, or this part of it: elements start..stop of the vector, row by row."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    full_shape: tuple[int, ...]
    dim: int = 0
    first: int = 0
    outer: bool = False  # an embedding, or the model's head

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def part(self) -> str:
        """Which part of the parameter: "" for all of it, else "dim:first:stop"."""
        if self.shape == self.full_shape:
            return ""
        return f"{self.dim}:{self.first}:{self.first + self.shape[self.dim]}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters of one vector, in order. `numel` counts the padding too."""

    spans: tuple[Span, ...]
    numel: int

    @staticmethod
    def of(shapes: Mapping[str, Sequence[int]], outer: Collection[str] = ()) -> "Layout":
        """Whole parameters one behind the other, by name; those in `outer` are embeddings or the head."""
        stops = list(accumulate((prod(shape) for shape in shapes.values()), initial=0))
        spans = [
            Span(name, tuple(shape), start, start + prod(shape), tuple(shape), outer=name in outer)
            for (name, shape), start in zip(shapes.items(), stops, strict=False)
        ]
        return Layout(tuple(spans), stops[-1])

    @staticmethod
    def flat(numel: int) -> "Layout":
        """One 1-D parameter: the layout of a vector that belongs to no model."""
        return Layout.of({"x": (numel,)})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {span.name: span.shape for span in self.spans}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(span.name for span in self.spans)

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(span.numel for span in self.spans)

    @property
    def key(self) -> str:
        return self.spans[0].name

    def span(self, name: str) -> Span:
        """The span of one parameter; KeyError if it is not here."""
        for span in self.spans:
            if span.name == name:
                return span
        raise KeyError(name)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat` by parameter name, each in its shape: writing into them writes into `flat`."""
        return {span.name: flat[span.start : span.stop].view(span.shape) for span in self.spans}

    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """A new vector of the dtype and device of `like`; zero for what is not in `parts`, and in the padding."""
        flat = like.new_zeros(self.numel)
        for span in self.spans:
            if span.name in parts:
                flat[span.start : span.stop] = parts[span.name].reshape(-1).to(flat)
        return flat
