"""One rank's model as its peers see it: as it was after the last step, and what meetings have added to it since.

The training thread owns the parameters. Peers work on a copy of the last step's, and what they change is added to the parameters after
the next step: adding keeps what was learned meanwhile, and the mean of all models too. Nobody ever sees half a step. What a meeting
does here, lock included, takes as long as the layers that it is about are large, not as the model is.

On an accelerator the training thread may have a stream of its own; peers' threads work on the default one. Each side waits for the other's
last event there, on the device: no thread blocks for it.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tacit import _core
from tacit.errors import ConfigError
from tacit.gossip.layers import Chosen, Layers
from tacit.gossip.meeting import difference
from tacit.gossip.protocol import FollowedMeeting, FollowedMeetings
from tacit.gossip.untrained import Untrained
from tacit.rounds.adaptive import learned
from tacit.rounds.rules import UNRELATED


@dataclass(slots=True)
class Pair:
    """What this rank shares with one peer: a reference of the same bits on both sides, called by `version`."""

    version: str
    reference: Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class Prepared(FollowedMeeting):
    """A meeting that this rank has prepared and its caller decides, with the result that a commit applies."""

    layers: Chosen
    delta: Tensor | None  # of these layers; None: nothing moves here (pull, or it waits for a merge)
    middle: Tensor
    known: bool = True  # both referred to the same


@dataclass(slots=True)
class Replica:
    """`stepped` is the training thread's; all else may be called from any thread."""

    parameters: Mapping[str, nn.Parameter]
    untrained: Untrained = field(default_factory=Untrained)
    start: Tensor | None = None  # what all ranks began with; None on one that came later
    step: int = 0
    top_lr: float = 0.0  # the largest so far
    layers: Layers = field(init=False)
    reference: Tensor | None = None  # what `moved` is measured from; None: nobody asks
    moved: list[float] = field(default_factory=list)  # |w - reference|^2 by layer, as of the last step
    lengths: list[float] = field(default_factory=list)  # |reference|^2 by layer
    pairs: dict[int, Pair] = field(default_factory=dict)
    followed_meetings: FollowedMeetings[Prepared] = field(default_factory=FollowedMeetings)
    differs: float = UNRELATED  # what meetings have shown of the others' data
    holds: bool = False  # it waits for a merge: peers move towards this model, and it stays as it is
    met: int = 0  # meetings that moved this model, or in which it was pushed to another
    merges: int = 0  # as counted by all
    offered: Tensor | None = None  # what this rank brings to a merge, while there is one
    lock: threading.RLock = field(default_factory=threading.RLock)
    _own: Tensor = field(init=False)  # as of the last step; replaced, never written to
    _pending: dict[int, Tensor] = field(default_factory=dict)  # by layer, what peers have added since
    _exchanged: set[int] = field(default_factory=set)  # layers, since the last step
    _written: torch.Event | None = None  # on an accelerator: when `_own` is there,
    _added: torch.Event | None = None  # and when `_pending` is

    def __post_init__(self) -> None:
        devices = {str(parameter.device) for parameter in self.parameters.values()}
        if len(devices) > 1:
            raise ConfigError(
                f"the model is on {', '.join(sorted(devices))}; models that gossip have one device each"
            )
        self.layers = Layers.of(self.parameters)
        self._own = self.flat()
        self._written = _now(self._own)

    @property
    def numel(self) -> int:
        return self._own.numel()

    @property
    def device(self) -> torch.device:
        return self._own.device

    @property
    def snapshot(self) -> Tensor:
        """The whole model as peers see it. Nobody may write to it."""
        return self.seen(None)

    def seen(self, layers: Chosen) -> Tensor:
        """These layers as peers see them, one after another."""
        with self.lock:
            for event, read in ((self._written, [self._own]), (self._added, self._pending.values())):
                _after(event, read)
            if layers is None and not self._pending:
                return self._own
            own = self._own.split(self.layers.sizes)
            parts = [
                own[k] + self._pending[k] if k in self._pending else own[k]
                for k in self.layers.numbers(layers)
            ]
        return torch.cat(parts)

    @torch.no_grad()
    def flat(self) -> Tensor:
        """The parameters now, in float32; only the training thread may ask."""
        return torch.cat([p.detach().reshape(-1).float() for p in self.parameters.values()])

    @torch.no_grad()
    def write(self, flat: Tensor, layers: Chosen = None) -> None:
        """The parameters of these layers become those of `flat`; only the training thread may do it."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        chosen = set(self.layers.numbers(layers))
        for parameter, part, layer in zip(self.parameters.values(), parts, self.layers.owners, strict=True):
            if layer in chosen:
                parameter.copy_(part.view(parameter.shape))

    def stepped(self) -> bool:
        """After an optimizer step; whether peers had added something."""
        self.step += 1
        return self.gather_in(self._measured() if self.reference is not None else self.flat())

    @torch.no_grad()
    def _measured(self) -> Tensor:
        """The same as flat(), and `moved` in the same pass."""
        assert self.reference is not None
        own, sizes = torch.empty_like(self.reference), [p.numel() for p in self.parameters.values()]
        parts = zip(self.parameters.values(), self.reference.split(sizes), own.split(sizes), strict=True)
        squares = [_keep(parameter.detach().reshape(-1), then, now) for parameter, then, now in parts]
        self.moved = self.layers.summed(_as_floats(squares))
        return own

    def refer(self) -> None:
        """From here on the change of all layers is measured from what they are now; the training thread's."""
        self.reference = self._own.clone()
        self.lengths = self.layers.squares(self.reference)
        self.moved = [0.0] * len(self.lengths)

    def gather_in(self, own: Tensor | None = None) -> bool:
        """What peers have added, if anything, goes into the parameters, and peers see the parameters as they are now; the training thread's.

        From here on the change of layers that were exchanged is measured from what they are now.
        """
        own = self.flat() if own is None else own
        with self.lock:
            pending, self._pending = self._pending, {}
            exchanged, self._exchanged = self._exchanged, set()
            parts = own.split(self.layers.sizes)
            _after(self._added, pending.values())
            for layer, delta in pending.items():
                parts[layer].add_(delta)
            self._own, self._written = own, _now(own)
        if pending:
            self.write(own, tuple(pending))
        if self.reference is not None:
            then = self.reference.split(self.layers.sizes)
            for layer in exchanged:
                then[layer].copy_(parts[layer])
                self.moved[layer], self.lengths[layer] = 0.0, float(parts[layer].square().sum())
        return bool(pending)

    def set(self, flat: Tensor) -> None:
        """Begins again from `flat`, forgetting what was shared; the training thread's."""
        self.write(flat)
        with self.lock:
            self._own = self.flat()
            self._written = _now(self._own)
            for kept in (self._pending, self._exchanged, self.pairs, self.followed_meetings.undecided):
                kept.clear()

    def conclude(
        self,
        peer: int,
        meeting: str,
        layers: Chosen,
        delta: Tensor | None,
        middle: Tensor,
        *,
        keep: bool,
        led: bool,
        known: bool = True,
    ) -> None:
        """A meeting about `layers` ended well: they move by `delta`, and `middle` is what both refer to the next time (if `keep`).

        `known`: both referred to the same, so it shows how their moves differ.
        """
        with self.lock:
            if delta is not None:
                if known and (pair := self.pair(peer)) is not None:
                    common = middle - self.layers.pick(pair.reference, layers)
                    self.differs = learned(self.differs, difference(delta, common))
                for layer, part in zip(
                    self.layers.numbers(layers), self.layers.parts(delta, layers), strict=True
                ):
                    self._pending[layer] = self._pending[layer] + part if layer in self._pending else part
                self._added = _now(delta)
            if delta is not None or led:  # who pushes has exchanged, too
                self.met += 1
                self._exchanged.update(self.layers.numbers(layers))
            if keep:
                self.pairs[peer] = Pair(meeting, self._agreed(peer, layers, middle))

    def _agreed(self, peer: int, layers: Chosen, middle: Tensor) -> Tensor:
        """What this rank and `peer` refer to from now on."""
        if layers is None:
            return middle
        pair = self.pair(peer)
        assert pair is not None, "two that share no reference exchange all layers"
        reference = pair.reference if peer in self.pairs else pair.reference.clone()  # all ranks' start stays
        self.layers.put(reference, layers, middle)
        return reference

    def forget_reference(self, peer: int, meeting: str) -> None:
        """This rank and `peer` turned out not to share a reference: their next meeting exchanges all layers, in full."""
        with self.lock:
            self.pairs[peer] = Pair(f"not since {meeting}", self._own)

    def pair(self, peer: int) -> Pair | None:
        """What is shared with `peer`: their last middle, or what all began with."""
        with self.lock:
            if peer in self.pairs or self.start is None:
                return self.pairs.get(peer)
            return Pair("start", self.start)


def _keep(w: Tensor, reference: Tensor, out: Tensor) -> float | Tensor:
    """out = w, and |w - reference|^2: on an accelerator, where it was computed."""
    if w.device.type == "cpu" and w.dtype == torch.float32:
        return _core.keep(w, reference, out)
    out.copy_(w)
    return torch.dist(out, reference).square()


def _as_floats(squares: Sequence[float | Tensor]) -> Sequence[float]:
    """The device is asked once for all of them."""
    tensors = [square for square in squares if isinstance(square, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(values) if isinstance(square, Tensor) else square for square in squares]


def _now(made: Tensor) -> torch.Event | None:
    """What this thread has asked of the accelerator up to here; None where there is none."""
    if made.device.type == "cpu":
        return None
    event: torch.Event = torch.accelerator.current_stream(made.device).record_event()
    return event


def _after(event: torch.Event | None, read: Iterable[Tensor]) -> None:
    """What this thread asks of the accelerator from here on comes after `event`, and `read` is kept for it."""
    if event is None:
        return
    for tensor in read:
        stream = torch.accelerator.current_stream(tensor.device)
        stream.wait_event(event)
        tensor.record_stream(stream)
