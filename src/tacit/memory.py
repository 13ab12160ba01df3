"""What codecs keep between steps, keyed by parameter name.

So it survives bucket rebuilds, goes into a checkpoint, loads with `weights_only=True`, and has one rule for a changed
world: every new rank takes the MEAN of what all old ranks kept. The update is a mean over ranks, so the mean of
the memories is exactly what is still owed to the model; giving it to each new rank keeps that debt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """Where the parameters lie in a bucket's flat vector."""

    @property
    def key(self) -> str: ...
    @property
    def numel(self) -> int: ...
    def split(self, flat: Tensor) -> dict[str, Tensor]: ...
    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters one behind the other: names and element counts."""

    names: tuple[str, ...]
    numels: tuple[int, ...]

    @property
    def key(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.names, flat.split(self.numels), strict=True))

    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        zeros = (like.new_zeros(numel) for numel in self.numels)
        return torch.cat(
            [parts.get(name, zero).to(like) for name, zero in zip(self.names, zeros, strict=True)]
        )


@dataclass(slots=True)
class Memory:
    """All slots of one model on one rank. A bucket sees its own part through `of(layout, device)`."""

    _flats: dict[tuple[str, str], tuple[Layout, Tensor]] = field(default_factory=dict)
    _loaded: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def of(self, layout: Layout, device: torch.device) -> "BucketSlots":
        return BucketSlots(self, layout, device)

    def vector(self, slot: str, layout: Layout, device: torch.device) -> Tensor:
        key = (slot, layout.key)
        if key not in self._flats:
            empty = torch.zeros(0, dtype=torch.float32, device=device)
            self._flats[key] = (layout, layout.join(self._loaded.get(slot, {}), like=empty))
        return self._flats[key][1]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """{slot: {parameter name: its flat values}}: copies, on the CPU, so that a machine with other devices can load them."""
        state = {slot: {n: _copy(t) for n, t in parts.items()} for slot, parts in self._loaded.items()}
        for (slot, _), (layout, flat) in self._flats.items():
            state.setdefault(slot, {}).update({n: _copy(t) for n, t in layout.split(flat).items()})
        return state

    def give_back(self, name: str, values: Tensor) -> None:
        """Remembers again what a parameter said although nobody was going to use it."""
        for layout, flat in self._flats.values():
            parts = layout.split(flat)
            if name in parts:
                parts[name] += values.reshape(-1)

    def clear(self) -> None:
        """Forgets everything."""
        self._loaded.clear()
        self._flats.clear()

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces everything kept by copies of what `pick` returned; buckets take their parts when they are next used."""
        self._loaded = {slot: {n: _copy(t) for n, t in parts.items()} for slot, parts in state.items()}
        self._flats.clear()


@dataclass(frozen=True, slots=True)
class BucketSlots:
    """One bucket's view of the memory."""

    memory: Memory
    layout: Layout
    device: torch.device

    def vector(self, slot: str) -> Tensor:
        return self.memory.vector(slot, self.layout, self.device)


def mean_of(states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """The rule for a changed world: the mean over the old ranks, in rank order; what a rank lacks counts as zero."""
    slots = _ordered(slot for state in states for slot in state)
    merged: dict[str, dict[str, Tensor]] = {}
    for slot in slots:
        names = _ordered(name for state in states for name in state.get(slot, {}))
        merged[slot] = {
            name: _mean([s[slot][name] for s in states if name in s.get(slot, {})], len(states))
            for name in names
        }
    return merged


def _mean(parts: list[Tensor], count: int) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / count


def _copy(values: Tensor) -> Tensor:
    return values.detach().reshape(-1).to("cpu", copy=True)


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
