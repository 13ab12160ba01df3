"""How FSDP2 lays out the gradients of one `fully_shard`ed module, and which part of them a rank keeps."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tacit.errors import ConfigError
from tacit.layout import Layout, Span
from tacit.memory import MemoryStore


@dataclass(frozen=True, slots=True)
class Unit:
    """One `fully_shard`ed module's parameters, as FSDP2 lays them out for its reduce-scatter."""

    module: FSDPModule
    names: tuple[str, ...]
    params: tuple[Any, ...]  # FSDP2's own records of them
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    outer: frozenset[str]  # embeddings and the head
    label: str
    group: Any  # a ProcessGroup of those that share shards; None under replicate(), and in a unit without parameters
    replicas: Any = (
        None  # a ProcessGroup of those that all-reduce what they have, where the mesh has such a dimension
    )

    @staticmethod
    def of(
        module: FSDPModule, name_of: Mapping[int, str], groups: Mapping[str, str], outer: Collection[str]
    ) -> "Unit":
        found = module._get_fsdp_state()._fsdp_param_groups
        if len(found) > 1:
            raise ConfigError(
                "a module sharded over several meshes cannot take a strategy; shard it over one"
            )
        params = [p for g in found for p in g.fsdp_params if p.sharded_param.requires_grad]
        names = tuple(name_of[id(p.sharded_param)] for p in params)
        return Unit(
            module=module,
            names=names,
            params=tuple(params),
            shapes=tuple(tuple(p._orig_size) for p in params),
            dims=tuple(p.fsdp_placement.dim for p in params),
            outer=frozenset(name for name in names if name in outer),
            label="+".join(sorted({groups[name] for name in names})),  # a unit travels as one
            group=getattr(found[0].mesh_info, "shard_process_group", None) if found else None,
            replicas=getattr(found[0].mesh_info, "replicate_process_group", None) if found else None,
        )

    @property
    def inside(self) -> tuple[int, int]:
        """This rank among those that share shards, and how many these are."""
        return (0, 1) if self.group is None else (self.group.rank(), self.group.size())

    def replace_replicas(self, group: Any) -> None:
        """From now on FSDP2 all-reduces this unit's gradients over `group`."""
        (found,) = self.module._get_fsdp_state()._fsdp_param_groups
        own: Any = copy(found.mesh_info)  # which another unit may have too
        own.replicate_process_group = group
        found.mesh_info = own

    @property
    def divide_factor(self) -> float | None:
        """What gradients are divided by, where it is not the number of ranks."""
        (group,) = self.module._get_fsdp_state()._fsdp_param_groups
        return group.gradient_divide_factor

    def lands_late(self) -> bool:
        """Whether nobody looks at a gradient before the backward pass is over: neither a hook, nor a copy to the host, nor a division."""
        (group,) = self.module._get_fsdp_state()._fsdp_param_groups
        return not group.force_sum_reduction_for_comms and not any(
            p.offload_to_cpu or p.sharded_param._post_accumulate_grad_hooks for p in self.params
        )

    @property
    def device(self) -> torch.device:
        """Where it is computed; its shards may be kept on the host."""
        (group,) = self.module._get_fsdp_state()._fsdp_param_groups
        return torch.device(group.device)

    def part(self, rank: int, world: int) -> Layout:
        """What of the parameters is in the shard of `rank`: whole rows (slices of the cut dimension), then padding."""
        spans, start = [], 0
        for name, shape, dim in zip(self.names, self.shapes, self.dims, strict=True):
            here, first = shape, 0
            if shape:
                rows = -(-shape[dim] // world)
                first = rank * rows
                left = max(0, min(rows, shape[dim] - first))
                here = (*shape[:dim], left, *shape[dim + 1 :])
            end, outer = start + prod(here), name in self.outer
            spans.append(Span(name, here, start, end, shape, dim, first, outer))
            start += chunk_numel(shape, dim, world)
        return Layout(tuple(spans), start)


@dataclass(frozen=True, slots=True)
class ShardRows:
    """A unit's gradient as FSDP2 hands it over: `world` rows, each with one chunk of every parameter, padded to equal size.

    Cut along dimension 0, a parameter's chunks one behind the other are the parameter itself, then padding.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]  # of the whole parameters
    chunks: tuple[int, ...]  # of each in a row
    world: int

    @property
    def key(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return self.world * sum(self.chunks)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        columns = flat.view(self.world, -1).split(self.chunks, dim=1)
        return {
            n: c.reshape(-1)[:numel] for n, numel, c in zip(self.names, self.numels, columns, strict=True)
        }

    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        flat = like.new_zeros(self.numel)
        columns = flat.view(self.world, -1).split(self.chunks, dim=1)
        for name, column, chunk in zip(self.names, columns, self.chunks, strict=True):
            if name in parts:
                padded = like.new_zeros(self.world * chunk)
                padded[: parts[name].numel()] = parts[name]
                column.copy_(padded.view(self.world, chunk))
        return flat


@dataclass(frozen=True, slots=True)
class UnitRowMemory:
    """One row of the unit's memory, as the row's codec sees it."""

    memory: MemoryStore
    unit: ShardRows
    row: int
    layout: Layout
    device: torch.device

    def vector(self, slot: str) -> Tensor:
        return self.memory.vector(slot, self.unit, self.device).view(self.unit.world, -1)[self.row]

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
        return self.memory.of(self.layout, self.device).tensor(
            slot, name, shape, rule=rule, dtype=dtype, init=init
        )


def island_of(model: nn.Module) -> Any:
    """The process group among whose ranks a model is sharded, where it is that alone. ConfigError otherwise, with the way out."""
    found = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    shards = {
        id(own): own for group in found if (own := getattr(group.mesh_info, "shard_process_group", None))
    }
    if any(hasattr(group.mesh_info, "replicate_process_group") for group in found) or len(shards) != 1:
        raise ConfigError(
            "this model's mesh adds gradients of all islands in every step, or has several dimensions that shard; to merge models build FSDP2 on a "
            "1-D mesh of one island's ranks"
        )
    if not all(group.is_sharded for group in found):
        raise ConfigError(
            "FSDP2 has gathered this model's parameters; attach it before a forward pass, or after the backward pass"
        )
    return next(iter(shards.values()))


def own_part(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter: under FSDP2 its shard, else all of it. Writing into it writes into the parameter."""
    own: Any = parameter.detach()
    found: Tensor = own.to_local() if isinstance(own, DTensor) else own
    return found


def shards_of(units: Sequence[Unit]) -> dict[str, Tensor]:
    """This rank's part of every parameter, also while FSDP2 has gathered the whole ones."""
    named = [(name, p) for unit in units for name, p in zip(unit.names, unit.params, strict=True)]
    return {name: p.sharded_param.detach().to_local() for name, p in named}


def chunk_numel(shape: tuple[int, ...], dim: int, world: int) -> int:
    return -(-shape[dim] // world) * prod(shape) // max(1, shape[dim]) if shape else 1
