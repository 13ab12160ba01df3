"""What `attach` returns: figures, state and the way out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

from tacit import memory as memories
from tacit.errors import ConfigError
from tacit.memory import Memory
from tacit.records import Recorder
from tacit.stats import Stats
from tacit.strategy import Strategy
from tacit.transports import Opens, Wire


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
    def load(self, state: Mapping[str, Any]) -> None: ...


class Handle:
    """One strategy on one model on one rank. `close()` gives the model back to plain float32 exchange."""

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
        self._records = Recorder(records) if records is not None else None

    def fasten(self, attachment: Attachment) -> None:
        """Called once by the attachment, when all ranks have agreed."""
        self._attachment = attachment
        if attachment.wire is not None:
            self.rank, self.world = attachment.wire.rank, attachment.wire.world
        self.numels = attachment.numels

    def stepped(self, numel: int) -> None:
        """Called by the attachment after every round."""
        self.step += 1
        self.stats.stepped(numel)
        if self._records is not None:
            self.record("step", step=self.step, strategy=str(self.strategy), **self.stats.as_dict())

    def record(self, kind: str, **fields: Any) -> None:
        """One line in the file of records, where there is one, and a word to who listens."""
        if self.listen is not None:
            self.listen(kind, **fields)
        if self._records is not None:
            self._records.record(kind, rank=self.rank, **fields)

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
        """This rank's state: tensors, numbers and text only, so it loads with `weights_only=True`.

        Where ranks' models part between rounds it holds this rank's model too; its optimizer is for you to save.
        """
        parted = {"round": self._attachment.save()} if isinstance(self._attachment, Parting) else {}
        return parted | {
            "format": memories.FORMAT,
            "strategy": str(self.strategy),
            "world": self.world,
            "rank": self.rank,
            "step": self.step,
            "seed": self.seed,
            "memory": self.memory.state(),
        }

    def full_state_dict(self) -> dict[str, Any]:
        """Every rank's state, on every rank: for checkpoints that one rank writes. All ranks must call it."""
        if self.closed:
            raise ConfigError("the handle is closed; take full_state_dict() before close()")
        states: list[Any] = [self.state_dict()]
        if self._attachment is not None:
            if self._attachment.wire is None:
                raise ConfigError(
                    "ranks that gossip have no process group to gather states in; save state_dict() of each"
                )
            states = [None] * self.world
            dist.all_gather_object(states, self.state_dict(), group=self._attachment.wire.group)
        return {"format": memories.FORMAT, "ranks": states}

    def load_state_dict(self, state: Any) -> None:
        """Goes on from `state`: this rank's own, a full one, or a list of all ranks' states.

        In the same world the next step has the same bits as in an unbroken run (in gossip, whose ranks meet when they like, the
        same model). In another world every rank takes the mean of the old memories, which keeps what is still owed to the model.
        """
        chosen = memories.pick(state, rank=self.rank, world=self.world, strategy=str(self.strategy))
        if isinstance(self._attachment, Parting):
            self._attachment.settle()  # what is still being heard must not land in the memory that is loaded
        self.memory.load(chosen["memory"], self.numels)
        self.step, self.seed = int(chosen["step"]), int(chosen["seed"])
        if isinstance(self._attachment, Parting):
            self._attachment.load(chosen["round"])

    def close(self) -> None:
        """Ends tacit's threads and files; safe to call twice."""
        self.closed = True
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()
        if self._records is not None:
            self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_wire(strategy: Strategy, parent: dist.ProcessGroup | None, timeout: timedelta | None) -> Wire:
    """A wire over a group of tacit's own among the ranks of `parent`, and to the node beside them where the strategy has one."""
    wire = Wire(own_group(parent, timeout))
    if isinstance(strategy.scheme, Opens):
        strategy.scheme.open(wire, timeout or timeout_of(parent))
    return wire


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
    """Frees the sockets and threads of what `open_wire` made."""
    outside, wire.outside = wire.outside, None
    if dist.is_initialized():
        if outside is not None:
            outside.close()
        dist.destroy_process_group(wire.group)


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
