"""Statistical levels in two bits, for differences of models (as MuLoCo and SparseLoCo take them, 2025): what is sent is a mean.

    C(x)_j = sign(x_j) mean{|x_i| : |x_i| <= t} where |x_j| <= t,  sign(x_j) mean{|x_i| : |x_i| > t} elsewhere
    t: halfway between the two means, fitted to the block by Lloyd's steps;      |x - C(x)|^2 = |x|^2 - |C(x)|^2

Levels that are means of what they stand for shrink x whatever its distribution, where a grid from 0 to the largest spends its levels on
what hardly occurs. Normal numbers keep .88 of their energy, as with the best four levels (`sign`: .64), and of a block that is
mostly zeros the zeros stay near zero. Differences of models are sent rarely and remembered: `diloco(64) / ef(twobit)`, `streaming(64) / ef(twobit)`.
A gradient in two bits belongs into error feedback too.
"""

from dataclasses import dataclass

from torch import Tensor

from tacit.codecs.few_bits import RecordFormat, check_block, sum_of
from tacit.codecs.in_torch import kernels
from tacit.requests import Context, Conversation, Traits


@dataclass(frozen=True, slots=True)
class TwoBitFormat(RecordFormat):
    """Records of two float32 means and two bits an element."""

    block: int

    @property
    def head_nbytes(self) -> int:
        return 8

    @property
    def code_bits(self) -> int:
        return 2

    @property
    def elements(self) -> int:
        return self.block

    def write(self, x: Tensor, seed: int, out: Tensor) -> None:
        kernels(x).pack_two_bits(x, self.block, out)

    def read(self, data: Tensor, gain: float, add: bool, out: Tensor) -> None:
        kernels(data).unpack_two_bits(data, self.block, gain, add, out)


@dataclass(frozen=True, slots=True)
class TwoBit:
    """`twobit(block=512)`: 2.13 bits an element, up and down."""

    block: int = 512
    traits = Traits(rounds=1, summable=False, contracting=True)

    def __post_init__(self) -> None:
        check_block(self.block)

    def __str__(self) -> str:
        return f"twobit(block={self.block})"

    @property
    def format(self) -> TwoBitFormat:
        return TwoBitFormat(self.block)

    def nbytes(self, numel: int) -> int:
        return self.format.nbytes(numel)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        return sum_of(self.format, x, context)
