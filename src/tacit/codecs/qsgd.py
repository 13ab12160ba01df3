"""QSGD (Alistarh et al., NeurIPS 2017, arXiv 1610.02132): random rounding to s levels of a bucket's norm.

    Q(x_i) = |x| sign(x_i) l / s,   l / s one of the two levels around |x_i| / |x|, at random, so that E Q(x) = x
    E |Q(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2        d: elements of a bucket, |x| Euclidean (Lemma 3.1)

`norm=max`, the largest |x_i|, is what the paper's experiments take: finer, and the bound holds too (`int8` and `int4` are QSGD with it).
Levels travel as 2 (s = 1), 4 (to 7) or 8 bits (to 127). The paper's Elias codes would be shorter where most levels are 0, but their
length depends on the numbers, and a payload here is as long as declared. Unbiased, also where the shard's owner rounds the sum once more.
A level can be as large as the norm: with few levels, sums of numbers above about 1e36 leave float32.
"""

from dataclasses import dataclass

from torch import Tensor

from tacit.codecs.few_bits import RecordFormat, check_block, check_choice, sum_of
from tacit.codecs.in_torch import kernels
from tacit.errors import ConfigError
from tacit.requests import Context, Conversation, Traits

_MOST = {2: 1, 4: 7, 8: 127}  # levels by bits


@dataclass(frozen=True, slots=True)
class LevelFormat(RecordFormat):
    """Records of a float32 unit and a few bits an element."""

    levels: int
    block: int
    euclidean: bool

    @property
    def head_nbytes(self) -> int:
        return 4

    @property
    def code_bits(self) -> int:
        return next(bits for bits, most in _MOST.items() if self.levels <= most)

    @property
    def elements(self) -> int:
        return self.block

    def write(self, x: Tensor, seed: int, out: Tensor) -> None:
        kernels(x).pack_levels(x, self.block, self.code_bits, self.levels, self.euclidean, seed, out)

    def read(self, data: Tensor, gain: float, add: bool, out: Tensor) -> None:
        kernels(data).unpack_levels(data, self.block, self.code_bits, gain, add, out)


@dataclass(frozen=True, slots=True)
class Qsgd:
    """`qsgd(levels=7, bucket=512, norm=l2)`: 4.06 bits an element; with 127 levels 8.06, with one 2.06."""

    levels: int = 7
    bucket: int = 512
    norm: str = "l2"
    traits = Traits(rounds=1, summable=False, unbiased=True)

    def __post_init__(self) -> None:
        if not isinstance(self.levels, int) or isinstance(self.levels, bool) or not 1 <= self.levels <= 127:
            raise ConfigError(f"levels={self.levels}: 1 to 127 levels above zero; try 7, which take 4 bits")
        check_block(self.bucket, "bucket")
        check_choice("norm", self.norm, ("l2", "max"))

    def __str__(self) -> str:
        norm = "" if self.norm == "l2" else f", norm={self.norm}"
        return f"qsgd(levels={self.levels}, bucket={self.bucket}{norm})"

    @property
    def format(self) -> LevelFormat:
        return LevelFormat(self.levels, self.bucket, self.norm == "l2")

    def nbytes(self, numel: int) -> int:
        return self.format.nbytes(numel)

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        return sum_of(self.format, x, context)
