"""Many ranks in one process, for experiments with rules: every island has its model, and meets others as its trigger says.

Not a network: nobody is late and nobody dies. What is counted is what would be sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.gossip.meeting import distance_apart, keeps_reference, meet
from tacit.gossip.partners import Gossip
from tacit.requests import Codec, LocalSlots, Slots
from tacit.rounds.adaptive import Movement, Trigger


@dataclass(slots=True)
class Islands:
    """`models` are rows of one matrix, changed in place; `layers` are the lengths of the parameters in a row."""

    models: Tensor
    layers: Sequence[int]
    trigger: Trigger
    codec: Codec
    who: Gossip = field(default_factory=Gossip)
    seed: int = 0
    sent_nbytes: int = 0
    exchanges: int = 0
    _since: list[int] = field(init=False)
    _references: Tensor = field(init=False)
    _agreed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _memories: dict[tuple[int, int], tuple[Slots, Slots]] = field(default_factory=dict)
    _start: Tensor = field(init=False)
    _top_lr: float = 0.0
    _number: int = 0

    def __post_init__(self) -> None:
        self._references = self.models.clone()
        self._start = self.models[0].clone()
        self._since = [0] * len(self.models)

    def stepped(self, lr: float) -> None:
        """Every island has taken a step; those whose trigger fires call a partner, in an order that changes."""
        world = len(self.models)
        self._top_lr = max(self._top_lr, lr)
        self._since = [since + 1 for since in self._since]
        moved = self._squares(self.models - self._references)
        length = self._squares(self._references) if self.trigger.measures else moved
        first = self._number
        for place in range(world):
            rank = (first + place) % world
            if not self._since[rank]:
                continue  # somebody called it in this step
            at = Movement(self._since[rank], moved[rank], length[rank], lr, self._top_lr)
            if self.trigger.why(at) is None:
                continue
            peer = self.who.partner(rank, world, self._number, range(world), self.seed)
            self._number += 1
            if peer is not None:
                self._meet(rank, peer)

    def _squares(self, rows: Tensor) -> list[list[float]]:
        if not self.trigger.measures:
            return [[0.0]] * len(rows)
        return torch.stack([part.square().sum(1) for part in rows.split(list(self.layers), 1)], 1).tolist()

    def _meet(self, caller: int, called: int) -> None:
        pair = (min(caller, called), max(caller, called))
        reference = self._agreed.get(pair, self._start)
        if pair not in self._memories:
            self._memories[pair] = (LocalSlots(reference), LocalSlots(reference))
        low, high = meet(
            self.codec, self.models[pair[0]], self.models[pair[1]], reference, self._memories[pair],
            seed=self.seed, number=self._number,
        )  # fmt: skip
        moves = {pair[0]: low.delta, pair[1]: high.delta}
        for rank in {"symmetric": pair, "push": (called,), "pull": (caller,)}[self.who.mode]:
            self.models[rank] += moves[rank]
            self._references[rank] = self.models[rank]
            self._since[rank] = 0
        if keeps_reference(self.codec):
            self._agreed[pair] = low.middle
        self._since[caller] = 0
        self._references[caller] = self.models[caller]
        self.exchanges += 1
        self.sent_nbytes += (2 if self.who.mode == "symmetric" else 1) * self.codec.nbytes(
            self.models.shape[1]
        )

    def mean(self) -> Tensor:
        return self.models.mean(0)

    def consensus(self) -> float:
        return distance_apart(self.models)
