"""The course of `auto`: a generator that goes on after every step, alike on all ranks.

    none, some steps    ->  none, with the exchange held back: the model's own step     ->  probe, predict, advise: rank 0 decides
    winner, bf16, bf16, winner: steps of the training, measured  ->  what was faster stays; all ranks agree on it in the store

Switching happens between two steps, inside our own hook. A plan in the cache, or a checkpoint, skips all of it.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any, Protocol, runtime_checkable
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.attachments.agreement import agree
from tacit.attachments.auto.cache import read_plan, write_plan
from tacit.attachments.auto.choice import Choice, switchable
from tacit.attachments.auto.clock import StepClock
from tacit.attachments.auto.deciding import confirmed, contenders_for, decide
from tacit.attachments.auto.live_check import LiveCheck, StepParts
from tacit.attachments.auto.options import HALF, TRIAL, Auto
from tacit.attachments.handle import Attachment, Handle, weak_parameters
from tacit.attachments.sizing import DEFAULT_NBYTES
from tacit.attachments.target import Target
from tacit.errors import ConfigError
from tacit.exchange import Exchange
from tacit.plan.values import BucketSizes
from tacit.records import host_facts
from tacit.requests import Gather, seed_of
from tacit.strategy import Strategy

log = logging.getLogger("tacit")
Course = Generator[None, None, None]
BUDGET_S = 20.0  # of the probe
_PROBES = 2  # a probe that something disturbed is refused, and made once more
_WARM = 3  # steps before one is timed: DDP cuts its buckets anew after the first
_BLOCK = 4  # steps of a contender in turn; the first makes memory and is not counted
_DDP_FIRST_NBYTES = 1 << 20  # of DDP's first bucket, unless bucket_cap_mb is given
_MOST_GRADIENTS = 1 << 25  # elements that are copied to compare codecs on


@runtime_checkable
class Switchable(Attachment, Protocol):
    """One that can take another strategy between two steps."""

    exchange: Exchange | None

    def switch(self, strategy: Strategy, bucket_nbytes: int) -> None: ...
    def hold(self, held: Any) -> None: ...
    def settle(self) -> None: ...


class AutoPlanner:
    """Chooses the strategy of one handle; it keeps neither the model nor the handle alive."""

    def __init__(self, handle: Handle, target: Target, options: Auto, attachment: Switchable):
        self._handle, self._attachment = ref(handle), ref(attachment)
        self._module, self._parameters = ref(target.module), weak_parameters(target.parameters)
        self._options, self._timeout, self._kind = options, target.timeout, target.kind
        self._device = next(iter(target.parameters.values())).device
        self._asked_nbytes = self._bucket_nbytes = target.bucket_nbytes or DEFAULT_NBYTES
        self._ddp_nbytes = _ddp_nbytes(target)
        self._settled, self._memory_of = False, ""
        self._facts: dict[str, Any] = {}
        self._live: LiveCheck | None = None
        self._at = time.perf_counter()
        self._seen: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self._took_s = 0.0
        self._course: Course = self._begin()
        next(self._course, None)

    # ---- what the handle calls ----

    def step_ended(self) -> None:
        now = time.perf_counter()
        self._took_s, self._at = now - self._at, now
        if self._live is not None:
            self._look(self._live)
        next(self._course, None)
        self._at = time.perf_counter()  # what was done here belongs to no step

    def replan(self) -> None:
        self._go(self._plan())

    def save(self) -> dict[str, Any]:
        return {"settled": self._settled, "bucket_nbytes": self._bucket_nbytes}

    def close(self) -> None:
        self._course.close()

    def load(self, strategy: str, saved: Mapping[str, Any]) -> None:
        parsed = switchable(strategy)
        nbytes, settled = int(saved.get("bucket_nbytes", self._asked_nbytes)), saved.get("settled", True)
        agree(self._group, parsed, ["auto", nbytes, settled], self._timeout)  # else the course goes on
        if not settled:
            self._go(self._plan())
            self._memory_of = str(parsed)  # what is loaded next
            return
        self._course.close()
        self._take(Choice(str(parsed), nbytes, "checkpoint", "the checkpoint was written under it"))
        self._memory_of = str(parsed)

    def _go(self, course: Course) -> None:
        """Leaves the course so far, whatever it was doing, for another."""
        self._course.close()
        self._course = course
        next(self._course, None)

    # ---- the course ----

    def _begin(self) -> Course:
        cached = self._cached()
        if cached is not None:
            self._settle(cached)
            return
        yield from self._plan()

    def _plan(self) -> Course:
        self._settled, self._live = False, None
        self._switch(TRIAL, self._asked_nbytes)
        warm = min(_WARM, self._options.steps // 2)
        for _ in range(warm):
            yield
        gradients: dict[str, Tensor] = {}
        with closing(self._new_clock()) as clock:
            try:
                last = self._options.steps - warm - 1
                for number in range(self._options.steps - warm):
                    self._there(self._attachment).hold(_Held(clock, gradients if number == last else None))
                    yield
                    clock.ended()
            finally:
                if (attachment := self._attachment()) is not None:
                    attachment.hold(None)
                    del attachment
            choice = self._chosen(clock, gradients)
        gradients.clear()
        choice = yield from self._confirmed(choice)
        self._settle(choice)
        folder = self._options.folder
        if folder is not None and self._group_rank == 0:
            write_plan(folder, self._facts, choice)

    def _chosen(self, clock: StepClock, gradients: dict[str, Tensor]) -> Choice:
        """What rank 0 decides from a probe that all ranks made; the same on all."""
        start, attachment = time.perf_counter(), self._there(self._attachment)
        attachment.settle()
        choice = Choice(HALF, self._asked_nbytes, "measured", "")
        for _ in range(_PROBES):
            try:
                with torch.no_grad():
                    choice = self._advised(clock, gradients)
                break
            except ConfigError as cause:  # of what all ranks have measured together: alike on all
                choice = replace(choice, why=f"nothing was predicted ({cause})")
        choice = replace(choice, start_up_s=time.perf_counter() - start)
        found: list[Any] = [choice.as_plain()]
        dist.broadcast_object_list(found, group_src=0, group=self._group)
        agreed = Choice.read(found[0])
        assert agreed is not None, "rank 0 sends what it has made"
        return agreed

    def _advised(self, clock: StepClock, gradients: dict[str, Tensor]) -> Choice:
        from tacit.plan.probing import probe
        from tacit.plan.steps import slowest

        recorded, passes_s = clock.recorded()
        step = slowest(recorded, self._group, totals=passes_s)
        sizes = BucketSizes(self._asked_nbytes, *self._ddp_nbytes)
        found = probe(
            step,
            self._options.choices,
            group=self._group,
            device=self._device,
            buckets=sizes,
            gradients=gradients or None,
            finalists=2,
            budget_s=BUDGET_S,
        )
        return decide(found, step, self._options, sizes)

    def _confirmed(self, choice: Choice) -> Generator[None, None, Choice]:
        """The choice, or what it is never to be slower than: steps of the training under each, in turn, forth and back."""
        contenders = contenders_for(choice, self._asked_nbytes)
        took: list[list[float]] = [[] for _ in contenders]
        turns = [*range(len(contenders)), *reversed(range(len(contenders)))]
        for place in turns:
            self._switch(contenders[place].strategy, contenders[place].bucket_nbytes)
            for number in range(_BLOCK):
                yield
                if number:
                    took[place].append(self._took_s)
        own = torch.tensor([median(each) for each in took])
        return confirmed(contenders, self._gathered(own).amax(0).tolist())

    def _settle(self, choice: Choice) -> None:
        """From the next step on; all ranks make sure that they mean the same."""
        agree(
            self._group, Strategy.parse(choice.strategy), ["auto", choice.bucket_nbytes, True], self._timeout
        )
        self._take(choice)

    def _take(self, choice: Choice) -> None:
        handle = self._there(self._handle)
        self._switch(choice.strategy, choice.bucket_nbytes)
        self._settled, self._live = True, LiveCheck(choice.expected)
        handle.stats.planned(str(choice), choice.expected.step_s if choice.expected else None)
        fields = {name: value for name, value in choice.as_plain().items() if name != "expected"}
        handle.record("chosen", step=handle.step, predicted=choice.as_plain()["expected"], **fields)
        if self._group_rank == 0:
            log.info("%s", choice)

    def _switch(self, text: str, bucket_nbytes: int) -> None:
        handle, strategy = self._there(self._handle), Strategy.parse(text)
        if strategy.what.traits.remembers and self._memory_of != text:
            handle.memory.clear()
            self._memory_of = text
        self._bucket_nbytes = bucket_nbytes
        handle.strategy = strategy
        self._there(self._attachment).switch(strategy, bucket_nbytes)
        self._seen = self._sums(handle)

    # ---- whether it holds ----

    def _look(self, live: LiveCheck) -> None:
        handle = self._there(self._handle)
        now = self._sums(handle)
        wait_s, wire_s, codec_s = (b - a for a, b in zip(self._seen, now, strict=True))
        self._seen = now
        window = live.add(StepParts(self._took_s, max(0.0, self._took_s - wait_s), wire_s, codec_s))
        if window is None:
            return
        gathered = self._gathered(torch.tensor(window.as_list()))
        ranks = [StepParts(*row) for row in gathered.tolist()]
        drift = live.judge(ranks, handle.step)
        handle.stats.measured(max(rank.step_s for rank in ranks), drift.sentence if drift else "")
        handle.record("ranks", step=handle.step, own_s=[rank.own_s for rank in ranks])
        if drift is not None:
            fields = {"part": drift.part, "expected_s": drift.expected_s, "measured_s": drift.measured_s}
            handle.record("drift", step=handle.step, sentence=drift.sentence, **fields)
            if self._group_rank == 0:
                log.warning("the plan no longer holds: %s", drift.sentence)

    @staticmethod
    def _sums(handle: Handle) -> tuple[float, float, float]:
        found = handle.stats.as_dict()
        return found["wait_s"], found["wire_s"], found["encode_s"] + found["decode_s"]

    def _gathered(self, own: Tensor) -> Tensor:
        """A row a rank."""
        exchange = self._there(self._attachment).exchange
        assert exchange is not None, "a closed handle plans nothing"
        return torch.stack([each.cpu() for each in exchange.ask(Gather(own.to(self._device)))])

    # ---- the cache ----

    def _cached(self) -> Choice | None:
        """A plan for these machines and this model, if rank 0 has one."""
        folder = self._options.folder
        own = host_facts()
        machine = f"{platform.node()}: {own['cpu']}, {own['cores']} cores, {round(own['memory_nbytes'] / 2**30)} GiB, torch {own['torch']}"
        machines: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(machines, machine, group=self._group)
        sizes = ((name, p.numel(), str(p.dtype)) for name, p in self._parameters().items())
        self._facts = {
            "model": f"{seed_of(self._kind, *sizes):x}",
            "world": len(machines),
            "machines": machines,
            "backend": str(dist.get_backend(self._group)),
            "device": self._device.type,
            "asked": str(self._options),
            "bucket_nbytes": self._asked_nbytes,
        }
        found: list[Any] = [None]
        if self._group_rank == 0 and folder is not None:
            choice = read_plan(folder, self._facts)
            found = [replace(choice, how="cached", start_up_s=0.0).as_plain() if choice else None]
        dist.broadcast_object_list(found, group_src=0, group=self._group)
        return Choice.read(found[0])

    # ---- what it works on ----

    @staticmethod
    def _there(weak: Any) -> Any:
        found = weak()
        assert found is not None, "steps end while the model is there"
        return found

    @property
    def _group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._there(self._attachment).wire.group
        return group

    @property
    def _group_rank(self) -> int:
        rank: int = self._there(self._attachment).wire.rank
        return rank

    def _new_clock(self) -> StepClock:
        return StepClock(self._there(self._module), self._parameters(), self._device)


class _Held:
    """Called with all gradients of a step before any of them leaves."""

    def __init__(self, clock: StepClock, copies: dict[str, Tensor] | None):
        self._clock, self._copies = clock, copies

    def __call__(self, arrived: Mapping[str, Tensor]) -> None:
        self._clock.computed()
        if self._copies is not None and sum(x.numel() for x in arrived.values()) <= _MOST_GRADIENTS:
            self._copies.update({name: x.detach().float().clone() for name, x in arrived.items()})


def plan_with(handle: Handle, target: Target, options: Auto) -> None:
    """Has the strategy of `handle` chosen while the model trains; nothing is chosen where there are no other ranks."""
    attachment = handle.attachment
    if isinstance(attachment, Switchable):
        handle.planner = AutoPlanner(handle, target, options, attachment)
    else:
        handle.planner = LonePlanner(target.bucket_nbytes or DEFAULT_NBYTES)


class LonePlanner:
    """That of a process without others: a script with `auto` runs alone too, and saves and loads what it may go on with elsewhere."""

    def __init__(self, bucket_nbytes: int):
        self._saved: dict[str, Any] = {"settled": False, "bucket_nbytes": bucket_nbytes}

    def step_ended(self) -> None:
        """Nothing is exchanged, so nothing is timed."""

    def replan(self) -> None:
        """There is nothing to choose."""

    def close(self) -> None:
        """Nothing is open."""

    def save(self) -> dict[str, Any]:
        return self._saved

    def load(self, strategy: str, saved: Mapping[str, Any]) -> None:
        switchable(strategy)


def check_kind(target: Target, strategy: str, sparse: bool) -> None:
    """Refuses what `auto` has no prediction for."""
    if target.kind == "fsdp2":
        raise ConfigError(
            f"{strategy}: auto chooses for DDP and plain modules; for FSDP2 name a strategy, for example 'every / int8 / sharded'"
        )
    if target.overlap == "forward":
        raise ConfigError(
            f"{strategy}: auto chooses among exchanges beside the backward pass; leave overlap='forward' out, or name a strategy"
        )
    if sparse:
        raise ConfigError(
            f"{strategy}: nobody can predict steps with sparse gradients, whose rows no step knows before; name a strategy, for example 'int8'"
        )


def _ddp_nbytes(target: Target) -> tuple[int, int | None]:
    """DDP's buckets, and its first one; a plain module hands over one parameter at a time."""
    if target.kind != "ddp":
        return 1, None
    ddp = target.module
    first = _DDP_FIRST_NBYTES if ddp.bucket_bytes_cap_default else None
    return int(ddp.bucket_bytes_cap), first
