"""bucket="auto": a bucket's size from what an exchange costs here, and a warning where DDP's own buckets undo it.

An exchange of s bytes of gradient takes a + s / b. In buckets of s, N bytes cost N / s latencies, and the last bucket, which nothing is left to
hide behind, a + s / b: merging two buckets lets the last gradient arrive earlier as long as N a / s + s / b falls, down to

    s = sqrt(N a b)

whatever the computation takes. It is rounded to a power of two, so that a resumed run finds the same size unless its network has changed.
"""

import time
import warnings
from collections.abc import Mapping
from math import log2, sqrt

import torch
from torch import nn

from tacit.attachments.handle import Handle
from tacit.exchange import converse
from tacit.layout import Layout
from tacit.memory import MemoryStore
from tacit.requests import Codec, Max, context_for
from tacit.schemes import Channel
from tacit.stats import Stats
from tacit.units import size_text

DEFAULT_NBYTES = 4 * 2**20
_LEAST, _MOST = 2**18, 2**26
_PROBES = (2**8, 2**10)  # square matrices of so many rows: 256 KiB and 4 MiB in float32
_TIMES = 3  # the first one also connects


def measured_nbytes(channel: Channel, codec: Codec, numel: int, device: torch.device) -> int:
    """The size of a bucket for a model of `numel` float32 elements, the same on all ranks, which call it together."""
    short, long = (_exchange_s(channel, codec, rows, device) for rows in _PROBES)
    answer = channel.answer(Max(torch.tensor([short, long], dtype=torch.float64, device=device)), 0)
    return best_nbytes(4 * numel, *answer.tolist())


def settled_nbytes(
    handle: Handle, channel: Channel, parameters: Mapping[str, nn.Parameter], asked: int | None
) -> int:
    """What was asked for; where that is None, what is measured, which the handle's checkpoints then name."""
    if asked is not None:
        return asked
    numel, device = sum(p.numel() for p in parameters.values()), next(iter(parameters.values())).device
    handle.bucket_nbytes = measured_nbytes(channel, handle.strategy.what, numel, device)
    return handle.bucket_nbytes


def best_nbytes(nbytes: int, short_s: float, long_s: float) -> int:
    """sqrt(N a b) for N = `nbytes`, of which the shorter probe takes `short_s` and the longer `long_s`."""
    first, second = (4 * rows * rows for rows in _PROBES)
    byte_s = max(1e-12, (long_s - short_s) / (second - first))
    latency_s = max(1e-6, short_s - first * byte_s)
    return int(min(_MOST, max(_LEAST, 2 ** round(log2(sqrt(nbytes * latency_s / byte_s))))))


def _exchange_s(channel: Channel, codec: Codec, rows: int, device: torch.device) -> float:
    layout, memory = Layout.of({"probe": (rows, rows)}), MemoryStore()
    x = torch.ones(layout.numel, device=device)
    took = []
    for step in range(_TIMES):
        context = context_for(
            memory.of(layout, device),
            seed=0,
            step=step,
            bucket="probe",
            rank=channel.wire.rank,
            world=channel.wire.world,
        )
        start = time.perf_counter()
        converse(channel, codec.reduce(x, context), context.own_seed, Stats(), "control")
        took.append(time.perf_counter() - start)
    return min(took)


def warn_of_wide_buckets(ddp: nn.parallel.DistributedDataParallel, nbytes: int, bucket_nbytes: int) -> None:
    """Warns where DDP hands over gradients so late that hardly any exchange goes on beside the backward pass."""
    cap = ddp.bucket_bytes_cap
    if cap >= 4 * bucket_nbytes and 4 * bucket_nbytes <= nbytes <= 2 * cap:
        warnings.warn(
            f"DDP hands over this model's {size_text(nbytes)} of gradients in buckets of {size_text(cap)}, so tacit's of {size_text(bucket_nbytes)} "
            f"leave when the backward pass is almost over; write DistributedDataParallel(..., bucket_cap_mb={bucket_nbytes / 2**20:g})",
            stacklevel=4,
        )
