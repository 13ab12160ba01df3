"""A flat model by layers, so that two that meet can speak of some of them only: the parameters of one module are a layer."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

Chosen = tuple[int, ...] | None  # layers by number, in order; None: all of them


@dataclass(frozen=True, slots=True)
class Layers:
    """How many elements each has, one after another. Nothing here changes what it is given."""

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
        return flat if chosen is None else torch.cat([flat[run] for run in self._runs(chosen)])

    def put(self, flat: Tensor, chosen: Chosen, part: Tensor) -> Tensor:
        """`flat`, with `part` in the place of the chosen layers."""
        if chosen is None:
            return part
        made = flat.clone()
        for run, values in zip(self._runs(chosen), self.parts(part, chosen), strict=True):
            made[run] = values
        return made

    def add(self, flat: Tensor, chosen: Chosen, part: Tensor) -> Tensor:
        """`flat`, with `part` added to the chosen layers."""
        return self.put(flat, chosen, self.pick(flat, chosen) + part)

    def parts(self, part: Tensor, chosen: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What pick() has put together, layer by layer."""
        return torch.split(part, [self.sizes[layer] for layer in chosen])

    def read(self, told: Any) -> Chosen:
        """The layers that a peer names; ValueError where it cannot mean this model."""
        if told is None:
            return None
        numbers = [number for number in told if isinstance(number, int) and 0 <= number < len(self.sizes)]
        if not numbers or numbers != sorted(set(told)):
            raise ValueError(f"{told!r} are no layers of a model that has {len(self.sizes)}")
        return tuple(numbers)

    def squares(self, flat: Tensor) -> list[float]:
        """The squared length of every layer."""
        return [float(part.square().sum()) for part in flat.split(self.sizes)]

    def summed(self, of_parameters: Iterable[float]) -> list[float]:
        """One value a parameter, added up by layer."""
        found = [0.0] * len(self.sizes)
        for layer, value in zip(self.owners, of_parameters, strict=True):
            found[layer] += value
        return found

    def _runs(self, chosen: tuple[int, ...]) -> Iterator[slice]:
        ends = list(pairwise(accumulate(self.sizes, initial=0)))
        return (slice(*ends[layer]) for layer in chosen)
