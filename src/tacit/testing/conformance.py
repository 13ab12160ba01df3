"""The rules of the conversation, each as a check that measures and judges. A codec that lies fails."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.errors import ConformanceError, TacitError
from tacit.requests import Codec, Dense, Heard, LocalSlots, Request, Slots, Sum, TableSum, loop_back
from tacit.testing.published import claims
from tacit.testing.vectors import FAMILIES, nmse, vectors

WORLDS = (1, 2, 3, 4, 8, 10)
SIZES = (0, 1, 2, 7, 255, 256, 1000, 4097)
_NUMEL = 8192
_TRIALS = 64
MAGNITUDES = (1e-30, 1e-20, 1e20, 1e37)


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule, one measurement, one verdict."""

    codec: str
    check: str
    passed: bool
    why: str
    family: str | None = None
    world: int | None = None
    value: float | None = None
    limit: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[Codec], Iterator[Finding]]


def check(codec: Codec, only: Iterable[str] | None = None) -> list[Finding]:
    """Every finding on `codec`, in the order of CHECKS. An exception inside a check is a failed finding, not a crash."""
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
    """Raises ConformanceError with the first broken rule."""
    broken = next((f for f in check(codec) if not f.passed), None)
    if broken is not None:
        where = "".join(
            f", {k} {v}" for k, v in (("family", broken.family), ("world", broken.world)) if v is not None
        )
        raise ConformanceError(f"{codec} breaks the rule {broken.check!r}{where}: {broken.why}")


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


def _magnitude(codec: Codec) -> Iterator[Finding]:
    """Gradients of 1e-30 and of 1e37 are off by as much, relative to their size, as those of 1."""
    asked: list[Request] = []
    inputs = vectors("gauss", 4, _NUMEL)
    usual = nmse(loop_back(codec, inputs, observe=asked.append)[0].total, inputs)
    low, high = _range(asked)
    for magnitude in MAGNITUDES:
        scale = min(max(magnitude, low), high)
        scaled = [(x.double() * scale).float() for x in inputs]
        total = loop_back(codec, scaled)[0].total.double() / scale
        value, limit = nmse(total, [x.double() / scale for x in scaled]), 1.05 * usual + 1e-12
        why = f"NMSE at {scale:g}" + ("" if value <= limit else f" is {value:.3g}, and {usual:.3g} at 1")
        yield Finding(str(codec), "magnitude", value <= limit, why, "gauss", 4, value, limit)


def _range(asked: Sequence[Request]) -> tuple[float, float]:
    """What the plain numbers it sends can hold, with room for tails and sums: float16 ends early, and nobody expects more."""
    forms = [request.payload.form for request in asked if isinstance(request, Sum)]
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
    """|x - said|^2 < |x|^2 over all ranks, if the codec claims to contract: what error feedback needs."""
    if not codec.traits.contracting:
        return
    for family in FAMILIES:
        if family == "zero":
            continue
        inputs = vectors(family, 4, _NUMEL)
        heard = loop_back(codec, inputs, scheme="ideal")
        unsaid = sum((x - _said(h, x)).square().sum().item() for h, x in zip(heard, inputs, strict=True))
        value = unsaid / sum(x.square().sum().item() for x in inputs)
        why = "what stays unsaid is smaller than x" if value < 1 else "it claims to contract, and does not"
        yield Finding(str(codec), "contracting", value < 1, why, family, 4, value, 1.0)


def _bytes(codec: Codec) -> Iterator[Finding]:
    """What it hands to its requests is exactly what it declares, for any length; so is what it hands to be added."""
    for numel in SIZES:
        asked: list[Request] = []
        loop_back(codec, vectors("gauss", 2, numel), observe=asked.append)
        value, limit = sum(request.nbytes for request in asked), codec.nbytes(numel)
        why = f"{value} bytes for {numel} elements" + ("" if value == limit else f", but {limit} declared")
        yield Finding(str(codec), "bytes", value == limit, why, value=value, limit=limit)
        if (fault := _lies_about_adding(codec, asked)) is not None:
            yield Finding(str(codec), "bytes", False, fault)


def _lies_about_adding(codec: Codec, asked: Sequence[Request]) -> str | None:
    traits = codec.traits
    for request in asked:
        if isinstance(request, Sum) and traits.summable and not request.payload.form.adds:
            return "it claims that its payloads add in flight, and their form does not"
        if isinstance(request, TableSum) and (
            traits.lanes is None or max(request.table) > traits.lanes.largest
        ):
            return f"it asks to add values up to {max(request.table)}, and claims lanes for {traits.lanes}"
    return None


def _requests(codec: Codec) -> Iterator[Finding]:
    """As many requests as declared, so that the exchange may start the next conversation in time."""
    asked: list[Request] = []
    loop_back(codec, vectors("gauss", 3, 1000), observe=asked.append)
    why = f"{len(asked)} requests, {codec.traits.rounds} declared"
    good = len(asked) == codec.traits.rounds
    yield Finding(str(codec), "requests", good, why, value=len(asked), limit=codec.traits.rounds)


def _agreement(codec: Codec) -> Iterator[Finding]:
    """Every rank hears the same bits; x is only read; the same turn gives the same bits again."""
    for world in WORLDS:
        inputs = vectors("gauss", world, 1001)
        before = [x.clone() for x in inputs]
        first, again = loop_back(codec, inputs), loop_back(codec, inputs)
        if not all(torch.equal(first[0].total, h.total) for h in first):
            why = "ranks hear different sums"
        elif not all(map(torch.equal, before, inputs)):
            why = "it changed its input"
        elif not torch.equal(first[0].total, again[0].total):
            why = "the same turn gave other bits: its randomness does not come from the turn's seeds"
        elif first[0].total.shape != inputs[0].shape:
            why = f"{inputs[0].numel()} elements came back as {tuple(first[0].total.shape)}"
        else:
            yield Finding(str(codec), "agreement", True, "same bits on all ranks and again", world=world)
            continue
        yield Finding(str(codec), "agreement", False, why, world=world)


def _shares(codec: Codec) -> Iterator[Finding]:
    """What the ranks say adds up to what they hear: re-encoding loss is somebody's."""
    for world in WORLDS:
        inputs = vectors("lognormal", world, 3001)
        heard = loop_back(codec, inputs)
        said = torch.stack([_said(h, x).double() for h, x in zip(heard, inputs, strict=True)]).sum(0)
        scale = torch.stack(inputs).abs().sum(0).max().item()
        value = (said - heard[0].total.double()).abs().max().item() / scale
        why = "shares add up to the total" if value < 1e-5 else "the shares do not add up to the total"
        yield Finding(str(codec), "shares", value < 1e-5, why, world=world, value=value, limit=1e-5)


def _memory(codec: Codec) -> Iterator[Finding]:
    """sent + remembered = input + what stayed of the memory, in several steps, if the codec claims to remember."""
    if not codec.traits.remembers:
        return
    world, steps, numel = 3, 5, 1000
    slots = [LocalSlots(torch.empty(numel)) for _ in range(world)]
    kept, value, stays = torch.zeros(numel, dtype=torch.float64), 0.0, getattr(codec, "decay", 1.0)
    for step in range(steps):
        inputs = vectors("lognormal", world, numel, seed=step)
        given = torch.stack(inputs).double().sum(0) + stays * kept
        got = loop_back(codec, inputs, memories=slots, step=step)[0].total.double()
        kept = torch.stack([s.vector("residual") for s in slots]).double().sum(0)
        value = max(value, ((given - got - kept).abs().max() / given.abs().max()).item())
    why = "sent + remembered = input" if value < 1e-5 else "what was not sent was not remembered"
    yield Finding(str(codec), "memory", value < 1e-5, why, world=world, value=value, limit=1e-5)


def _resume(codec: Codec) -> Iterator[Finding]:
    """Three steps, a checkpoint, three more: the same bits as six steps in a row."""
    world, numel = 2, 1000

    def run(steps: range, memories: Sequence[Slots]) -> list[Tensor]:
        return [
            loop_back(codec, vectors("gauss", world, numel, seed=t), memories=memories, step=t)[0].total
            for t in steps
        ]

    whole = run(range(6), [LocalSlots(torch.empty(numel)) for _ in range(world)])
    slots = [LocalSlots(torch.empty(numel)) for _ in range(world)]
    first = run(range(3), slots)
    file = io.BytesIO()
    torch.save([s.kept for s in slots], file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    rest = run(range(3, 6), [LocalSlots(torch.empty(numel), k) for k in kept])
    good = all(map(torch.equal, whole, first + rest))
    yield Finding(
        str(codec), "resume", good, "same bits" if good else "the resumed run went another way", world=world
    )


def _nonfinite(codec: Codec) -> Iterator[Finding]:
    """A NaN or an infinity on one rank must reach every rank, not turn into a number."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        inputs = vectors("gauss", 3, 1000)
        inputs[1][5] = bad
        heard = loop_back(codec, inputs)
        good = not any(bool(h.total[5].isfinite()) for h in heard)
        why = (
            f"{bad} is seen by all ranks"
            if good
            else f"{bad} was quietly turned into {heard[0].total[5].item()}"
        )
        yield Finding(str(codec), "nonfinite", good, why, world=3)


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
    return type(codec) in CODECS.values() and all(
        _registered(part) for part in parts if hasattr(part, "reduce")
    )


def _said(heard: Heard, x: Tensor) -> Tensor:
    return x if heard.said is None else heard.said()


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
    "nonfinite": _nonfinite,
    "text": _text,
    "published": _published,
}
