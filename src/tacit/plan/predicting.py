"""The step under a choice, from what was probed: pieces of every bucket, played through the pipeline.

    bucket b, N elements, request j:   encode_j(N)                                codec thread
                                       sum of operations at their bytes + owner_j(N)      wire
                                       decode(N)                                  codec thread

- Gradients are copied into DDP's buckets by the training thread, and joined by it where tacit's bucket has parts of several.
- DDP's buckets decide when gradients reach tacit's: those that end in one of DDP's come out of it together.
- Pieces are scaled by what an exchange alone took over what they add up to, where that was measured.
- Intervals: all pieces at the fast and at the slow end of their spread, and 4 % either way at the least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from tacit.plan.pipeline import BucketJob, PipelineTimes, Segment, Work, play
from tacit.plan.values import (
    BASELINES,
    BucketSizes,
    Curve,
    Limit,
    OperationUse,
    Prediction,
    Probe,
    RecordedStep,
    StrategyCost,
    share_of,
)
from tacit.sim.workloads import Layer, Workload

LONG_NBYTES = 64 * 1024
"""From here on an all-to-all is sent pair by pair: transports/process_group.py."""
SIZES_NBYTES = (1 << 20, 4 << 20, 8 << 20, 25 << 20)
_WORTH = 0.97  # another size of buckets has to gain as much
_FORMULA = 0.04  # what a step played through is off, however well its pieces are known: twice the median, as the formula was first tried
_UNCALIBRATED = (
    0.9,
    1.15,
)  # low and high of what nobody ran as a whole; the median of the others' factors is applied


def predict(
    probe: Probe,
    step: RecordedStep | Workload,
    strategies: Sequence[str] | None = None,
    *,
    buckets: BucketSizes | None = None,
) -> list[Prediction]:
    """The step's time under each choice.

    Args:
        probe: What was measured of ranks, links and codecs.
        step: The model's own step, recorded or estimated.
        strategies: Strategies and names of BASELINES; None: all that the probe has measured.
        buckets: How gradients are cut; by default as `attach` and DDP do.

    Returns:
        A prediction a choice, fastest first.

    Raises:
        ConfigError: The probe has not measured a choice.

    Example:
        >>> from tacit.plan.values import Probe  # tacit plan --json writes one, `tacit.plan.load` reads it
    """
    recorded = step if isinstance(step, RecordedStep) else RecordedStep(step)
    sizes = buckets or BucketSizes()
    choices = [cost.choice for cost in probe.costs] if strategies is None else strategies
    found = [_predicted(probe, recorded, probe.cost(choice), sizes) for choice in choices]
    return sorted(found, key=lambda each: each.step_s)


def tuned(
    probe: Probe,
    step: RecordedStep | Workload,
    found: Prediction,
    sizes_nbytes: Sequence[int] = SIZES_NBYTES,
) -> Prediction:
    """The same choice in the bucket sizes in which its step is shortest, DDP's and tacit's alike; as it is where that gains too little."""
    if probe.cost(found.choice).period > 1:
        return found
    best = found
    for nbytes in sizes_nbytes:
        (other,) = predict(probe, step, [found.choice], buckets=BucketSizes(nbytes, nbytes))
        best = other if other.step_s < best.step_s else best
    return best if best.step_s < _WORTH * found.step_s else found


def _predicted(probe: Probe, step: RecordedStep, cost: StrategyCost, sizes: BucketSizes) -> Prediction:
    if cost.choice in BASELINES:
        sizes = replace(sizes, nbytes=sizes.ddp_nbytes)
    factor, low, high, calibrated = _factors(probe, cost.choice)
    held = _held(probe, cost.choice)
    times = played(probe, step, cost, sizes, Pace(factor=factor, held=held))
    picks = (
        (Curve.at, Curve.at) if calibrated else (Curve.low, Curve.high)
    )  # a calibration has the spread of all pieces
    fast = played(probe, step, cost, sizes, Pace(picks[0], low, step.low, held))
    slow = played(probe, step, cost, sizes, Pace(picks[1], high, step.high, held))
    compute_s = step.compute_s
    sent = (
        sum(share_of(cost.numels, cost.sent_nbytes, n) for n in numels_of(step.workload, cost, sizes))
        / cost.period
    )
    nmse = next((each.nmse for each in probe.errors if each.choice == cost.choice), None)
    return Prediction(
        cost.choice,
        times.step_s,
        min((1 - _FORMULA) * times.step_s, fast.step_s),
        max((1 + _FORMULA) * times.step_s, slow.step_s),
        compute_s,
        times.wire_s,
        times.codec_s,
        _limit(times, compute_s),
        sent,
        sizes,
        cost.lossy,
        calibrated,
        nmse if cost.lossy else 0.0,
        _caution(probe, cost),
    )


def _caution(probe: Probe, cost: StrategyCost) -> str:
    """What a prediction does not know."""
    found = [f"not measured: {probe.assumed}"] if probe.assumed else []
    if cost.choice.endswith("gossip"):
        found.append(
            f"one meeting in {cost.period:g} steps is assumed, with nothing of it hidden; no two ranks hold the same model"
        )
    elif cost.period > 1:
        found.append(
            f"a mean over {cost.period:g} steps; models that part learn something else than gradients of all ranks"
        )
    return "; ".join(found)


def _factors(probe: Probe, choice: str) -> tuple[float, float, float, bool]:
    """What the pieces are multiplied by: middle, low, high; and whether this very choice was run."""
    own = probe.calibration(choice)
    if own is not None:
        return own.factor, own.low, own.high, True
    others = [each.factor for each in probe.calibrations]
    factor = median(others) if others else 1.0
    return factor, factor * _UNCALIBRATED[0], factor * _UNCALIBRATED[1], False


def _held(probe: Probe, choice: str) -> float:
    """The share of its speed that an exchange loses beside the computation: this choice's, or else that of others, as they were tried."""
    own = probe.calibration(choice)
    if own is not None and own.held is not None:
        return own.held
    tried = [each.held for each in probe.calibrations if each.held is not None]
    return median(tried) if tried else 0.0


def _limit(times: PipelineTimes, compute_s: float) -> Limit:
    busy: list[tuple[float, Limit]] = [
        (compute_s, "compute"),
        (times.wire_s, "wire"),
        (times.codec_s, "codec"),
    ]
    return max(busy, key=lambda each: each[0])[1]


@dataclass(frozen=True, slots=True)
class Pace:
    """Which end of the spread is taken, what the pieces of the exchange and of the computation are multiplied by, and the share of its speed
    that an exchange loses beside a computation."""

    pick: Callable[[Curve, float], float] = Curve.at
    factor: float = 1.0
    compute: float = 1.0
    held: float = 0.0


def played(
    probe: Probe, step: RecordedStep, cost: StrategyCost, sizes: BucketSizes, pace: Pace | None = None
) -> PipelineTimes:
    """A step with every bucket's pieces."""
    pace = pace or Pace()
    ddp_layers = ddp_buckets(step.workload, sizes)
    own = ddp_layers if cost.choice in BASELINES else tacit_buckets(step.workload, sizes)
    if cost.period > 1:
        return _between_steps(probe, step, cost, own, pace)
    numels = [sum(layer.parameters for layer in layers) for layers in own]
    jobs = [job_of(probe, cost, numel, pace) for numel in numels]
    copies = {layer.name: _copied(probe, cost, layer.parameters, pace) for layers in own for layer in layers}
    if cost.choice not in BASELINES:
        crossing = crossing_of(ddp_layers, own)
        jobs = [
            replace(job, hook=_copied(probe, cost, numel, pace)) if crosses else job
            for job, numel, crosses in zip(jobs, numels, crossing, strict=True)
        ]
    segments = _segments(step, ddp_layers, own, pace.compute, copies)
    together = _together(probe, cost, numels)
    return play(
        segments, jobs, in_flight=cost.in_flight, together=together, cores=probe.cores, held=pace.held
    )


def crossing_of(ddp: Sequence[Sequence[Layer]], own: Sequence[Sequence[Layer]]) -> list[bool]:
    """Whether a bucket's gradients lie in several of DDP's: the training thread then joins them."""
    place_of = {layer.name: place for place, bucket in enumerate(ddp) for layer in bucket}
    return [len({place_of[layer.name] for layer in layers}) > 1 for layers in own]


def _between_steps(
    probe: Probe, step: RecordedStep, cost: StrategyCost, own: Sequence[Sequence[Layer]], pace: Pace
) -> PipelineTimes:
    """The mean step of a rule that exchanges models, every `period` steps and with nothing beside it."""
    numels = [sum(layer.parameters for layer in layers) for layers in own]
    exchange_s = exchange_alone(probe, cost, numels, pace) / cost.period
    compute_s = pace.compute * step.compute_s
    return PipelineTimes(compute_s + exchange_s, compute_s, exchange_s, 0.0)


def exchange_alone(
    probe: Probe, cost: StrategyCost, numels: Sequence[int], pace: Pace | None = None
) -> float:
    """Seconds of the exchange of such buckets, all ready at once, with nothing beside it."""
    return exchange_beside(probe, cost, numels, Work(0.0), pace)


def exchange_beside(
    probe: Probe, cost: StrategyCost, numels: Sequence[int], work: Work, pace: Pace | None = None
) -> float:
    """The same with `work` in the training thread meanwhile."""
    pace = pace or Pace()
    jobs = [job_of(probe, cost, numel, pace) for numel in numels]
    copied = [Segment(_copied(probe, cost, numel, pace), (place,)) for place, numel in enumerate(numels)]
    every = tuple(range(len(jobs)))
    return play(
        [*copied, Segment(work), Segment(Work(0.0), needs=every)],
        jobs,
        in_flight=cost.in_flight,
        together=_together(probe, cost, numels),
        cores=probe.cores,
        held=pace.held,
    ).step_s


def _copied(probe: Probe, cost: StrategyCost, numel: int, pace: Pace) -> Work:
    """The copy into DDP's bucket; plain DDP divides while it copies, which its hook has already."""
    if probe.copy is None or cost.choice == "DDP" or not numel:
        return Work(0.0)
    alone_s = probe.copy.at(numel)
    return _work(pace.factor * alone_s, probe.copy.cpu(numel), alone_s)


def job_of(probe: Probe, cost: StrategyCost, numel: int, pace: Pace) -> BucketJob:
    """One bucket's pieces."""

    def piece(curve: Curve) -> Work:
        return _work(pace.pick(curve, numel) * pace.factor, curve.cpu(numel), curve.at(numel))

    encodes = tuple(piece(request.encode) for request in cost.requests)
    wires = []
    for request in cost.requests:
        parts = [piece(request.owner), *(_used(probe, cost, use, numel, pace) for use in request.uses)]
        seconds = sum(part.seconds for part in parts)
        cpu_s = sum(part.seconds * part.cpu for part in parts)
        wires.append(Work(seconds, cpu_s / seconds if seconds else 0.0))
    if cost.choice in BASELINES:  # the hook runs where gradients come: in the training thread
        return BucketJob((Work(0.0),), tuple(wires), piece(cost.decode), encodes[0])
    return BucketJob(encodes, tuple(wires), piece(cost.decode))


def _used(probe: Probe, cost: StrategyCost, use: OperationUse, numel: int, pace: Pace) -> Work:
    nbytes = share_of(cost.numels, use.nbytes, numel)
    name = use.operation
    if name.startswith("all_to_all"):
        name = _by_length(probe, nbytes)
    curve = probe.operation(name)
    return _work(pace.pick(curve, nbytes) * pace.factor, curve.cpu(nbytes), curve.at(nbytes))


def length_name(nbytes: float) -> str:
    """Short messages are one operation, long ones many: the bytes decide, not what the nearest measured size took."""
    return "all_to_all long" if nbytes >= LONG_NBYTES else "all_to_all short"


def _by_length(probe: Probe, nbytes: float) -> str:
    wanted, known = length_name(nbytes), [each.operation for each in probe.operations]
    return wanted if wanted in known else next(name for name in known if name.startswith("all_to_all"))


def _work(seconds: float, cpu_s: float, alone_s: float) -> Work:
    return Work(seconds, cpu_s / alone_s if alone_s > 0 else 0.0)


def _together(probe: Probe, cost: StrategyCost, numels: Sequence[int]) -> float:
    """The speed of each of two operations under way, against one alone."""
    use = cost.requests[0].uses[0] if cost.requests[0].uses else None
    if cost.in_flight == 1 or use is None or not numels:
        return 0.5
    names = [each.operation for each in probe.operations]
    if f"{use.operation} x2" not in names:
        return 0.5
    nbytes = median(share_of(cost.numels, use.nbytes, numel) for numel in numels)
    double = probe.operation(f"{use.operation} x2")
    nbytes = max(nbytes, double.sizes[0])
    alone_s, each_s = probe.operation(use.operation).at(nbytes), double.at(nbytes)
    return min(1.0, max(0.5, alone_s / (2 * each_s))) if each_s > 0 else 0.5


# ---- buckets ----


def ddp_buckets(work: Workload, sizes: BucketSizes) -> list[list[Layer]]:
    """Layers in the order of the backward pass, a bucket closed once it holds as much as DDP's limit."""
    first = sizes.ddp_first_nbytes
    buckets: list[list[Layer]] = []
    held, limit = inf, 0
    for layer in reversed(work.layers):
        if not layer.parameters:
            continue
        if held >= limit:
            limit = first if not buckets and first is not None else sizes.ddp_nbytes
            buckets.append([])
            held = 0
        buckets[-1].append(layer)
        held += 4 * layer.parameters
    return buckets


def tacit_buckets(work: Workload, sizes: BucketSizes) -> list[list[Layer]]:
    """tacit's beside a DDP with `sizes`: DDP's own where those are no larger."""
    follows = 1 < sizes.ddp_nbytes <= sizes.nbytes  # 1: a module without DDP
    return ddp_buckets(work, sizes) if follows else own_buckets(work, sizes.nbytes)


def own_buckets(work: Workload, nbytes: int) -> list[list[Layer]]:
    """tacit's: a bucket is closed before a layer with which it would hold more than `nbytes`."""
    buckets: list[list[Layer]] = []
    for layer in reversed(work.layers):
        if not layer.parameters:
            continue
        held = 4 * sum(each.parameters for each in buckets[-1]) if buckets else 0
        if not buckets or held + 4 * layer.parameters > nbytes:
            buckets.append([])
        buckets[-1].append(layer)
    return buckets


def numels_of(work: Workload, cost: StrategyCost, sizes: BucketSizes) -> list[int]:
    """Elements of each bucket, under a choice."""
    own = ddp_buckets(work, sizes) if cost.choice in BASELINES else tacit_buckets(work, sizes)
    return [sum(layer.parameters for layer in layers) for layers in own]


def _segments(
    step: RecordedStep,
    ddp: Sequence[Sequence[Layer]],
    own: Sequence[Sequence[Layer]],
    factor: float,
    copies: Mapping[str, Work],
) -> list[Segment]:
    """Forward, the layers' backward passes, and the rest of the step, which waits for every job.

    A job is released with the last of DDP's buckets that has a layer of it, and after the jobs before it.
    """
    last_of = {bucket[-1].name: place for place, bucket in enumerate(ddp)}
    place_of = {layer.name: place for place, bucket in enumerate(ddp) for layer in bucket}
    due = [max(place_of[layer.name] for layer in layers) for layers in own]
    segments = [Segment(Work(factor * step.workload.forward_s, step.cpu))]
    released = 0
    for layer in reversed(step.workload.layers):
        jobs: list[int] = []
        if layer.name in last_of:
            while released < len(own) and due[released] <= last_of[layer.name]:
                jobs.append(released)
                released += 1
        segments.append(Segment(Work(factor * layer.backward_s, step.cpu)))
        segments.append(Segment(copies.get(layer.name, Work(0.0)), tuple(jobs)))
    rest = Work(factor * step.other_s, step.cpu)
    return [*segments, Segment(rest, needs=tuple(range(len(own))))]
