"""A sparse table as a value: what all ranks must agree on before they exchange its rows."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit import _core
from tacit.errors import ConfigError
from tacit.requests import seed_of
from tacit.rows.values import NORMAL, Normal, Uniform

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of rows: its name, its shape and how new rows begin.

    Args:
        name: what it is called in checkpoints; owners and first values follow from it.
        width: elements of a row.
        keys: keys are 0 to keys - 1; None for any 64-bit integer.
        dtype: torch.float32 or torch.bfloat16, in which rows are stored and sent; they are always computed in float32.
        padding: a key whose row is never trained; None without one.
        init: the values of rows that nobody has trained.
        seed: of these values.

    Raises:
        ConfigError: a width, a number of keys, a dtype or a padding key that cannot be.

    Example:
        >>> Table("user", width=16, keys=1_000_000)
    """

    name: str
    width: int
    keys: int | None = None
    dtype: torch.dtype = torch.float32
    padding: int | None = None
    init: Normal | Uniform = NORMAL
    seed: int = 0
    number: int = field(
        init=False
    )  # of this table in every hash: by its name, so that others may come and go

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"table {self.name!r} has rows of {self.width} elements; give at least 1")
        if self.keys is not None and self.keys < 1:
            raise ConfigError(f"table {self.name!r} has {self.keys} keys; give at least 1, or None for any")
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"table {self.name!r} is {self.dtype}; rows are stored as torch.float32 or torch.bfloat16"
            )
        if self.padding is not None and self.keys is not None and not 0 <= self.padding < self.keys:
            raise ConfigError(f"padding={self.padding} of table {self.name!r}: from 0 to {self.keys - 1}")
        object.__setattr__(self, "number", seed_of("table", self.name))

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row, stored or sent."""
        return self.width * self.dtype.itemsize

    def first_values(self, keys: Tensor) -> Tensor:
        """The rows of `keys` as they begin, in the table's dtype; the padding row is zero."""
        out = torch.empty(len(keys), self.width)
        self.init.fill(out, keys, self.number, self.seed & (2**64 - 1))
        if self.padding is not None:
            out[keys == self.padding] = 0
        return out.to(self.dtype)

    def by_owner(self, keys: Tensor, world: int) -> tuple[Tensor, list[int]]:
        """Positions in `keys` by owner (mix(table, key) mod world), and how many each rank owns."""
        order, counts = torch.empty_like(keys), torch.empty(world, dtype=torch.int64)
        _core.row_route(keys, self.number, order, counts)
        return order, counts.tolist()

    def check_keys(self, keys: Tensor) -> None:
        """Raises ConfigError unless all of `keys` may be looked up."""
        if keys.dtype not in (torch.int64, torch.int32):
            raise ConfigError(
                f"keys of table {self.name!r} are {keys.dtype}; pass torch.int64 or torch.int32"
            )
        if self.keys is None or not keys.numel():
            return
        low, high = (int(found) for found in keys.aminmax())
        if low < 0 or high >= self.keys:
            raise ConfigError(
                f"key {low if low < 0 else high} is not in table {self.name!r}, whose keys are 0 to {self.keys - 1}; hash the ids "
                f"into that range, or shard the table with unbounded=[{self.name!r}]"
            )
