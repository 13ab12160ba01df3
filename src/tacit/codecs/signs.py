"""One bit an element, and one or two means a block.

`onebit`: 1-bit SGD (Seide et al., Interspeech 2014). A block, as a column there, has the mean of each side of zero:

    C(x)_j = mean{x_i : x_i >= 0} where x_j >= 0,  mean{x_i : x_i < 0} elsewhere

`sign`: the operator of EF-signSGD (Karimireddy et al., ICML 2019, arXiv 1901.09847), block by block; `ef(sign)` is the method:

    C(x) = (|x|_1 / d) sign(x);   |x - C(x)|^2 = (1 - |x|_1^2 / (d |x|_2^2)) |x|^2

Both shrink: two means by at least as much. Signs with scales of their own cannot be added in flight: whoever holds a shard adds
in float32 and sends one bit an element back, whose error stays in the memory of `ef` like any other. One bit alone loses most of
a gradient; it belongs into error feedback. A zero counts as positive.
"""

from dataclasses import dataclass

from torch import Tensor

from tacit.codecs.few_bits import RecordFormat, check_block, sum_of
from tacit.codecs.in_torch import kernels
from tacit.requests import Context, Conversation, Traits


@dataclass(frozen=True, slots=True)
class SignFormat(RecordFormat):
    """Records of `means` float32 and a bit an element."""

    block: int
    means: int

    @property
    def head_nbytes(self) -> int:
        return 4 * self.means

    @property
    def code_bits(self) -> int:
        return 1

    @property
    def elements(self) -> int:
        return self.block

    def write(self, x: Tensor, seed: int, out: Tensor) -> None:
        kernels(x).pack_signs(x, self.block, self.means, out)

    def read(self, data: Tensor, gain: float, add: bool, out: Tensor) -> None:
        kernels(data).unpack_signs(data, self.block, self.means, gain, add, out)


@dataclass(frozen=True, slots=True)
class Sign:
    """`sign(block=1024)`: 1.03 bits an element, up and down."""

    block: int = 1024
    name = "sign"
    means = 1
    traits = Traits(rounds=1, summable=False, contracting=True)

    def __post_init__(self) -> None:
        check_block(self.block)

    def __str__(self) -> str:
        return f"{self.name}(block={self.block})"

    @property
    def format(self) -> SignFormat:
        return SignFormat(self.block, self.means)

    def nbytes(self, numel: int) -> int:
        return self.format.nbytes(numel)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        return sum_of(self.format, x, context)


@dataclass(frozen=True, slots=True)
class OneBit(Sign):
    """`onebit(block=1024)`: 1.06 bits an element, up and down."""

    name = "onebit"
    means = 2
