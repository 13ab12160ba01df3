"""Fixed threshold (Strom 2015, Aji and Heafield 2017; as an absolute compressor Sahu et al. 2021): all that is large enough.

    sent_j = x_j  where |x_j| >= value,  else 0;      |x_j - sent_j| < value for every j

What top-k bounds relative to x, this bounds absolutely, which is what error feedback wants (Sahu et al.): `ef(threshold(0.001))`. The
value is in the unit of the gradient, so it has to fit the model; where gradients shrink, less and less is sent. How many bytes that is
depends on the numbers: `nbytes` is the most. Each rank sends its own to every other, (n - 1) times, with their number first. On an
accelerator that number is waited for.
"""

from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor

from tacit import recycled
from tacit.codecs.cast import Plain
from tacit.codecs.sparse_form import SparseForm, above, with_values
from tacit.codecs.topk import format_of
from tacit.errors import ConfigError
from tacit.requests import Codec, Context, Conversation, Gather, Reduced, Traits

_HEAD_NBYTES = 8  # how many
_LENGTH_NBYTES = 8  # of Gather(ragged=True)


@dataclass(frozen=True, slots=True)
class Threshold:
    """`threshold(value=0.001)`; `threshold(0.001) > int8` writes the numbers as int8 does."""

    value: float = 0.001
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        value = self.value
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not (value > 0 and isfinite(value))
        ):
            raise ConfigError(
                f"value={value}: what is sent is at least so large, a number above 0; try 0.001"
            )
        format_of(self.values, "threshold")

    def __str__(self) -> str:
        return with_values(f"threshold(value={self.value})", self.values)

    @property
    def traits(self) -> Traits:
        return Traits(rounds=1, summable=False, varies=True, absolute=True)

    def over(self, values: Codec) -> Codec:
        return replace(self, values=values)

    def nbytes(self, numel: int) -> int:
        return _LENGTH_NBYTES + _HEAD_NBYTES + self._form(numel, numel).nbytes

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        x = x.float()
        own = self.pack(x, context.own_seed)
        payloads: list[Tensor] = yield Gather(own, ragged=True)
        total = recycled.zeros(x.numel(), torch.float32, x.device)
        for payload in payloads:
            self.unpack_add(payload, total)
        return Reduced(
            total,
            contribution=lambda: self.unpack_add(own, recycled.zeros(x.numel(), torch.float32, x.device)),
        )

    def pack(self, x: Tensor, seed: int) -> Tensor:
        """What is sent of x, as bytes."""
        index = above(x, self.value)
        head = torch.tensor([index.numel()], device=x.device).view(torch.uint8)
        return torch.cat([head, self._form(x.numel(), index.numel()).pack(index, x[index], seed)])

    def unpack_add(self, payload: Tensor, out: Tensor) -> Tensor:
        """out += what `payload` holds; `out` itself."""
        kept = int(payload[:_HEAD_NBYTES].clone().view(torch.int64))
        if not 0 <= kept <= out.numel():
            raise ValueError(f"a payload names {kept} of {out.numel()} elements")
        return self._form(out.numel(), kept).add(payload[_HEAD_NBYTES:], out)

    def _form(self, numel: int, kept: int) -> SparseForm:
        return SparseForm(numel, kept, format_of(self.values, "threshold"))
