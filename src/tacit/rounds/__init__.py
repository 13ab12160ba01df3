"""WHEN ranks communicate: one file a rule; rules.py has the three kinds."""

from tacit.registry import Registry
from tacit.rounds.adacomm import AdaComm
from tacit.rounds.adaptive import Adaptive
from tacit.rounds.diloco import DiLoCo
from tacit.rounds.elastic import Elastic
from tacit.rounds.every_step import EveryStep
from tacit.rounds.local import Local
from tacit.rounds.post_local import PostLocal
from tacit.rounds.rules import GradientRule, MergeRule, Moment, Movement, Rule, TriggerRule, Wish
from tacit.rounds.slowmo import SlowMo
from tacit.rounds.sparseloco import SparseLoCo
from tacit.rounds.stale import Stale
from tacit.rounds.streaming import Streaming

_BUILT_IN: dict[str, type[Rule]] = {
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
RULES: Registry[type[Rule]] = Registry(
    "rule",
    "tacit.rules",
    _BUILT_IN,
    accepts=lambda found: isinstance(found, type) and issubclass(found, Rule),
)

__all__ = [
    "RULES",
    "AdaComm",
    "Adaptive",
    "DiLoCo",
    "Elastic",
    "EveryStep",
    "GradientRule",
    "Local",
    "MergeRule",
    "Moment",
    "Movement",
    "PostLocal",
    "Rule",
    "SlowMo",
    "SparseLoCo",
    "Stale",
    "Streaming",
    "TriggerRule",
    "Wish",
]
