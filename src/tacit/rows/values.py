"""The values of a row that nobody has trained yet: they follow from (seed, table, key), so no rank has to store or send them.

Integers mixed by splitmix64 and exact arithmetic only: the same bits whatever the world, the machine and the order of first touches.
"""

from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from tacit import _core
from tacit.errors import ConfigError
from tacit.requests import threads_for


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with standard deviation `std` (the sum of 12 uniforms: never beyond 6 deviations), as nn.Embedding's own 1.0.

    Args:
        std: the standard deviation; 0 makes rows of zeros.

    Raises:
        ConfigError: `std` is negative or not finite.

    Example:
        >>> tacit.rows.shard(model, optimizer=SGD(lr=0.1), init=Normal(std=0.01))
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        _check("Normal(std", self.std)

    def fill(self, out: Tensor, keys: Tensor, table: int, seed: int) -> None:
        """Writes the rows of `keys` into `out`, float32."""
        _core.row_values(keys, table, seed, True, self.std, out, threads_for(4 * out.numel()))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform from -bound to bound.

    Args:
        bound: the largest magnitude; 0 makes rows of zeros.

    Raises:
        ConfigError: `bound` is negative or not finite.

    Example:
        >>> tacit.rows.shard(model, optimizer=SGD(lr=0.1), init=Uniform(bound=0.05))
    """

    bound: float

    def __post_init__(self) -> None:
        _check("Uniform(bound", self.bound)

    def fill(self, out: Tensor, keys: Tensor, table: int, seed: int) -> None:
        """Writes the rows of `keys` into `out`, float32."""
        _core.row_values(keys, table, seed, False, self.bound, out, threads_for(2 * out.numel()))


def _check(what: str, value: float) -> None:
    if not isinstance(value, float | int) or not isfinite(value) or value < 0:
        raise ConfigError(f"{what}={value!r}): a finite number, 0 or more; try 0.01")


NORMAL = Normal()  # as nn.Embedding begins
