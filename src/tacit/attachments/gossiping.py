"""Models that gossip: every rank trains alone and meets a peer when its trigger says so, in the background, with no collective at all.

Nothing here needs all ranks: one that dies is not called any more, one that comes back takes the model of one that lives. So no
process group is used, only torch's store, to know who is there.
"""

import itertools
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.attachments.handle import Handle
from tacit.attachments.hosts import Follower, Host
from tacit.errors import ConfigError, TransportError
from tacit.gossip.frames import PeerError
from tacit.gossip.island import Island
from tacit.gossip.line import Line, StoreError
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
    inside: dist.ProcessGroup | None = None,
) -> None:
    """`inside` is the process group of DDP inside this rank's host, if there is one."""
    if optimizer is None:
        raise ConfigError(f"{trigger} looks at the model after optimizer steps; give attach() the optimizer")
    host = Host(inside) if inside is not None else None
    rank, world = (host.place, host.number) if host else _place()
    if world == 1:
        return
    found: GossipAttachment | Follower
    if host is None or host.leads:
        found = GossipAttachment(handle, trigger, who, optimizer, parameters, rank, world, timeout, host)
    else:
        found = Follower(handle, host, optimizer, parameters)
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
        host: Host | None = None,
    ):
        self._handle, self._trigger, self._optimizer, self._host = handle, trigger, optimizer, host
        self._island = Island(parameters)
        self._members = Members(Line(_store(rank)), rank, world, start_s=2 * _START_S)
        address, incarnation = _own_host(), f"{self._members.life}-{secrets.token_hex(4)}"
        self._peers = Peers(
            self._island,
            who,
            handle.strategy.what,
            rank=rank,
            world=world,
            incarnation=incarnation,
            seed=handle.seed,
            host=address,
            members=self._members.live,
            tell=self._heard,
            sent=lambda nbytes: handle.stats.sent("Meeting", "gossip", nbytes),
        )
        self._rank, self._world = rank, world
        try:
            self._begin(Address(address, self._peers.port, incarnation), timeout)
        except BaseException:
            self._members.close()
            self._peers.close()
            raise
        self._tell(True)
        self._top_lr, self._since, self._followed = 0.0, 0, 0
        self._refer()
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _begin(self, own: Address, timeout: timedelta | None) -> None:
        """All first lives start from rank 0's model, when all are there; who comes later from the model of any that lives, at its step."""
        first = self._members.life == 1 and self._members.get("begun") is None
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else _START_S)
        if first and self._rank == 0:
            self._island.start = self._island.snapshot.clone()
        elif not self._take_model(first, deadline):
            missing = "rank 0" if first else "another rank that lives"
            raise TransportError(
                f"rank {self._rank} waited for {missing} to take its model from, and nobody came; start it"
            )
        self._members.begin(own)
        while first and not self._members.all_began():
            if time.monotonic() > deadline:
                absent = sorted(set(range(self._world)) - {self._rank, *self._members.live()})
                warnings.warn(
                    f"rank {self._rank} begins without ranks {absent}, which may come later", stacklevel=2
                )
                break
            time.sleep(0.02)  # polled, within the deadline
        self._members.look()
        with suppress(StoreError):
            self._members.set("begun", "yes")

    def _take_model(self, first: bool, deadline: float) -> bool:
        while time.monotonic() < deadline:
            members = self._members.look()
            for rank, address in members.items():
                if first and rank != 0:
                    continue
                with suppress(PeerError):
                    model, told = self._peers.fetch(address, "start" if first else "now", deadline)
                    if first and int(told["step"]):  # the store has forgotten a run that goes on
                        return self._take_model(False, deadline)
                    if model is None:
                        continue
                    self._island.set(model)
                    self._island.start = model.clone() if first else None
                    if not first:
                        self._island.step = self._handle.step = int(told["step"])
                        self._island.merges = int(told["merges"])
                    return True
            time.sleep(0.02)
        return False

    # ---- after every step

    def _tell(self, changed: bool) -> None:
        """The others of this host, if there are any, take what became of the model."""
        if self._host is not None:
            self._host.tell(self._island.flat() if changed else None, self._island.snapshot)

    def _stepped(self) -> None:
        calling = self._peers.calling  # asked first: what a call that ends now has moved is measured below
        self._tell(self._island.stepped())
        self._handle.stepped(0)
        lr = float(self._optimizer.param_groups[0]["lr"])
        self._top_lr = max(self._top_lr, lr)
        if not self._trigger.measures:
            self._look_at_period(lr)
        elif not calling:
            self._look_at_change(lr)

    def _look_at_change(self, lr: float) -> None:
        """Nothing is waited for: who calls now will still have moved after the next step."""
        if (wish := self._trigger.wish(self._movement(lr))) is not None:
            self._peers.wish(wish)

    def _look_at_period(self, lr: float) -> None:
        """A fixed period is kept, as far as peers let it: a call begins when the last one has ended. One that was called has exchanged too."""
        followed = self._peers.followed
        self._since = self._since + 1 if followed == self._followed else 0
        self._followed = followed
        wish = self._trigger.wish(self._movement(lr)) if self._since else None
        if wish is not None:
            self._peers.wait(self._peers.patience_s)
            self._peers.wish(wish)
            self._since = 0

    def _movement(self, lr: float) -> Movement:
        island = self._island
        return Movement(self._since, island.moved, island.lengths, island.layers.sizes, lr, self._top_lr)

    def _refer(self) -> None:
        """From here on the model's change is measured from what it is now."""
        self._since, self._followed = 0, self._peers.followed
        if self._trigger.measures:
            self._island.refer()

    def _heard(self, met: Met) -> None:
        self._handle.record(
            "exchange", step=self._island.step, peer=met.peer, why=met.why, layers=met.layers,
            outcome=met.outcome, seconds=met.seconds, sent_nbytes=met.sent_nbytes,
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
        """The mean of the models of all that live and call it, within two minutes; the lowest rank says who that is.

        All have all models before anybody takes the mean. If one dies before that, those that are left agree again.
        """
        self._peers.wait(self._peers.patience_s)
        deadline, key = time.monotonic() + _MERGE_S, f"merge/{self._island.merges + 1}"
        try:
            chosen = self._agree(f"{key}/1", deadline)  # who waits here may still be met
            self._peers.settle()
            with self._peers.apart():
                self._island.gather_in()
                self._island.offered = self._island.snapshot
                self._island.set(self._mean(key, chosen, deadline))
                self._island.start = self._island.snapshot.clone()
        finally:
            self._island.offered = None
            self._island.merges += 1
            self._tell(True)  # also when it failed: the others of the host wait for a word
        self._refer()

    def _mean(self, key: str, chosen: list[int], deadline: float) -> Tensor:
        for attempt in itertools.count(1):
            if self._rank not in chosen:
                break
            models = self._brought(chosen, deadline)
            if self._all_have(f"{key}/{attempt}", chosen, models is not None, deadline):
                assert models is not None
                return torch.stack(models).mean(0)
            chosen = self._agree(f"{key}/{attempt + 1}", deadline)
        raise TransportError(
            f"rank {self._rank} came too late to the merge of ranks {chosen}; its model stays its own"
        )

    def _agree(self, key: str, deadline: float) -> list[int]:
        """Who takes part: all that live, once all of them are here; the lowest of them says so, and the first word holds."""
        while time.monotonic() < deadline:
            with suppress(StoreError):
                self._members.set(f"{key}/{self._rank}", "ready")
                if (told := self._members.get(f"{key}/who")) is not None:
                    return [int(rank) for rank in told.split()]
                live = sorted([*self._members.look(), self._rank])
                ready = [r for r in live if r == self._rank or self._members.get(f"{key}/{r}")]
                if live[0] == self._rank and ready == live and not self._members.store_lost:
                    self._members.claim(f"{key}/who", " ".join(map(str, ready)))
                    continue
            time.sleep(0.02)  # polled, within the deadline
        if self._members.store_lost:
            raise TransportError("the models cannot be merged: torch's store is gone")
        raise TransportError(
            f"rank {self._rank} waited {_MERGE_S:g} s for the others to merge; all that live must call merge()"
        )

    def _brought(self, chosen: Sequence[int], deadline: float) -> list[Tensor] | None:
        """Everybody's model, or None where one of them cannot be had any more."""
        models: list[Tensor] = []
        for rank in chosen:
            model = self._island.offered if rank == self._rank else self._offer_of(rank, deadline)
            if model is None:
                return None
            models.append(model)
        return models

    def _offer_of(self, rank: int, deadline: float) -> Tensor | None:
        """What `rank` brings, asked for until it is given or its lease has run out."""
        while time.monotonic() < deadline and (address := self._members.look().get(rank)):
            with suppress(PeerError):
                model, _ = self._peers.fetch(address, "merge", deadline)
                if model is not None:
                    return model
            time.sleep(0.02)  # polled, within the deadline
        return None

    def _all_have(self, key: str, chosen: Sequence[int], have: bool, deadline: float) -> bool:
        """Whether all that still live have all models; one that has not makes all of them agree again."""
        while time.monotonic() < deadline:
            with suppress(StoreError):
                self._members.set(f"{key}/{self._rank}", "done" if have else "failed")
                live = self._members.look()
                said = {r: self._members.get(f"{key}/{r}") for r in chosen if r == self._rank or r in live}
                if "failed" in said.values():
                    return False
                if set(said.values()) == {"done"}:
                    return True
            time.sleep(0.02)  # polled, within the deadline
        raise TransportError(
            f"rank {self._rank} did not hear from all that merge within {_MERGE_S:g} s; its model stays its own"
        )

    def consensus(self) -> float:
        """Root mean square distance of all live models from their mean, over its length; each rank fetches the others'."""
        apart, own = float("nan"), self._island.snapshot
        try:
            deadline = time.monotonic() + _MERGE_S
            members = sorted(self._members.live().items())
            others = [self._peers.fetch(address, "now", deadline)[0] for _, address in members]
            apart = distance_apart(torch.stack([own, *(model for model in others if model is not None)]))
        finally:
            apart = self._host.agree(apart, own) if self._host is not None else apart
        return apart

    def settle(self) -> None:
        """Meetings change the island, never the memory."""

    def save(self) -> dict[str, Any]:
        """The model, with what peers have added, goes into the memory. References are not kept: after a restart the first meeting says it all."""
        self._peers.settle()
        if self._host is None:
            self._island.gather_in()
        self._kept_model().copy_(self._island.snapshot)
        return {"step": self._island.step, "top_lr": self._top_lr}

    def load(self, state: Mapping[str, Any]) -> None:
        with self._peers.apart():
            self._island.set(self._kept_model())
            self._island.start = None
        self._island.step, self._top_lr = int(state["step"]), float(state["top_lr"])
        self._tell(True)
        self._refer()

    def _kept_model(self) -> Tensor:
        numels = self.numels
        layout = Run(tuple(numels), tuple(numels.values()))
        return self._handle.memory.vector("model", layout, self._island.device)

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


def _store(rank: int) -> Callable[[], Any]:
    """Opens a store of this attachment's alone: of the process group, of TACIT_STORE, or of torchrun's environment; and again, when lost.

    A process's first attachment in a process group meets the others' first, and so on: a rank that comes back must attach in the same
    order.
    """
    global _attached
    c10d: Any = dist  # it does not name its stores for type checkers
    group_store = _group_store()
    _attached = (group_store, _attached[1] + 1 if _attached[0] is group_store else 1)
    prefix = f"tacit/gossip/{_attached[1]}"
    named = os.environ.get("TACIT_STORE")
    host, port = _split(named) if named else _master()
    hosted = not named and rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") != "True"

    def opened() -> Any:
        nonlocal hosted
        if group_store is not None and not named:
            made = group_store.clone() if hasattr(group_store, "clone") else group_store
        else:
            master, hosted = hosted, False  # once: a lost line to it is not a lost store
            if not master:
                _await_port(host, port, _START_S)
            patience = timedelta(seconds=_START_S)
            made = c10d.TCPStore(host, port, is_master=master, timeout=patience, wait_for_workers=False)
            if master:
                _HOSTED.append(made)  # it serves the others for as long as the process lives
        return c10d.PrefixStore(prefix, made)

    return opened


_HOSTED: list[Any] = []
_attached: tuple[Any, int] = (None, 0)  # the process group's store, and how many attachments it has seen


def _group_store() -> Any:
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _master() -> tuple[str, int]:
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"TACIT_STORE={address!r} is no address; write host:port, for example 10.0.0.1:29400"
        )
    return host, int(port)


def _await_port(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there; torch's own client would say much about every attempt."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)  # polled, within the deadline


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
