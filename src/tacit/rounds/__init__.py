"""WHEN to talk: after which steps the ranks exchange something, and what they make of it."""

from typing import ClassVar, Protocol

from tacit.rounds.adacomm import AdaComm
from tacit.rounds.adaptive import Adaptive, Movement, Trigger, Wish
from tacit.rounds.diloco import DiLoCo
from tacit.rounds.elastic import Elastic
from tacit.rounds.every_step import EveryStep
from tacit.rounds.local import Local
from tacit.rounds.merging import Merging, Moment
from tacit.rounds.post_local import PostLocal
from tacit.rounds.slowmo import SlowMo
from tacit.rounds.sparseloco import SparseLoCo
from tacit.rounds.stale import Stale
from tacit.rounds.streaming import Streaming


class Round(Protocol):
    """The first part of a Strategy: options only. `speaks` of "gradients", in every step, or of "models" (some `after` a time of gradients)."""

    speaks: ClassVar[str]


ROUNDS: dict[str, type] = {
    "every": EveryStep,
    "local": Local,
    "post_local": PostLocal,
    "adacomm": AdaComm,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
    "streaming": Streaming,
    "elastic": Elastic,
    "stale": Stale,
    "adaptive": Adaptive,
}

__all__ = [
    "ROUNDS",
    "AdaComm",
    "Adaptive",
    "DiLoCo",
    "Elastic",
    "EveryStep",
    "Local",
    "Merging",
    "Moment",
    "Movement",
    "PostLocal",
    "Round",
    "SlowMo",
    "SparseLoCo",
    "Stale",
    "Streaming",
    "Trigger",
    "Wish",
]
