"""The rules of the conversation, each as a check that measures and judges. A codec that lies fails.

Every rule holds for one 1-D parameter, for a bucket of several parameters (a matrix, a 4-D convolution, a vector, an empty one
and a scalar), and for a shard of FSDP2 (parts of parameters, with padding): `LAYOUTS`.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.errors import ConformanceError, TacitError
from tacit.layout import Layout, Span
from tacit.memory import MemoryStore, merged_of
from tacit.requests import (
    STEADY_STEP,
    Codec,
    Dense,
    Memory,
    Reduced,
    Request,
    Sum,
    TableSum,
    declared_nbytes,
    loop_back,
)
from tacit.testing.published import claims
from tacit.testing.vectors import FAMILIES, nmse, vectors

WORLDS = (1, 2, 3, 4, 8, 10)
SIZES = (0, 1, 2, 7, 255, 256, 1000, 4097)
_NUMEL = 8192
_TRIALS = 64
MAGNITUDES = (1e-30, 1e-20, 1e20, 1e37)
_CPU = torch.device("cpu")
LAYOUTS = {
    "bucket": Layout.of(
        {"matrix": (24, 16), "conv": (8, 4, 3, 3), "empty": (0, 5), "vector": (40,), "scalar": ()}
    ),
    "shard": Layout(  # what the second of two ranks has of a 5 x 9 matrix, a vector of 3 and a matrix of one row
        (
            Span("matrix", (2, 9), 0, 18, (5, 9), first=3),
            Span("vector", (1,), 27, 28, (3,), first=2),
            Span("row", (0, 4), 29, 29, (1, 4), first=1),
        ),
        numel=33,
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule, one measurement, one verdict.

    Args:
        codec: The codec, as it is written in a strategy.
        check: The rule, a name in `CHECKS`.
        passed: The verdict.
        why: The measurement as a sentence.
        family: The kind of vectors, a name in `FAMILIES`.
        world: How many ranks there were.
        value: What was measured.
        limit: What it is compared with.
        layout: A key of `LAYOUTS`; None: one 1-D parameter.

    Example:
        >>> Finding("int8", "requests", True, "1 request, as declared").as_dict()["passed"]
        True
    """

    codec: str
    check: str
    passed: bool
    why: str
    family: str | None = None
    world: int | None = None
    value: float | None = None
    limit: float | None = None
    layout: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[Codec], Iterator[Finding]]


def check(codec: Codec, only: Iterable[str] | None = None) -> list[Finding]:
    """Measures `codec` against what it claims. An exception inside a check is a failed finding, not a crash.

    Args:
        codec: Any codec, built in or your own.
        only: Names of `CHECKS` to run; all by default.

    Returns:
        Every finding, in the order of the checks.

    Raises:
        KeyError: `only` names no check.

    Example:
        >>> from tacit.codecs import Int8
        >>> from tacit.testing import check
        >>> all(finding.passed for finding in check(Int8(), only=["bytes", "requests"]))
        True
    """
    names = list(CHECKS if only is None else only)
    findings: list[Finding] = []
    for name in names:
        try:
            findings += list(CHECKS[name](codec))
        except TacitError as cause:
            findings.append(Finding(str(codec), name, False, str(cause)))
        except Exception as cause:
            findings.append(Finding(str(codec), name, False, f"it raised {type(cause).__name__}: {cause}"))
    return findings


def require(codec: Codec) -> None:
    """For a test: passes if `codec` does all that it claims.

    Args:
        codec: Any codec, built in or your own.

    Raises:
        ConformanceError: It names the first broken rule.

    Example:
        >>> from tacit.codecs import Int8
        >>> from tacit.testing import require
        >>> require(Int8())
    """
    broken = next((f for f in check(codec) if not f.passed), None)
    if broken is not None:
        places = {"family": broken.family, "world": broken.world, "layout": broken.layout}
        where = "".join(f", {kind} {place}" for kind, place in places.items() if place is not None)
        raise ConformanceError(f"{codec} breaks the rule {broken.check!r}{where}: {broken.why}")


def _layouts(numel: int) -> Iterator[tuple[str | None, Layout]]:
    """One 1-D parameter of `numel` elements, then LAYOUTS, with their names."""
    yield None, Layout.flat(numel)
    yield from LAYOUTS.items()


def _inputs(family: str, world: int, layout: Layout, seed: int = 0) -> list[Tensor]:
    """Vectors of all ranks, zero in the padding."""
    found = vectors(family, world, layout.numel, seed)
    return [layout.join(layout.split(x), like=x) for x in found]


def _memories(stores: Sequence[MemoryStore], layout: Layout) -> list[Memory]:
    """One a rank; its vectors are saved with their padding, as those of a shard that has replicas are."""
    return [store.of(layout, _CPU, placement=Layout.flat(layout.numel)) for store in stores]


def _error(codec: Codec) -> Iterator[Finding]:
    """How far the estimate is from the mean; zeros must come back as zeros."""
    for family in FAMILIES:
        for world in WORLDS:
            inputs = vectors(family, world, _NUMEL)
            value = nmse(loop_back(codec, inputs)[0].total, inputs)
            limit = 0.0 if family == "zero" else None
            good = value == 0.0 if family == "zero" else bool(torch.tensor(value).isfinite())
            why = "NMSE measured" if good else "zeros came back changed" if family == "zero" else "not finite"
            yield Finding(str(codec), "error", good, why, family, world, value, limit)
    for name, layout in LAYOUTS.items():
        total = loop_back(codec, _inputs("zero", 3, layout), layout=layout)[0].total
        good = not bool(total.count_nonzero())
        why = "zeros came back" if good else "zeros came back changed"
        yield Finding(str(codec), "error", good, why, "zero", 3, layout=name)


def _magnitude(codec: Codec) -> Iterator[Finding]:
    """Gradients of 1e-30 and of 1e37 are off by as much, relative to their size, as those of 1."""
    for name, layout in _layouts(_NUMEL):
        asked: list[Request] = []
        # few elements round unevenly
        inputs, room = (
            _inputs("gauss", 4, layout),
            1.05 if name is None else 10,
        )
        usual = nmse(loop_back(codec, inputs, layout=layout, observe=asked.append)[0].total, inputs)
        low, high = _range(asked)
        for magnitude in MAGNITUDES:
            scale = min(max(magnitude, low), high)
            scaled = [(x.double() * scale).float() for x in inputs]
            total = loop_back(codec, scaled, layout=layout)[0].total.double() / scale
            value, limit = nmse(total, [x.double() / scale for x in scaled]), room * usual + 1e-12
            if codec.traits.absolute:  # where all is small nothing is sent, and nothing made up
                limit = 1.0 + 1e-12
            why = f"NMSE at {scale:g}" + ("" if value <= limit else f" is {value:.3g}, and {usual:.3g} at 1")
            yield Finding(str(codec), "magnitude", value <= limit, why, "gauss", 4, value, limit, name)


def _range(asked: Sequence[Request]) -> tuple[float, float]:
    """What the plain numbers it sends can hold, with room for tails and sums: float16 ends early, and nobody expects more."""
    forms = [request.payload.format for request in asked if isinstance(request, Sum)]
    infos = [torch.finfo(f.dtype) for f in forms if isinstance(f, Dense) and f.dtype.is_floating_point]
    return max((64 * i.tiny for i in infos), default=0.0), min((i.max / 32 for i in infos), default=torch.inf)


def _unbiased(codec: Codec) -> Iterator[Finding]:
    """The mean error of many trials must shrink as 1 / trials, if the codec claims to be unbiased."""
    if not codec.traits.unbiased:
        return
    for family in ("gauss", "lognormal"):
        inputs = vectors(family, 2, 2048)
        exact = torch.stack(inputs).double().sum(0)
        errors = torch.stack(
            [loop_back(codec, inputs, step=t)[0].total.double() - exact for t in range(_TRIALS)]
        )
        single, mean = errors.square().sum(1).mean().item(), errors.mean(0).square().sum().item()
        exactly = single <= 1e-10 * exact.square().sum().item()
        value, limit = (0.0 if exactly else mean / single), 3 / _TRIALS
        why = (
            "the mean error of many trials vanishes"
            if value <= limit
            else "it claims to be unbiased, and is not"
        )
        yield Finding(str(codec), "unbiased", value <= limit, why, family, 2, value, limit)


def _contracting(codec: Codec) -> Iterator[Finding]:
    """|x - contribution|^2 < |x|^2 over all ranks, if the codec claims to contract: what error feedback needs."""
    if not codec.traits.contracting:
        return
    for family in FAMILIES:
        for name, layout in _layouts(_NUMEL) if family != "zero" else ():
            inputs = _inputs(family, 4, layout)
            reduced = loop_back(codec, inputs, layout=layout, scheme="ideal")
            kept = sum((x - _share(r, x)).square().sum().item() for r, x in zip(reduced, inputs, strict=True))
            value = kept / sum(x.square().sum().item() for x in inputs)
            why = "what is not sent is smaller than x" if value < 1 else "it claims to contract, and does not"
            yield Finding(str(codec), "contracting", value < 1, why, family, 4, value, 1.0, name)


def _bytes(codec: Codec) -> Iterator[Finding]:
    """What it hands to its requests is exactly what it declares, or at most that if it declares that it varies, for any layout; so is what
    it hands to be added."""
    flats = [(None, Layout.flat(numel)) for numel in SIZES]
    for name, layout in [*flats, *LAYOUTS.items()]:
        asked: list[Request] = []
        inputs = _inputs("gauss", 2, layout)
        loop_back(codec, inputs, layout=layout, step=STEADY_STEP, observe=asked.append)
        value, limit = sum(request.nbytes for request in asked), declared_nbytes(codec, layout)
        why = f"{value} bytes for {layout.numel} elements" + (
            "" if value == limit else f", but {limit} declared"
        )
        good = value <= limit if codec.traits.varies else value == limit
        yield Finding(str(codec), "bytes", good, why, value=value, limit=limit, layout=name)
        if (fault := _lies_about_adding(codec, asked)) is not None:
            yield Finding(str(codec), "bytes", False, fault, layout=name)


def _lies_about_adding(codec: Codec, asked: Sequence[Request]) -> str | None:
    traits = codec.traits
    for request in asked:
        if isinstance(request, Sum) and traits.summable and not request.payload.format.adds:
            return "it claims that its payloads add in flight, and their form does not"
        if isinstance(request, TableSum) and (
            traits.lanes is None or max(request.table) > traits.lanes.largest
        ):
            return f"it asks to add values up to {max(request.table)}, and claims lanes for {traits.lanes}"
    return None


def _requests(codec: Codec) -> Iterator[Finding]:
    """As many requests as declared, so that the exchange may start the next conversation in time."""
    for name, layout in _layouts(1000):
        asked: list[Request] = []
        loop_back(codec, _inputs("gauss", 3, layout), layout=layout, observe=asked.append)
        value, limit = len(asked), codec.traits.rounds
        why = f"{value} requests, {limit} declared"
        yield Finding(str(codec), "requests", value == limit, why, value=value, limit=limit, layout=name)


def _agreement(codec: Codec) -> Iterator[Finding]:
    """Every rank receives the same bits; x is only read; the same context gives the same bits again."""
    for name, layout in _layouts(1001):
        for world in WORLDS:
            why = _disagreement(codec, _inputs("gauss", world, layout), layout)
            good = why is None
            why = why or "same bits on all ranks and again"
            yield Finding(str(codec), "agreement", good, why, world=world, layout=name)


def _disagreement(codec: Codec, inputs: list[Tensor], layout: Layout) -> str | None:
    before = [x.clone() for x in inputs]
    first, again = (loop_back(codec, inputs, layout=layout) for _ in range(2))
    if not _alike(first):
        return "ranks receive different sums"
    if not all(map(torch.equal, before, inputs)):
        return "it changed its input"
    if not torch.equal(first[0].total, again[0].total):
        return "the same context gave other bits: its randomness does not come from the context's seeds"
    if first[0].total.shape != inputs[0].shape:
        return f"{inputs[0].numel()} elements came back as {tuple(first[0].total.shape)}"
    return None


def _alike(reduced: Sequence[Reduced]) -> bool:
    return all(torch.equal(reduced[0].total, other.total) for other in reduced)


def _shares(codec: Codec) -> Iterator[Finding]:
    """The contributions of the ranks add up to what they receive: re-encoding loss is somebody's."""
    for name, layout in _layouts(3001):
        for world in WORLDS:
            inputs = _inputs("lognormal", world, layout)
            reduced = loop_back(codec, inputs, layout=layout)
            shares = [_share(r, x).double() for r, x in zip(reduced, inputs, strict=True)]
            scale = torch.stack(inputs).abs().sum(0).max().item()
            value = (torch.stack(shares).sum(0) - reduced[0].total.double()).abs().max().item() / scale
            why = "shares add up to the total" if value < 1e-5 else "the shares do not add up to the total"
            yield Finding(
                str(codec), "shares", value < 1e-5, why, world=world, value=value, limit=1e-5, layout=name
            )


def _memory(codec: Codec) -> Iterator[Finding]:
    """sent + remembered = input + what stayed of the memory, in several steps, if the codec claims to remember. Where it has momentum,
    the input is that of the velocity; where it clips, the inputs are too small to be clipped."""
    if not codec.traits.remembers:
        return
    world, steps, stays, momentum = 3, 5, getattr(codec, "decay", 1.0), getattr(codec, "momentum", 0.0)
    size = 1e-6 * (getattr(codec, "clip", 0.0) or 1e6)
    for name, layout in _layouts(1000):
        memories = _memories([MemoryStore() for _ in range(world)], layout)
        kept, value = torch.zeros(layout.numel, dtype=torch.float64), 0.0
        for step in range(steps):
            inputs = [size * x for x in _inputs("lognormal", world, layout, seed=step)]
            given = torch.stack(inputs).double().sum(0) + stays * kept
            if momentum:
                given += momentum * torch.stack([m.vector("momentum") for m in memories]).double().sum(0)
            got = loop_back(codec, inputs, memories=memories, step=step)[0].total.double()
            kept = torch.stack([m.vector("residual") for m in memories]).double().sum(0)
            value = max(value, ((given - got - kept).abs().max() / given.abs().max()).item())
        why = "sent + remembered = input" if value < 1e-5 else "what was not sent was not remembered"
        yield Finding(
            str(codec), "memory", value < 1e-5, why, world=world, value=value, limit=1e-5, layout=name
        )


def _resume(codec: Codec) -> Iterator[Finding]:
    """Three steps, a checkpoint, three more: the same bits as six steps in a row."""
    world = 2
    for name, layout in _layouts(1000):
        whole = _run(codec, layout, [MemoryStore() for _ in range(world)], range(6))
        stores = [MemoryStore() for _ in range(world)]
        first = _run(codec, layout, stores, range(3))
        rest = _run(codec, layout, _reloaded([store.state() for store in stores]), range(3, 6))
        pairs = zip(whole, first + rest, strict=True)
        good = all(torch.equal(a[0].total, b[0].total) for a, b in pairs)
        why = "same bits" if good else "the resumed run went another way"
        yield Finding(str(codec), "resume", good, why, world=world, layout=name)


def _world(codec: Codec) -> Iterator[Finding]:
    """Three steps of four ranks, then three of another number, from memory merged by the rules: the ranks still agree."""
    for name, layout in _layouts(1000):
        stores = [MemoryStore() for _ in range(4)]
        _run(codec, layout, stores, range(3))
        merged = merged_of([store.state() for store in stores])
        for world in (2, 5):
            steps = _run(codec, layout, _reloaded([merged] * world), range(3, 6))
            good = all(_alike(step) and bool(step[0].total.isfinite().all()) for step in steps)
            why = "same bits on all ranks" if good else "after a change from 4 ranks their sums differ"
            yield Finding(str(codec), "world", good, why, world=world, layout=name)


def _run(codec: Codec, layout: Layout, stores: Sequence[MemoryStore], steps: range) -> list[list[Reduced]]:
    """What all ranks receive in each step."""
    memories = _memories(stores, layout)
    inputs = [_inputs("gauss", len(stores), layout, seed=step) for step in steps]
    return [loop_back(codec, x, memories=memories, step=step) for step, x in zip(steps, inputs, strict=True)]


def _reloaded(states: Sequence[Any]) -> list[MemoryStore]:
    """Memory that went through a file, as checkpoints do."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    stores = [MemoryStore() for _ in states]
    for store, state in zip(stores, torch.load(file, weights_only=True), strict=True):
        store.load(state)
    return stores


def _nonfinite(codec: Codec) -> Iterator[Finding]:
    """A NaN or an infinity on one rank must reach every rank, not turn into a number."""
    for name, layout in _layouts(1000):
        for bad in (torch.nan, torch.inf, -torch.inf):
            inputs = _inputs("gauss", 3, layout)
            inputs[1][5] = bad
            reduced = loop_back(codec, inputs, layout=layout)
            good = not any(bool(r.total[5].isfinite()) for r in reduced)
            why = (
                f"{bad} is seen by all ranks"
                if good
                else f"{bad} was quietly turned into {reduced[0].total[5].item()}"
            )
            yield Finding(str(codec), "nonfinite", good, why, world=3, layout=name)


def _text(codec: Codec) -> Iterator[Finding]:
    """Objects hold options only: hashable, equal when their options are, and read back from their text."""
    from tacit.strategy import parse_codec

    hash(codec)
    known = _registered(codec)
    good = not known or parse_codec(str(codec)) == codec
    why = "its text reads back" if known else "not registered, so its text is not read"
    yield Finding(str(codec), "text", good, why if good else f"{str(codec)!r} reads back as something else")


def _published(codec: Codec) -> Iterator[Finding]:
    """What its paper reports, or what we promise, is what it gives here."""
    for what, family, world, value, low, high in claims(codec):
        why = f"{what}: {value:.5g}, expected {low:g} to {high:.5g}"
        yield Finding(
            str(codec), "published", low <= value <= high, why, family or None, world or None, value, high
        )


def _registered(codec: object) -> bool:
    from tacit.codecs import CODECS

    parts = [getattr(codec, name) for name in getattr(codec, "__dataclass_fields__", {})]
    return type(codec) in CODECS.built_in.values() and all(
        _registered(part) for part in parts if hasattr(part, "reduce")
    )


def _share(reduced: Reduced, x: Tensor) -> Tensor:
    return x if reduced.contribution is None else reduced.contribution()


CHECKS: dict[str, Check] = {
    "requests": _requests,
    "bytes": _bytes,
    "agreement": _agreement,
    "error": _error,
    "magnitude": _magnitude,
    "unbiased": _unbiased,
    "contracting": _contracting,
    "shares": _shares,
    "memory": _memory,
    "resume": _resume,
    "world": _world,
    "nonfinite": _nonfinite,
    "text": _text,
    "published": _published,
}
