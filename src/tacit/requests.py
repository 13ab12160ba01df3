"""Requests: what a codec may ask of the other ranks, and the loop-back that answers in one process.

A codec is a generator. It yields requests and receives their results; it never sees sockets, threads or futures:

    def reduce(self, x, context):
        norm  = yield Max(x.norm())
        total = yield TableSum(quantize(x, norm), table)
        return Reduced(dequantize(total, norm), contribution=...)

Every codec returns the SUM over ranks. Averaging happens once, in exchange.py.
"""

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from tacit import _core, recycled
from tacit.errors import ConformanceError, PairingError
from tacit.layout import Layout


class WireFormat(Protocol):
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
        return recycled.cast(x, self.dtype)

    def unpack(self, data: Tensor, numel: int) -> Tensor:
        return data if data.dtype in (torch.float32, torch.float64) else recycled.cast(data, torch.float32)

    def unpack_add(self, data: Tensor, out: Tensor, gain: float = 1.0) -> None:
        out.add_(data, alpha=gain)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return recycled.join(parts)


@dataclass(frozen=True, slots=True)
class Payload:
    """`numel` numbers written in a format.

    Args:
        data: The bytes or numbers that are sent.
        format: How they are laid out.
        numel: How many numbers they stand for.

    Example:
        >>> Payload.dense(torch.ones(3, dtype=torch.bfloat16)).nbytes
        6
    """

    data: Tensor
    format: WireFormat
    numel: int

    @staticmethod
    def dense(x: Tensor) -> "Payload":
        return Payload(x, Dense(x.dtype), x.numel())

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def unpack(self) -> Tensor:
        return self.format.unpack(self.data, self.numel)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Integer lanes of `bits` bits that must hold the sum of values up to `largest` from every rank.

    Args:
        bits: 8, 16 or 32.
        largest: The largest value of one rank.

    Example:
        >>> Lanes(bits=8, largest=15).most_ranks
        17
    """

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

    Args:
        payload: This rank's part.
        to_all: Every rank needs it to go on, also where FSDP2 scatters the result.
        small: It costs latency, not bandwidth: an aggregator is not asked.
        room: Where the exchange set it, the payload may be overwritten, and the total, which may stay in bfloat16, will be written there.

    Example:
        >>> Sum(Payload.dense(torch.zeros(5))).nbytes
        20
    """

    payload: Payload
    to_all: bool = False
    small: bool = False
    room: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes


@dataclass(frozen=True, slots=True)
class Max:
    """The element-wise maximum over ranks of a small tensor; NaN counts as infinity. Answered by a Tensor.

    Args:
        value: This rank's part.

    Example:
        >>> Max(torch.tensor([0.5])).nbytes
        4
    """

    value: Tensor

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size()


@dataclass(frozen=True, slots=True)
class Gather:
    """Every rank's tensor, in rank order; all of one shape. Answered by a list of Tensors.

    Args:
        value: This rank's part.
        ragged: Ranks have different numbers of elements, and `value` is 1-D: each sends its number, 8 bytes, first.

    Example:
        >>> Gather(torch.zeros(4, dtype=torch.uint8)).nbytes
        4
    """

    value: Tensor
    ragged: bool = False

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size() + 8 * self.ragged


@dataclass(frozen=True, slots=True)
class TableSum:
    """The sum over ranks of table[index]: whoever adds, adds small integers. Answered by a Total of lanes.

    Args:
        index: 8 / bits indices a byte, the first in the low bits.
        table: What each index stands for; 2, 4, 16 or 256 integers.
        numel: How many indices there are.
        lanes: The integers that are added.
        to_all: As in Sum.

    Example:
        >>> index = torch.tensor([0x21, 0x03], dtype=torch.uint8)  # 1, 2, 3
        >>> TableSum(index, tuple(range(16)), 3, Lanes(bits=8, largest=15)).look_up().tolist()
        [1, 2, 3]
    """

    index: Tensor
    table: tuple[int, ...]
    numel: int
    lanes: Lanes
    to_all: bool = False

    @property
    def bits(self) -> int:
        return max(1, (len(self.table) - 1).bit_length())

    @property
    def nbytes(self) -> int:
        return self.index.numel()

    def look_up(self) -> Tensor:
        """table[index] as lanes: what an aggregator adds for this rank."""
        lanes = recycled.empty(self.numel, self.lanes.dtype, self.index.device)
        self._apply(self.index, lanes, add=False)
        return lanes

    def add(self, index: Tensor, lanes: Tensor) -> None:
        """lanes += table[index], for any run of packed indices of this request."""
        self._apply(index, lanes, add=True)

    def _apply(self, index: Tensor, lanes: Tensor, add: bool) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise ConformanceError(
                f"TableSum: a table of {len(self.table)} cannot be packed; pad it to 2, 4, 16 or 256"
            )
        if self.bits == 8 or index.device.type != "cpu":
            (self.add_in_torch if add else self.look_up_in_torch)(index, lanes)
            return
        wide = lanes.view(torch.uint16) if lanes.dtype == torch.int16 else lanes
        table = torch.tensor(self.table, dtype=torch.uint8)
        if self.bits == 4:
            kernel = _core.add_table if add else _core.lookup_table
            kernel(index, lanes.numel(), table, wide, threads_for(lanes.numel()))
        else:
            own = index[: -(-lanes.numel() * self.bits // 8)]
            _core.add_codes(own, self.bits, pad(table, (0, 2**self.bits - len(table))), add, wide)

    def look_up_in_torch(self, index: Tensor, lanes: Tensor) -> None:
        self.add_in_torch(index, lanes.zero_())

    def add_in_torch(self, index: Tensor, lanes: Tensor) -> None:
        """The same for any width and device."""
        table = torch.tensor(self.table, dtype=lanes.dtype, device=index.device)
        shifts = torch.arange(0, 8, self.bits, device=index.device, dtype=torch.uint8)
        codes = (index[:, None] >> shifts) & (2**self.bits - 1)
        lanes += table[codes.reshape(-1)[: lanes.numel()].int()]


@dataclass(frozen=True, slots=True)
class Merge:
    """A sum whose partial sums stay as short as one payload: ranks of a binomial tree merge what they receive with what they have, and the
    root's result goes back the same way. Answered by a Merged.

    Args:
        value: This rank's part, of the same length on all ranks.
        join: (own, received) -> (both in one, of the same length; what that left out, in whatever form the codec wants to have it back).

    Example:
        >>> Merge(torch.tensor([3.0]), join=lambda own, received: (torch.maximum(own, received), None)).nbytes
        4
    """

    value: Tensor
    join: Callable[[Tensor, Tensor], tuple[Tensor, Any]]

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.value.element_size()


@dataclass(frozen=True, slots=True)
class Merged:
    """What comes back from Merge.

    Args:
        value: The root's result, on every rank.
        left_out: What this rank's own merges left out, one entry a merge: it belongs to this rank's memory.

    Example:
        >>> Merged(torch.zeros(1)).left_out
        ()
    """

    value: Tensor
    left_out: tuple[Any, ...] = ()


def merge_stages(world: int) -> list[list[tuple[int, int]]]:
    """Who sends to whom in each stage of a merge, as in schedules/tree.py; the way back is the same, turned round."""
    steps = [1 << k for k in range((world - 1).bit_length())]
    return [[(r + step, r) for r in range(0, world - step, 2 * step)] for step in steps]


Request = Sum | Max | Gather | TableSum | Merge


@dataclass(frozen=True, slots=True)
class Total:
    """What comes back from Sum and TableSum: `value`, and how many ranks are in it.

    Args:
        value: The sum.
        count: How many ranks are in it.
        lost: Where this rank re-encoded a part of the sum for the others, the elements [start, stop) and the exact
            minus the re-encoded values. It belongs to this rank's memory, so that nothing disappears on the way.

    Example:
        >>> own = Payload.dense(torch.tensor([1.0, 2.0]))
        >>> Total(torch.tensor([4.0, 6.0]), count=2).reduced(own).contribution()
        tensor([1., 2.])
    """

    value: Tensor
    count: int
    lost: tuple[int, int, Tensor] | None = None

    def reduced(self, payload: Payload) -> "Reduced":
        """The end of a one-Sum conversation: this rank contributed its own payload, less `lost`."""

        def contribution() -> Tensor:
            own = recycled.clone(recycled.cast(payload.unpack(), torch.float32))
            if self.lost is not None:
                start, stop, values = self.lost
                own[start:stop] -= values
            return own

        return Reduced(self.value, contribution)


@dataclass(frozen=True, slots=True)
class Reduced:
    """How a conversation ends. The contributions of all ranks add up to the total: error feedback and the conformance kit rely on it.

    Args:
        total: The sum over ranks.
        contribution: Returns this rank's part of it, when it is asked for; None where that is all of x.

    Example:
        >>> Reduced(torch.tensor([3.0]), contribution=lambda: torch.tensor([1.0])).contribution()
        tensor([1.])
    """

    total: Tensor
    contribution: Callable[[], Tensor] | None = None


Conversation = Generator[Request, Any, Reduced]

STEADY_STEP = 2**30  # by then every codec sends what it declares; some send more in their first steps


class Memory(Protocol):
    """What one bucket keeps between steps."""

    @property
    def layout(self) -> Layout: ...

    def vector(self, slot: str) -> Tensor:
        """A float32 vector as long as the bucket, zero at first; kept by writing into it."""
        ...

    def tensor(
        self,
        slot: str,
        name: str,
        shape: Sequence[int | None],
        *,
        rule: str,
        dtype: torch.dtype = torch.float32,
        init: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """A tensor of any shape and dtype that belongs to parameter `name` of the layout; kept by writing into it.

        Args:
            shape: None for a dimension that `init` decides at first, and `resize_()` of what is kept from then on.
            init: makes its first value; zeros without one.
            rule: what it becomes in another world: "mean" of the old ranks (floating point only), "first" (the lowest old
                rank's, for what all ranks hold alike) or "reset" (`init` again).
        """
        ...


RULES = ("mean", "first", "reset")


def check_rule(slot: str, rule: str, dtype: torch.dtype) -> None:
    """Raises ConformanceError for a rule that does not exist, or that does not fit the dtype."""
    if rule not in RULES or (rule == "mean" and not dtype.is_floating_point):
        raise ConformanceError(
            f"memory {slot!r} of {dtype} with rule={rule!r}: write 'mean' (floating point only), 'first' or 'reset'"
        )


def new_tensor(
    shape: Sequence[int | None], dtype: torch.dtype, device: torch.device, init: Callable[[], Tensor] | None
) -> Tensor:
    """The first value of a kept tensor: what `init` makes, or zeros."""
    made = None if init is None else init()
    if made is None and None in shape:
        raise ConformanceError(
            f"memory of shape {tuple(shape)} needs init=, which decides what None stands for"
        )
    lengths = [own if own is not None or made is None else made.shape[i] for i, own in enumerate(shape)]
    found = torch.zeros([each for each in lengths if each is not None], dtype=dtype, device=device)
    return found if made is None else found.copy_(made)


def has_shape(kept: Tensor, shape: Sequence[int | None]) -> bool:
    """Whether a kept tensor is of the shape that is asked for, where None fits any length."""
    return kept.dim() == len(shape) and all(b in (a, None) for a, b in zip(kept.shape, shape, strict=True))


@dataclass(slots=True)
class LocalMemory:
    """Memory that lives as long as this object: for one vector that belongs to no model."""

    like: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict)
    given: Layout | None = None

    @property
    def layout(self) -> Layout:
        return Layout.flat(self.like.numel()) if self.given is None else self.given

    def vector(self, slot: str) -> Tensor:
        if slot not in self.kept:
            self.kept[slot] = torch.zeros(self.like.numel(), dtype=torch.float32, device=self.like.device)
        return self.kept[slot]

    def tensor(
        self,
        slot: str,
        name: str,
        shape: Sequence[int | None],
        *,
        rule: str,
        dtype: torch.dtype = torch.float32,
        init: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        check_rule(slot, rule, dtype)
        key = f"{slot}/{self.layout.span(name).name}"
        if key not in self.kept:
            self.kept[key] = new_tensor(shape, dtype, self.like.device, init)
        return self.kept[key]


@dataclass(frozen=True, slots=True)
class Context:
    """What a codec may know of one bucket in one step, beside the numbers.

    Args:
        memory: What this bucket keeps between steps.
        world: How many ranks there are.
        rank: Only to distinguish ranks in what all of them share, as strata of one random stream.
        step: How many steps came before.
        own_seed: Differs between ranks: rounding noise that averages out.
        shared_seed: The same on all ranks: signs, rotations, shared indices.

    Example:
        >>> context = context_for(LocalMemory(torch.zeros(6)), seed=1, step=0, bucket="b", rank=0, world=2)
        >>> [span.shape for span in context.layout.spans], context.memory.vector("residual").shape
        ([(6,)], torch.Size([6]))
    """

    memory: Memory
    world: int
    rank: int
    step: int
    own_seed: int
    shared_seed: int

    @property
    def layout(self) -> Layout:
        """Names, shapes and offsets of the parameters in the vector; `context.layout.split(x)` gives views by name."""
        return self.memory.layout


def seed_of(*parts: object) -> int:
    """64 bits that depend on every part and on nothing else: the same on every machine, in every process."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def context_for(memory: Memory, *, seed: int, step: int, bucket: str, rank: int, world: int) -> Context:
    """The context of `bucket` at `step`: a run can be replayed from its seed."""
    return Context(
        memory, world, rank, step, seed_of(seed, step, bucket, rank), seed_of(seed, step, bucket, "all")
    )


@dataclass(frozen=True, slots=True)
class Traits:
    """What a codec claims; `tacit codecs check` holds it to that, and a Strategy refuses pairings by it.

    Args:
        rounds: Requests in one conversation.
        summable: Its Sum payloads may be added in flight, by a ring, a tree or an aggregator.
        unbiased: The expectation of the total is the true sum.
        contracting: |x - contribution| < |x|.
        remembers: Keeps what it did not send, and sends it later.
        exact: Sends x as it is, in its own dtype.
        lanes: Integers that it asks others to add.
        stateful: Writes memory after its last answer: FSDP2 drives all rows to their end.
        varies: How many bytes it sends depends on the numbers; `nbytes` is the most.
        absolute: An option is in the unit of the numbers, so their size decides how much of them is sent.

    Example:
        >>> Traits(rounds=1, summable=False, unbiased=True).remembers
        False
    """

    rounds: int
    summable: bool
    unbiased: bool = False
    contracting: bool = False
    remembers: bool = False
    exact: bool = False
    lanes: Lanes | None = None
    stateful: bool = False
    varies: bool = False
    absolute: bool = False


class Codec(Protocol):
    """What is sent. Objects hold options only: frozen, comparable, printed as they are written in a strategy.

    Example:
        >>> class Plain:  # as `none`: one sum of the numbers as they are
        ...     traits = Traits(rounds=1, summable=True, exact=True)
        ...     def nbytes(self, numel):
        ...         return 4 * numel
        ...     def reduce(self, x, context):
        ...         payload = Payload.dense(x)
        ...         return (yield Sum(payload)).reduced(payload)
        >>> [reduced.total.tolist() for reduced in loop_back(Plain(), [torch.ones(2), torch.ones(2)])]
        [[2.0, 2.0], [2.0, 2.0]]
    """

    @property
    def traits(self) -> Traits: ...
    def nbytes(self, numel: int) -> int:
        """Payload bytes one rank hands to its requests for `numel` float32 elements."""
        ...

    def reduce(self, x: Tensor, context: Context) -> Conversation:
        """The conversation about one bucket `x`, which is only read; it ends with the sum over ranks."""
        ...


@runtime_checkable
class ShapedCodec(Protocol):
    """A codec whose payloads depend on shapes; its `nbytes(numel)` is that of one 1-D parameter."""

    def nbytes_of(self, layout: Layout) -> int:
        """Payload bytes one rank hands to its requests for a vector with this layout."""
        ...


@runtime_checkable
class Composes(Protocol):
    """A codec that sends few numbers of many, and whose numbers may take the wire format of another: `topk > int8`."""

    def over(self, values: Codec) -> Codec:
        """This codec with its numbers in the format of `values`; PairingError, with the way out, if that has none."""
        ...


@runtime_checkable
class HasFormat(Protocol):
    """A codec that writes each rank's numbers in a format of their own, which another codec may use for its numbers."""

    @property
    def format(self) -> WireFormat: ...


def declared_nbytes(codec: Codec, layout: Layout) -> int:
    """Payload bytes that `codec` declares for a vector with this layout."""
    return codec.nbytes_of(layout) if isinstance(codec, ShapedCodec) else codec.nbytes(layout.numel)


# ---- arithmetic that every scheme shares: one place decides what a sum is ----


def add_shard(
    format: WireFormat, parts: Sequence[Tensor], numel: int, seed: int
) -> tuple[Tensor, Tensor | None]:
    """One shard's payloads of all ranks added in float32 in rank order and packed again: (packed, what that lost)."""
    wide = torch.float64 if isinstance(format, Dense) and format.dtype == torch.float64 else torch.float32
    exact = recycled.zeros(numel, wide, parts[0].device)
    for part in parts:
        format.unpack_add(part, exact)
    packed = format.pack(exact, seed)
    if packed is exact:
        return packed, None
    format.unpack_add(packed, exact, gain=-1.0)
    return packed, exact


# ---- the loop-back driver ----


def loop_back(
    codec: Codec,
    vectors: Sequence[Tensor],
    *,
    memories: Sequence[Memory] | None = None,
    layout: Layout | None = None,
    seed: int = 0,
    step: int = 0,
    scheme: str = "sharded",
    observe: Callable[[Request], None] = lambda request: None,
) -> list[Reduced]:
    """What every rank of a world of `len(vectors)` receives, in one process and in lock step.

    Args:
        codec: What is sent.
        vectors: One bucket of each rank, all of one length.
        memories: One for each rank, for what is kept from call to call; without them each call starts anew.
        layout: Where parameters lie in the vectors: one 1-D parameter without it; `memories` bring their own.
        seed: Makes stochastic rounding repeatable.
        step: The number of the step, which the seeds depend on.
        scheme: "sharded" answers a Sum as the sharded scheme does, bit for bit (shards added in float32 and packed
            again); "ideal" adds once and loses nothing.
        observe: Called with rank 0's requests.

    Returns:
        How the conversation ended on each rank, in rank order.

    Raises:
        ConformanceError: The ranks made different requests, or more than the codec declares.

    Example:
        >>> from tacit.strategy import parse_codec
        >>> a, b = loop_back(parse_codec("none"), [torch.tensor([1.0]), torch.tensor([2.0])])
        >>> a.total, b.total
        (tensor([3.]), tensor([3.]))
    """
    world = len(vectors)
    kept = memories or [LocalMemory(x, given=layout) for x in vectors]
    contexts = [
        context_for(kept[r], seed=seed, step=step, bucket="loop", rank=r, world=world) for r in range(world)
    ]
    talks = [codec.reduce(x, context) for x, context in zip(vectors, contexts, strict=True)]
    answers: list[Any] = [None] * world
    for _ in range(codec.traits.rounds + 1):
        said = [_advance(talk, answer) for talk, answer in zip(talks, answers, strict=True)]
        reduced = [s for s in said if isinstance(s, Reduced)]
        if len(reduced) == world:
            return reduced
        requests = [s for s in said if not isinstance(s, Reduced)]
        if reduced or len({type(request) for request in requests}) > 1:
            raise ConformanceError(
                f"{codec}: the ranks do not ask the same; a conversation may not depend on the data"
            )
        observe(requests[0])
        answers = answer_all(requests, [context.own_seed for context in contexts], scheme)
    raise ConformanceError(f"{codec} made more than the {codec.traits.rounds} requests it declares")


def _advance(talk: Conversation, answer: Any) -> Request | Reduced:
    """The conversation's next request, or its end."""
    try:
        return talk.send(answer)
    except StopIteration as end:
        return as_reduced(end.value)


def as_reduced(value: object) -> Reduced:
    """The end of a conversation; a bare tensor is a total to which all of x contributed."""
    if isinstance(value, Tensor):
        return Reduced(value)
    if isinstance(value, Reduced):
        return value
    raise ConformanceError(
        f"a conversation ended with {type(value).__name__}; return Reduced(total, contribution) or the total"
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
    if isinstance(first, Merge):
        return _merge_all([r for r in requests if isinstance(r, Merge)])
    first.lanes.check(world)
    lanes = first.look_up()
    for request in requests[1:]:
        if isinstance(request, TableSum):
            first.add(request.index, lanes)
    return [Total(lanes, world)] * world


def _merge_all(requests: list[Merge]) -> list[Merged]:
    values, left_out = [r.value for r in requests], [list[Any]() for _ in requests]
    for stage in merge_stages(len(requests)):
        for source, rank in stage:
            values[rank], left = requests[rank].join(values[rank], values[source])
            left_out[rank].append(left)
    return [Merged(values[0], tuple(left)) for left in left_out]


def _sum_all(payloads: list[Payload], seeds: Sequence[int], scheme: str) -> list[Total]:
    world, format, numel = len(payloads), payloads[0].format, payloads[0].numel
    if scheme == "ideal":
        value = torch.stack([p.unpack() for p in payloads]).sum(0)
        return [Total(value, world)] * world
    cuts = format.cuts(numel, world)
    spans = list(pairwise(cuts))
    shards = [
        add_shard(format, [format.cut(p.data, a, b) for p in payloads], b - a, seed_of(seeds[rank], "shard"))
        for rank, (a, b) in enumerate(spans)
    ]
    value = format.unpack(format.join([packed for packed, _ in shards]), numel)
    return [
        Total(value.clone(), world, None if lost is None else (a, b, lost))
        for (a, b), (_, lost) in zip(spans, shards, strict=True)
    ]
