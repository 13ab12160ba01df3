"""Error feedback (Seide 2014, Karimireddy 2019): what was not sent now is sent later.

    wanted = x + d e;   send C(wanted);  e = wanted - sent          d: the decay, 1 by default

A wrapper around any codec. `sent` counts what this rank's re-encoding of the sum lost too, so that in a sharded scheme
total + remembered = input holds over all ranks, to the last rounding. (A ring of 16-bit floats rounds at every hop, and
those roundings are nobody's: `ef(bf16)` is therefore sharded by default.)

A decay below 1 forgets what has waited for long: what top-k left out of a model's difference many rounds ago belongs to
a place where nobody stands any more. SparseLoCo takes 0.95.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.shared_places import all_finite
from tacit.errors import ConfigError, PairingError
from tacit.layout import Layout
from tacit.requests import Codec, Context, Conversation, Reduced, Traits, as_reduced, declared_nbytes


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """`inner`, with a memory of what it did not send; `ef(topk, decay=0.95)`."""

    inner: Codec
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not hasattr(self.inner, "reduce"):
            raise ConfigError(f"ef({self.inner}): an inner codec is needed, for example ef(int4)")
        if self.inner.traits.remembers:
            raise PairingError(
                f"ef({self.inner}): {self.inner} already remembers what it did not send; write it once"
            )
        if (
            not isinstance(self.decay, int | float)
            or isinstance(self.decay, bool)
            or not 0 <= self.decay <= 1
        ):
            raise ConfigError(
                f"decay={self.decay}: the part of the memory that a step keeps, 0 to 1; the default is 1"
            )

    def __str__(self) -> str:
        return f"ef({self.inner})" if self.decay == 1 else f"ef({self.inner}, decay={self.decay})"

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, unbiased=False, contracting=False, remembers=True)

    def nbytes(self, numel: int) -> int:
        return self.inner.nbytes(numel)

    def nbytes_of(self, layout: Layout) -> int:
        return declared_nbytes(self.inner, layout)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        residual = context.memory.vector("residual")
        wanted = torch.add(x, residual, alpha=self.decay, out=recycled.empty_like(residual))
        reduced: Reduced = as_reduced((yield from self.inner.reduce(wanted, context)))
        left = recycled.empty_like(residual)
        if reduced.contribution:
            torch.sub(wanted, reduced.contribution(), out=left)
        else:
            left.zero_()
        if left.device.type == "cpu" and bool(all_finite(left)):  # a tenth of what looking at each costs
            residual.copy_(left)
        else:  # a block that held a NaN or infinity was not sent; it must not live on in the memory
            torch.where(left.isfinite(), left, residual, out=residual)
        return reduced
