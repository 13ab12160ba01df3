"""Models that gossip: every rank trains alone and meets a peer when its trigger fires, in the background, with no collective at all.

Nothing here needs all ranks: one that dies is not called any more, one that comes back takes the model of one that lives. So no
process group is used, only torch's store, to know who is there.
"""

import atexit
import os
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.attachments.agreement import Agreement, agree
from tacit.attachments.guard import watch_steps
from tacit.attachments.handle import Handle
from tacit.attachments.hosts import Follower, HostGroup
from tacit.attachments.target import Target
from tacit.authentication import run_secret
from tacit.checkpoints import is_whole, need, need_all
from tacit.errors import ConfigError, TransportError
from tacit.gossip.frames import PeerError
from tacit.gossip.meeting import distance_apart
from tacit.gossip.members import Members
from tacit.gossip.merge import merge
from tacit.gossip.peers import SHOWN_S, Met, PeerAddress, Peers
from tacit.gossip.refusals import Refusals
from tacit.gossip.rendezvous import START_S, own_endpoint, rank_and_world, store_of
from tacit.gossip.replica import Replica
from tacit.gossip.store_client import DeadlineClient, StoreError
from tacit.gossip.untrained import Untrained
from tacit.layout import Layout
from tacit.rounds import Movement, TriggerRule
from tacit.rounds.rules import UNRELATED
from tacit.schemes import Gossip
from tacit.strategy import Strategy
from tacit.transports import Wire

_ALONE_S = 30.0  # nobody of a run that was on is seen for so long: all of it is gone
_CONSENSUS_S = 120.0
_CALLS_IN_VAIN = 8  # in a row, before a warning


def attach_gossip(handle: Handle, target: Target) -> None:
    strategy = handle.strategy
    trigger, who = strategy.when, strategy.who
    assert isinstance(trigger, TriggerRule), "Strategy.check pairs them"
    assert isinstance(who, Gossip), "Strategy.check pairs them"
    if target.kind == "fsdp2":
        raise ConfigError(
            f"{strategy} moves whole models, and FSDP2 has cut this one; attach the plain module, or use DDP inside a host"
        )
    if target.group is not None:
        raise ConfigError(
            f"{strategy} finds its ranks in torch's store, not in a group; leave group= out, or give it to DDP inside a host"
        )
    optimizer, parameters, inside, timeout = (
        target.optimizer,
        target.parameters,
        target.inside,
        target.timeout,
    )
    agreed = _agreement(strategy, inside, timeout)
    untrained = Untrained.of(target.module)
    if optimizer is None:
        raise ConfigError(f"{trigger} looks at the model after optimizer steps; give attach() the optimizer")
    host = HostGroup(inside) if inside is not None else None
    rank, world = (host.place, host.number) if host else rank_and_world()
    if world == 1:
        return
    found: GossipAttachment | Follower
    if host is None or host.leads:
        found = GossipAttachment(
            handle, trigger, who, optimizer, parameters, untrained, rank, world, timeout, host, agreed
        )
    else:
        found = Follower(handle, host, optimizer, parameters, untrained)
    handle.fasten(found, rank, world)
    if world > 1:
        watch_steps(handle, optimizer, target.module, inside)


def _agreement(
    strategy: Strategy, inside: dist.ProcessGroup | None, timeout: timedelta | None
) -> Callable[[], None]:
    """Raises, when it is called, if ranks are known to have attached something else. Ranks that gossip wait for nobody, but for those of
    their own host; without a process group they have only the store of their leases, and others have nothing."""
    if not dist.is_initialized():
        return lambda: None
    if inside is not None:
        agree(inside, strategy, ["ddp"], timeout)
        return lambda: None
    return Agreement.about(dist.get_process_group_ranks(None), strategy, ["models"]).look


class GossipAttachment:
    """Counts the optimizer's steps, asks the trigger, and lets peers.py do the rest."""

    def __init__(
        self,
        handle: Handle,
        trigger: TriggerRule,
        who: Gossip,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        untrained: Untrained,
        rank: int,
        world: int,
        timeout: timedelta | None,
        host: HostGroup | None = None,
        agreed: Callable[[], None] = lambda: None,
    ):
        self._agreed = agreed
        self._handle, self._trigger, self._optimizer, self._host = handle, trigger, optimizer, host
        self._replica = Replica(parameters, untrained)
        self._came_at = 0  # the step at which a late one came
        secret, refusals = run_secret(), Refusals(rank, handle.stats.refused)
        endpoint = own_endpoint(secret)
        opens, scope = store_of(rank, secret)
        self._rank, self._world, self._process = rank, world, os.getpid()
        with ExitStack() as opened:  # which is closed again if attach() is refused
            store_client = DeadlineClient(opens)
            opened.callback(store_client.close)
            self._members = Members(
                store_client, rank, world, start_s=2 * START_S, secret=secret, scope=scope, refusals=refusals
            )
            opened.callback(self._members.close)
            incarnation = f"{self._members.life}-{secrets.token_hex(4)}"
            self._members.announce(incarnation)
            self._peers = Peers(
                self._replica,
                who,
                handle.strategy.what,
                rank=rank,
                world=world,
                incarnation=incarnation,
                seed=handle.seed,
                endpoint=endpoint,
                members=self._members.live,
                report=self._met,
                sent=lambda nbytes: handle.stats.sent("Meeting", "gossip", nbytes),
                knows=self._members.knows,
                secret=secret,
                theta=trigger.allowed_distance,
                refusals=refusals,
            )
            opened.callback(self._peers.close)
            self._peers.away = True  # until the first step: a checkpoint may be loaded yet
            self._begin(PeerAddress(endpoint.advertised_host, self._peers.port, incarnation), timeout)
            self._send_to_host(True)
            self._share([*untrained.buffers, *untrained.frozen])
            self._since = self._followed = self._in_vain = 0
            self._refer()
            opened.pop_all()
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())
        atexit.register(self._at_exit)

    def _begin(self, own: PeerAddress, timeout: timedelta | None) -> None:
        """All first lives start from rank 0's model, when all are there; who comes later from the model of any that lives, at its step.

        Where a run was on and all of it is gone, the next one begins.
        """
        deadline = time.monotonic() + (timeout.total_seconds() if timeout else START_S)
        members, replica, before = self._members, self._replica, ""
        while True:
            first = members.life == 1 and members.get("begun") is None
            if first and self._rank == 0:
                replica.start = replica.snapshot.clone()
                break
            if (cause := self._take_model(first, min(deadline, time.monotonic() + _ALONE_S))) is None:
                break
            if time.monotonic() > deadline:
                missing = "rank 0" if first else "another rank that lives"
                raise TransportError(
                    f"rank {self._rank} waited for {missing} to take its model from, and {cause}; start it{before}"
                )
            run = members.run
            members.enter(next_run=not first and not members.look())
            if members.run != run and not first:
                before = f" (of the run that this rank was in, {cause}: it came back too late)"
        members.begin(own)
        self._agreed()
        while first and not members.all_began():
            self._agreed()
            if time.monotonic() > deadline:
                absent = sorted(set(range(self._world)) - {self._rank, *members.live()})
                warnings.warn(
                    f"rank {self._rank} begins without ranks {absent}, which may come later", stacklevel=2
                )
                break
            time.sleep(0.02)  # polled, within the deadline
        self._agreed()
        members.look()
        with suppress(StoreError):
            members.set("begun", "yes")

    def _take_model(self, first: bool, deadline: float) -> str | None:
        """None, or why there was none to take: nobody came before the deadline, or all have left."""
        why = "nobody came"
        while time.monotonic() < deadline:
            self._agreed()
            for rank, address in self._members.look().items():
                if first and rank != 0:
                    continue
                try:
                    told = self._take_model_of(address, "start" if first else "now")
                except PeerError as cause:
                    why = str(cause)
                    continue
                if told == "running":  # the store has forgotten a run that goes on
                    return self._take_model(False, deadline)
                if told == "taken":
                    return None
            if not first and self._members.all_left and not self._members.store_lost:
                return "all have left"
            time.sleep(0.02)  # polled, within the deadline
        return why

    def _take_model_of(self, address: PeerAddress, what: str) -> str:
        """`taken`; `running`, where it has begun already; or `nothing`, where it has none to give."""
        deadline = time.monotonic() + SHOWN_S
        replica, shown = self._replica, self._peers.fetch(address, what, deadline)
        step = int(shown.fields["step"])
        if what == "start" and step:
            return "running"
        if shown.model is None or not bool(shown.model.isfinite().all()):
            return "nothing"
        if shown.fields["frozen"] != replica.untrained.crc:
            self._peers.take_frozen(address, deadline)
        replica.untrained.take(shown.buffers)
        replica.set(shown.model)
        replica.start = shown.model.clone() if what == "start" else None
        if what == "now":
            self._came_at = replica.step = self._handle.step = step
            replica.merges, replica.top_lr = int(shown.fields["merges"]), float(shown.fields["top_lr"])
        return "taken"

    # ---- after every step

    def _send_to_host(self, changed: bool) -> None:
        """The others of this host, if there are any, take what became of the model."""
        if self._host is not None:
            self._host.send(self._replica.flat() if changed else None, self._replica.snapshot)

    def _share(self, tensors: Sequence[Tensor]) -> None:
        if self._host is not None:
            self._host.share(tensors)

    def _stepped(self) -> None:
        calling = self._peers.calling  # asked first: what a call that ends now has moved is measured below
        self._send_to_host(self._replica.stepped())
        self._peers.away, self._came_at = False, 0
        self._handle.stepped(0)
        lr = max(float(group["lr"]) for group in self._optimizer.param_groups)
        self._replica.top_lr = max(self._replica.top_lr, lr)
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
            self._peers.wait(self._peers.timeout_s)
            self._peers.wish(wish)
            self._since = 0

    def _movement(self, lr: float) -> Movement:
        replica = self._replica
        return Movement(
            self._since,
            replica.moved,
            replica.lengths,
            replica.layers.sizes,
            lr,
            replica.top_lr,
            replica.differs,
        )

    def _refer(self) -> None:
        """From here on the model's change is measured from what it is now."""
        self._since, self._followed = 0, self._peers.followed
        if self._trigger.measures:
            self._replica.refer()

    def _met(self, met: Met) -> None:
        self._handle.record(
            "exchange", step=self._replica.step, peer=met.peer, why=met.why, layers=met.layers,
            outcome=met.outcome, seconds=met.seconds, sent_nbytes=met.sent_nbytes,
        )  # fmt: skip
        answered = met.outcome in ("met", "busy", "was called")
        self._in_vain = 0 if answered else self._in_vain + 1
        if self._in_vain == _CALLS_IN_VAIN:
            warnings.warn(
                f"rank {self._rank} trains alone: {_CALLS_IN_VAIN} calls came to nothing (the last: {met.outcome})",
                stacklevel=2,
            )
        self._peers.settle()

    # ---- what a handle offers

    @property
    def wire(self) -> Wire | None:
        return None

    @property
    def numels(self) -> dict[str, int]:
        return {name: p.numel() for name, p in self._replica.parameters.items()}

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def merge(self) -> None:
        """The mean of the models of all that live, by their steps, once all of them have called it."""
        self._peers.wait(self._peers.timeout_s)
        try:
            shares = merge(self._replica, self._peers, self._members, self._rank)
            self._handle.record(
                "merge", step=self._replica.step, shares={str(r): s for r, s in shares.items()}
            )
        finally:
            self._send_to_host(True)  # also when it failed: the others of the host wait for a message
            self._share(self._replica.untrained.buffers)
        self._refer()

    def divergence(self) -> float:
        """Root mean square distance of all live models from their mean, over its length; nan where no other can be reached.

        Each rank fetches the others' models: none has to ask at the same time, and one that does not answer is left out.
        """
        apart, own = float("nan"), self._replica.snapshot
        try:
            deadline, models = time.monotonic() + _CONSENSUS_S, [own]
            for _, address in sorted(self._members.live().items()):
                with suppress(PeerError):
                    shown = self._peers.fetch(address, "now", deadline)
                    models += [shown.model] if shown.model is not None else []
            apart = distance_apart(torch.stack(models)) if len(models) > 1 else apart
        finally:
            apart = self._host.agree(apart, own) if self._host is not None else apart
        return apart

    def settle(self) -> None:
        """Meetings change the replica, never the memory."""

    def save(self) -> dict[str, Any]:
        """The model, with what peers have added, goes into the memory. References are not kept: after a restart the first meeting sends everything."""
        self._peers.settle()
        if self._host is None:
            self._replica.gather_in()
        self._kept_model().copy_(self._replica.snapshot)
        replica = self._replica
        return {"step": replica.step, "top_lr": replica.top_lr, "differs": replica.differs}

    def check(self, state: Mapping[str, Any], memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuses what `save` cannot have returned."""
        top_lr, differs = state.get("top_lr"), state.get("differs", UNRELATED)  # older ones have none
        need(state, "step", is_whole(state.get("step"), 0), "a whole number of at least 0")
        good = isinstance(top_lr, float) and 0 <= top_lr < float("inf")
        need(state, "top_lr", good, "a finite number of at least 0")
        good = isinstance(differs, float) and 0 <= differs < float("inf")
        need(state, "differs", good, "a finite number of at least 0")
        need_all(memory, ["model"], self.numels)

    def load(self, state: Mapping[str, Any]) -> None:
        """This rank's model as it was. One that came late to ranks that have come further keeps what it has taken from them."""
        replica, step = self._replica, int(state["step"])
        top_lr, differs = float(state["top_lr"]), float(state.get("differs", UNRELATED))
        if self._came_at > step:
            warnings.warn(
                f"rank {self._rank} goes on from the others' model of step {self._came_at}, not from the checkpoint of step {step}",
                stacklevel=2,
            )
            self._handle.step = replica.step
        else:
            with self._peers.apart():
                replica.set(self._kept_model())
                replica.start = None
                self._peers.away = True  # until it steps from here
            replica.step, replica.top_lr, replica.differs = step, top_lr, differs
        self._send_to_host(True)
        self._refer()

    def _kept_model(self) -> Tensor:
        numels = self.numels
        layout = Layout.of({name: (numel,) for name, numel in numels.items()})
        return self._handle.memory.vector("model", layout, self._replica.device)

    def _at_exit(self) -> None:
        """A script that ends without close(): threads that are inside torch when Python ends would abort it. Not for forked children."""
        if os.getpid() == self._process:
            self.close()

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        self._hook.remove()
        self._peers.close()
        self._members.close()
        if self._replica.followed_meetings.undecided:
            warnings.warn(
                f"rank {self._rank} leaves with meetings of which it does not know how they ended",
                stacklevel=2,
            )
