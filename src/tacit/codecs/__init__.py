"""WHAT is sent: one file a method, each a short generator; `CODECS` maps the names of the strategy text to them."""

from tacit.codecs.blocks import Blocks, Int4, Int8
from tacit.codecs.by_shape import ByShape
from tacit.codecs.cast import Bf16, Fp16, Plain
from tacit.codecs.dct import Dct
from tacit.codecs.dgc import Dgc
from tacit.codecs.ef21 import Ef21
from tacit.codecs.error_feedback import ErrorFeedback
from tacit.codecs.exact import Exact
from tacit.codecs.fp8 import Fp8
from tacit.codecs.gtopk import GTopK
from tacit.codecs.hush import Hush
from tacit.codecs.low_rank import LowRank
from tacit.codecs.natural import Natural
from tacit.codecs.omni_reduce import OmniReduce
from tacit.codecs.qsgd import Qsgd
from tacit.codecs.random_k import RandomK
from tacit.codecs.scale_com import ScaleCom
from tacit.codecs.signs import OneBit, Sign
from tacit.codecs.signsgd import MajorityVote
from tacit.codecs.terngrad import TernGrad
from tacit.codecs.thc import Thc
from tacit.codecs.threshold import Threshold
from tacit.codecs.topk import TopK
from tacit.codecs.two_bits import TwoBit
from tacit.registry import Registry
from tacit.requests import Codec

_BUILT_IN: dict[str, type] = {
    "none": Plain,
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "int4": Int4,
    "fp8": Fp8,
    "natural": Natural,
    "qsgd": Qsgd,
    "terngrad": TernGrad,
    "onebit": OneBit,
    "sign": Sign,
    "twobit": TwoBit,
    "signsgd": MajorityVote,
    "thc": Thc,
    "hush": Hush,
    "topk": TopK,
    "lowrank": LowRank,
    "ef": ErrorFeedback,
    "ef21": Ef21,
    "by_shape": ByShape,
    "threshold": Threshold,
    "randomk": RandomK,
    "dgc": Dgc,
    "dct": Dct,
    "exact": Exact,
    "gtopk": GTopK,
    "scalecom": ScaleCom,
    "omnireduce": OmniReduce,
}
CODECS: Registry[type] = Registry("codec", "tacit.codecs", _BUILT_IN)


def register(name: str, codec: type[Codec]) -> None:
    """Makes `codec` known as `name` in strategy texts; call it before `attach`, on every rank.

    Args:
        name: A plain name that no other codec has.
        codec: What makes the codec, from the options that the text gives.

    Raises:
        ConfigError: The name is taken by another codec, or cannot stand in a strategy.

    Example:
        >>> from tacit.strategy import Strategy
        >>> register("half", Fp16)
        >>> print(Strategy.parse("every / half"))
        every / fp16 / allreduce
    """
    CODECS.register(name, codec)


__all__ = [
    "CODECS",
    "Bf16",
    "Blocks",
    "ByShape",
    "Dct",
    "Dgc",
    "Ef21",
    "ErrorFeedback",
    "Exact",
    "Fp8",
    "Fp16",
    "GTopK",
    "Hush",
    "Int4",
    "Int8",
    "LowRank",
    "MajorityVote",
    "Natural",
    "OmniReduce",
    "OneBit",
    "Plain",
    "Qsgd",
    "RandomK",
    "ScaleCom",
    "Sign",
    "TernGrad",
    "Thc",
    "Threshold",
    "TopK",
    "TwoBit",
    "register",
]
