"""The words of a conversation: what a codec may ask of the other ranks, and the loop-back that answers in one process.

A codec is a generator. It yields requests and receives their results; it never sees sockets, threads or futures:

    def reduce(self, x, turn):
        norm  = yield Max(x.norm())
        total = yield TableSum(quantize(x, norm), table)
        return Heard(dequantize(total, norm), said=...)

Every codec returns the SUM over ranks. Averaging happens once, in exchange.py.
"""

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from tacit import _core
from tacit.errors import ConformanceError, PairingError


class Form(Protocol):
    """How a run of floats lies on the wire. `adds`: payloads of this form may be added where they stand."""

    @property
    def adds(self) -> bool: ...
    def nbytes(self, numel: int) -> int:
        """Exact payload bytes of `numel` elements."""
        ...

    def cuts(self, numel: int, shards: int) -> list[int]:
        """`shards + 1` element positions at which a payload may be cut, from 0 to `numel`."""
        ...

    def cut(self, data: Tensor, start: int, stop: int) -> Tensor:
        """The payload of elements start..stop, a view."""
        ...

    def pack(self, x: Tensor, seed: int) -> Tensor: ...
    def unpack(self, data: Tensor, numel: int) -> Tensor: ...
    def unpack_add(self, data: Tensor, out: Tensor, gain: float = 1.0) -> None:
        """out += gain * unpack(data), in float32."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor: ...


_THREAD_NUMEL = 2**19  # a thread that has less to do costs more than it saves


def threads_for(numel: int) -> int:
    """Threads for a kernel over `numel` elements: torch.get_num_threads() at most; the bits are the same for any number."""
    return max(1, min(torch.get_num_threads(), numel // _THREAD_NUMEL))


def even_cuts(numel: int, shards: int, unit: int = 1) -> list[int]:
    """Positions that cut `numel` elements into `shards` runs of whole units, as even as they can be."""
    units = -(-numel // unit)
    return [min(numel, units * shard // shards * unit) for shard in range(shards + 1)]


@dataclass(frozen=True, slots=True)
class Dense:
    """Plain numbers of one dtype; they add natively."""

    dtype: torch.dtype
    adds = True

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def cuts(self, numel: int, shards: int) -> list[int]:
        return even_cuts(numel, shards)

    def cut(self, data: Tensor, start: int, stop: int) -> Tensor:
        return data[start:stop]

    def pack(self, x: Tensor, seed: int) -> Tensor:
        return x.to(self.dtype)

    def unpack(self, data: Tensor, numel: int) -> Tensor:
        return data if data.dtype in (torch.float32, torch.float64) else data.float()

    def unpack_add(self, data: Tensor, out: Tensor, gain: float = 1.0) -> None:
        out.add_(data, alpha=gain)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))


@dataclass(frozen=True, slots=True)
class Payload:
    """`numel` numbers written in a form."""

    data: Tensor
    form: Form
    numel: int

    @staticmethod
    def dense(x: Tensor) -> "Payload":
        return Payload(x, Dense(x.dtype), x.numel())

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def unpack(self) -> Tensor:
        return self.form.unpack(self.data, self.numel)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Integer lanes of `bits` bits that must hold the sum of values up to `largest` from every rank."""

    bits: int
    largest: int

    @property
    def dtype(self) -> torch.dtype:
        return {8: torch.uint8, 16: torch.int16, 32: torch.int32}[self.bits]

    @property
    def most_ranks(self) -> int:
        return int((2 ** (self.bits - (self.bits > 8)) - 1) // max(1, self.largest))

    def check(self, world: int) -> None:
        if world > self.most_ranks:
            raise PairingError(
                f"world {world}: {self.bits}-bit lanes hold the sum of at most {self.most_ranks} ranks when one "
                f"value reaches {self.largest}; use wider lanes, a smaller granularity or fewer ranks a group"
            )


@dataclass(frozen=True, slots=True)
class Sum:
    """The element-wise sum of every rank's payload. Answered by a Total.

    `to_all`: a small sum that every rank needs to go on, also where FSDP2 scatters the result.
    """

    payload: Payload
    to_all: bool = False

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes


@dataclass(frozen=True, slots=True)
class Max:
    """The element-wise maximum over ranks of a small tensor; NaN counts as infinity. Answered by a Tensor."""

    value: Tensor

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size()


@dataclass(frozen=True, slots=True)
class Gather:
    """Every rank's tensor, in rank order; all of one shape. Answered by a list of Tensors."""

    value: Tensor

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size()


@dataclass(frozen=True, slots=True)
class TableSum:
    """The sum over ranks of table[index]: whoever adds, adds small integers. Answered by a Total of lanes.

    `index` holds 8 / bits indices a byte, the first in the low bits.
    """

    index: Tensor
    table: tuple[int, ...]
    numel: int
    lanes: Lanes

    @property
    def bits(self) -> int:
        return max(1, (len(self.table) - 1).bit_length())

    @property
    def nbytes(self) -> int:
        return self.index.numel()

    def look_up(self) -> Tensor:
        """table[index] as lanes: what an aggregator adds for this rank."""
        lanes = self.index.new_empty(self.numel, dtype=self.lanes.dtype)
        self._apply(_core.lookup_table, self.index, lanes, self.look_up_in_torch)
        return lanes

    def add(self, index: Tensor, lanes: Tensor) -> None:
        """lanes += table[index], for any run of packed indices of this request."""
        self._apply(_core.add_table, index, lanes, self.add_in_torch)

    def _apply(
        self, kernel: Callable[..., object], index: Tensor, lanes: Tensor, in_torch: Callable[..., None]
    ) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise ConformanceError(
                f"TableSum: a table of {len(self.table)} cannot be packed; pad it to 2, 4, 16 or 256"
            )
        if self.bits == 4 and index.device.type == "cpu":
            wide = lanes.view(torch.uint16) if lanes.dtype == torch.int16 else lanes
            table = torch.tensor(self.table, dtype=torch.uint8)
            kernel(index, lanes.numel(), table, wide, threads_for(lanes.numel()))
        else:
            in_torch(index, lanes)

    def look_up_in_torch(self, index: Tensor, lanes: Tensor) -> None:
        self.add_in_torch(index, lanes.zero_())

    def add_in_torch(self, index: Tensor, lanes: Tensor) -> None:
        """The same for any width and device."""
        table = torch.tensor(self.table, dtype=lanes.dtype, device=index.device)
        shifts = torch.arange(0, 8, self.bits, device=index.device, dtype=torch.uint8)
        codes = (index[:, None] >> shifts) & (2**self.bits - 1)
        lanes += table[codes.reshape(-1)[: lanes.numel()].int()]


Request = Sum | Max | Gather | TableSum


@dataclass(frozen=True, slots=True)
class Total:
    """What comes back from Sum and TableSum: `value`, and how many ranks are in it.

    `lost`: where this rank re-encoded a part of the sum for the others, the elements [start, stop) and the exact
    minus the re-encoded values. It belongs to this rank's memory, so that nothing disappears on the way.
    """

    value: Tensor
    count: int
    lost: tuple[int, int, Tensor] | None = None

    def heard(self, payload: Payload) -> "Heard":
        """The end of a one-Sum conversation: what the others heard of this rank is its own payload, less `lost`."""

        def said() -> Tensor:
            own = payload.unpack().to(torch.float32, copy=True)
            if self.lost is not None:
                start, stop, values = self.lost
                own[start:stop] -= values
            return own

        return Heard(self.value, said)


@dataclass(frozen=True, slots=True)
class Heard:
    """How a conversation ends: `total`, the sum that came back; `said()`, this rank's share in it (None: all of x).

    The shares of all ranks add up to the total: error feedback and the conformance kit rely on it.
    """

    total: Tensor
    said: Callable[[], Tensor] | None = None


Conversation = Generator[Request, Any, Heard]


class Slots(Protocol):
    """What one bucket keeps between steps."""

    def vector(self, slot: str) -> Tensor:
        """A float32 vector as long as the bucket, zero at first; kept by writing into it."""
        ...


@dataclass(slots=True)
class LocalSlots:
    """Slots that live as long as this object: for one vector that belongs to no model."""

    like: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict)

    def vector(self, slot: str) -> Tensor:
        if slot not in self.kept:
            self.kept[slot] = torch.zeros(self.like.numel(), dtype=torch.float32, device=self.like.device)
        return self.kept[slot]


@dataclass(frozen=True, slots=True)
class Turn:
    """One bucket's turn to speak: everything a codec may know besides the numbers."""

    memory: Slots
    world: int
    rank: int  # only to tell ranks apart in what all of them share, as strata of one random stream
    step: int
    own_seed: int  # differs between ranks: rounding noise that averages out
    shared_seed: int  # the same on all ranks: signs, rotations, shared indices


def seed_of(*parts: object) -> int:
    """64 bits that depend on every part and on nothing else: the same on every machine, in every process."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def turn_for(memory: Slots, *, seed: int, step: int, bucket: str, rank: int, world: int) -> Turn:
    """The turn of `bucket` at `step`: a run can be replayed from its seed."""
    return Turn(
        memory, world, rank, step, seed_of(seed, step, bucket, rank), seed_of(seed, step, bucket, "all")
    )


@dataclass(frozen=True, slots=True)
class Traits:
    """What a codec claims; `tacit codecs check` holds it to that, and a Strategy refuses pairings by it."""

    rounds: int  # requests in one conversation
    summable: bool  # its Sum payloads may be added in flight, by a ring, a tree or an aggregator
    unbiased: bool = False  # the expectation of the total is the true sum
    contracting: bool = False  # |x - said| < |x|
    remembers: bool = False  # keeps what it did not say, and says it later
    lanes: Lanes | None = None  # integers it asks others to add


class Codec(Protocol):
    """What is said. Objects hold options only: frozen, comparable, printed as they are written in a strategy."""

    @property
    def traits(self) -> Traits: ...
    def nbytes(self, numel: int) -> int:
        """Payload bytes one rank hands to its requests for `numel` float32 elements."""
        ...

    def reduce(self, x: Tensor, turn: Turn) -> Conversation: ...


# ---- arithmetic that every scheme shares: one place decides what a sum is ----


def add_shard(form: Form, parts: Sequence[Tensor], numel: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """One shard's payloads of all ranks added in float32 in rank order and packed again: (packed, what that lost)."""
    wide = torch.float64 if isinstance(form, Dense) and form.dtype == torch.float64 else torch.float32
    exact = torch.zeros(numel, dtype=wide, device=parts[0].device)
    for part in parts:
        form.unpack_add(part, exact)
    packed = form.pack(exact, seed)
    if packed is exact:
        return packed, None
    form.unpack_add(packed, exact, gain=-1.0)
    return packed, exact


# ---- the loop-back driver ----


def loop_back(
    codec: Codec,
    vectors: Sequence[Tensor],
    *,
    memories: Sequence[Slots] | None = None,
    seed: int = 0,
    step: int = 0,
    scheme: str = "sharded",
    observe: Callable[[Request], None] = lambda request: None,
) -> list[Heard]:
    """What every rank of a world of `len(vectors)` hears, in one process and in lock step.

    `scheme="sharded"` answers a Sum as the sharded scheme does, bit for bit (shards added in float32 and packed
    again); `scheme="ideal"` adds once and loses nothing. `observe` sees rank 0's requests.
    """
    world = len(vectors)
    slots = memories or [LocalSlots(x) for x in vectors]
    turns = [
        turn_for(slots[r], seed=seed, step=step, bucket="loop", rank=r, world=world) for r in range(world)
    ]
    talks = [codec.reduce(x, turn) for x, turn in zip(vectors, turns, strict=True)]
    answers: list[Any] = [None] * world
    for _ in range(codec.traits.rounds + 1):
        said = [_advance(talk, answer) for talk, answer in zip(talks, answers, strict=True)]
        heard = [s for s in said if isinstance(s, Heard)]
        if len(heard) == world:
            return heard
        requests = [s for s in said if not isinstance(s, Heard)]
        if heard or len({type(request) for request in requests}) > 1:
            raise ConformanceError(
                f"{codec}: the ranks do not ask the same; a conversation may not depend on the data"
            )
        observe(requests[0])
        answers = answer_all(requests, [turn.own_seed for turn in turns], scheme)
    raise ConformanceError(f"{codec} made more than the {codec.traits.rounds} requests it declares")


def _advance(talk: Conversation, answer: Any) -> Request | Heard:
    """The conversation's next request, or its end."""
    try:
        return talk.send(answer)
    except StopIteration as end:
        return as_heard(end.value)


def as_heard(value: object) -> Heard:
    """The end of a conversation; a bare tensor is a total in which all of x was said."""
    if isinstance(value, Tensor):
        return Heard(value)
    if isinstance(value, Heard):
        return value
    raise ConformanceError(
        f"a conversation ended with {type(value).__name__}; return Heard(total, said) or the total"
    )


def answer_all(requests: Sequence[Request], seeds: Sequence[int], scheme: str = "sharded") -> list[Any]:
    """The answers to one request of every rank, as the ranks of a real world would get them."""
    world = len(requests)
    if isinstance(first := requests[0], Sum):
        return _sum_all([r.payload for r in requests if isinstance(r, Sum)], seeds, scheme)
    if isinstance(first, Max):
        values = torch.stack([r.value for r in requests if isinstance(r, Max)])
        return [values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(0)] * world
    if isinstance(first, Gather):
        return [[r.value for r in requests if isinstance(r, Gather)]] * world
    first.lanes.check(world)
    lanes = first.look_up()
    for request in requests[1:]:
        if isinstance(request, TableSum):
            first.add(request.index, lanes)
    return [Total(lanes, world)] * world


def _sum_all(payloads: list[Payload], seeds: Sequence[int], scheme: str) -> list[Total]:
    world, form, numel = len(payloads), payloads[0].form, payloads[0].numel
    if scheme == "ideal":
        value = torch.stack([p.unpack() for p in payloads]).sum(0)
        return [Total(value, world)] * world
    cuts = form.cuts(numel, world)
    spans = list(pairwise(cuts))
    shards = [
        add_shard(form, [form.cut(p.data, a, b) for p in payloads], b - a, seed_of(seeds[rank], "shard"))
        for rank, (a, b) in enumerate(spans)
    ]
    value = form.unpack(form.join([packed for packed, _ in shards]), numel)
    return [
        Total(value.clone(), world, None if lost is None else (a, b, lost))
        for (a, b), (_, lost) in zip(spans, shards, strict=True)
    ]
