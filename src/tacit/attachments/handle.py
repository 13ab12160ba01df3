"""What `attach` returns: figures, state and the way out."""

import errno
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from tacit import checkpoints
from tacit.errors import CheckpointError, ConfigError
from tacit.memory import Memory
from tacit.records import Recorder
from tacit.stats import Stats
from tacit.strategy import Strategy
from tacit.transports import Opens, Wire

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.checkpoint.storage import StorageReader


class Attachment(Protocol):
    """How a strategy sits on one kind of model."""

    @property
    def wire(self) -> Wire | None:
        """None where ranks have no process group in common."""
        ...

    @property
    def numels(self) -> dict[str, int]:
        """Elements that the memory of each parameter has."""
        ...

    def no_sync(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


@runtime_checkable
class Parting(Attachment, Protocol):
    """One whose ranks' models part between rounds, see rounds/."""

    def merge(self) -> None: ...
    def consensus(self) -> float: ...
    def settle(self) -> None: ...
    def save(self) -> dict[str, Any]: ...

    def check(self, state: Mapping[str, Any], memory: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raises CheckpointError unless `load` can go on from `state`, and from `memory` beside it."""
        ...

    def load(self, state: Mapping[str, Any]) -> None: ...


class Handle:
    """One strategy on one model on one rank, until `close()`.

    It is a `torch.distributed.checkpoint` `Stateful`: `dcp.save({"model": ..., "tacit": handle})` keeps every rank's memory.
    """

    def __init__(
        self, strategy: Strategy, numels: dict[str, int], *, seed: int = 0, records: str | Path | None = None
    ):
        self.strategy = strategy
        self.stats = Stats()
        self.memory = Memory()
        self.seed = seed
        self.step = 0
        self.rank, self.world = 0, 1
        self.numels = numels  # elements that the memory of each parameter has
        self.closed = False
        self.loss: float | None = None  # as last told
        self.listen: Callable[..., None] | None = None  # hears what is recorded, file or not
        self._attachment: Attachment | None = None
        self._group_lane: int | None = None
        self._parts = False
        self._records = _recorder(records) if records is not None else None
        self._records_failed = False

    def fasten(self, attachment: Attachment) -> None:
        """Called once by the attachment, when all ranks have agreed."""
        self._attachment = attachment
        self._parts = isinstance(attachment, Parting)
        if attachment.wire is not None:
            self.rank, self.world = attachment.wire.rank, attachment.wire.world
            self._group_lane = dist.get_process_group_ranks(attachment.wire.group)[0]
        self.numels = attachment.numels

    def stepped(self, numel: int) -> None:
        """Called by the attachment after every round."""
        self.step += 1
        self.stats.stepped(numel)
        if self._records is not None:
            self.record("step", step=self.step, strategy=str(self.strategy), **self.stats.as_dict())

    def record(self, kind: str, **fields: Any) -> None:
        """One line in the file of records, where there is one, and a call of who listens. A full disk costs records, not the training."""
        if self.listen is not None:
            self.listen(kind, **fields)
        if self._records is not None:
            with self._unless_disk_fails(self._records):
                self._records.record(kind, rank=self.rank, **fields)

    @contextmanager
    def _unless_disk_fails(self, records: Recorder) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            if not self._records_failed:
                self._records_failed = True
                warnings.warn(
                    f"records={records.path}: {cause.strerror}; records are lost until it can be written again, and training goes on",
                    stacklevel=2,
                )

    def told(self, loss: float | torch.Tensor) -> None:
        """The loss of this step, for rules that go by it (`adacomm`)."""
        self.loss = float(loss)

    def merge(self) -> None:
        """Gives all ranks the mean of their models, where a rule lets them part; for the end of training. All must call it."""
        if isinstance(self._attachment, Parting):
            self._attachment.merge()

    def consensus(self) -> float:
        """How far the ranks' models are apart, relative to their mean's length; 0 where they never part. All must call it, but in gossip
        between ranks: there each asks by itself (nan: no other could be reached)."""
        return self._attachment.consensus() if isinstance(self._attachment, Parting) else 0.0

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside it only accumulate, as with DDP.no_sync()."""
        return self._attachment.no_sync() if self._attachment else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, under a name that no other rank's has: copies, of tensors, numbers and text only (`weights_only=True`).

        Where ranks' models part between rounds it holds this rank's model too; its optimizer is for you to save.
        """
        return {checkpoints.key_of(self._process): (self._own_state(),)}

    def full_state_dict(self) -> dict[str, Any]:
        """Every rank's state, on every rank: for checkpoints that one rank writes. All ranks must call it."""
        if self.closed:
            raise ConfigError("the handle is closed; take full_state_dict() before close()")
        states: list[Any] = [self._own_state()]
        if self._attachment is not None:
            if self._attachment.wire is None:
                raise ConfigError(
                    "ranks that gossip have no process group to gather states in; save state_dict() of each"
                )
            states = [None] * self.world
            dist.all_gather_object(states, self._own_state(), group=self._attachment.wire.group)
        return {"format": checkpoints.FORMAT, "ranks": states}

    def load_state_dict(self, state: Any) -> None:
        """Goes on from `state`: this rank's own, a full one, or a list of all ranks' states.

        In the same world the next step has the same bits as in an unbroken run (in gossip, whose ranks meet when they like, the
        same model). In another world every rank takes the mean of the old memories, which keeps what is still owed to the model.
        A state that cannot be loaded is refused with a CheckpointError, before anything has changed.
        """
        if self.closed:
            raise ConfigError(
                "the handle is closed; attach the model again, and load the state into that handle"
            )
        place = checkpoints.Place(self.rank, self.world, self._lane)
        chosen = checkpoints.pick(state, place, str(self.strategy), self.numels)
        parting = self._attachment if isinstance(self._attachment, Parting) else None
        if parting is not None:
            checkpoints.need(chosen, "round", isinstance(chosen.get("round"), Mapping), "a dict")
            parting.check(chosen["round"], chosen["memory"])
            parting.settle()  # what is still being received must not land in the memory that is loaded
        self.memory.load(chosen["memory"])
        self.step, self.seed = chosen["step"], chosen["seed"]
        if parting is not None:
            parting.load(chosen["round"])

    def resharded(self, checkpoint: "str | os.PathLike[str] | StorageReader") -> "Stateful":
        """What to load in place of the handle where the checkpoint may be of another number of ranks.

            dcp.load({"model": ..., "tacit": handle.resharded(path)}, checkpoint_id=path)

        It reads the checkpoint's list of contents, and asks for this rank's state in the same world, for all ranks' in another.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.storage import StorageReader

        reader = checkpoint if isinstance(checkpoint, StorageReader) else FileSystemReader(checkpoint)
        try:
            names = reader.read_metadata().state_dict_metadata
        except Exception as cause:  # whatever a storage reader, or the pickle that it reads, fails with
            raise CheckpointError(
                f"{checkpoint} is no checkpoint of torch.distributed.checkpoint that can be read ({type(cause).__name__}); "
                f"give the path that dcp.save wrote to"
            ) from cause
        saved = checkpoints.processes_in(names)
        if not saved:
            raise CheckpointError(
                f'{checkpoint} holds no state of tacit; save it with dcp.save({{"tacit": handle, ...}})'
            )
        same = saved == list(range(dist.get_world_size() if _distributed() else 1))
        return _Resharded(self, [self._process] if same else saved)

    @property
    def _process(self) -> int:
        """This process's number among all, also those that this handle exchanges nothing with."""
        return dist.get_rank() if _distributed() else self.rank

    @property
    def _lane(self) -> int:
        """The first process of those that this one exchanges with: 0 but where hosts have several such sets."""
        if self._group_lane is not None:
            return self._group_lane
        return self._process - self.rank * (dist.get_world_size() // self.world) if _distributed() else 0

    def _own_state(self) -> dict[str, Any]:
        if self.closed and self._parts:
            raise ConfigError("the handle is closed, and left its round; take state_dict() before close()")
        parted = {"round": self._attachment.save()} if isinstance(self._attachment, Parting) else {}
        return parted | {
            "format": checkpoints.FORMAT,
            "strategy": str(self.strategy),
            "world": self.world,
            "rank": self.rank,
            "lane": self._lane,
            "step": self.step,
            "seed": self.seed,
            "memory": self.memory.state(),
        }

    def close(self) -> None:
        """Takes tacit off the model, and ends its threads and files; safe to call twice.

        DDP averages in float32 from then on, as it did before, and so does FSDP2 (with `group=`, between the replicas too). A plain
        module has no exchange of its own to return to: its gradients are each rank's own again, and models that rules merge part.
        """
        self.closed = True
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()
        if self._records is not None:
            with self._unless_disk_fails(self._records):
                self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Resharded:
    """A handle, for one `dcp.load` that reads the states of other processes too."""

    def __init__(self, handle: Handle, processes: Sequence[int]):
        self._handle, self._processes = handle, processes

    def state_dict(self) -> dict[str, Any]:
        return {checkpoints.key_of(process): None for process in self._processes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._handle.load_state_dict(state_dict)


def _recorder(path: str | Path) -> Recorder | None:
    try:
        return Recorder(path)
    except OSError as cause:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):  # costs the records, not the training
            warnings.warn(f"records={path}: {cause.strerror}; training goes on without records", stacklevel=2)
            return None
        raise ConfigError(f"records={path}: {cause.strerror}; name a file that can be written") from cause


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def open_wire(strategy: Strategy, parent: dist.ProcessGroup | None, timeout: timedelta | None) -> Wire:
    """A wire over a group of tacit's own among the ranks of `parent`, and to the node beside them where the strategy has one."""
    with left_on_failure(Wire(own_group(parent, timeout))) as wire:
        if isinstance(strategy.scheme, Opens):
            strategy.scheme.open(wire, timeout or timeout_of(parent))
    return wire


@contextmanager
def left_on_failure(wire: Wire) -> Iterator[Wire]:
    """`wire`, which is closed if the block fails: an attach that is refused leaves nothing open."""
    try:
        yield wire
    except BaseException:
        leave_group(wire)
        raise


def own_group(parent: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """A process group with the members of `parent` that only tacit uses: the user's own collectives cannot mix with its."""
    ranks = dist.get_process_group_ranks(parent)
    whole = len(ranks) == dist.get_world_size()
    made = dist.new_group(
        ranks,
        timeout=timeout or timeout_of(parent),
        backend=_backend_name(parent),
        use_local_synchronization=not whole,
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _backend_name(group: dist.ProcessGroup | None) -> str | None:
    name = str(dist.get_backend(group))
    return (
        None if name == "undefined" else name
    )  # of init_process_group() without a backend: the default, again


def leave_group(wire: Wire) -> None:
    """Frees the sockets and threads of what `open_wire` made; safe to call twice."""
    outside, wire.outside = wire.outside, None
    if dist.is_initialized():
        if outside is not None:
            outside.close()
        with suppress(ValueError):  # left already
            dist.destroy_process_group(wire.group)


def leave_with(owner: object, wire: Wire) -> None:
    """Frees `wire` after `owner` was dropped, for those who never call close(): with the next attach(), see `leave_dropped`."""
    when_dropped(owner, _DROPPED.append, wire)


_DROPPED: list[Wire] = []


def leave_dropped() -> None:
    """Leaves the process groups of handles that were dropped. Ranks collect garbage at different times, and torch counts groups by rank when
    it names new ones (and NCCL may wait for the others when one is destroyed): so this is done where all ranks come to the same place."""
    gc.collect()
    while _DROPPED:
        leave_group(_DROPPED.pop())


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, for threads and hooks that must not keep its object alive: once that is gone, it does nothing."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (found := weak()) is not None:
            found(*args)

    return call


def weak_parameters(parameters: Mapping[str, nn.Parameter]) -> Callable[[], dict[str, nn.Parameter]]:
    """Gives the parameters by name, without keeping them alive: a parameter has its hooks in C++, where the garbage collector does not
    look, so what those hold must not hold the parameter."""
    refs = {name: weakref.ref(parameter) for name, parameter in parameters.items()}

    def found() -> dict[str, nn.Parameter]:
        alive = {name: parameter for name, weak in refs.items() if (parameter := weak()) is not None}
        if gone := next((name for name in refs if name not in alive), None):
            raise ConfigError(
                f"parameter {gone!r} is gone from the model; close the handle and attach the model anew"
            )
        return alive

    return found


def when_dropped(owner: object, end: Callable[..., None], *args: object) -> None:
    """Calls `end(*args)`, which must not hold `owner`, when `owner` is garbage: not at exit, where torch may be gone already."""
    weakref.finalize(owner, end, *args).atexit = False


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    found: timedelta | None = getattr(_backend(group).options, "_timeout", None)
    return found


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """A device whose tensors `group` moves: the CPU where it can."""
    group = group or dist.group.WORLD
    assert group is not None
    try:
        group._get_backend(torch.device("cpu"))
        return torch.device("cpu")
    except RuntimeError:  # nccl alone
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def _backend(group: dist.ProcessGroup | None) -> Any:
    group = group or dist.group.WORLD
    assert group is not None
    return group._get_backend(_device(group))


def start_alike(wire: Wire, model: nn.Module) -> None:
    """Every rank takes the model of the first."""
    spread([*model.parameters(), *model.buffers()], wire.group)


def spread(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Every rank's tensors become those of the first of `group`."""
    for tensor in tensors:
        raw = tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.detach()
        dist.broadcast(raw, group_src=0, group=group)  # as bytes: gloo does not know every dtype
        if tensor.numel() and raw.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(raw.view(tensor.dtype).view(tensor.shape))


@contextmanager
def switched_off(switch: Callable[[bool], None]) -> Iterator[None]:
    """`switch(False)` for as long as the block runs."""
    switch(False)
    try:
        yield
    finally:
        switch(True)
