"""Plain numbers: as they are, or cast to 16 bits.

    total = sum_i cast(x_i)

16 bits halve the wire and add natively, on every device: the baseline that any cleverer codec has to beat.
In a sharded scheme the sum is taken in float32 and cast once more; in a ring it is rounded at every hop.

`spends`: once sent, neither x nor the payload is read again but for `contribution`, so an exchange that asks for none may reduce in place.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import recycled
from tacit.requests import Context, Conversation, Dense, Payload, Reduced, Sum, Total, Traits


@dataclass(frozen=True, slots=True)
class Plain:
    """Sends x as it is, in its own dtype."""

    traits = Traits(rounds=1, summable=True, unbiased=True, contracting=True, exact=True)
    spends: ClassVar[bool] = True
    format = Dense(torch.float32)

    def __str__(self) -> str:
        return "none"

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        payload = Payload.dense(x)
        total: Total = yield Sum(payload)
        return total.reduced(payload)


@dataclass(frozen=True, slots=True)
class Bf16:
    """8 significant bits, float32's range; unlike torch's own hook it runs on the CPU too."""

    traits = Traits(rounds=1, summable=True, contracting=True)
    spends: ClassVar[bool] = True
    format = Dense(torch.bfloat16)

    def __str__(self) -> str:
        return "bf16"

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        payload = Payload.dense(recycled.cast(x, torch.bfloat16))
        total: Total = yield Sum(payload)
        return total.reduced(payload)


@dataclass(frozen=True, slots=True)
class Fp16:
    """11 significant bits; what travels is x / n, so that a mean within fp16's range (65504) has a sum within it too."""

    traits = Traits(rounds=1, summable=True, contracting=True)

    def __str__(self) -> str:
        return "fp16"

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        payload = Payload.dense((x / context.world).half())
        total: Total = yield Sum(payload)
        reduced = total.reduced(payload)
        return Reduced(
            total.value.float() * context.world,
            lambda: reduced.contribution() * context.world if reduced.contribution else x,
        )
