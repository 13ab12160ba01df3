"""Error feedback (Seide 2014, Karimireddy 2019): what was not said now is said later.

    wanted = x + e;   say C(wanted);   e = wanted - said

A wrapper around any codec. `said` counts what this rank's re-encoding of the sum lost too, so that in a sharded scheme
total + remembered = input holds over all ranks, to the last rounding. (A ring of 16-bit floats rounds at every hop, and
those roundings are nobody's: `ef(bf16)` is therefore sharded by default.)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit.errors import ConfigError, PairingError
from tacit.requests import Codec, Conversation, Heard, Traits, Turn, as_heard


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """`inner`, with a memory of what it left unsaid."""

    inner: Codec

    def __post_init__(self) -> None:
        if not hasattr(self.inner, "reduce"):
            raise ConfigError(f"ef({self.inner}): an inner codec is needed, for example ef(int4)")
        if self.inner.traits.remembers:
            raise PairingError(
                f"ef({self.inner}): {self.inner} already remembers what it left unsaid; write it once"
            )

    def __str__(self) -> str:
        return f"ef({self.inner})"

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, unbiased=False, contracting=False, remembers=True)

    def nbytes(self, numel: int) -> int:
        return self.inner.nbytes(numel)

    def reduce(self, x: Tensor, turn: Turn) -> Conversation:
        residual = turn.memory.vector("residual")
        wanted = x + residual
        heard: Heard = as_heard((yield from self.inner.reduce(wanted, turn)))
        left = wanted - heard.said() if heard.said else torch.zeros_like(residual)
        # a block that held a NaN or infinity was not said; it must not live on in the memory
        residual.copy_(torch.where(left.isfinite(), left, residual))
        return heard
