"""A strategy for one dimension of a device mesh: whoever all-reduces gradients over it sends less, and notices nothing.

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"),
                            backend_override={"dp_replicate": tacit.mesh_backend("ef(int4)")})
    handle = tacit.mesh_handle(mesh["dp_replicate"])

In native HSDP, in torch's replicate() and in compiled FSDP no hook comes before that all-reduce, but all of them ask a process group: this one.

What is a gradient: floating-point numbers, LEAST_NUMEL of them or more, that are added (SUM or AVG) while a backward pass runs. All else
(losses and norms, integers, maxima, broadcasts, barriers, gathers) is done by the inner group unchanged.

What memory belongs to: nobody names the numbers, so the n-th gradient of a backward pass takes the memory of the n-th of the last one. Where
their number or their sizes change, a codec with memory is refused, and one without goes on.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as C10dBackend
from torch.distributed.device_mesh import DeviceMesh

from tacit.attachments.agreement import agree
from tacit.attachments.backward import PassWatch
from tacit.attachments.handle import Handle, group_of
from tacit.attachments.passing_group import PassingGroup, adds, done
from tacit.errors import ConfigError
from tacit.exchange import converse, report_nonfinite
from tacit.layout import Layout
from tacit.requests import Codec, context_for, declared_nbytes
from tacit.rounds import GradientRule
from tacit.schemes import Channel
from tacit.strategy import Strategy
from tacit.transports import Wire, interfaces
from tacit.transports.process_group import ring_nbytes

BACKEND = "tacit"
LEAST_NUMEL = 256  # fewer numbers cost latency, not bandwidth
_WAY_OUT = "take a codec without memory (int8), or tacit.attach(model), which knows the parameters"
_SHAPES = ((512, 512), (3, 1000), (1000, 3), (65, 33))
_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mtia")


class _Options(C10dBackend.Options):
    """What `mesh_backend` was given, on its way through torch."""

    def __init__(self, strategy: Strategy, seed: int, timeout: timedelta, records: str | Path | None):
        super().__init__(BACKEND, timeout)
        self.strategy, self.seed, self.records = strategy, seed, records


def mesh_backend(
    strategy: str | Strategy = "every / int8(block=256) / sharded",
    *,
    seed: int = 0,
    timeout: timedelta = dist.default_pg_timeout,
    records: str | Path | None = None,
) -> tuple[str, Any]:
    """What to give to `backend_override` of `init_device_mesh` for a dimension whose gradients take `strategy`.

    Args:
        strategy: `every / what / who` as text, or a Strategy; codecs that look at the shapes of parameters are refused.
        seed: Makes stochastic rounding repeatable.
        timeout: Bounds every wait.
        records: A JSONL file that gets one record a backward pass.

    Returns:
        The name of a backend, and its options.

    Raises:
        ConfigError: The strategy cannot be read, or does not exchange gradients in every step.
        PairingError: Its parts do not fit each other.

    Example:
        >>> import tacit
        >>> name, options = tacit.mesh_backend("ef(int4)")
        >>> name, str(options.strategy)
        ('tacit', 'every / ef(int4(block=64)) / sharded')
    """
    parsed = Strategy.parse(strategy)
    if not isinstance(parsed.when, GradientRule):
        raise ConfigError(
            f"a mesh dimension adds gradients in every step, and {parsed.when} merges models; write 'every / {parsed.what}', or attach "
            f"{str(parsed.when)!r} to the model"
        )
    if _looks_at_shapes(parsed.what):
        raise ConfigError(
            f"{parsed.what} looks at the shapes of parameters, and a mesh dimension sees vectors without names; take another codec, or "
            f"tacit.attach(model), which knows the parameters"
        )
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _open, extended_api=True, devices=list(_DEVICES))
    return BACKEND, _Options(parsed, seed, timeout, records)


def _looks_at_shapes(codec: Codec) -> bool:
    """Whether it sends something else for a matrix than for a vector of as many numbers; some matrices show it, where others happen to agree."""
    matrices = [Layout.of({"x": shape}) for shape in _SHAPES]
    return any(
        declared_nbytes(codec, own) != declared_nbytes(codec, Layout.flat(own.numel)) for own in matrices
    )


def mesh_handle(dimension: DeviceMesh | dist.ProcessGroup) -> Handle:
    """The handle of a mesh dimension that was made with `mesh_backend`: its counters, its memory for a checkpoint, `close()`.

    Args:
        dimension: `mesh["dp_replicate"]`, or its process group.

    Returns:
        The handle; one for all models on this dimension.

    Raises:
        ConfigError: The dimension is another one.

    Example:
        >>> import tempfile, tacit, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        ...     mesh = init_device_mesh("cpu", (1,), backend_override={0: tacit.mesh_backend("int8")})
        ...     print(tacit.mesh_handle(mesh).strategy)
        ...     dist.destroy_process_group()
        every / int8(block=256) / sharded
    """
    if isinstance(dimension, DeviceMesh) and dimension.ndim != 1:
        raise ConfigError(
            f"a mesh of {dimension.ndim} dimensions has no handle; name the one that has a strategy: mesh['dp_replicate']"
        )
    group = dimension.get_group() if isinstance(dimension, DeviceMesh) else dimension
    if not isinstance(group, MeshGroup):
        raise ConfigError(
            "this mesh dimension has no strategy; give init_device_mesh(..., backend_override={its name: tacit.mesh_backend(...)})"
        )
    return group.handle


def _open(asked: Any, options: Any) -> "MeshGroup":
    """What torch calls to make the process group, on all of its ranks."""
    if not isinstance(options, _Options):
        raise ConfigError(
            f"the backend {BACKEND!r} needs a strategy: give backend_override={{...: tacit.mesh_backend(...)}}"
        )
    before = interfaces.connections()
    inner = group_of(asked.global_ranks_in_group, asked.timeout)
    used = interfaces.used_by(interfaces.connections() - before)
    return MeshGroup(inner, asked.group_id, options, used)


class MeshGroup(PassingGroup):
    """The process group of a mesh dimension; its sums of gradients are conversations."""

    def __init__(
        self, inner: dist.ProcessGroup, name: str, options: _Options, used: Sequence[interfaces.Interface]
    ):
        super().__init__(inner, name)
        strategy = options.strategy
        strategy.scheme.prepare()
        agree(inner, strategy, ["mesh", options.seed], options._timeout)
        self.handle = Handle(strategy, {}, seed=options.seed, records=options.records)
        self._attachment: _MeshAttachment | None = None
        self._scatters = False
        if self.size() > 1:
            wire = Wire(inner)
            wire.interfaces = used
            channel = Channel.open(wire, strategy.scheme, options._timeout)
            self._attachment = _MeshAttachment(self.handle, channel)
            self.handle.fasten(self._attachment)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        found = self._attachment
        if found is None or found.closed or not _is_gradient(tensors, opts):
            if found is not None:
                found.count_passed(tensors)
            return super().allreduce(tensors, opts)
        found.reduce(tensors[0], average=opts.reduceOp == dist.ReduceOp.AVG)
        return done(tensors)

    def warn_of_scattering(self) -> None:
        """Once: whoever shards over this dimension thinks that it sends less."""
        if not self._scatters:
            self._scatters = True
            warnings.warn(
                f"a reduce-scatter goes over the mesh dimension of {str(self.handle.strategy)!r}, which takes all-reduces alone; for a dimension "
                f"that shards leave its backend as it is, and use tacit.attach(model)",
                stacklevel=4,
            )


def _warned(name: str) -> Callable[..., Any]:
    def method(self: MeshGroup, *args: Any, **options: Any) -> Any:
        self.warn_of_scattering()
        return getattr(self.inner, name)(*args, **options)

    return method


for _name in ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"):
    setattr(MeshGroup, _name, _warned(_name))


def _is_gradient(tensors: list[Tensor], opts: Any) -> bool:
    return (
        adds(opts)
        and len(tensors) == 1
        and tensors[0].is_floating_point()
        and tensors[0].layout == torch.strided
        and tensors[0].numel() >= LEAST_NUMEL
        and torch._C._current_graph_task_id() != -1  # a backward pass runs
    )


class _Places(dict[str, int]):
    """Elements of each gradient of a backward pass, by place in it. Before the first pass whatever a checkpoint holds is right."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if self else _numel_in(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) if self else isinstance(name, str) and _numel_in(name) is not None


def _name_of(place: int, numel: int) -> str:
    return f"gradient {place} of {numel}"


_NAME = re.compile("gradient ([0-9]{1,9}) of ([0-9]{1,18})")


def _place_in(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _numel_in(name: str) -> int | None:
    found = _NAME.fullmatch(name)
    return int(found[2]) if found else None


class _MeshAttachment:
    """Conversations in the thread that asks for a sum: FSDP2 reads the result when the call returns."""

    def __init__(self, handle: Handle, channel: Channel):
        self.channel, self.wire, self.closed = channel, channel.wire, False
        self._handle = handle
        self._places = _Places()  # as in the last pass
        self._names: list[str] = []  # of this pass
        self._known: list[str] = []  # of the pass before, or of a checkpoint
        self._numel = 0
        self._watch = PassWatch(self._finish)

    @property
    def numels(self) -> dict[str, int]:
        return self._places

    def reduce(self, gradient: Tensor, *, average: bool) -> None:
        """`gradient` becomes the sum, or the mean, over the ranks."""
        handle, codec = self._handle, self._handle.strategy.what
        if not self._watch.under_way:
            self._watch.begin()
            self._known = list(self._places) or sorted(handle.memory.names(), key=_place_in)
        name = _name_of(len(self._names), gradient.numel())
        self._names.append(name)
        self._check_place(name)
        layout = Layout.of({name: (gradient.numel(),)})
        context = context_for(
            handle.memory.of(layout, gradient.device),
            seed=handle.seed,
            step=handle.step,
            bucket=name,
            rank=self.wire.rank,
            world=self.wire.world,
        )
        x = gradient.detach().reshape(-1)
        talk = codec.reduce(x, context)
        reduced = converse(self.channel, talk, context.own_seed, handle.stats, "gradients")
        found = reduced.total / self.wire.world if average else reduced.total
        if found.device.type == "cpu" and not bool(found.sum().isfinite()):
            report_nonfinite(handle.stats, handle.step, {name: x}, {name: found})
        gradient.detach().copy_(found.view(gradient.shape))
        self._numel += gradient.numel()

    def count_passed(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            nbytes = ring_nbytes(tensor.numel(), tensor.element_size(), self.wire.world, self.wire.rank)
            self._handle.stats.sent("all_reduce", "passed on", nbytes)

    def _check_place(self, name: str) -> None:
        """Refuses a gradient of another size than the last pass had in its place: nothing names the parameters."""
        known, place = self._known, len(self._names) - 1
        if self._keeps and known and name not in known:
            there = (
                f"{_numel_in(known[place])} were in its place" if place < len(known) else "had no such place"
            )
            raise ConfigError(
                f"gradient {place} of this backward pass has {_numel_in(name)} numbers, and the pass before, or the checkpoint, {there}: without "
                f"names {self._handle.strategy.what} cannot tell whose memory it needs; {_WAY_OUT}"
            )

    @property
    def _keeps(self) -> bool:
        traits = self._handle.strategy.what.traits
        return traits.remembers or traits.stateful

    def _finish(self) -> None:
        names, numel = self._names, self._numel
        self._names, self._numel = [], 0
        before = len(self._places)
        self._places.clear()  # the same object: the handle has it too
        self._places.update({name: _numel_in(name) or 0 for name in names})
        if self._keeps and before and before != len(names):
            raise ConfigError(
                f"this backward pass had {len(names)} gradients and the last one {before}: without names {self._handle.strategy.what} may have "
                f"given some of them the memory of others; restart from the last checkpoint, and {_WAY_OUT}"
            )
        self._handle.stepped(numel)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        raise ConfigError(
            "a mesh dimension does not know the model; call model.set_requires_gradient_sync(False)"
        )
        yield

    def close(self) -> None:
        """The dimension goes on as a plain one."""
        self.closed = True
        self.channel.close()
