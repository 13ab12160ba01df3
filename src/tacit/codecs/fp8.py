"""8-bit floats in blocks (FP8 formats for deep learning, Micikevicius et al. 2022, arXiv 2209.05433): a scale a block.

    scale = max |x_block| / largest;   C(x) = scale cast(x / scale)        largest: 448 for e4m3, 57344 for e5m2

e4m3 has 3 bits of mantissa (an error of 1/16 at most) over 15 powers of two, e5m2 2 bits (1/8) over 30. Where int8 has one step for all of a
block, here small elements have small errors. `rounding=nearest` (ties to even) contracts; `stochastic` is unbiased.
"""

from dataclasses import dataclass

from torch import Tensor

from tacit.codecs.few_bits import RecordFormat, check_block, check_choice, sum_of
from tacit.codecs.in_torch import kernels
from tacit.requests import Context, Conversation, Traits

_MANTISSA = {"e4m3": 3, "e5m2": 2}


@dataclass(frozen=True, slots=True)
class Float8Format(RecordFormat):
    """Records of a float32 scale and a byte an element."""

    mantissa: int
    block: int
    stochastic: bool

    @property
    def head_nbytes(self) -> int:
        return 4

    @property
    def code_bits(self) -> int:
        return 8

    @property
    def elements(self) -> int:
        return self.block

    def write(self, x: Tensor, seed: int, out: Tensor) -> None:
        kernels(x).pack_fp8(x, self.block, self.mantissa, self.stochastic, seed, out)

    def read(self, data: Tensor, gain: float, add: bool, out: Tensor) -> None:
        kernels(data).unpack_fp8(data, self.block, self.mantissa, gain, add, out)


@dataclass(frozen=True, slots=True)
class Fp8:
    """`fp8(e4m3, block=256)`: 8.13 bits an element, up and down."""

    kind: str = "e4m3"
    block: int = 256
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, tuple(_MANTISSA))
        check_block(self.block)
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))

    def __str__(self) -> str:
        rounding = "" if self.rounding == "nearest" else f", rounding={self.rounding}"
        return f"fp8({self.kind}, block={self.block}{rounding})"

    @property
    def format(self) -> Float8Format:
        return Float8Format(_MANTISSA[self.kind], self.block, self.rounding == "stochastic")

    @property
    def traits(self) -> Traits:
        stochastic = self.rounding == "stochastic"
        return Traits(rounds=1, summable=False, unbiased=stochastic, contracting=not stochastic)

    def nbytes(self, numel: int) -> int:
        return self.format.nbytes(numel)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        return sum_of(self.format, x, context)
