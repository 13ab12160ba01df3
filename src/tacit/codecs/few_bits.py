"""What formats of few bits have in common: records of `block` elements, a head of a few bytes and then `bits` an element.

A payload may be cut between records. What is in a head, and what the codes stand for, is a format's own: see native/fewbits.h.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tacit import recycled
from tacit.errors import ConfigError
from tacit.requests import Context, Conversation, Payload, Sum, Total, WireFormat, even_cuts

MOST_BLOCK = 2**20


class RecordFormat(ABC):
    """A WireFormat of records; the last is cut short. Those who derive from it are frozen values."""

    __slots__ = ()
    adds = False

    @property
    @abstractmethod
    def head_nbytes(self) -> int: ...

    @property
    @abstractmethod
    def code_bits(self) -> int: ...

    @property
    @abstractmethod
    def elements(self) -> int:
        """Of a record: a multiple of 8."""

    @abstractmethod
    def write(self, x: Tensor, seed: int, out: Tensor) -> None:
        """`x` in `out`, which has nbytes(x.numel()) bytes."""

    @abstractmethod
    def read(self, data: Tensor, gain: float, add: bool, out: Tensor) -> None:
        """out = (out if add else 0) + gain * what `data` stands for."""

    def nbytes(self, numel: int) -> int:
        full, rest = divmod(numel, self.elements)
        return full * self._record_nbytes(self.elements) + (self._record_nbytes(rest) if rest else 0)

    def _record_nbytes(self, numel: int) -> int:
        return self.head_nbytes + (numel * self.code_bits + 7) // 8

    def cuts(self, numel: int, shards: int) -> list[int]:
        return even_cuts(numel, shards, unit=self.elements)

    def cut(self, data: Tensor, start: int, stop: int) -> Tensor:
        return data[self.nbytes(start) : self.nbytes(stop)]

    def pack(self, x: Tensor, seed: int) -> Tensor:
        out = recycled.empty(self.nbytes(x.numel()), torch.uint8, x.device)
        self.write(x, seed, out)
        return out

    def unpack(self, data: Tensor, numel: int) -> Tensor:
        out = recycled.empty(numel, torch.float32, data.device)
        self.read(data, 1.0, False, out)
        return out

    def unpack_add(self, data: Tensor, out: Tensor, gain: float = 1.0) -> None:
        self.read(data, gain, True, out)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return recycled.join(parts)


def sum_of(format: WireFormat, x: Tensor, context: Context) -> Conversation:
    """The conversation of a codec that is nothing but a format: one Sum of x in it."""
    payload = Payload(format.pack(recycled.cast(x, torch.float32), context.own_seed), format, x.numel())
    total: Total = yield Sum(payload)
    return total.reduced(payload)


def check_block(block: object, name: str = "block") -> None:
    """Refuses a block that records cannot have."""
    whole = isinstance(block, int) and not isinstance(block, bool)
    if not whole or not 8 <= block <= MOST_BLOCK or block % 8:  # type: ignore[operator]
        raise ConfigError(f"{name}={block}: a multiple of 8 elements, from 8 to {MOST_BLOCK}; try 1024")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuses an option's value that is none of `choices`."""
    if value not in choices:
        raise ConfigError(f"{name}={value}: choose {' or '.join(choices)}")


def blocks_of(numel: int, block: int) -> int:
    """How many blocks `numel` elements are; the last may be short."""
    return -(-numel // block)


def of_lanes(lanes: Tensor) -> Tensor:
    """Lanes as the kernels take them: never negative."""
    narrow = lanes.dtype == torch.int16 and lanes.device.type == "cpu"
    return lanes.view(torch.uint16) if narrow else lanes
