"""Steps that lose nothing, at first or ever more rarely, and a codec in all others.

    exact(inner, until=1000)     the first 1000 steps send the numbers as they are: the warm-up of 1-bit Adam (Tang et al., ICML 2021, arXiv
                                 2102.02888), and of low rank in long trainings
    exact(inner, doubling=16)    exact steps are 16 in a row, then 16 that are 2 apart, 16 that are 4 apart, ...: the updates of the variance in
                                 0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009), k_{j+1} = k_j + 2^floor(j / 16)

With both, the second begins where the first ends. What `inner` remembers waits meanwhile. An optimizer that exchanges its momentum
(tacit.optim.OneBitAdam) exchanges gradients in the exact steps, and updates its variance in them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.codecs.cast import Plain
from tacit.codecs.dgc import Dgc
from tacit.errors import ConfigError, PairingError
from tacit.layout import Layout
from tacit.requests import STEADY_STEP, Codec, Context, Conversation, Max, Traits, declared_nbytes

_MOST = 10**9


@dataclass(frozen=True, slots=True)
class Exact:
    """`exact(ef(sign), until=1000)`, or `exact(ef(sign), doubling=16)`."""

    inner: Codec
    until: int = 0
    doubling: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.inner, "reduce"):
            raise ConfigError(
                f"exact({self.inner}): an inner codec is needed, for example exact(ef(sign), until=1000)"
            )
        if isinstance(self.inner, Exact | Dgc):
            raise PairingError(
                f"exact({self.inner}): {self.inner} has a beginning of its own; set that instead, without exact"
            )
        for name, value in (("until", self.until), ("doubling", self.doubling)):
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
                raise ConfigError(f"{name}={value}: a number of steps, 0 to {_MOST}; try until=1000")
        if not self.until and not self.doubling:
            raise ConfigError(
                f"exact({self.inner}) has no exact step; say which, with until=1000 or doubling=16"
            )

    def __str__(self) -> str:
        said = [
            f"{name}={value}" for name, value in (("until", self.until), ("doubling", self.doubling)) if value
        ]
        return f"exact({', '.join([str(self.inner), *said])})"

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def exact_at(self, step: int) -> bool:
        """Whether step `step`, from 0, sends the numbers as they are."""
        after = step - self.until
        if after < 0 or not self.doubling or step >= STEADY_STEP:  # by then they are 2^26 apart
            return after < 0
        # run r begins at doubling (2^r - 1), and its steps are 2^r apart
        apart = 1 << ((after // self.doubling + 1).bit_length() - 1)
        return (after - self.doubling * (apart - 1)) % apart == 0

    def nbytes(self, numel: int) -> int:
        return self.inner.nbytes(numel)

    def nbytes_of(self, layout: Layout) -> int:
        return declared_nbytes(self.inner, layout)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        if not self.exact_at(context.step):
            return (yield from self.inner.reduce(x, context))
        for _ in range(self.inner.traits.rounds - 1):  # as many requests as declared, in every step
            yield Max(x.new_zeros(0, dtype=torch.float32))
        return (yield from Plain().reduce(x, context))
