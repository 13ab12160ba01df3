"""WHAT is said: one file a method, each a short generator; `CODECS` maps the names of the strategy text to them."""

from tacit.codecs.blocks import Blocks, Int4, Int8
from tacit.codecs.cast import Bf16, Fp16, Plain
from tacit.codecs.error_feedback import ErrorFeedback
from tacit.codecs.hush import Hush
from tacit.codecs.thc import Thc
from tacit.codecs.topk import TopK
from tacit.errors import ConfigError
from tacit.requests import Codec

CODECS: dict[str, type] = {
    "none": Plain,
    "fp16": Fp16,
    "bf16": Bf16,
    "int8": Int8,
    "int4": Int4,
    "thc": Thc,
    "hush": Hush,
    "topk": TopK,
    "ef": ErrorFeedback,
}


def register(name: str, codec: type[Codec]) -> None:
    """Makes `codec` speakable as `name` in a strategy text; call it before `attach`, on every rank."""
    if not name.isidentifier() or name in CODECS:
        problem = "is taken" if name in CODECS else "is no plain word"
        raise ConfigError(f"codec name {name!r} {problem}; choose another")
    CODECS[name] = codec


__all__ = [
    "CODECS",
    "Bf16",
    "Blocks",
    "ErrorFeedback",
    "Fp16",
    "Hush",
    "Int4",
    "Int8",
    "Plain",
    "Thc",
    "TopK",
    "register",
]
