"""Natural compression (Horvath et al., MSML 2022, arXiv 1905.10988): a number becomes one of the two powers of two around it.

    C(t) = sign(t) 2^a with probability 2 - |t| / 2^a, else sign(t) 2^(a + 1);   a = floor(log2 |t|)
    E C(t) = t;   E |C(t) - t|^2 <= |t|^2 / 8

Only sign and exponent travel: 9 bits, no scale and no block, whatever the range. The mantissa is the distance to the next power, so that
rounding is one addition of random bits. What would round up to infinity stays below it. In a sharded scheme the sum is rounded once more.
"""

from dataclasses import dataclass

from torch import Tensor

from tacit.codecs.few_bits import RecordFormat, sum_of
from tacit.codecs.in_torch import kernels
from tacit.requests import Context, Conversation, Traits


@dataclass(frozen=True, slots=True)
class PowerFormat(RecordFormat):
    """Records of 8 elements: a byte of signs, then their exponents, a byte each."""

    @property
    def head_nbytes(self) -> int:
        return 1

    @property
    def code_bits(self) -> int:
        return 8

    @property
    def elements(self) -> int:
        return 8

    def write(self, x: Tensor, seed: int, out: Tensor) -> None:
        kernels(x).pack_natural(x, seed, out)

    def read(self, data: Tensor, gain: float, add: bool, out: Tensor) -> None:
        kernels(data).unpack_natural(data, gain, add, out)


@dataclass(frozen=True, slots=True)
class Natural:
    """`natural`: 9 bits an element, up and down."""

    traits = Traits(rounds=1, summable=False, unbiased=True, contracting=True)
    format = PowerFormat()

    def __str__(self) -> str:
        return "natural"

    def nbytes(self, numel: int) -> int:
        return self.format.nbytes(numel)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        return sum_of(self.format, x, context)
