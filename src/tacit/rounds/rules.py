"""The three kinds of rule that a strategy's first part can name. A rule holds options only; `Strategy` and `attach` dispatch on its type.

    GradientRule   exchanges gradients, in every step
    MergeRule      lets models part, and merges them at steps that all ranks agree on
    TriggerRule    decides by itself, after each of a rank's own steps, whether to exchange models with a peer (gossip)

A rule may be two of them: `every` and `local` are triggers too, with a fixed period.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from tacit.requests import Memory

UNRELATED = 1.0  # meeting.difference() of moves that have nothing to do with each other


class Rule:
    """The first part of a Strategy."""

    __slots__ = ()
    default_codec: ClassVar[str] = ""  # where the strategy names none; "": it has to

    def for_codec(self, bits: float) -> Self:
        """The same rule, with defaults that suit a codec of `bits` an element."""
        return self


class GradientRule(Rule):
    """Exchanges gradients in every step, while the backward pass runs."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """When a merge happens: after `step` local steps, at the optimizer's learning rate."""

    step: int
    lr: float
    world: int


class MergeRule(Rule, ABC):
    """Lets models part, and merges them at agreed steps. `Periodic` in merging.py is what most rules are built on.

    after: steps at the beginning whose gradients are exchanged, before models part
    first: the codec of those gradients; "" for the strategy's own
    delay: steps between the exchange and the merge, in which training goes on
    """

    __slots__ = ()
    wants_loss: ClassVar[bool] = False
    after: int
    first: str

    @property
    @abstractmethod
    def delay(self) -> int: ...

    @abstractmethod
    def period(self, step: int, loss: float | None) -> int:
        """Local steps from the merge after `step` steps to the next; the same on all ranks, as is `loss`, their mean."""

    @abstractmethod
    def due(self, since: int, period: int, bucket: int) -> bool:
        """Whether `bucket` is exchanged now, `since` steps after the last whole period began."""

    @abstractmethod
    def difference(self, w: Tensor, memory: Memory) -> Tensor:
        """What is exchanged: a new float32 vector."""

    @abstractmethod
    def merge(self, w: Tensor, mean: Tensor, own: Tensor, memory: Memory, at: Moment) -> Tensor:
        """The model from here on; `own` is this rank's difference. Brings `memory` up to date."""


@dataclass(frozen=True, slots=True)
class Movement:
    """How far a model has come since the last exchange, layer by layer."""

    since: int  # steps, for rules that count them
    moved: Sequence[float]  # |w - ref|^2
    length: Sequence[float]  # |ref|^2
    sizes: Sequence[int]
    lr: float
    top_lr: float  # the largest so far
    differs: float = UNRELATED  # the running mean of meeting.difference()


@dataclass(frozen=True, slots=True)
class Wish:
    """To exchange, now: why, for the record, and which layers (None: all)."""

    why: str
    layers: tuple[int, ...] | None = None


class TriggerRule(Rule, ABC):
    """Decides after each of a rank's own steps whether to exchange models with a peer."""

    __slots__ = ()
    measures: ClassVar[bool] = False  # whether it looks at lengths at all

    @property
    def allowed_distance(self) -> float:
        """How far layers may have parted when they meet, relative to their length; all of it where a rule does not measure it."""
        return 1.0

    @abstractmethod
    def wish(self, movement: Movement) -> Wish | None:
        """What to exchange now, or None."""
