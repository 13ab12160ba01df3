"""One rank's model as its peers see it: a snapshot of the last step, and what meetings have added to it since.

The training thread owns the parameters. Peers work on the snapshot, and what they change is added to the parameters after the
next step: adding keeps what was learned meanwhile, and the mean of all models too. Nobody ever sees half a step.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tacit import _core
from tacit.gossip.layers import Chosen, Layers


@dataclass(slots=True)
class Pair:
    """What this rank shares with one peer: a reference of the same bits on both sides, called by `version`."""

    version: str
    reference: Tensor


@dataclass(slots=True)
class Doubt:
    """A meeting that this rank was ready to conclude when the caller fell silent; only the caller knows how it ended."""

    meeting: str
    caller: int
    incarnation: str
    layers: Chosen
    delta: Tensor | None  # of these layers; None: nothing moves here (pull)
    middle: Tensor


@dataclass(slots=True)
class Island:
    """`stepped` is the training thread's; all else may be called from any thread."""

    parameters: Mapping[str, nn.Parameter]
    start: Tensor | None = None  # what all ranks began with; None on one that came later
    step: int = 0
    snapshot: Tensor = field(init=False)
    layers: Layers = field(init=False)
    reference: Tensor | None = None  # what `moved` is measured from; None: nobody asks
    moved: list[float] = field(default_factory=list)  # |w - reference|^2 by layer, as of the last step
    lengths: list[float] = field(default_factory=list)  # |reference|^2 by layer
    pairs: dict[int, Pair] = field(default_factory=dict)
    doubts: dict[int, Doubt] = field(default_factory=dict)
    met: int = 0  # meetings that moved this model, or in which it was pushed to another
    merges: int = 0  # as counted by all
    offered: Tensor | None = None  # what this rank brings to a merge, while there is one
    lock: threading.RLock = field(default_factory=threading.RLock)
    _pending: Tensor | None = None
    _exchanged: set[int] = field(default_factory=set)  # layers, since refer() was last called

    def __post_init__(self) -> None:
        self.layers = Layers.of(self.parameters)
        self.snapshot = self.flat()

    @property
    def numel(self) -> int:
        return self.snapshot.numel()

    @torch.no_grad()
    def flat(self) -> Tensor:
        """The parameters now, in float32; only the training thread may ask."""
        return torch.cat([p.detach().reshape(-1).float() for p in self.parameters.values()])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """The parameters become `flat`; only the training thread may do it."""
        parts = flat.split([p.numel() for p in self.parameters.values()])
        for parameter, part in zip(self.parameters.values(), parts, strict=True):
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
        self.moved = self.layers.summed(
            _keep(parameter.detach().reshape(-1), then, now) for parameter, then, now in parts
        )
        return own

    def refer(self, *, anew: bool = False) -> None:
        """From here on the change of layers that were exchanged is measured from what they are now (`anew`: of all); the training thread's."""
        with self.lock:
            exchanged, now = sorted(self._exchanged), self.snapshot
            self._exchanged.clear()
        if anew or self.reference is None or len(exchanged) == len(self.layers.sizes):
            self.reference, self.lengths = now, self.layers.squares(now)
            self.moved = [0.0] * len(self.lengths)
        elif exchanged:
            chosen = tuple(exchanged)
            part = self.layers.pick(now, chosen)
            self.reference = self.layers.put(self.reference, chosen, part)
            for layer, values in zip(chosen, self.layers.parts(part, chosen), strict=True):
                self.moved[layer], self.lengths[layer] = 0.0, float(values.square().sum())

    def gather_in(self, own: Tensor | None = None) -> bool:
        """What peers have added, if anything, goes into the parameters, and peers see the parameters as they are now; the training thread's."""
        own = self.flat() if own is None else own
        with self.lock:
            pending, self._pending = self._pending, None
            if pending is not None:
                own += pending
            self.snapshot = own
        if pending is not None:
            self.write(own)
        return pending is not None

    def set(self, flat: Tensor) -> None:
        """Begins again from `flat`, forgetting what was shared; the training thread's."""
        self.write(flat)
        with self.lock:
            self._pending, self.snapshot = None, self.flat()
            self.pairs.clear()
            self.doubts.clear()
            self._exchanged.clear()

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
    ) -> None:
        """A meeting about `layers` ended well: they move by `delta`, and `middle` is what both refer to the next time (if `keep`)."""
        with self.lock:
            if delta is not None:
                pending = torch.zeros_like(self.snapshot) if self._pending is None else self._pending
                self._pending = self.layers.add(pending, layers, delta)
                self.snapshot = self.layers.add(self.snapshot, layers, delta)
            if delta is not None or led:  # who pushes has exchanged, too
                self.met += 1
                self._exchanged.update(range(len(self.layers.sizes)) if layers is None else layers)
            if keep:
                pair = self.pair(peer)
                assert pair is not None or layers is None, "two that share nothing speak of everything"
                before = middle if pair is None else pair.reference
                self.pairs[peer] = Pair(meeting, self.layers.put(before, layers, middle))

    def pair(self, peer: int) -> Pair | None:
        """What is shared with `peer`: their last middle, or what all began with."""
        with self.lock:
            if peer in self.pairs or self.start is None:
                return self.pairs.get(peer)
            return Pair("start", self.start)


def _keep(w: Tensor, reference: Tensor, out: Tensor) -> float:
    """out = w, and |w - reference|^2."""
    if w.device.type == "cpu" and w.dtype == torch.float32:
        return _core.keep(w, reference, out)
    out.copy_(w)
    return float(torch.dist(out, reference)) ** 2
