"""A flat model by layers, so that two ranks can exchange some of them only: the parameters of one module are a layer."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import torch
from torch import Tensor, nn

Chosen = tuple[int, ...] | None  # layers by number, in order; None: all of them


@dataclass(frozen=True, slots=True)
class Layers:
    """How many elements each has, one after another."""

    sizes: tuple[int, ...]
    owners: tuple[int, ...] = ()  # of every parameter, its layer

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter]) -> Self:
        found = groupby(parameters.items(), key=lambda named: named[0].rpartition(".")[0])
        modules = [[parameter.numel() for _, parameter in module] for _, module in found]
        owners = tuple(layer for layer, numels in enumerate(modules) for _ in numels)
        return cls(tuple(map(sum, modules)), owners)

    def pick(self, flat: Tensor, chosen: Chosen) -> Tensor:
        """What `flat` holds of the chosen layers, one after another."""
        if chosen is None:
            return flat
        own = flat.split(self.sizes)
        return torch.cat([own[layer] for layer in chosen])

    def put(self, flat: Tensor, chosen: Chosen, part: Tensor) -> None:
        """In `flat`, `part` takes the place of the chosen layers."""
        own = flat.split(self.sizes)
        for layer, values in zip(self.numbers(chosen), self.parts(part, chosen), strict=True):
            own[layer].copy_(values)

    def add(self, flat: Tensor, chosen: Chosen, part: Tensor) -> None:
        """In `flat`, `part` is added to the chosen layers."""
        own = flat.split(self.sizes)
        for layer, values in zip(self.numbers(chosen), self.parts(part, chosen), strict=True):
            own[layer].add_(values)

    def parts(self, part: Tensor, chosen: Chosen) -> tuple[Tensor, ...]:
        """What pick() has put together, layer by layer."""
        return torch.split(part, [self.sizes[layer] for layer in self.numbers(chosen)])

    def encode(self, chosen: Chosen) -> str | None:
        """As it is sent to a peer: a bit a layer in hexadecimal, so that a thousand layers are 250 characters."""
        return None if chosen is None else f"{sum(1 << layer for layer in chosen):x}"

    def decode(self, text: str | None) -> Chosen:
        """The layers that a peer has sent; ValueError or TypeError where they cannot be this model's."""
        if text is None:
            return None
        bits = int(text, 16)
        if not 0 < bits < 1 << len(self.sizes):
            raise ValueError(f"{text!r} are no layers of a model that has {len(self.sizes)}")
        return tuple(layer for layer in range(len(self.sizes)) if bits >> layer & 1)

    @property
    def crc(self) -> int:
        """Equal where models are cut alike."""
        return zlib.crc32(repr(self.sizes).encode())

    def squares(self, flat: Tensor) -> list[float]:
        """The squared length of every layer."""
        return [float(part.square().sum()) for part in flat.split(self.sizes)]

    def summed(self, of_parameters: Iterable[float]) -> list[float]:
        """One value a parameter, added up by layer."""
        found = [0.0] * len(self.sizes)
        for layer, value in zip(self.owners, of_parameters, strict=True):
            found[layer] += value
        return found

    def numbers(self, chosen: Chosen) -> Sequence[int]:
        return range(len(self.sizes)) if chosen is None else chosen
