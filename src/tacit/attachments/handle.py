"""What `attach` returns: counters, checkpoint state, and `close()`."""

import errno
import gc
import logging
import os
import platform
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from tacit import checkpoints, environment
from tacit.errors import CheckpointError, ConfigError, one_line
from tacit.memory import MemoryStore
from tacit.records import Recorder
from tacit.schemes import Channel
from tacit.stats import Stats
from tacit.strategy import Strategy
from tacit.transports import Wire, interfaces

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful
    from torch.distributed.checkpoint.storage import StorageReader

log = logging.getLogger("tacit")


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
    def divergence(self) -> float: ...
    def settle(self) -> None: ...
    def save(self) -> dict[str, Any]: ...

    def check(self, state: Mapping[str, Any], memory: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raises CheckpointError unless `load` can go on from `state`, and from `memory` beside it."""
        ...

    def load(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Cutting(Attachment, Protocol):
    """One whose buckets may be those of what it sits on."""

    def cut_of(self, bucket_nbytes: int) -> list[int]:
        """The sizes that decide where buckets of so many bytes are cut, beside their own; empty where none do."""
        ...


class Planner(Protocol):
    """What chooses the strategy of a handle while the model trains, see auto/. All methods are called on all ranks alike."""

    def step_ended(self) -> None: ...
    def replan(self) -> None: ...
    def save(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

    def load(self, strategy: str, saved: Mapping[str, Any]) -> None:
        """Goes on with what a checkpoint was written under."""
        ...


@runtime_checkable
class Owing(Attachment, Protocol):
    """One that may owe gradients or steps to parameters after `backward()` and `step()` have returned."""

    def flush(self) -> None: ...


@runtime_checkable
class Missing(Attachment, Protocol):
    """One whose ranks need not be at the same step."""

    def missed(self) -> bool: ...


class Handle:
    """One strategy on one model on one rank, until `close()`. `tacit.attach` makes it.

    It is a `torch.distributed.checkpoint` `Stateful`: `dcp.save({"model": ..., "tacit": handle})` keeps every rank's memory.

    Args:
        strategy: What was attached.
        numels: Elements that the memory of each parameter has, by parameter name.
        seed: Makes stochastic rounding repeatable.
        records: A JSONL file that gets one record a step.

    Raises:
        ConfigError: `records` cannot be written.

    Example:
        >>> import tacit, torch
        >>> model = torch.nn.Linear(2, 1)  # one process: nothing to exchange, the same interface
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tacit.attach(model, optimizer, "every / int8(block=256) / sharded") as handle:
        ...     handle.rank, handle.world, handle.stats.as_dict()["sent_nbytes"]
        (0, 1, 0)
        >>> handle.closed
        True
    """

    def __init__(
        self, strategy: Strategy, numels: dict[str, int], *, seed: int = 0, records: str | Path | None = None
    ):
        self.strategy = strategy
        self.stats = Stats()
        self.memory = MemoryStore()
        self.seed = seed
        self.step = 0
        self.rank, self.world = 0, 1
        self.numels = numels  # elements that the memory of each parameter has
        self.closed = False
        self.bucket_nbytes: int | None = None  # with bucket="auto", what was measured
        self.asked_nbytes: int | None = None  # with a size, that
        self.loss: float | None = None  # as last reported
        self.on_record: Callable[..., None] | None = None  # called with every record, with or without a file
        self.planner: Planner | None = None  # where the strategy is `auto`
        # makes a gradient what is exchanged instead of it, see momenta.py
        self.offer: Callable[[str, torch.Tensor], bool] | None = None
        self._attachment: Attachment | None = None
        self._group_lane: int | None = None
        self._parts = False
        self._records = _recorder(records) if records is not None else None
        self._records_failed = False
        self._log: Callable[..., Any] = lambda scalars, step: None
        self._log_every = 0
        self._log_failed = False

    def fasten(self, attachment: Attachment, rank: int = 0, world: int = 1) -> None:
        """Called once by the attachment, when all ranks have agreed.

        Args:
            attachment: How the strategy sits on the model.
            rank: This rank, where the attachment has no wire that knows it.
            world: How many ranks there are, likewise.
        """
        self._attachment = attachment
        self._parts = isinstance(attachment, Parting)
        if attachment.wire is not None:
            rank, world = attachment.wire.rank, attachment.wire.world
            self._group_lane = dist.get_process_group_ranks(attachment.wire.group)[0]
        self.rank, self.world, self.numels = rank, world, attachment.numels
        if attachment.wire is not None:
            self._name_interfaces(attachment.wire)
        if self._records is not None:
            facts = {
                "strategy": str(self.strategy),
                "world": world,
                "host": platform.node(),
                "over": self.stats.over,
            }
            self.record("attached", **facts, elements=sum(self.numels.values()))

    def _name_interfaces(self, wire: Wire) -> None:
        """In `stats.over` and the log; one rank of a host warns where another interface is probably meant."""
        backend = str(dist.get_backend(wire.group))
        self.stats.over = ", ".join(map(str, wire.interfaces))
        if environment.local_rank() == 0 and wire.interfaces:
            log.info("exchanges over %s with %s", self.stats.over, backend)
            alone = not environment.several_hosts()
            doubt = interfaces.doubt(wire.interfaces, interfaces.on_this_host(), alone=alone, backend=backend)
            if doubt:
                log.warning("%s: %s", platform.node(), doubt)

    @property
    def attachment(self) -> Attachment | None:
        """How the strategy sits on the model; None where there are no other ranks, and once the handle is closed."""
        return self._attachment

    def stepped(self, numel: int) -> None:
        """Called by the attachment after every round: counts it, and writes a `step` record.

        Args:
            numel: Elements that this round exchanged.
        """
        self.step += 1
        self.stats.stepped(numel)
        if self._records is not None:
            self.record("step", step=self.step, strategy=str(self.strategy), **self.stats.as_dict())
        if self._log_every and self.step % self._log_every == 0:
            self._log_scalars()

    def step_ended(self) -> None:
        """Called by the attachment when a step's gradients are means and nothing of it is left in the exchange."""
        if self.planner is not None:
            self.planner.step_ended()

    def record(self, kind: str, **fields: Any) -> None:
        """Passes one record to `on_record`, and appends it to the file of records, where there is one.

        A full disk costs records, with a warning, and not the training.

        Args:
            kind: The kind of record.
            fields: Its values, as JSON can hold them.

        Example:
            >>> import tacit, torch
            >>> with tacit.attach(torch.nn.Linear(2, 1)) as handle:
            ...     handle.on_record = lambda kind, **fields: print(kind, fields)
            ...     handle.record("epoch", number=3)
            epoch {'number': 3}
        """
        if self.on_record is not None:
            self.on_record(kind, **fields)
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

    def log_to(self, log: Callable[..., Any], every: int = 50) -> None:
        """Has the figures of `stats` logged while the training runs: by `wandb.log`, `mlflow.log_metrics`, or a Lightning logger's
        `log_metrics`, which all take a dict and a step. If it fails, that costs its figures, with one warning, and not the training.

        Args:
            log: Called as `log({"tacit/sent_nbytes": 1.0, ...}, step=100)`, in the thread that ends a step. Call `log_to` on the ranks that log.
            every: Steps, or rounds of rules that merge models, between two calls.

        Raises:
            ConfigError: `every` is no positive whole number.

        Example:
            >>> import tacit, torch
            >>> with tacit.attach(torch.nn.Linear(2, 1)) as handle:
            ...     handle.log_to(lambda scalars, step: print(step, scalars["tacit/steps"]), every=2)
            ...     handle.stepped(3), handle.stepped(3)
            2 2
            (None, None)
        """
        if not isinstance(every, int) or every < 1:
            raise ConfigError(f"every={every!r}: steps between two logs, 1 or more")
        self._log, self._log_every = log, every

    def _log_scalars(self) -> None:
        try:
            self._log(self.stats.scalars(), step=self.step)
        except Exception as cause:  # whatever it raises: a service that is away must not end a training
            if not self._log_failed:
                self._log_failed = True
                warnings.warn(
                    f"step {self.step}: figures could not be logged ({one_line(str(cause), 200)}); training goes on, and later failures are not reported",
                    stacklevel=2,
                )

    def report_loss(self, loss: float | torch.Tensor) -> None:
        """The loss of this step, for rules that adapt to it (`adacomm`); others ignore it.

        Args:
            loss: A number, or a tensor of one element.

        Example:
            >>> import tacit, torch
            >>> with tacit.attach(torch.nn.Linear(2, 1)) as handle:
            ...     handle.report_loss(torch.tensor(0.5))
            >>> handle.loss
            0.5
        """
        self.loss = float(loss)

    def replan(self) -> None:
        """Where the strategy is `auto`: trains some steps without a codec again, probes, and chooses anew. All ranks must call it,
        between the same two steps. What a codec remembers is kept if it is chosen again, and dropped otherwise.

        Raises:
            ConfigError: The handle has a strategy that was named, or is closed.
        """
        if self.planner is None or self.closed:
            raise ConfigError(
                "the handle is closed; attach the model again"
                if self.closed
                else f"this handle runs {str(self.strategy)!r}, which was named; attach with 'auto' to have one chosen"
            )
        self.planner.replan()

    def merge(self) -> None:
        """Gives all ranks the mean of their models, where a rule lets them part; for the end of training. All must call it."""
        if isinstance(self._attachment, Parting):
            self._attachment.merge()

    def flush(self) -> None:
        """Waits for what is still on its way, with `overlap="forward"`: call it before you read or change parameters outside of a forward pass.

        Elsewhere nothing is on its way, and it does nothing.

        Raises:
            TransportError: The exchange has ended.

        Example:
            >>> import tacit, torch
            >>> with tacit.attach(torch.nn.Linear(2, 1)) as handle:
            ...     handle.flush()
        """
        if isinstance(self._attachment, Owing):
            self._attachment.flush()

    def missed(self) -> bool:
        """Whether the others are in the next step already and have left this rank out, with `star(loss=...)`: it was late. If so it has taken
        that step's means as its gradients, and there is nothing to compute for it: a rank that is late catches up with

            if not handle.missed():
                loss_of(model(x)).backward()
            optimizer.step()

        A rank that never asks is never wrong, but stays as far behind as it is, and what it computes is sent later.

        Returns:
            True where this step needs no computing; False without `star(loss=...)`.

        Raises:
            TransportError: The exchange has ended.

        Example:
            >>> import tacit, torch
            >>> with tacit.attach(torch.nn.Linear(2, 1)) as handle:
            ...     handle.missed()
            False
        """
        return isinstance(self._attachment, Missing) and self._attachment.missed()

    def divergence(self) -> float:
        """How far the ranks' models differ. All ranks must call it, except in gossip, where each rank queries others by itself.

        Returns:
            The distance of the models from their mean, relative to the norm of that mean; 0 where models never differ, nan where
            gossip could reach no other rank.
        """
        return self._attachment.divergence() if isinstance(self._attachment, Parting) else 0.0

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside it only accumulate, as with DDP.no_sync().

        Returns:
            A context manager.
        """
        return self._attachment.no_sync() if self._attachment else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, under a name that no other rank's has.

        Returns:
            Copies, of tensors, numbers and text only (loads with `weights_only=True`). Where ranks' models part between rounds it
            holds this rank's model too; its optimizer is for you to save.

        Raises:
            ConfigError: The handle is closed, and its rule keeps a model of its own.
        """
        return {checkpoints.key_of(self._process): (self._own_state(),)}

    def full_state_dict(self) -> dict[str, Any]:
        """Every rank's state, on every rank: for checkpoints that one rank writes. All ranks must call it.

        Returns:
            What `load_state_dict` takes on any number of ranks.

        Raises:
            ConfigError: The handle is closed, or ranks gossip and have no process group in common.
        """
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
        """Goes on from `state`. In the same world the next step has the same bits as in an unbroken run (in gossip, whose ranks meet when they like, the
        same model). In another world every rank takes the mean of the old memories, which keeps what is still owed to the model.

        Args:
            state: This rank's own (`state_dict()`), a full one (`full_state_dict()`), or a list of all ranks' states.

        Raises:
            CheckpointError: The state cannot be loaded; nothing has changed.
            ConfigError: The handle is closed.

        Example:
            >>> import tacit, torch
            >>> with tacit.attach(torch.nn.Linear(2, 1), seed=7) as handle:
            ...     state = handle.state_dict()
            >>> with tacit.attach(torch.nn.Linear(2, 1)) as handle:
            ...     handle.load_state_dict(state)
            ...     handle.seed
            7
        """
        if self.closed:
            raise ConfigError(
                "the handle is closed; attach the model again, and load the state into that handle"
            )
        self.flush()
        place = checkpoints.Place(self.rank, self.world, self._lane)
        strategy = checkpoints.strategy_of(state) if self.planner is not None else str(self.strategy)
        chosen = checkpoints.pick(state, place, strategy, self.numels)
        checkpoints.check_bucket(chosen, place, self.bucket_nbytes)
        nbytes = (
            self._bucket_nbytes if self.planner is None else checkpoints.auto_of(chosen).get("bucket_nbytes")
        )
        checkpoints.check_cut(chosen, place, nbytes, self._cut_of(nbytes))
        parting = self._attachment if isinstance(self._attachment, Parting) else None
        if parting is not None:
            checkpoints.need(chosen, "round", isinstance(chosen.get("round"), Mapping), "a dict")
            parting.check(chosen["round"], chosen["memory"])
            parting.settle()  # what is still being received must not land in the memory that is loaded
        if self.planner is not None:
            self.planner.load(strategy, checkpoints.auto_of(chosen))
        self.memory.load(chosen["memory"])
        self.step, self.seed = chosen["step"], chosen["seed"]
        if parting is not None:
            parting.load(chosen["round"])

    def resharded(self, checkpoint: "str | os.PathLike[str] | StorageReader") -> "Stateful":
        """What to load in place of the handle where the checkpoint may be of another number of ranks.

        It reads the checkpoint's metadata, and requests this rank's state in the same world, all ranks' states in another.

        Args:
            checkpoint: The path that `dcp.save` wrote to, or a storage reader of it.

        Returns:
            A `Stateful` for one `dcp.load`, which loads into this handle.

        Raises:
            CheckpointError: It is no checkpoint that can be read, or holds no state of tacit.

        Example:
            >>> import tacit, tempfile, torch
            >>> import torch.distributed.checkpoint as dcp
            >>> with tempfile.TemporaryDirectory() as path, tacit.attach(torch.nn.Linear(2, 1)) as handle:
            ...     _ = dcp.save({"tacit": handle}, checkpoint_id=path, no_dist=True)
            ...     dcp.load({"tacit": handle.resharded(path)}, checkpoint_id=path, no_dist=True)
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
        self.flush()
        if self.closed and self._parts:
            raise ConfigError("the handle is closed, and left its round; take state_dict() before close()")
        parted = {"round": self._attachment.save()} if isinstance(self._attachment, Parting) else {}
        planned = {"auto": self.planner.save()} if self.planner is not None else {}
        nbytes = self._bucket_nbytes
        sized: dict[str, Any] = {} if nbytes is None or self.planner is not None else {"bucket": nbytes}
        if self.planner is not None:
            nbytes = planned["auto"]["bucket_nbytes"]
        if isinstance(self._attachment, Cutting):
            sized["cut"] = self._cut_of(nbytes)
        return (
            parted
            | planned
            | sized
            | {
                "format": checkpoints.FORMAT,
                "strategy": str(self.strategy),
                "world": self.world,
                "rank": self.rank,
                "lane": self._lane,
                "step": self.step,
                "seed": self.seed,
                "memory": self.memory.state(),
            }
        )

    @property
    def _bucket_nbytes(self) -> int | None:
        return self.bucket_nbytes or self.asked_nbytes

    def _cut_of(self, bucket_nbytes: int | None) -> list[int]:
        if bucket_nbytes is None or not isinstance(self._attachment, Cutting):
            return []
        return self._attachment.cut_of(bucket_nbytes)

    def close(self) -> None:
        """Takes tacit off the model, and ends its threads and files; safe to call twice.

        DDP averages in float32 from then on, as it did before, and so does FSDP2 (with `group=`, between the replicas too). A plain
        module has no exchange of its own to return to: its gradients are each rank's own again, and models that rules merge part.
        """
        self.closed = True
        if self.planner is not None:
            self.planner.close()
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


def open_channel(strategy: Strategy, parent: dist.ProcessGroup | None, timeout: timedelta | None) -> Channel:
    """A wire over a group of tacit's own among the ranks of `parent`, with the strategy's scheme opened over it."""
    before = interfaces.connections()
    wire = Wire(own_group(parent, timeout))
    try:
        channel = Channel.open(wire, strategy.scheme, timeout or timeout_of(parent))
    except BaseException:
        leave_group(wire)
        raise
    wire.interfaces = interfaces.used_by(interfaces.connections() - before)
    return channel


@contextmanager
def left_on_failure(channel: Channel) -> Iterator[Channel]:
    """`channel`, which is closed if the block fails: an attach that is refused leaves nothing open."""
    try:
        yield channel
    except BaseException:
        leave(channel)
        raise


def own_group(parent: dist.ProcessGroup | None, timeout: timedelta | None) -> dist.ProcessGroup:
    """A process group with the members of `parent` that only tacit uses: the user's own collectives cannot mix with its."""
    ranks = dist.get_process_group_ranks(parent)
    if len(ranks) < dist.get_world_size():
        return group_of(ranks, timeout or timeout_of(parent), _backend_name(parent))
    made = dist.new_group(ranks, timeout=timeout or timeout_of(parent), backend=_backend_name(parent))
    assert isinstance(made, dist.ProcessGroup)
    return made


def group_of(
    ranks: Sequence[int], timeout: timedelta | None, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group that its members alone make, all of them together.

    torch's own, `new_group(use_local_synchronization=True)`, has the number of living groups in its name: the group that follows one which
    was destroyed finds the addresses of that in the store, and never connects.
    """
    c10d: Any = dist.distributed_c10d
    default = c10d._get_default_group()
    backend_of_default, store = c10d._world.pg_map[default]
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend or backend_of_default),
        store,
        f"tacit-{'-'.join(map(str, ranks))}-{_next_of(ranks, store)}",
        timeout=timeout or dist.default_pg_timeout,
        device_id=default.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    assert isinstance(made, dist.ProcessGroup)
    return made


_made: tuple[Any, Counter[tuple[int, ...]]] = (None, Counter())  # by store: those of a new world count anew


def _next_of(ranks: Sequence[int], store: Any) -> int:
    """How many groups of `ranks` this process has made before."""
    global _made
    if _made[0] is not store:
        _made = (store, Counter())
    _made[1][tuple(ranks)] += 1
    return _made[1][tuple(ranks)]


def _backend_name(group: dist.ProcessGroup | None) -> str | None:
    name = str(dist.get_backend(group))
    return (
        None if name == "undefined" else name
    )  # of init_process_group() without a backend: the default, again


def leave(channel: Channel) -> None:
    """Frees the sockets and threads of what `open_channel` made; safe to call twice."""
    if dist.is_initialized():
        channel.close()
        leave_group(channel.wire)


def leave_group(wire: Wire) -> None:
    """Destroys the process group of `wire`; safe to call twice."""
    if dist.is_initialized():
        with suppress(ValueError):  # left already
            dist.destroy_process_group(wire.group)


def leave_with(owner: object, channel: Channel) -> None:
    """Frees `channel` after `owner` was dropped, for those who never call close(): with the next attach(), see `leave_dropped`."""
    when_dropped(owner, _DROPPED.append, channel)


_DROPPED: list[Channel] = []


def leave_dropped() -> None:
    """Leaves the process groups of handles that were dropped. Ranks collect garbage at different times, and torch counts groups by rank when
    it names new ones (and NCCL may wait for the others when one is destroyed): so this is done where all ranks come to the same place."""
    gc.collect()
    while _DROPPED:
        leave(_DROPPED.pop())


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


def when_dropped(owner: object, end: Callable[..., None], *args: object) -> Callable[[], object]:
    """Calls `end(*args)`, which must not hold `owner`, when `owner` is garbage: not at exit, where torch may be gone already. What is
    returned takes it back."""
    finalizer = weakref.finalize(owner, end, *args)
    finalizer.atexit = False
    return finalizer.detach


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
