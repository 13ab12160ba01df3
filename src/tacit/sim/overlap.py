"""The time of a training step: what of the exchange hides behind the backward pass, and what does not.

    compute:   forward, then backward, last layer first
    bucket:    layers in the order of backward, closed once it holds `bucket_nbytes` (as DDP does), the first one earlier
    encode:    as soon as the bucket's last gradient is there and the codec is free
    transfer:  as soon as it is encoded and the transfer before it is over: one at a time, in order
    decode:    as soon as it is there and the codec is free; what came first goes first

One codec and one wire, as in exchange.py; both run beside the computation and do not slow it down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Any, Literal

from tacit.errors import ConfigError
from tacit.sim.workloads import Layer, Workload

Kind = Literal["forward", "backward", "encode", "transfer", "decode"]
DDP_BUCKET_NBYTES = 25 * 2**20
DDP_FIRST_BUCKET_NBYTES = 2**20


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec does to a bucket: the payload's bytes for so many elements, and its time on one rank.

    Where the sum comes back wider than it went (shapes.requests_of shows it), give the mean: half of the exchange carries each.
    """

    nbytes: Callable[[int], int] = lambda numel: 4 * numel
    encode_s_per_element: float = 0.0
    decode_s_per_element: float = 0.0


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that takes time: a layer's computation, or a bucket's encoding, transfer or decoding."""

    kind: Kind
    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class TimedBucket:
    """Layers that travel together."""

    layers: tuple[str, ...]
    elements: int
    nbytes: int  # of the payload
    ready_s: float  # when the last of its gradients is there


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step, with every event: ready to be drawn."""

    workload: str
    forward_s: float
    backward_s: float
    transfer_s: float  # of all buckets together, hidden or not
    codec_s: float
    step_s: float
    buckets: tuple[TimedBucket, ...]
    events: tuple[TimelineEvent, ...]

    @property
    def exposed_s(self) -> float:
        """What the step takes beyond its computation."""
        return self.step_s - self.forward_s - self.backward_s

    def as_record(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "step_s": self.step_s,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "exposed_s": self.exposed_s,
            "transfer_s": self.transfer_s,
            "codec_s": self.codec_s,
            "buckets": len(self.buckets),
            "payload_nbytes": sum(bucket.nbytes for bucket in self.buckets),
        }


def step_time(
    workload: Workload,
    transfer_s: Callable[[int], float],
    *,
    codec: CodecCost | None = None,
    bucket_nbytes: int = DDP_BUCKET_NBYTES,
    first_bucket_nbytes: int | None = DDP_FIRST_BUCKET_NBYTES,
    slowest: float = 1.0,
) -> StepTime:
    """The step of `workload` when a payload of b bytes takes transfer_s(b) to be exchanged, called once for each b.

    For example `lambda b: electrical.cost(ring(64), b, network).time_s`. Buckets are measured in float32 gradients.
    `slowest`: the slowest rank's computation and codec take this many times as long; everybody waits for it.
    """
    codec = codec or CodecCost()
    first_bucket_nbytes = bucket_nbytes if first_bucket_nbytes is None else first_bucket_nbytes
    if min(bucket_nbytes, first_bucket_nbytes) < 1 or not 0 < slowest < inf:
        raise ConfigError(
            f"buckets of {bucket_nbytes} bytes, the first {first_bucket_nbytes}, slowest={slowest:g}: all must be above 0, and finite"
        )
    compute, ready_s = _compute(workload, slowest)
    buckets = [
        TimedBucket(
            tuple(layer.name for layer in layers),
            elements := sum(layer.parameters for layer in layers),
            codec.nbytes(elements),
            ready_s[layers[-1].name],
        )
        for layers in _cut(workload, bucket_nbytes, first_bucket_nbytes)
    ]
    moved = _exchange(buckets, transfer_s, codec, slowest)
    return StepTime(
        workload.name,
        slowest * workload.forward_s,
        slowest * workload.backward_s,
        sum(e.stop_s - e.start_s for e in moved if e.kind == "transfer"),
        sum(e.stop_s - e.start_s for e in moved if e.kind != "transfer"),
        max(event.stop_s for event in (*compute, *moved)),
        tuple(buckets),
        (*compute, *moved),
    )


def _compute(workload: Workload, slowest: float) -> tuple[list[TimelineEvent], dict[str, float]]:
    """The computation's events, and when each layer's gradients are there."""
    events: list[TimelineEvent] = []
    now_s, ready_s = 0.0, {}
    passes: list[tuple[Kind, list[Layer]]] = [
        ("forward", list(workload.layers)),
        ("backward", list(reversed(workload.layers))),
    ]
    for kind, layers in passes:
        for layer in layers:
            took_s = slowest * (layer.forward_s if kind == "forward" else layer.backward_s)
            events.append(TimelineEvent(kind, layer.name, now_s, now_s + took_s))
            now_s += took_s
            ready_s[layer.name] = now_s
    return events, ready_s


def _cut(workload: Workload, bucket_nbytes: int, first_nbytes: int) -> list[list[Layer]]:
    """Layers with parameters, last first, in buckets; a layer is never cut."""
    buckets: list[list[Layer]] = []
    held, limit = 0, 0
    for layer in reversed(workload.layers):
        if not layer.parameters:
            continue
        if held >= limit:
            buckets.append([])
            held, limit = 0, bucket_nbytes if len(buckets) > 1 else first_nbytes
        buckets[-1].append(layer)
        held += 4 * layer.parameters
    return buckets


def _exchange(
    buckets: list[TimedBucket], transfer_s: Callable[[int], float], codec: CodecCost, slowest: float
) -> list[TimelineEvent]:
    """Encodings, transfers and decodings of all buckets, in time."""
    took_s = {nbytes: transfer_s(nbytes) for nbytes in {bucket.nbytes for bucket in buckets}}
    waiting: list[
        tuple[float, int, int]
    ] = []  # for the codec: since when, decode (0) before encode (1), bucket
    for index, bucket in enumerate(buckets):
        heappush(waiting, (bucket.ready_s, 1, index))
    events: list[TimelineEvent] = []
    codec_free_s = wire_free_s = 0.0
    while waiting:
        since_s, encodes, index = heappop(waiting)
        bucket, name = buckets[index], f"bucket {index}"
        rate = codec.encode_s_per_element if encodes else codec.decode_s_per_element
        start_s = max(since_s, codec_free_s)
        codec_free_s = start_s + slowest * rate * bucket.elements
        if rate:
            events.append(TimelineEvent("encode" if encodes else "decode", name, start_s, codec_free_s))
        if encodes:
            sent_s = max(codec_free_s, wire_free_s)
            wire_free_s = sent_s + took_s[bucket.nbytes]
            events.append(TimelineEvent("transfer", name, sent_s, wire_free_s))
            heappush(waiting, (wire_free_s, 0, index))
    return events
