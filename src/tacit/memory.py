"""What codecs keep between steps, keyed by parameter name.

So it survives bucket rebuilds, goes into a checkpoint, loads with `weights_only=True`, and has a rule for a changed world:

- Vectors (`memory.vector(slot)`) are debts: every new rank takes the MEAN of what all old ranks kept. The update is a mean
  over ranks, so the mean of the memories is exactly what is still owed to the model; giving it to each new rank keeps that debt.
- Tensors (`memory.tensor(slot, name, shape, rule=...)`) follow the rule that the codec states when it asks for them:
  "mean": as vectors (floating point only); "first": the value of the lowest old rank, for what all ranks hold alike (a
  subspace, a counter); "reset": they start from `init` again.
- Under FSDP2 a tensor belongs to a part of a parameter (layout.py): where a changed world cuts the parameter elsewhere, no
  old part fits, and the tensor starts from `init` again.

In a state, a slot's entry of a parameter is a flat float32 tensor (a vector's part), or {"rule": ..., "parts": {part: tensor}}.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit.errors import CheckpointError, ConformanceError
from tacit.layout import Layout, Placement
from tacit.requests import check_rule, has_shape, new_tensor

Kept = Mapping[str, Any]  # of one slot: by parameter name, a Tensor or {"rule": ..., "parts": ...}


@dataclass(slots=True)
class _Tensors:
    """The tensors of one slot and parameter, by part, with their rule for a changed world."""

    rule: str
    parts: dict[str, Tensor]


@dataclass(slots=True)
class MemoryStore:
    """All slots of one model on one rank. A bucket sees its own part through `of(layout, device)`."""

    _flats: dict[tuple[str, str], tuple[Placement, Tensor]] = field(default_factory=dict)
    _tensors: dict[tuple[str, str], _Tensors] = field(default_factory=dict)
    _loaded: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, layout: Layout, device: torch.device, placement: Placement | None = None) -> "BucketMemory":
        """The memory of a vector with `layout`. `placement`: how checkpoints cut its vectors, where that differs."""
        return BucketMemory(self, layout, device, layout if placement is None else placement)

    def vector(self, slot: str, placement: Placement, device: torch.device) -> Tensor:
        key = (slot, placement.key)
        if key not in self._flats:
            if any(kept == slot for kept, _ in self._tensors):
                raise _two_kinds(slot)
            empty = torch.zeros(0, dtype=torch.float32, device=device)
            loaded = {n: t for n, t in self._loaded.get(slot, {}).items() if isinstance(t, Tensor)}
            self._flats[key] = (placement, placement.join(loaded, like=empty))
        return self._flats[key][1]

    def tensor(
        self,
        slot: str,
        name: str,
        part: str,
        shape: Sequence[int | None],
        *,
        rule: str,
        dtype: torch.dtype,
        device: torch.device,
        init: Callable[[], Tensor] | None,
    ) -> Tensor:
        """The tensor of `part` of parameter `name`; None in `shape` fits any length."""
        key = (slot, name)
        if key not in self._tensors:
            check_rule(slot, rule, dtype)
            if any(kept == slot for kept, _ in self._flats):
                raise _two_kinds(slot)
            loaded = self._loaded.get(slot, {}).get(name)
            parts = dict(loaded["parts"]) if isinstance(loaded, Mapping) else {}
            self._tensors[key] = _Tensors(rule, parts)
        parts = self._tensors[key].parts
        if part not in parts:
            parts[part] = new_tensor(shape, dtype, device, init)
        kept = parts[part]
        if not has_shape(kept, shape) or kept.dtype != dtype:
            raise CheckpointError(
                f"memory {slot!r} of parameter {name!r} is {kept.dtype} of {tuple(kept.shape)} and the codec asks for "
                f"{dtype} of {tuple(shape)}; load the checkpoint of this codec, or leave tacit's state out"
            )
        if kept.device != device:
            kept = parts[part] = kept.to(device)
        return kept

    def names(self) -> set[str]:
        """The parameters of which something is kept, or was loaded."""
        loaded = {name for parts in self._loaded.values() for name in parts}
        flats = {name for _, (placement, flat) in self._flats.items() for name in placement.split(flat)}
        return loaded | flats | {name for _, name in self._tensors}

    def state(self) -> dict[str, dict[str, Any]]:
        """{slot: {parameter name: what is kept}}: copies, on the CPU, so that a machine with other devices can load them."""
        state = {slot: {n: _copy(t) for n, t in parts.items()} for slot, parts in self._loaded.items()}
        for (slot, _), (placement, flat) in self._flats.items():
            found = {n: _copy(t.reshape(-1)) for n, t in placement.split(flat).items()}
            state.setdefault(slot, {}).update(found)
        for (slot, name), kept in self._tensors.items():
            state.setdefault(slot, {})[name] = _copy({"rule": kept.rule, "parts": kept.parts})
        return state

    def give_back(self, name: str, values: Tensor) -> None:
        """Adds to the residual what was sent for a parameter that no rank used: it is sent again later."""
        for (slot, _), (placement, flat) in self._flats.items():
            parts = placement.split(flat)
            if slot == "residual" and name in parts:
                parts[name] += values.view_as(parts[name])

    def clear(self) -> None:
        """Forgets everything."""
        self._loaded.clear()
        self._flats.clear()
        self._tensors.clear()

    def load(self, state: Mapping[str, Kept]) -> None:
        """Replaces everything kept by copies of what `pick` returned; buckets take their parts when they are next used."""
        loaded = {slot: {n: _copy(t) for n, t in parts.items()} for slot, parts in state.items()}
        self.clear()
        self._loaded = loaded


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """One bucket's view of the memory."""

    memory: MemoryStore
    layout: Layout
    device: torch.device
    placement: Placement

    def vector(self, slot: str) -> Tensor:
        return self.memory.vector(slot, self.placement, self.device)

    def tensor(
        self,
        slot: str,
        name: str,
        shape: Sequence[int | None],
        *,
        rule: str,
        dtype: torch.dtype = torch.float32,
        init: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        part = self.layout.span(name).part
        return self.memory.tensor(
            slot, name, part, shape, rule=rule, dtype=dtype, device=self.device, init=init
        )


def _two_kinds(slot: str) -> ConformanceError:
    return ConformanceError(f"memory {slot!r} is asked for as a vector and as tensors; use two names")


def merged_of(states: Sequence[Mapping[str, Kept]]) -> dict[str, dict[str, Any]]:
    """The rule for a changed world: of vectors the mean over the old ranks, in rank order (what a rank lacks counts as zero);
    of tensors what their rule asks for."""
    slots = _ordered(slot for state in states for slot in state)
    merged: dict[str, dict[str, Any]] = {}
    for slot in slots:
        names = _ordered(name for state in states for name in state.get(slot, {}))
        merged[slot] = {
            name: _merged([s[slot][name] for s in states if name in s.get(slot, {})], len(states))
            for name in names
        }
    return merged


def _merged(found: list[Any], count: int) -> Any:
    if all(isinstance(kept, Tensor) for kept in found):
        return _mean(found, count)
    rule = found[0]["rule"]
    parts: dict[str, Tensor] = {}
    for part in _ordered(part for kept in found for part in kept["parts"]) if rule != "reset" else ():
        values = [kept["parts"][part] for kept in found if part in kept["parts"]]
        parts[part] = values[0] if rule == "first" else _mean(values, count)
    return {"rule": rule, "parts": parts}


def _mean(parts: list[Tensor], count: int) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / count


def _copy(kept: Any) -> Any:
    if isinstance(kept, Tensor):
        return kept.detach().to("cpu", copy=True).contiguous()
    return {"rule": kept["rule"], "parts": {part: _copy(t) for part, t in kept["parts"].items()}}


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
