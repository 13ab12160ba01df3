"""What ranks compare while they train, so that none of them goes its own way without anyone noticing.

With every exchange each rank sends a note of 24 bytes: the parameter that it trains and nobody exchanges, if there is one; its step; and
every `check_every` steps a checksum of what all ranks must hold alike. The answer is the same on all ranks, and so is the error. Where ranks
may be at different steps, notes go with checksums only.

    note = x, ~x      Max over ranks = max x, ~min x:    all notes are equal if both halves agree
"""

import operator
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tacit.attachments.handle import Handle
from tacit.buckets import clean_name
from tacit.errors import CheckpointError, ConfigError, ConformanceError, DivergenceError
from tacit.exchange import Exchange, Reduction
from tacit.requests import Conversation, Gather, Max, Reduced, Request, seed_of

CHECK_EVERY = 100  # steps
_NOTE = 24  # bytes: three 64-bit integers
_NAME = 160  # bytes of a parameter's name that travel with an error
_CHUNK = 1 << 16
_MOST_AT_ONCE = 1 << 22  # elements of a device's tensor that are multiplied at a time: 32 MB


class Watch:
    """Notices parameters of `model` that want a gradient since it was attached, or came since. It keeps no module and no parameter alive:
    a parameter's hooks may hold it, in C++, where the garbage collector does not look."""

    def __init__(self, model: nn.Module, known: Iterable[nn.Parameter] = (), *, by_name: bool = False):
        """`known`: frozen parameters that are exchanged all the same. `by_name`: where parameters are replaced all the time and only their
        names stay (FSDP2); such parameters must not be referred to weakly, torch could not swap them any more."""
        self._model, self._by_name = ref(model), by_name
        frozen = {id(parameter) for parameter in known}
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or id(p) in frozen]
        self._known = {name if by_name else id(p): _weak(None if by_name else p) for name, p in named}
        self._remember(model)

    def _is_known(self, name: str, parameter: nn.Parameter) -> bool:
        if self._by_name:
            return name in self._known
        found = self._known.get(id(parameter))
        return found is not None and found() is parameter

    def _remember(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._modules = [ref(module) for module in modules.values()]
        self._there = [_weak(found) for found in self._look()]
        self._frozen = [
            (ref(modules[place]), own)
            for place, _, own in (name.rpartition(".") for name in self._unknown(model))
        ]

    def _unknown(self, model: nn.Module) -> list[str]:
        return [name for name, p in model.named_parameters() if not self._is_known(name, p)]

    def _look(self) -> list[Any]:
        """All modules, and all parameters or their names: much cheaper than named_parameters(), and done in every step."""
        modules = [module for weak in self._modules if (module := weak()) is not None]
        owned: Iterable[Any] = (module._parameters for module in modules)
        owned = owned if self._by_name else map(dict.values, owned)
        children = (module._modules.values() for module in modules)
        return [*chain.from_iterable(children), *chain.from_iterable(owned)]

    def _thawed(self) -> bool:
        frozen = (
            (module._parameters.get(own)) for weak, own in self._frozen if (module := weak()) is not None
        )
        return any(parameter is not None and parameter.requires_grad for parameter in frozen)

    def newcomer(self) -> str:
        """The name of a parameter that is trained but not exchanged; empty if there is none."""
        now, then = self._look(), [weak() for weak in self._there]
        if not self._thawed() and len(now) == len(then) and all(map(operator.is_, now, then)):
            return ""
        return self._search()

    def _search(self) -> str:
        if (model := self._model()) is None:
            return ""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not self._is_known(name, parameter):
                return clean_name(name, model)
        self._remember(model)
        return ""


def _weak(found: Any) -> Callable[[], Any]:
    """A weak reference; to a name or None, which a module has where a parameter is left out, the thing itself."""
    return ref(found) if isinstance(found, nn.Module | Tensor) else lambda: found


def not_exchanged(name: str, where: str = "") -> ConfigError:
    return ConfigError(
        f"parameter {name!r} was unfrozen or added after attach(){where}, so it is not exchanged and ranks would differ; close the "
        f"handle and attach again (a DDP module has to be built again, too)"
    )


def watch_steps(
    handle: Handle, optimizer: torch.optim.Optimizer, model: nn.Module, inside: dist.ProcessGroup | None
) -> None:
    """Raises before a step of `optimizer` that would train what is not exchanged: for ranks that exchange no notes.

    Those of one host (`inside`) raise together.
    """
    watch, attached, device = Watch(model), ref(handle), next(model.parameters()).device

    def check(*_: Any) -> None:
        if (now := attached()) is None or now.closed:
            hook.remove()
            return
        name = watch.newcomer()
        if inside is not None:
            found = torch.tensor([bool(name)], dtype=torch.uint8, device=device)
            dist.all_reduce(found, dist.ReduceOp.MAX, inside)
            if found.item() and not name:
                raise not_exchanged("a parameter", " on another rank of this host")
        if name:
            raise not_exchanged(name)

    hook = optimizer.register_step_pre_hook(check)


@dataclass(frozen=True, slots=True)
class Note:
    """What one rank sends, and what it keeps to explain a difference."""

    newcomer: str
    step: int
    sums: Tensor | None  # one a parameter; None where nothing is checked
    own: Tensor

    @property
    def sent(self) -> Tensor:
        return torch.cat([self.own, ~self.own])


class Guard:
    """Makes this rank's notes and reads the answers. `alike` is what all ranks hold alike by name, None where nothing is."""

    def __init__(
        self,
        handle: Handle,
        watch: Watch,
        alike: Callable[[], Mapping[str, Tensor]] | None,
        every: int,
        device: torch.device,
        *,
        sparing: bool = False,
    ):
        """`sparing`: ranks need not be at the same step, so that a note makes them wait for each other: none but where checksums are due."""
        self._sparing = sparing
        self._handle, self._watch, self._alike, self._every = handle, watch, alike, every
        self._device = device
        self._notes = 0
        self._checked_at = 0  # the step of the last check,
        self._held_at: int | None = None  # and of the last one that was right

    @property
    def rests(self) -> bool:
        """Whether this step needs no note. All ranks know it alike."""
        return self._sparing and not self._is_due(self._handle.step)

    def note(self, *, any_step: bool = False, device: torch.device | None = None) -> Note:
        """This rank's note, for a Max with the others', on `device`. Nothing waits for the device.

        `any_step`: at the end of a training in which ranks may have taken different numbers of steps.
        """
        step, newcomer, device = self._handle.step, self._watch.newcomer(), device or self._device
        due = bool(self._every) if any_step else self._due(step)
        sums = checksums(self._alike(), device) if self._alike and due else None
        numbers = [seed_of(newcomer) >> 1 if newcomer else 0, 0 if any_step else step, 0]
        own = torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
        if sums is not None:
            own[2] = weighted_sum(sums)
        return Note(newcomer, step, sums, own.view(torch.uint8))

    def _due(self, step: int) -> bool:
        """At the start, after the first step, and then every so often."""
        due = self._is_due(step)
        self._notes += 1
        if due:
            self._checked_at = step
        return due

    def _is_due(self, step: int) -> bool:
        return bool(self._every) and (self._notes < 2 or abs(step - self._checked_at) >= self._every)

    def judge(self, note: Note, answer: Tensor, ask: Callable[[Request], Any]) -> None:
        """Raises, on all ranks, unless all notes were equal and name no parameter. Only then more is asked, with `ask`."""
        answer = answer.cpu()
        most, least = answer[:_NOTE], ~answer[_NOTE:]
        if not torch.equal(most, least) or bool(most[:8].any()):
            self._explain(note, ask)
        if note.sums is not None:
            self._held_at = note.step

    def _explain(self, own: Note, ask: Callable[[Request], Any]) -> None:
        name = own.newcomer.encode()[:_NAME].ljust(_NAME, b"\0")
        text = torch.frombuffer(bytearray(name), dtype=torch.uint8).to(own.own.device)
        notes = [note.cpu() for note in ask(Gather(torch.cat([own.own, text])))]
        for rank, note in enumerate(notes):
            if bool(note[:8].any()):
                newcomer = bytes(note[_NOTE:].tolist()).rstrip(b"\0").decode(errors="replace")
                everywhere = all(torch.equal(note[:8], other[:8]) for other in notes)
                raise not_exchanged(newcomer, "" if everywhere else f" on rank {rank}")
        steps = [int(note[8:16].clone().view(torch.int64)) for note in notes]
        if (odd := odd_one_out(steps)) is not None:
            raise CheckpointError(
                f"rank {odd} is at step {steps[odd]} and others are at step {_usual(steps)}; load checkpoints of one step on all ranks"
            )
        if own.sums is None or self._alike is None:
            raise ConformanceError("notes of ranks differ in nothing that they hold; report this as a bug")
        sums = [found.cpu().tolist() for found in ask(Gather(own.sums))]
        raise self._diverged(own.step, sums, list(self._alike()))

    def _diverged(self, step: int, sums: Sequence[Sequence[int]], names: Sequence[str]) -> DivergenceError:
        ranks = [odd_one_out(column) for column in zip(*sums, strict=True)]
        odd = [(rank, name) for rank, name in zip(ranks, names, strict=True) if rank is not None]
        if not odd:
            raise ConformanceError(
                "the sum of ranks' checksums differs, and no checksum does; report this as a bug"
            )
        rank, name = odd[0]
        more = f" and {len(odd) - 1} more parameters" if len(odd) > 1 else ""
        others = "rank 0" if len(sums) == 2 else "most ranks"
        if self._held_at is None:
            when = "; they were not seen equal since attach(): start all ranks from one checkpoint"
        else:
            when = f", as they did at step {self._held_at}; restart all ranks from a checkpoint of then"
        return DivergenceError(
            f"step {step}: rank {rank} holds other bits than {others} in {name!r}{more}, and all should hold the same{when}, or, where "
            f"ranks compute on different hardware and may differ by rounding, attach with check_every=0"
        )


class BackgroundGuard:
    """Notes that travel with an Exchange. On an accelerator the answer is read one step later, when that stops nobody."""

    def __init__(self, guard: Guard, exchange: Exchange, device: torch.device):
        self._guard, self._exchange, self._late = guard, exchange, device.type != "cpu"
        self._device = device
        self._answer = torch.empty(2 * _NOTE, dtype=torch.uint8, pin_memory=self._late)
        self._sent: tuple[Note, Tensor, Reduction] | None = (
            None  # the tensor, while another stream may read it
        )

    def over(self, exchange: Exchange) -> "BackgroundGuard":
        """The same, whose notes travel with another exchange."""
        return BackgroundGuard(self._guard, exchange, self._device)

    def begin(self) -> None:
        """Before the first exchange of a step."""
        self._judge()
        if self._guard.rests:
            return
        note = self._guard.note()
        sent = note.sent

        def talk() -> Conversation:
            self._answer.copy_((yield Max(sent)), non_blocking=True)
            return Reduced(torch.empty(0))

        job = self._exchange.submit(talk(), 1, lambda reduced: None, "control", 0)
        self._sent = note, sent, job

    def end(self) -> None:
        """After the last."""
        if not self._late:
            self._judge()

    def settle(self) -> None:
        """Reads an answer that is still on its way, wherever tensors are: nothing is left in the exchange."""
        self._judge()

    def _judge(self) -> None:
        if self._sent is None:
            return
        note, _, job = self._sent
        self._sent = None
        self._exchange.wait([job])
        if job.finished is not None:
            job.finished.synchronize()
        self._guard.judge(note, self._answer, self._exchange.ask)


def odd_one_out(values: Sequence[int]) -> int | None:
    """The first rank whose value is not the usual one; None if all are equal."""
    usual = _usual(values)
    return next((rank for rank, value in enumerate(values) if value != usual), None)


def _usual(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0]  # of equally many the first


# ---- checksums


def checksums(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """One int64 a tensor, of its bits, on `device`: CRC-32 where the host has them, a weighted sum where they are."""
    host = {name: _crc(t) for name, t in tensors.items() if t.device.type == "cpu"}
    if len(host) == len(tensors):
        return torch.tensor(list(host.values()), dtype=torch.int64).to(device)
    sums = [torch.tensor(host[n]) if n in host else weighted_sum(t) for n, t in tensors.items()]
    return torch.stack([s.to(device) for s in sums])


def _crc(tensor: Tensor) -> int:
    raw = tensor.detach().contiguous().reshape(-1)
    data: Any = raw.view(torch.uint8).numpy() if raw.numel() else b""
    return zlib.crc32(data)


def weighted_sum(tensor: Tensor) -> Tensor:
    """sum_i k_i x_i mod 2^64 of the bits of `tensor` as integers, on its device: k differs by place, so neither a swap nor opposite errors cancel."""
    raw = tensor.detach().contiguous().reshape(-1)
    x = raw if raw.dtype == torch.int64 else raw.view(_integer(raw.element_size()))
    keys = _keys(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, part in enumerate(x.split(_MOST_AT_ONCE)):
        whole = part[: part.numel() // _CHUNK * _CHUNK].view(-1, _CHUNK)
        rest = part[whole.numel() :]
        rows = torch.cat([(whole * keys).sum(1), (rest * keys[: rest.numel()]).sum(0, keepdim=True)])
        total += (2 * number + 1) * (rows * keys[: rows.numel()]).sum()
    return total


def _integer(nbytes: int) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[nbytes]


def _keys(device: torch.device) -> Tensor:
    if device not in _KEYS:
        random = torch.Generator().manual_seed(20)
        _KEYS[device] = (torch.randint(0, 1 << 62, (_CHUNK,), generator=random) | 1).to(device)
    return _KEYS[device]


_KEYS: dict[torch.device, Tensor] = {}
