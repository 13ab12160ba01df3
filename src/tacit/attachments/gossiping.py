"""Models that gossip: every rank trains alone and meets a peer when its trigger says so, in the background, with no collective at all.

Nothing here needs all ranks: one that dies is not called any more, one that comes back takes the model of one that lives. So no
process group is used, only torch's store, to know who is there.
"""

import os
import secrets
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.attachments.handle import Handle
from tacit.errors import ConfigError, TransportError
from tacit.gossip.frames import PeerError
from tacit.gossip.island import Island
from tacit.gossip.meeting import distance_apart
from tacit.gossip.members import Members
from tacit.gossip.partners import Gossip
from tacit.gossip.peers import Address, Met, Peers
from tacit.memory import Run
from tacit.rounds import Movement, Trigger
from tacit.transports import Wire

_START_S = 60.0  # for the first ranks to find one another
_MERGE_S = 120.0


def attach_gossip(
    handle: Handle,
    trigger: Trigger,
    who: Gossip,
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    timeout: timedelta | None,
) -> None:
    if optimizer is None:
        raise ConfigError(f"{trigger} looks at the model after optimizer steps; give attach() the optimizer")
    rank, world = _place()
    if world == 1:
        return
    found = GossipAttachment(handle, trigger, who, optimizer, parameters, rank, world, timeout)
    handle.fasten(found)
    handle.rank, handle.world = rank, world


class GossipAttachment:
    """Counts the optimizer's steps, asks the trigger, and lets peers.py do the rest."""

    def __init__(
        self,
        handle: Handle,
        trigger: Trigger,
        who: Gossip,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        world: int,
        timeout: timedelta | None,
    ):
        self._handle, self._trigger, self._optimizer = handle, trigger, optimizer
        self._island = Island(parameters)
        self._members = Members(_store(rank), rank, world)
        host, incarnation = _own_host(), f"{self._members.life}-{secrets.token_hex(4)}"
        self._peers = Peers(
            self._island,
            who,
            handle.strategy.what,
            rank=rank,
            world=world,
            incarnation=incarnation,
            seed=handle.seed,
            host=host,
            members=self._members.live,
            tell=self._heard,
            sent=lambda nbytes: handle.stats.sent("Meeting", "gossip", nbytes),
        )
        self._rank, self._world = rank, world
        self._layers = [p.numel() for p in parameters.values()]
        self._begin(Address(host, self._peers.port, incarnation), timeout)
        self._top_lr, self._merges = 0.0, 0
        self._refer()
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _begin(self, own: Address, timeout: timedelta | None) -> None:
        """All first lives start from rank 0's model, when all are there; a later one from the model of any that lives."""
        first = self._members.life == 1
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else _START_S)
        if first and self._rank == 0:
            self._island.start = self._island.snapshot.clone()
        elif not self._take_model(first, deadline):
            missing = "rank 0" if first else "another rank that lives"
            raise TransportError(
                f"rank {self._rank} waited for {missing} to take its model from, and nobody came; start it"
            )
        self._members.begin(own)
        while first and len(self._members.look()) < self._world - 1:
            if time.monotonic() > deadline:
                absent = sorted(set(range(self._world)) - {self._rank, *self._members.live()})
                warnings.warn(
                    f"rank {self._rank} begins without ranks {absent}, which may come later", stacklevel=2
                )
                break
            time.sleep(0.02)  # polled, within the deadline

    def _take_model(self, first: bool, deadline: float) -> bool:
        while time.monotonic() < deadline:
            members = self._members.look()
            for rank, address in members.items():
                if first and rank != 0:
                    continue
                with suppress(PeerError):
                    model, _ = self._peers.fetch(address, "start" if first else "now", deadline)
                    if model is not None:
                        self._island.set(model)
                        self._island.start = model.clone() if first else None
                        return True
            time.sleep(0.02)
        return False

    # ---- after every step

    def _stepped(self) -> None:
        self._island.stepped()
        self._since += 1
        self._handle.stepped(0)
        if self._island.met != self._met:  # as caller or called: both look from here on
            self._refer()
        lr = float(self._optimizer.param_groups[0]["lr"])
        self._top_lr = max(self._top_lr, lr)
        moved = self._moved() if self._trigger.measures else [0.0] * len(self._lengths)
        why = self._trigger.why(Movement(max(1, self._since), moved, self._lengths, lr, self._top_lr))
        if why is None:
            return
        if self._peers.calling:
            if self._trigger.measures:
                return  # it will still have moved after the next step
            self._peers.wait(self._peers.patience_s)  # a fixed period is kept, as far as peers let it
        if self._since or self._trigger.measures:
            self._peers.wish(why)

    def _refer(self) -> None:
        """From here on the model's change is measured from what it is now."""
        self._reference, self._since, self._met = self._island.snapshot, 0, self._island.met
        self._lengths = [float(part.norm()) ** 2 for part in self._parts(self._reference)]

    def _moved(self) -> list[float]:
        """|w - ref|^2, by layer if the trigger looks at layers: one pass over both, and no network."""
        pairs = zip(self._parts(self._island.snapshot), self._parts(self._reference), strict=True)
        return [float(torch.dist(now, then)) ** 2 for now, then in pairs]

    def _parts(self, flat: Tensor) -> Sequence[Tensor]:
        return flat.split(self._layers) if getattr(self._trigger, "by", "model") == "layer" else (flat,)

    def _heard(self, met: Met) -> None:
        self._handle.record(
            "exchange", step=self._island.step, peer=met.peer, why=met.why, outcome=met.outcome, seconds=met.seconds,
            sent_nbytes=met.sent_nbytes,
        )  # fmt: skip
        self._peers.settle()

    # ---- what a handle offers

    @property
    def wire(self) -> Wire | None:
        return None

    @property
    def numels(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self._island.parameters.items()}

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def merge(self) -> None:
        """The mean of the models of all that live and call it, within two minutes; the lowest rank says who that is."""
        self._peers.wait(self._peers.patience_s)
        self._peers.settle()
        self._island.gather_in()
        self._merges += 1
        key = f"merge/{self._merges}"
        try:
            self._members.set(f"{key}/{self._rank}", "ready")
            chosen = self._agree(key)
        except (RuntimeError, ValueError, dist.DistError) as cause:
            raise TransportError(f"the models cannot be merged: torch's store is gone ({cause})") from cause
        if self._rank not in chosen:
            raise TransportError(
                f"rank {self._rank} came too late to the merge of ranks {chosen}; its model stays its own"
            )
        models = [self._fetched(rank) for rank in chosen]
        mean = torch.stack(models).mean(0)
        self._members.set(f"{key}/{self._rank}", "done")
        deadline = time.monotonic() + _MERGE_S
        while time.monotonic() < deadline:  # the others may still want this rank's model
            others = [r for r in chosen if r != self._rank and r in self._members.look()]
            if all(self._members.get(f"{key}/{r}") == "done" for r in others):
                break
            time.sleep(0.02)
        self._island.set(mean)
        self._island.start = mean.clone()
        self._refer()

    def _agree(self, key: str) -> list[int]:
        deadline = time.monotonic() + _MERGE_S
        while time.monotonic() < deadline:
            if (told := self._members.get(f"{key}/who")) is not None:
                return [int(rank) for rank in told.split()]
            live = sorted([*self._members.look(), self._rank])
            ready = [r for r in live if r == self._rank or self._members.get(f"{key}/{r}")]
            if live[0] == self._rank and ready == live:
                self._members.set(f"{key}/who", " ".join(map(str, ready)))
            time.sleep(0.02)
        raise TransportError(
            f"rank {self._rank} waited {_MERGE_S:g} s for the others to merge; all that live must call merge()"
        )

    def _fetched(self, rank: int) -> Tensor:
        if rank == self._rank:
            return self._island.snapshot
        model, _ = self._peers.fetch(self._members.live()[rank], "now", time.monotonic() + _MERGE_S)
        assert model is not None
        return model

    def consensus(self) -> float:
        """Root mean square distance of all live models from their mean, over its length; each rank fetches the others'."""
        ranks = sorted([*self._members.live(), self._rank])
        return distance_apart(torch.stack([self._fetched(rank) for rank in ranks]))

    def save(self) -> dict[str, Any]:
        """The model goes into the memory. References are not kept: after a restart the first meeting says it all."""
        self._peers.settle()
        self._island.gather_in()
        self._kept_model().copy_(self._island.snapshot)
        return {"step": self._island.step, "top_lr": self._top_lr}

    def load(self, state: Mapping[str, Any]) -> None:
        self._island.set(self._kept_model())
        self._island.start = None
        self._island.step, self._top_lr = int(state["step"]), float(state["top_lr"])
        self._refer()

    def _kept_model(self) -> Tensor:
        layout = Run(tuple(self._island.parameters), tuple(self._layers))
        return self._handle.memory.vector("model", layout, self._island.snapshot.device)

    def close(self) -> None:
        self._hook.remove()
        self._members.close()
        self._peers.close()
        if self._island.doubts:
            warnings.warn(
                f"rank {self._rank} leaves with meetings of which it does not know how they ended",
                stacklevel=2,
            )


def _place() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _store(rank: int) -> Any:
    """A store of this attachment's alone: of the process group, of TACIT_STORE, or of torchrun's environment.

    A process's first attachment meets the others' first, and so on: a rank that comes back must attach in the same order.
    """
    made: Any
    c10d: Any = dist  # it does not name its stores for type checkers
    if "TACIT_STORE" in os.environ:
        host, _, port = os.environ["TACIT_STORE"].rpartition(":")
        made = c10d.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_START_S))
    elif dist.is_initialized():
        default = dist.distributed_c10d._get_default_store()
        made = default.clone() if hasattr(default, "clone") else default
    else:
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
        hosted = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True"
        made = c10d.TCPStore(
            host, int(port), is_master=hosted, timeout=timedelta(seconds=_START_S), wait_for_workers=False
        )
    _STORES.append(made)  # rank 0's serves the others for as long as the process lives
    return c10d.PrefixStore(f"tacit/gossip/{len(_STORES)}", made)


_STORES: list[Any] = []


def _own_host() -> str:
    """The address at which others reach this rank: the one that leads to the store's host."""
    target = os.environ.get("TACIT_STORE", os.environ.get("MASTER_ADDR", "127.0.0.1")).rpartition(":")
    host = target[0] or target[2]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
