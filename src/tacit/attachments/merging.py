"""Models instead of gradients: every rank trains alone, and a rule of rounds/ merges the models after some of its steps.

The optimizer's own steps are counted; nothing else in the loop changes. What was exchanged may be merged some steps later
(`delay`), while training goes on. A rule with an `after` begins as `every` does, with gradients, and parts the models then.
In a host whose ranks train with DDP, `group` joins those of the same place on all hosts: DDP keeps a host's ranks equal, and
each of them merges with its own kind. Likewise with FSDP2 inside an island: every rank merges its shards with those of the same place on
all islands, so anchors are sharded as the model is, and nobody holds the whole of either.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tacit.attachments.agreement import agree
from tacit.attachments.fsdp_units import island_of, own_part
from tacit.attachments.guard import Guard, Watch
from tacit.attachments.handle import (
    Handle,
    leave,
    leave_with,
    left_on_failure,
    open_channel,
    spread,
    when_dropped,
)
from tacit.attachments.plain import PlainAttachment
from tacit.attachments.sizing import DEFAULT_NBYTES
from tacit.attachments.target import Target
from tacit.buckets import Bucket, digest_of, outer_names, plan, sparse_names
from tacit.checkpoints import is_whole, need, need_all
from tacit.errors import ConfigError
from tacit.exchange import Exchange, Reduction
from tacit.memory import BucketMemory
from tacit.requests import Max, Payload, Sum
from tacit.rounds.merging import ANCHOR
from tacit.rounds.rules import MergeRule, Moment
from tacit.schemes import Channel

_MEAN, _OWN, _MODEL = "heard", "own", "model"


def attach_merging(handle: Handle, rule: MergeRule, target: Target) -> None:
    _check_kind(rule, target)
    inside = island_of(target.module) if target.kind == "fsdp2" else target.inside
    if inside is not None:
        agree(inside, handle.strategy, [target.kind], target.timeout)
    model, optimizer, parameters = target.module, target.optimizer, target.parameters
    group, timeout, check_every = target.group, target.timeout, target.check_every
    if optimizer is None:
        raise ConfigError(f"{rule} merges models after optimizer steps; give attach() the optimizer")
    if dist.get_world_size(group) == 1:
        return
    outer = outer_names(model, parameters)
    parts = {name: own_part(p) for name, p in parameters.items()}
    if target.kind == "fsdp2":  # the last ranks of an island may have nothing of a small parameter
        parts = {name: part for name, part in parts.items() if part.numel()}
    buckets = plan(parts, target.groups, target.bucket_nbytes or DEFAULT_NBYTES, outer)
    opening = buckets  # models are dense, and the gradients before them may not be
    if rule.after and (sparse := sparse_names(model, parameters)):
        opening = plan(parameters, target.groups, target.bucket_nbytes or DEFAULT_NBYTES, outer, sparse)
    facts = ["models", digest_of(buckets), digest_of(opening), handle.seed, check_every]
    agree(group, handle.strategy, facts, timeout)
    with left_on_failure(open_channel(handle.strategy, group, timeout)) as channel:
        spread([own_part(t) for t in (*model.parameters(), *model.buffers())], channel.wire.group)
        attachment = MergingAttachment(
            handle, rule, channel, model, optimizer, parameters, buckets, opening, check_every
        )
        leave_with(attachment, channel)
    handle.fasten(attachment)


def _check_kind(rule: MergeRule, target: Target) -> None:
    if target.kind == "fsdp2" and target.group is None:
        raise ConfigError(
            f"FSDP2 keeps one model on all ranks of its mesh, so {rule} has nothing to merge; build it on a mesh of one island's ranks, and give "
            f"attach() the same place of all islands as group"
        )
    if target.kind == "ddp" and target.group is None:
        raise ConfigError(
            f"DDP keeps all its ranks equal, so {rule} has nothing to merge; attach the plain module, or give "
            f"DDP the ranks of one host as process_group and attach() the same place of all hosts as group"
        )
    if target.kind != "plain" and rule.after:
        within = "DDP keeps them to a host" if target.kind == "ddp" else "FSDP2 keeps them to an island"
        raise ConfigError(
            f"{rule} begins with gradients of all ranks, and {within}; train those steps first, and attach "
            f"a rule without after, such as local({rule.period(0, None)})"
        )


@dataclass(slots=True)
class InFlight:
    """One bucket between its exchange and its merge."""

    job: Reduction | None  # None: received before the checkpoint that it was loaded from
    merge_at: int
    compare: Callable[[], None] = lambda: (
        None
    )  # raises if the ranks' notes differ; of the first bucket of a round


class MergingAttachment:
    """Counts the optimizer's steps; exchanges differences and merges means when the rule asks for it."""

    def __init__(
        self,
        handle: Handle,
        rule: MergeRule,
        channel: Channel,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        buckets: list[Bucket],
        opening: list[Bucket],
        check_every: int,
    ):
        """`opening`: the buckets of the first gradients, where the rule begins with some."""
        self.channel, self.wire = channel, channel.wire
        self._handle, self._rule, self._model = handle, rule, model
        # FSDP2 replaces its parameters all the time
        self._watch = Watch(model, by_name=any(isinstance(p, DTensor) for p in parameters.values()))
        self._check_every = check_every
        self._optimizer, self._parameters = optimizer, parameters
        self._buckets, self._opening_buckets = buckets, opening
        self._since = 0
        self._first_loss: float | None = None
        self._period = rule.period(0, None)
        self._in_flight: dict[int, InFlight] = {}
        self._opening: PlainAttachment | None = None  # until models part
        self._open(gradients=rule.after > 0)
        if self._opening is None:
            self._set_anchors()
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())

    @property
    def numels(self) -> dict[str, int]:
        return {n: k for b in self._buckets for n, k in zip(b.names, b.layout.numels, strict=True)}

    # ---- gradients at first

    def _open(self, *, gradients: bool) -> None:
        """Begins to exchange gradients, or differences of models."""
        handle, channel, strategy = self._handle, self.channel, self._handle.strategy
        device = self._buckets[0].device
        alike = (lambda: self._parameters) if gradients else self._anchors
        self._guard = Guard(handle, self._watch, alike, self._check_every, device)
        if gradients:
            # the optimizer's hook holds this one
            self._opening = PlainAttachment(
                handle,
                channel,
                strategy.first,
                self._parameters,
                self._opening_buckets,
                self._guard,
                held=False,
            )
            self._exchange = self._opening.exchange
        else:
            self._exchange = Exchange(channel, strategy.what, handle.stats, device=device)
            when_dropped(self, self._exchange.drop)

    def _release(self) -> None:
        if self._opening is None:
            self._exchange.close()
        else:
            self._opening.release()
            self._opening = None

    def _part(self) -> None:
        """From here on the models go their own ways; what the codec kept of gradients is nothing to differences."""
        self._release()
        self._open(gradients=False)
        self._since = 0
        self._handle.memory.clear()
        self._set_anchors()

    # ---- after every step of the optimizer

    @torch.no_grad()
    def _stepped(self) -> None:
        self._since += 1
        if self._opening is not None:
            if self._since >= self._rule.after:
                self._part()
            return
        step = self._handle.step + 1
        self._merge([index for index, sent in self._in_flight.items() if sent.merge_at <= step], step)
        due = [b for b in self._buckets if self._rule.due(self._since, self._period, b.index)]
        compare = self._compare() if due else None
        for bucket in due:
            self._send(bucket, step)
        if compare is not None:
            self._in_flight[due[0].index].compare = compare
        if not self._rule.delay:
            self._merge([bucket.index for bucket in due], step)
        why = f"every {self._period}"
        if self._since >= self._period:
            self._since = 0
            self._period = self._rule.period(step, self._agreed_loss())
        self._handle.stepped(sum(b.layout.numel for b in due))
        if due:
            self._handle.record("round", step=step, why=why, buckets=len(due))

    def _send(self, bucket: Bucket, step: int) -> None:
        memory = self._memory(bucket)
        own = self._rule.difference(self._flat(bucket), memory)

        def received(mean: Tensor) -> None:
            memory.vector(_MEAN).copy_(mean)

        memory.vector(_OWN).copy_(own)
        seed, kept = self._handle.seed, self._handle.memory
        job = self._exchange.reduce(bucket, own, kept, received, seed=seed, step=step - 1)
        self._in_flight[bucket.index] = InFlight(job, step + self._rule.delay)

    def _merge(self, indices: Sequence[int], step: int) -> None:
        sent = [self._in_flight[index] for index in indices]
        for one in sent:
            one.compare()
        self._exchange.wait([one.job for one in sent if one.job is not None])
        for index in indices:
            del self._in_flight[index]
            bucket = self._buckets[index]
            memory, at = self._memory(bucket), Moment(step, self._lr(bucket), self.wire.world)
            merged = self._rule.merge(
                self._flat(bucket), memory.vector(_MEAN), memory.vector(_OWN), memory, at
            )
            self._write(bucket, merged)

    def _compare(self, *, any_step: bool = False) -> Callable[[], None]:
        """Sends this rank's note; what is returned waits for the others', and raises if they differ."""
        exchange, note = self._exchange, self._guard.note(any_step=any_step)
        answer = exchange.start(Max(note.sent))
        return lambda: self._guard.judge(note, answer(), exchange.ask)

    def _agreed_loss(self) -> float | None:
        """The mean loss over ranks, relative to the first such mean."""
        if not self._rule.wants_loss:
            return None
        if self._handle.loss is None:
            raise ConfigError(f"{self._rule} goes by the loss; call handle.report_loss(loss) in every step")
        own = torch.tensor([self._handle.loss], dtype=torch.float64, device=self._buckets[0].device)
        mean = float(self._exchange.ask(Sum(Payload.dense(own), small=True)).value) / self.wire.world
        self._first_loss = mean if self._first_loss is None else self._first_loss
        return mean / self._first_loss if self._first_loss else None

    # ---- what a handle offers

    def no_sync(self) -> AbstractContextManager[None]:
        if self._opening is not None:
            return self._opening.no_sync()
        return nullcontext()  # steps are counted, not backward passes

    @torch.no_grad()
    def merge(self) -> None:
        """All models become their mean, in full precision; so do floating point buffers. All ranks must call it."""
        self._merge(list(self._in_flight), self._handle.step)
        self._compare(any_step=True)()  # shards of data may be uneven
        for bucket in self._buckets:
            mean = self.wire.all_reduce(self._flat(bucket).float()).div_(self.wire.world)
            self._write(bucket, mean)
        for buffer in self._model.buffers():
            if buffer.is_floating_point() and buffer.numel():
                buffer.copy_(self.wire.all_reduce(buffer.float()).div_(self.wire.world))
        if self._opening is None:
            self._set_anchors()

    @torch.no_grad()
    def divergence(self) -> float:
        """How far the models are apart: root mean square distance from their mean, over the mean's length."""
        self.settle()
        apart = torch.zeros(2, dtype=torch.float64, device=self._buckets[0].device)
        for bucket in self._buckets:
            own = self._flat(bucket).float()
            mean = self.wire.all_reduce(own).div_(self.wire.world)
            apart += torch.stack([(own - mean).double().square().sum(), mean.double().square().sum()])
        far, length = (self.wire.all_reduce(apart) / self.wire.world).tolist()
        return float((far / length) ** 0.5) if length else 0.0

    def settle(self) -> None:
        """Waits for what is on its way; it is merged when its time comes."""
        self._exchange.wait([sent.job for sent in self._in_flight.values() if sent.job is not None])

    def save(self) -> dict[str, Any]:
        """What a checkpoint holds beside the memory; the model goes into the memory, since each rank has its own."""
        self.settle()
        for bucket in self._buckets:
            self._memory(bucket).vector(_MODEL).copy_(self._flat(bucket))
        said = {str(index): sent.merge_at for index, sent in self._in_flight.items()}
        return {
            "gradients": self._opening is not None,
            "since": self._since,
            "period": self._period,
            "first_loss": self._first_loss,
            "said": said,
        }

    def check(self, state: Mapping[str, Any], memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Refuses what `save` cannot have returned under this rule and with these buckets."""
        gradients, said = state.get("gradients", False), state.get("said")
        need(state, "gradients", gradients is False or (gradients is True and self._rule.after > 0), "False")
        longest = self._rule.period(0, None)
        need(state, "period", is_whole(state.get("period"), 1, longest), f"from 1 to {longest}")
        most = self._rule.after - 1 if gradients else state["period"] - 1
        need(state, "since", is_whole(state.get("since"), 0, most), f"from 0 to {most}")
        first_loss = state.get("first_loss", "")
        finite = isinstance(first_loss, float) and isfinite(first_loss)
        need(state, "first_loss", first_loss is None or finite, "a finite number, or None")
        indices = {str(bucket.index): bucket for bucket in self._buckets}
        good = isinstance(said, Mapping) and all(i in indices and is_whole(said[i], 0) for i in said)
        need(state, "said", good, f"a dict from buckets 0 to {len(indices) - 1} to steps")
        need_all(memory, [_MODEL] if gradients else [_MODEL, ANCHOR], self.numels)
        need_all(memory, [_MEAN, _OWN], [name for i in said or () for name in indices[i].names])

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `save` returned, the memory being loaded already."""
        self._since, self._period, self._first_loss = state["since"], state["period"], state["first_loss"]
        self._in_flight = {int(index): InFlight(None, merge_at) for index, merge_at in state["said"].items()}
        gradients = state.get("gradients", False)
        if (self._opening is not None) != gradients:
            self._release()
            self._open(gradients=gradients)
        for bucket in self._buckets:
            self._write(bucket, self._memory(bucket).vector(_MODEL))

    def close(self) -> None:
        self._hook.remove()
        self._release()
        leave(self.channel)

    # ---- the model as flat vectors

    def _memory(self, bucket: Bucket) -> BucketMemory:
        return self._handle.memory.of(bucket.layout, bucket.device)

    def _flat(self, bucket: Bucket) -> Tensor:
        return torch.cat([own_part(self._parameters[name]).reshape(-1) for name in bucket.names])

    def _write(self, bucket: Bucket, flat: Tensor) -> None:
        for name, part in bucket.layout.split(flat).items():
            parameter = own_part(self._parameters[name])
            parameter.copy_(part.view(parameter.shape))

    def _anchors(self) -> dict[str, Tensor]:
        """What all ranks hold alike, however far their models are apart."""
        return {
            name: part
            for bucket in self._buckets
            for name, part in bucket.layout.split(self._memory(bucket).vector(ANCHOR)).items()
        }

    def _set_anchors(self) -> None:
        for bucket in self._buckets:
            self._memory(bucket).vector(ANCHOR).copy_(self._flat(bucket))

    def _lr(self, bucket: Bucket) -> float:
        """The learning rate of the bucket's parameter group."""
        first = self._parameters[bucket.names[0]]
        for group in self._optimizer.param_groups:
            if any(p is first for p in group["params"]):
                return float(group["lr"])
        return float(self._optimizer.param_groups[0]["lr"])
