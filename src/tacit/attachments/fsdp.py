"""FSDP2 (`fully_shard`), through its two open places.

- 1-D mesh: the reduce-scatter takes the strategy. Row r of a parameter group's gradient is one conversation whose sum
  only rank r needs, so only the first half of a sharded exchange is sent: (n - 1) / n of the payload.
- `group=` replicas on other hosts: the reduce-scatter inside the host stays native, and the all-reduce between hosts,
  on each shard, takes the strategy.

FSDP2 calls both from its own place in the backward pass and waits, so no thread of tacit's is involved.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tacit.attachments.agreement import agree
from tacit.attachments.backward import call_after_backward
from tacit.attachments.guard import Guard, Note, Watch
from tacit.attachments.handle import Handle, switched_off
from tacit.attachments.target import Target
from tacit.buckets import clean_name, outer_names, sparse_names
from tacit.errors import ConfigError, ConformanceError
from tacit.exchange import converse, counted, report_nonfinite
from tacit.layout import Layout, Span
from tacit.memory import MemoryStore
from tacit.requests import (
    Conversation,
    Max,
    Reduced,
    Request,
    as_reduced,
    context_for,
)
from tacit.schemes import Channel
from tacit.transports import Wire


def attach_fsdp(handle: Handle, target: Target) -> None:
    model, groups, replicas, check_every = target.module, target.groups, target.group, target.check_every
    if tables := sparse_names(model, target.parameters):
        raise ConfigError(
            f"table {min(tables)!r} makes sparse gradients, and FSDP2 reduces dense ones; build it with sparse=False, or use DDP or a plain "
            f"module"
        )
    name_of = {id(p): clean_name(name, model) for name, p in model.named_parameters()}
    outer = outer_names(model, target.parameters)
    units = [
        _Unit.of(module, name_of, groups, outer)
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    frozen = [unit.module for unit in units if not unit.names and unit.group is not None]
    units = [unit for unit in units if unit.names]
    if not handle.strategy.scheme.scatters:
        raise ConfigError(
            f"FSDP2 scatters its sums over the ranks; {handle.strategy.scheme} has no part in that: write sharded"
        )
    wire = Wire(replicas if replicas is not None else units[0].group)
    if wire.world == 1:
        return
    if replicas is None and any(unit.group is not units[0].group for unit in units):
        raise ConfigError("the model is sharded over several meshes; tacit needs one mesh for all its units")
    for unit in units:
        if unit.hsdp:
            raise ConfigError(
                "native HSDP all-reduces by itself; build FSDP2 on a 1-D mesh and pass group=the replicas"
            )
        if any(unit.dims) and handle.strategy.what.traits.remembers:
            raise ConfigError(
                f"{unit.names[0]!r} is sharded along dimension {max(unit.dims)}; {handle.strategy.what} needs 0"
            )
    facts = [(unit.names, unit.shapes, sorted(unit.outer)) for unit in units]
    channel = Channel(wire, handle.strategy.scheme)  # none that has to be opened
    agree(wire.group, handle.strategy, ["fsdp2", facts, handle.seed, check_every], None)
    wire.measure()
    # on one mesh every rank has a shard of its own
    alike = None if replicas is None else lambda: shards_of(units)
    device = next(iter(shards_of(units).values())).device
    guard = Guard(handle, Watch(model, by_name=True), alike, check_every, device)
    handle.fasten(FsdpAttachment(handle, model, units, frozen, channel, guard, scatter=replicas is None))


def shards_of(units: Sequence["_Unit"]) -> dict[str, Tensor]:
    """This rank's part of every parameter, also while FSDP2 has gathered the whole ones."""
    named = [(name, p) for unit in units for name, p in zip(unit.names, unit.params, strict=True)]
    return {name: p.sharded_param.detach().to_local() for name, p in named}


@dataclass(frozen=True, slots=True)
class _Unit:
    """One `fully_shard`ed module's parameters, as FSDP2 lays them out for its reduce-scatter."""

    module: FSDPModule
    names: tuple[str, ...]
    params: tuple[Any, ...]  # FSDP2's own records of them
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    outer: frozenset[str]  # embeddings and the head
    label: str
    hsdp: bool
    group: Any  # a ProcessGroup; None in a unit without parameters

    @staticmethod
    def of(
        module: FSDPModule, name_of: Mapping[int, str], groups: Mapping[str, str], outer: Collection[str]
    ) -> "_Unit":
        found = module._get_fsdp_state()._fsdp_param_groups
        if len(found) > 1:
            raise ConfigError(
                "a module sharded over several meshes cannot take a strategy; shard it over one"
            )
        params = [p for g in found for p in g.fsdp_params if p.sharded_param.requires_grad]
        names = tuple(name_of[id(p.sharded_param)] for p in params)
        return _Unit(
            module=module,
            names=names,
            params=tuple(params),
            shapes=tuple(tuple(p._orig_size) for p in params),
            dims=tuple(p.fsdp_placement.dim for p in params),
            outer=frozenset(name for name in names if name in outer),
            label="+".join(sorted({groups[name] for name in names})),  # a unit travels as one
            hsdp=any(g._is_hsdp for g in found),
            group=found[0]._reduce_scatter_process_group if found else None,
        )

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
            start += _chunk(shape, dim, world)
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
class _RowMemory:
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


class FsdpAttachment:
    """The strategy in every unit's reduce-scatter, or in its all-reduce between replicas."""

    def __init__(
        self,
        handle: Handle,
        model: nn.Module,
        units: Sequence[_Unit],
        frozen: Sequence[FSDPModule],
        channel: Channel,
        guard: Guard,
        *,
        scatter: bool,
    ):
        self.channel, self.wire = channel, channel.wire
        self.handle, self._model, self._units, self._scatter = handle, model, units, scatter
        self._frozen, self._guard = frozen, guard
        self._asked: tuple[Note, Tensor] | None = None
        self._begun = False
        self.numels: dict[str, int] = {}
        self._exchanged = 0  # elements in this round; a round is one backward pass
        for unit in units:
            if scatter:
                comm = _ReduceScatter(self, unit)
                self.numels.update(zip(unit.names, comm.layout.numels, strict=True))
                unit.module.set_custom_reduce_scatter(comm)
            else:
                hook = _AllReduce(self, unit)
                self.numels.update(zip(unit.names, hook.layout.numels, strict=True))
                unit.module.set_all_reduce_hook(hook)
        if scatter:
            for module in frozen:  # thawed on one rank alone, they would send what nobody waits for
                module.set_custom_reduce_scatter(_Refused(self))

    def begin(self, device: torch.device) -> None:
        """Before anything is sent in a backward pass, from `device`: ranks compare notes. An accelerator's answer is read one pass later."""
        if self._begun:
            return
        self._judge()
        note = self._guard.note(device=device)
        with counted(self.wire, self.handle.stats, "Max", "control"):
            self._asked = note, self._ask(Max(note.sent))
        if self._asked[1].device.type == "cpu":
            self._judge()
        self._begun = True

    def _judge(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            self._guard.judge(*asked, self._ask)

    def _ask(self, request: Request) -> Any:
        return self.channel.answer(request, 0)

    def exchanged(self, numel: int) -> None:
        """A unit has been exchanged; the round is over when the backward pass is."""
        if self._exchanged == 0:
            call_after_backward(self._end_round)
        self._exchanged += numel

    def _end_round(self) -> None:
        numel, self._exchanged, self._begun = self._exchanged, 0, False
        self.handle.stepped(numel)

    def no_sync(self) -> AbstractContextManager[None]:
        return switched_off(self._model.set_requires_gradient_sync)  # type: ignore[arg-type]

    def close(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        for module in self._frozen if self._scatter else ():
            module.set_custom_reduce_scatter(DefaultReduceScatter())
        for unit in self._units:
            if self._scatter:
                unit.module.set_custom_reduce_scatter(DefaultReduceScatter())
            else:
                unit.module.set_all_reduce_hook(_plain_mean(self.wire))


class _ReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter: a conversation for every row, in lock step; rank r gets the sum of row r."""

    def __init__(self, attachment: FsdpAttachment, unit: _Unit):
        self._attachment, self._unit = attachment, unit
        world = attachment.wire.world
        numels = tuple(prod(shape) for shape in unit.shapes)
        chunks = tuple(_chunk(shape, dim, world) for shape, dim in zip(unit.shapes, unit.dims, strict=True))
        self.layout = ShardRows(unit.names, numels, chunks, world)
        self._rows = [unit.part(row, world) for row in range(world)]

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        handle, wire = self._attachment.handle, self._attachment.wire
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(f"FSDP2 asks for {op}; leave set_gradient_divide_factor alone under tacit")
        self._attachment.begin(input_tensor.device)
        if input_tensor.numel() != self.layout.numel:
            raise ConfigError(
                f"the unit of {self.layout.key!r} sends {input_tensor.numel()} of its {self.layout.numel} gradients: some "
                f"parameters took no part; call model.set_reduce_scatter_unused_params(True)"
            )
        with handle.stats.timed("wait"):
            total = self._converse(input_tensor.view(wire.world, -1))
        output_tensor.copy_(total / wire.world if op == dist.ReduceOp.AVG else total)
        self._report(input_tensor.view(wire.world, -1)[wire.rank], output_tensor)
        self._attachment.exchanged(input_tensor.numel())
        return None

    def _report(self, own: Tensor, mean: Tensor) -> None:
        """Each rank sees its own row of the sum; on an accelerator looking would stop it, and the optimizer will see."""
        if mean.device.type == "cpu" and not bool(mean.sum().isfinite()):
            row = self._rows[self._attachment.wire.rank]
            handle = self._attachment.handle
            report_nonfinite(handle.stats, handle.step, row.split(own), row.split(mean))

    def _converse(self, rows: Tensor) -> Tensor:
        handle, wire, codec = (
            self._attachment.handle,
            self._attachment.wire,
            self._attachment.handle.strategy.what,
        )
        contexts = [
            context_for(
                _RowMemory(handle.memory, self.layout, row, self._rows[row], x.device),
                seed=handle.seed,
                step=handle.step,
                bucket=f"{self.layout.key}#{row}",
                rank=wire.rank,
                world=wire.world,
            )
            for row, x in enumerate(rows)
        ]
        talks = [codec.reduce(x, context) for x, context in zip(rows, contexts, strict=True)]
        answers: list[Any] = [None] * wire.world
        for _ in range(codec.traits.rounds):
            with handle.stats.timed("encode"):
                requests = [talk.send(answer) for talk, answer in zip(talks, answers, strict=True)]
            with counted(wire, handle.stats, type(requests[0]).__name__, self._unit.label):
                answers = self._attachment.channel.scheme.answer_rows(
                    wire, requests, contexts[wire.rank].own_seed
                )
        with handle.stats.timed("decode"):
            reduced = _end(talks[wire.rank], answers[wire.rank])
            for row, talk in enumerate(talks):
                if row != wire.rank and (codec.traits.remembers or codec.traits.stateful):
                    _end(talk, answers[row])
        return reduced.total


class _Refused(ReduceScatter):
    """Of a unit that was frozen when the model was attached: it sends nothing but this rank's note."""

    def __init__(self, attachment: FsdpAttachment):
        self._attachment = attachment

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._attachment.begin(input_tensor.device)
        raise ConfigError("a unit of FSDP2 was unfrozen after attach(); close the handle and attach again")


def _end(talk: Conversation, answer: Any) -> Reduced:
    try:
        talk.send(answer)
    except StopIteration as end:
        return as_reduced(end.value)
    raise ConformanceError("the codec made more requests than it declares")


def _chunk(shape: tuple[int, ...], dim: int, world: int) -> int:
    return -(-shape[dim] // world) * prod(shape) // max(1, shape[dim]) if shape else 1


class _AllReduce:
    """The all-reduce of each shard between replicas: one whole conversation."""

    def __init__(self, attachment: FsdpAttachment, unit: _Unit):
        self._attachment, self._unit = attachment, unit
        inside = dist.get_world_size(unit.group)
        chunks = (_chunk(shape, dim, inside) for shape, dim in zip(unit.shapes, unit.dims, strict=True))
        self.layout = Layout.of({name: (chunk,) for name, chunk in zip(unit.names, chunks, strict=True)})
        self._part = unit.part(dist.get_rank(unit.group), inside)

    def __call__(self, shard: Tensor) -> None:
        handle, wire = self._attachment.handle, self._attachment.wire
        self._attachment.begin(shard.device)
        context = context_for(
            handle.memory.of(self._part, shard.device, self.layout),
            seed=handle.seed,
            step=handle.step,
            bucket=self.layout.key,
            rank=wire.rank,
            world=wire.world,
        )
        talk = handle.strategy.what.reduce(shard, context)
        with handle.stats.timed("wait"):
            reduced = converse(
                self._attachment.channel, talk, context.own_seed, handle.stats, self._unit.label
            )
        shard.copy_(reduced.total / wire.world)
        self._attachment.exchanged(shard.numel())


def _plain_mean(wire: Wire) -> Callable[[Tensor], None]:
    def hook(shard: Tensor) -> None:
        dist.all_reduce(shard, group=wire.group)
        shard.div_(wire.world)

    return hook
