"""FSDP2 (`fully_shard`) and `replicate()`, which builds on it, through their open places.

- 1-D mesh: the reduce-scatter takes the strategy. Row r of a parameter group's gradient is one conversation whose sum
  only rank r needs, so only the first half of a sharded exchange is sent: (n - 1) / n of the payload.
- `group=` replicas on other hosts: the reduce-scatter inside the host stays native, and the all-reduce between hosts,
  on each shard, takes the strategy.
- A mesh with a replicate dimension (native HSDP, `replicate()`): the all-reduce over that dimension takes the strategy. FSDP2 asks a process
  group for it, and no hook comes before: every unit is given a group of its own, which hands on everything else.

FSDP2 calls all of them from its own place in the backward pass, which goes on meanwhile: see fsdp_pass.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tacit import recycled
from tacit.attachments.agreement import agree
from tacit.attachments.fsdp_pass import FsdpPass, Outgoing
from tacit.attachments.fsdp_units import ShardRows, Unit, UnitRowMemory, chunk_numel, shards_of
from tacit.attachments.fsdp_weights import WeightGather, check_gathers
from tacit.attachments.guard import BackgroundGuard, Guard, Watch
from tacit.attachments.handle import (
    Handle,
    leave,
    leave_with,
    left_on_failure,
    open_channel,
    switched_off,
    when_dropped,
)
from tacit.attachments.mesh import MeshGroup
from tacit.attachments.passing_group import PassingGroup, adds, done
from tacit.attachments.target import Target
from tacit.buckets import clean_name, outer_names, sparse_names
from tacit.errors import ConfigError, ConformanceError
from tacit.exchange import Exchange, RowsTalk, nonfinite, report_nonfinite
from tacit.layout import Layout
from tacit.requests import Conversation, Reduced, as_reduced, context_for
from tacit.schemes import Channel, RowRequests


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
        Unit.of(module, name_of, groups, outer)
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    frozen = [unit.module for unit in units if not unit.names and unit.group is not None]
    units = [unit for unit in units if unit.names]
    group, scatter = _who_exchanges(units, replicas)
    if scatter and not handle.strategy.scheme.scatters:
        raise ConfigError(
            f"FSDP2 scatters its sums over the ranks; {handle.strategy.scheme} has no part in that: write sharded"
        )
    if dist.get_world_size(group) == 1:
        if units[0].inside[1] > 1 and (replicas is None or target.weights is not None):
            raise ConfigError(
                "the replicas that were to take the strategy are one rank, so nothing would be sent in another way; build FSDP2 on the dimension "
                "that shards alone, and leave group= out"
            )
        return
    for unit in units:
        if any(unit.dims) and handle.strategy.what.traits.remembers:
            raise ConfigError(
                f"{unit.names[0]!r} is sharded along dimension {max(unit.dims)}; {handle.strategy.what} needs 0"
            )
    if not scatter:
        handle.strategy.scheme.prepare()
    gathering = [unit.module for unit in units] + frozen if target.weights is not None else []
    for module in gathering:
        check_gathers(module)
    facts = [(unit.names, unit.shapes, sorted(unit.outer)) for unit in units]
    agree(group, handle.strategy, ["fsdp2", facts, handle.seed, check_every, target.weights], target.timeout)
    # on one mesh every rank has a shard of its own
    alike = None if scatter else lambda: shards_of(units)
    device = units[0].device
    with left_on_failure(open_channel(handle.strategy, group, target.timeout)) as channel:
        guard = Guard(handle, Watch(model, by_name=True), alike, check_every, device)
        attachment = FsdpAttachment(
            handle, model, units, frozen, channel, guard, device, group, scatter=scatter
        )
        leave_with(attachment, channel)
    if target.weights is not None:
        for module in gathering:
            module.set_custom_all_gather(WeightGather(module, target.weights, handle.stats))
        attachment.gathering = gathering
    handle.fasten(attachment)


def _who_exchanges(
    units: Sequence[Unit], replicas: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, bool]:
    """The ranks that exchange, and whether they scatter what they add."""
    native = units[0].replicas
    if replicas is not None and native is not None:
        raise ConfigError(
            "the model's mesh has a replicate dimension, which takes the strategy; leave group= out"
        )
    if replicas is not None:
        return replicas, False
    if any(unit.group is not units[0].group or unit.replicas is not native for unit in units):
        raise ConfigError("the model is sharded over several meshes; tacit needs one mesh for all its units")
    group = units[0].group if native is None else native
    if isinstance(group, MeshGroup):
        raise ConfigError(
            f"this mesh dimension was made with tacit.mesh_backend({str(group.handle.strategy)!r}); leave tacit.attach() out: "
            f"tacit.mesh_handle(mesh[...]) has its counters and its state"
        )
    return group, native is None


class FsdpAttachment:
    """The strategy in every unit's reduce-scatter, or in its all-reduce between replicas."""

    def __init__(
        self,
        handle: Handle,
        model: nn.Module,
        units: Sequence[Unit],
        frozen: Sequence[FSDPModule],
        channel: Channel,
        guard: Guard,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        scatter: bool,
    ):
        self.channel, self.wire, self._group = channel, channel.wire, group
        self.handle, self._model, self._units, self._scatter = handle, model, units, scatter
        self._frozen = frozen
        self.gathering: Sequence[FSDPModule] = ()  # units whose parameters travel packed
        self.exchange = Exchange(channel, handle.strategy.what, handle.stats, device=device)
        when_dropped(self, self.exchange.drop)
        self.under_way = FsdpPass(handle, self.exchange, BackgroundGuard(guard, self.exchange, device))
        self.numels: dict[str, int] = {}
        for unit in units:
            if scatter:
                comm = _ReduceScatter(self, unit)
                self.numels.update(zip(unit.names, comm.layout.numels, strict=True))
                unit.module.set_custom_reduce_scatter(comm)
            else:
                hook = _AllReduce(self, unit)
                self.numels.update(zip(unit.names, hook.layout.numels, strict=True))
                if unit.replicas is None:
                    unit.module.set_all_reduce_hook(hook)
                else:
                    unit.replace_replicas(_UnitGroup(unit.replicas, hook))
        if scatter:
            for module in frozen:  # thawed on one rank alone, they would send what nobody waits for
                module.set_custom_reduce_scatter(_Refused(self))

    def no_sync(self) -> AbstractContextManager[None]:
        return switched_off(self._model.set_requires_gradient_sync)  # type: ignore[arg-type]

    def close(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
            DefaultAllGather,
            DefaultReduceScatter,
        )

        for module in self.gathering:
            module.set_custom_all_gather(DefaultAllGather())
        for module in self._frozen if self._scatter else ():
            module.set_custom_reduce_scatter(DefaultReduceScatter())
        for unit in self._units:
            if self._scatter:
                unit.module.set_custom_reduce_scatter(DefaultReduceScatter())
            elif unit.replicas is None:
                unit.module.set_all_reduce_hook(_plain_mean(self._group))
            else:
                unit.replace_replicas(unit.replicas)
        self.exchange.close()
        leave(self.channel)


class _ReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter: a conversation for every row, in lock step; rank r gets the sum of row r."""

    def __init__(self, attachment: FsdpAttachment, unit: Unit):
        self._attachment, self._unit = attachment, unit
        world = attachment.wire.world
        numels = tuple(prod(shape) for shape in unit.shapes)
        chunks = tuple(
            chunk_numel(shape, dim, world) for shape, dim in zip(unit.shapes, unit.dims, strict=True)
        )
        self.layout = ShardRows(unit.names, numels, chunks, world)
        self._rows = [unit.part(row, world) for row in range(world)]

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        handle, wire = self._attachment.handle, self._attachment.wire
        divisor, late = self._asked(op)
        self._attachment.under_way.begin()
        if input_tensor.numel() != self.layout.numel:
            raise _partly_used(self.layout.key, input_tensor.numel(), self.layout.numel)
        rows, own, step = input_tensor.view(wire.world, -1), self._rows[wire.rank], handle.step

        def mean(reduced: Reduced) -> Tensor:
            found = reduced.total / divisor if divisor != 1 else reduced.total
            # on an accelerator looking would stop it, and the optimizer will see
            if found.device.type == "cpu" and not bool(found.sum().isfinite()):
                report_nonfinite(handle.stats, step, nonfinite(own.split(rows[wire.rank])), own.split(found))
            return found

        contexts = [
            context_for(
                UnitRowMemory(handle.memory, self.layout, row, self._rows[row], x.device),
                seed=handle.seed,
                step=step,
                bucket=f"{self.layout.key}#{row}",
                rank=wire.rank,
                world=wire.world,
            )
            for row, x in enumerate(rows)
        ]
        codec = handle.strategy.what
        talks = [codec.reduce(x, context) for x, context in zip(rows, contexts, strict=True)]
        kept = codec.traits.remembers or codec.traits.stateful
        talk, rounds = _in_lock_step(talks, codec.traits.rounds, wire.rank, kept), codec.traits.rounds
        outgoing = Outgoing(self._unit, own, talk, rounds, contexts[wire.rank].own_seed, input_tensor, mean)
        self._attachment.under_way.send(outgoing, output_tensor, late=late)
        return None

    def _asked(self, op: Any) -> tuple[float, bool]:
        """What the sum is to be divided by, and whether FSDP2 leaves alone what comes back."""
        if op == dist.ReduceOp.SUM:
            return 1.0, False
        if op == dist.ReduceOp.AVG:
            return self._attachment.wire.world, True
        factor = self._unit.divide_factor
        if op == dist.ReduceOp.PREMUL_SUM and factor is not None:  # set_gradient_divide_factor
            return factor, True
        raise ConfigError(
            f"FSDP2 asks for {op} in its reduce-scatter, and tacit has sums and means; leave it at torch's"
        )


def _in_lock_step(talks: Sequence[Conversation], rounds: int, own: int, kept: bool) -> RowsTalk:
    """The conversations of all rows as one, whose end is that of this rank's `own` row. `kept`: the others' ends are remembered too."""
    answers: Sequence[Any] = [None] * len(talks)
    for _ in range(rounds):
        requests = [talk.send(answer) for talk, answer in zip(talks, answers, strict=True)]
        answers = yield RowRequests(tuple(requests))
    reduced = _end(talks[own], answers[own])
    for row, talk in enumerate(talks):
        if row != own and kept:
            _end(talk, answers[row])
    return reduced


def _end(talk: Conversation, answer: Any) -> Reduced:
    try:
        talk.send(answer)
    except StopIteration as end:
        return as_reduced(end.value)
    raise ConformanceError("the codec made more requests than it declares")


class _Refused(ReduceScatter):
    """Of a unit that was frozen when the model was attached: it sends nothing but this rank's note."""

    def __init__(self, attachment: FsdpAttachment):
        self._attachment = attachment

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        self._attachment.under_way.begin()
        raise ConfigError("a unit of FSDP2 was unfrozen after attach(); close the handle and attach again")


class _AllReduce:
    """The all-reduce of each shard between replicas: one whole conversation."""

    def __init__(self, attachment: FsdpAttachment, unit: Unit):
        self._attachment, self._unit = attachment, unit
        rank, world = unit.inside
        chunks = (chunk_numel(shape, dim, world) for shape, dim in zip(unit.shapes, unit.dims, strict=True))
        self.layout = Layout.of({name: (chunk,) for name, chunk in zip(unit.names, chunks, strict=True)})
        self._part = unit.part(rank, world)

    def __call__(self, shard: Tensor, *, average: bool = True) -> None:
        """`shard` becomes the mean over the replicas, or their sum."""
        handle, wire, codec = (
            self._attachment.handle,
            self._attachment.wire,
            self._attachment.handle.strategy.what,
        )
        self._attachment.under_way.begin()
        if shard.numel() != self._part.numel and (codec.traits.remembers or codec.traits.stateful):
            raise _partly_used(self.layout.key, shard.numel(), self._part.numel)
        context = context_for(
            handle.memory.of(self._part, shard.device, self.layout),
            seed=handle.seed,
            step=handle.step,
            bucket=self.layout.key,
            rank=wire.rank,
            world=wire.world,
        )
        x = recycled.clone(shard)  # the gradient is where `shard` is
        outgoing = Outgoing(
            self._unit,
            self._part,
            codec.reduce(x, context),
            codec.traits.rounds,
            context.own_seed,
            x,
            lambda reduced: reduced.total / wire.world if average else reduced.total,
        )
        # FSDP2 divides 16-bit floats that overflow once more; and where a part of the unit alone has gradients, it is not known which
        late = shard.dtype in (torch.float32, torch.bfloat16) and shard.numel() == self._part.numel
        self._attachment.under_way.send(outgoing, shard, late=late and average)


class _UnitGroup(PassingGroup):
    """The process group over which FSDP2 all-reduces one unit's gradients."""

    def __init__(self, inner: dist.ProcessGroup, all_reduce: _AllReduce):
        super().__init__(inner, inner.group_name)
        self._all_reduce = all_reduce

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        if not adds(opts) or len(tensors) != 1:
            raise ConfigError(
                "FSDP2 asks for neither the sum nor the mean of a gradient over the replicas; leave its reductions alone under tacit"
            )
        self._all_reduce(tensors[0], average=opts.reduceOp == dist.ReduceOp.AVG)
        return done(tensors)


def _partly_used(name: str, here: int, whole: int) -> ConfigError:
    return ConfigError(
        f"the unit of {name!r} sends {here} of its {whole} gradients: some parameters took no part; call "
        f"model.set_reduce_scatter_unused_params(True)"
    )


def _plain_mean(group: dist.ProcessGroup) -> Callable[[Tensor], None]:
    def hook(shard: Tensor) -> None:
        dist.all_reduce(shard, group=group)
        shard.div_(dist.get_world_size(group))

    return hook
