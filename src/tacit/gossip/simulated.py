"""Many ranks in one process, for experiments with rules: every replica has its model, and meets others when its trigger fires.

Not a network: no message is late and nobody dies. Ranks may be of unequal speed: `stepped` takes those that have taken a step, and `waiting`
holds those that have taken all of theirs. Counted are the bytes that have to be sent; over sockets push and pull send as much as symmetric
meetings do, since both sides send.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.gossip.layers import Chosen, Layers
from tacit.gossip.meeting import difference, distance_apart, keeps_reference, meet, merge_weights
from tacit.requests import Codec, LocalMemory
from tacit.rounds.adaptive import learned
from tacit.rounds.rules import UNRELATED, Movement, TriggerRule
from tacit.schemes import Gossip


@dataclass(slots=True)
class SimulatedReplicas:
    """`models` are rows of one matrix, changed in place."""

    models: Tensor
    layers: Layers
    trigger: TriggerRule
    codec: Codec
    who: Gossip = field(default_factory=Gossip)
    seed: int = 0
    sent_nbytes: int = 0
    exchanges: int = 0
    waiting: set[int] = field(default_factory=set)  # for the merge: they answer, and hold their models
    steps: list[int] = field(init=False)
    differs: list[float] = field(init=False)  # by rank, what its meetings have shown
    _since: list[int] = field(init=False)
    _references: Tensor = field(init=False)
    _agreed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _start: Tensor = field(init=False)
    _moved: list[list[float]] = field(init=False)  # squared, by rank and layer, in this step
    _top_lr: float = 0.0
    _number: int = 0

    def __post_init__(self) -> None:
        self._references = self.models.clone()
        self._start = self.models[0].clone()
        self._since = [0] * len(self.models)
        self.steps = [0] * len(self.models)
        self.differs = [UNRELATED] * len(self.models)
        self._moved = self._squares(self.models - self._references)

    def stepped(self, lr: float, ranks: Sequence[int] | None = None) -> None:
        """These replicas (None: all) have taken a step; those whose trigger fires call a partner, in an order that changes."""
        world = len(self.models)
        stepped = set(range(world) if ranks is None else ranks)
        self._top_lr = max(self._top_lr, lr)
        for rank in stepped:
            self.steps[rank] += 1
            self._since[rank] += 1
        self._moved = self._squares(self.models - self._references)
        lengths = self._squares(self._references)
        first = self._number
        for offset in range(world):
            rank = (first + offset) % world
            if rank not in stepped:
                continue
            if not self._since[rank] and not self.trigger.measures:
                continue  # somebody called it in this step
            at = Movement(
                self._since[rank], self._moved[rank], lengths[rank], self.layers.sizes, lr, self._top_lr,
                self.differs[rank],
            )  # fmt: skip
            if (wish := self.trigger.wish(at)) is None:
                continue
            peer = self.who.partner(rank, world, self._number, range(world), self.seed)
            self._number += 1
            if peer is not None:
                self._meet(rank, peer, wish.layers)

    def _squares(self, rows: Tensor) -> list[list[float]]:
        if not self.trigger.measures:
            return [[0.0] * len(self.layers.sizes) for _ in rows]
        return torch.stack([part.square().sum(1) for part in rows.split(self.layers.sizes, 1)], 1).tolist()

    def _meet(self, caller: int, called: int, layers: Chosen) -> None:
        pair = (min(caller, called), max(caller, called))
        agreed = self._agreed.get(pair, self._start)
        left, right, reference = (
            self.layers.pick(flat, layers) for flat in (self.models[pair[0]], self.models[pair[1]], agreed)
        )
        memories = LocalMemory(left), LocalMemory(right)
        low, high = meet(self.codec, left, right, reference, memories, seed=self.seed, number=self._number)
        moves = {pair[0]: low.delta, pair[1]: high.delta}
        shown = difference(low.delta, low.middle - reference)
        for rank in pair:
            self.differs[rank] = learned(self.differs[rank], shown)
        movers = set({"symmetric": pair, "push": (called,), "pull": (caller,)}[self.who.mode]) - self.waiting
        for rank in movers:
            self.layers.add(self.models[rank], layers, moves[rank])
        for rank in {caller, *movers}:  # who pushes has exchanged, too
            self._refer(rank, layers)
        if keeps_reference(self.codec):
            self._agreed[pair] = agreed.clone() if agreed is self._start else agreed
            self.layers.put(self._agreed[pair], layers, low.middle)
        self.exchanges += 1
        both = 2 if self.who.mode == "symmetric" else 1
        self.sent_nbytes += both * self.codec.nbytes(left.numel())

    def _refer(self, rank: int, layers: Chosen) -> None:
        """From here on the change of these layers is measured from what they are now."""
        now = self.layers.pick(self.models[rank], layers)
        self.layers.put(self._references[rank], layers, now)
        self._since[rank] = 0
        for layer in self.layers.numbers(layers):
            self._moved[rank][layer] = 0.0

    def mean(self) -> Tensor:
        """What a merge gives to all."""
        weights = torch.tensor(merge_weights(self.steps))
        return (weights[:, None] * self.models).sum(0) / weights.sum()

    def divergence(self) -> float:
        return distance_apart(self.models)
