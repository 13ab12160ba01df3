"""What a codec will put on the wire, without a number computed: the conversation is driven with shapes only.

The vector lies on torch's meta device, where every kernel runs as its torch twin (codecs/in_torch.py) and computes shapes: no
memory, whatever the length. A codec that looks at a value cannot be driven so (meta tensors have none): it is then driven
with zeros on the CPU, at the price of real memory and time; `on` records which it was. Its requests may not depend on the
numbers anyway: the loop-back driver and the conformance kit hold it to that. The one exception is declared (`Traits.varies`): such a
codec is driven with large numbers, so that what it sends is the most it can send.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.errors import ConfigError, ConformanceError
from tacit.layout import Layout
from tacit.requests import (
    STEADY_STEP,
    Codec,
    Gather,
    LocalMemory,
    Max,
    Merge,
    Merged,
    Reduced,
    Request,
    Sum,
    TableSum,
    Total,
    as_reduced,
    context_for,
)

_LARGE = 1e30


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of one rank: the bytes it sends, and the bytes of the answer.

    - Sum: the packed sum, in the payload's own form; TableSum: one lane an element; Max: as many as it gave;
    - Gather: every rank's; Merge: one.
    """

    kind: str
    up_nbytes: int
    down_nbytes: int
    on: str  # "meta": shapes only; "cpu": numbers


def requests_of(codec: Codec, numel: int, world: int, layout: Layout | None = None) -> list[Asked]:
    """What `codec` requests for a vector of `numel` float32 elements (one 1-D parameter without a layout) among `world` ranks, in order."""
    if numel < 0 or world < 1:
        raise ConfigError(
            f"{numel} elements among {world} ranks; give 0 or more elements and 1 or more ranks"
        )
    if codec.traits.varies:  # the most that it sends
        return _drive(codec, torch.full((numel,), _LARGE), world, layout)
    try:
        return _drive(codec, torch.empty(numel, device="meta"), world, layout)
    except (RuntimeError, NotImplementedError):  # what torch raises where a value is wanted of a meta tensor
        return _drive(codec, torch.zeros(numel), world, layout)


def _drive(codec: Codec, x: Tensor, world: int, layout: Layout | None) -> list[Asked]:
    memory = LocalMemory(x, given=layout)
    context = context_for(memory, seed=0, step=STEADY_STEP, bucket="shapes", rank=0, world=world)
    talk, answer, asked = codec.reduce(x, context), None, list[Asked]()
    for _ in range(codec.traits.rounds + 1):
        try:
            request: Request = talk.send(answer)
        except StopIteration as end:
            _check_end(codec, as_reduced(end.value), x)
            return asked
        answer, down_nbytes = _answer(request, world)
        asked.append(Asked(type(request).__name__, request.nbytes, down_nbytes, x.device.type))
    raise ConformanceError(f"{codec} made more than the {codec.traits.rounds} requests it declares")


def _answer(request: Request, world: int) -> tuple[Any, int]:
    """An answer of the right shape, and its bytes."""
    if isinstance(request, Sum):
        payload = request.payload
        return Total(payload.unpack(), world), payload.format.nbytes(payload.numel)
    if isinstance(request, TableSum):
        request.lanes.check(world)
        lanes = request.index.new_zeros(request.numel, dtype=request.lanes.dtype)
        return Total(lanes, world), lanes.nbytes
    if isinstance(request, Max):
        return request.value, request.nbytes
    if isinstance(request, Merge):
        return Merged(request.value), request.nbytes
    if isinstance(request, Gather):
        return [request.value] * world, world * request.nbytes
    raise ConformanceError(
        f"a codec yielded {type(request).__name__}; ask with Sum, Max, Gather, Merge or TableSum"
    )


def _check_end(codec: Codec, reduced: Reduced, x: Tensor) -> None:
    if reduced.total.shape != x.shape:
        raise ConformanceError(
            f"{codec} ends with {tuple(reduced.total.shape)} for a vector of {tuple(x.shape)}"
        )
