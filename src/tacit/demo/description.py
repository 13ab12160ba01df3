"""What a record holds of a configuration beside its name; asked of the strategy, never read from its text."""

from __future__ import annotations

from typing import TypedDict

from tacit.codecs.cast import Bf16, Fp16
from tacit.schemes import AllReduce
from tacit.strategy import Strategy

_HALVES = {Bf16: "bf16", Fp16: "fp16"}


class Description(TypedDict):
    """The fields of `record_types.Described` that depend on the configuration alone."""

    family: str
    lossy: bool
    precision: str | None


def described(strategy: Strategy | None) -> Description:
    """`family`, `lossy` and `precision` of a strategy; None is plain DDP."""
    if strategy is None:
        return {"family": "ddp", "lossy": False, "precision": "fp32"}
    if strategy.what.traits.exact:
        return {"family": "tacit", "lossy": False, "precision": "fp32"}
    return {"family": "tacit", "lossy": True, "precision": _HALVES.get(type(strategy.what))}


def sent_is(strategy: Strategy | None) -> str:
    """How its bytes are known. An all-reduce is the process group's own: tacit, too, books what a ring would send."""
    ring = strategy is None or isinstance(strategy.who, AllReduce)
    return "computed" if ring else "counted"
