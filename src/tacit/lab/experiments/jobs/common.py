"""What the workers share: a process group, configurations measured a step each in turn, figures as records.

Everything that takes time is done by all ranks in the same order; rank 0 alone reports.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

from tacit.demo.description import sent_is
from tacit.lab.experiments.baselines import ConnectedModel
from tacit.lab.network.counters import traffic
from tacit.lab.network.theory import payload_share
from tacit.sim.overlap import CodecCost, step_time
from tacit.sim.workloads import Layer, Workload

TIMEOUT = timedelta(seconds=300)
PROGRESS_S = 1.0
SPLIT = ("encode", "wait", "decode", "wire")


@contextmanager
def joined() -> Iterator[None]:
    """The process group that torchrun's environment describes, over gloo, with one thread of compute a rank."""
    torch.set_num_threads(1)  # the ranks share the machine's cores
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def say(kind: str, **fields: Any) -> None:
    """One JSON line, from rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps({"kind": kind, **fields}), flush=True)


@dataclass(slots=True)
class Progress:
    """Reports to the runner, at most once a second how far a phase is."""

    job: str
    phase: str
    total: int
    done: int = 0
    _told: float = 0.0

    def advance(self) -> None:
        self.done += 1
        now = time.monotonic()
        if self.done == self.total or now - self._told > PROGRESS_S:
            self._told = now
            say("progress", job=self.job, phase=self.phase, step=self.done, steps=self.total)


@dataclass(slots=True)
class Contender:
    """One configuration on this rank: how it takes a step, and what was seen of its timed steps."""

    name: str
    step: Callable[[], None]
    link: ConnectedModel | None = None  # None: it sends nothing, as when only compute is timed
    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    interface_nbytes: list[int] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # how far a replayed clock fell behind
    split_s: list[dict[str, float]] = field(default_factory=list)  # of each step, where tacit measures it
    sent_before: float = 0.0

    def begin(self) -> None:
        """From here on steps count; those before it warmed up."""
        seen: tuple[list[Any], ...] = (
            self.step_s, self.cpu_s, self.interface_nbytes, self.late_s, self.split_s
        )  # fmt: skip
        for figures in seen:
            figures.clear()
        self.sent_before = self.sent_nbytes()

    def sent_nbytes(self) -> float:
        return self.link.counted() if self.link is not None and self.link.counted is not None else 0.0

    def spent_s(self) -> dict[str, float]:
        """Seconds since the start by part, where tacit measures them."""
        if self.link is None or self.link.handle is None:
            return {}
        told = self.link.handle.stats.as_dict()
        return {f"{part}_s": told[f"{part}_s"] for part in SPLIT}


def interleave(
    contenders: Sequence[Contender],
    *,
    steps: int,
    warmup: int,
    progress: Progress,
    transmitted: Callable[[], int],
) -> None:
    """`warmup` rounds, then `steps` timed ones: in each, every contender takes one step, and another one begins.

    A barrier before each step, so a step's time is its own; bytes at the interface are read between barriers, when what
    was sent has also been received.
    """
    for turn in range(warmup + steps):
        if turn == warmup:
            for contender in contenders:
                contender.begin()
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            dist.barrier()
            spent_s, nbytes = contender.spent_s(), transmitted()
            cpu_s, start = time.process_time(), time.perf_counter()
            contender.step()
            contender.step_s.append(time.perf_counter() - start)
            contender.cpu_s.append(time.process_time() - cpu_s)
            dist.barrier()
            contender.interface_nbytes.append(transmitted() - nbytes)
            contender.split_s.append({part: s - spent_s[part] for part, s in contender.spent_s().items()})
            progress.advance()


def over_ranks(values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    """Element by element over the ranks."""
    total = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(total, op)
    found: list[float] = total.tolist()
    return found


def slowest(values: Sequence[float]) -> list[float]:
    """The longest of all ranks, step by step."""
    return over_ranks(values, dist.ReduceOp.MAX)


def mean(values: Sequence[float]) -> float:
    """The mean over steps and ranks."""
    total, count = over_ranks([float(sum(values)), float(len(values))], dist.ReduceOp.SUM)
    return total / max(1.0, count)


def deciles(values: Sequence[float]) -> tuple[float, float, float]:
    """p10, p50, p90."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[0], median(values), cuts[8]


@dataclass(frozen=True, slots=True)
class WorkerNetwork:
    """The links, as the runner describes them: `text` for people, `rate_bps` None where nothing limits them.

    `interface` is the one whose bytes are this host's alone: None on the loopback, which all ranks share.
    """

    text: str = "loopback, unshaped"
    rate_bps: float | None = None
    shaped: bool = False
    interface: str | None = None
    mtu: int = 1500

    @property
    def payload_share(self) -> float:
        """The most of a rate that TCP's payload can have."""
        return payload_share(self.mtu)

    def transmitted(self) -> int:
        """Bytes that left this host through its interface, as the kernel counts them: one header a GSO packet."""
        return traffic(self.interface).tx_nbytes if self.interface else 0


def timing(
    contender: Contender,
    baseline: Contender,
    *,
    network: WorkerNetwork,
    compute_s: float,
    **facts: Any,
) -> dict[str, Any]:
    """The figures of one contender as a record of kind `timing`; all ranks call it, in one order.

    Step times are the slowest rank's. Bytes and CPU seconds are means over ranks and steps, the split is a mean over ranks
    of medians over steps; `goodput_bps` is payload
    over the whole step, so a step that computes longer than it talks has little of it. `predicted_step_s` is what
    `predicted` computes from the bytes that cross the busiest link; None where no rate limits it, or ranks share one.
    """
    link = contender.link
    assert link is not None
    steps_s, reference_s = slowest(contender.step_s), slowest(baseline.step_s)
    p10, p50, p90 = deciles(steps_s)
    slow, middle, fast = deciles([b / s for b, s in zip(reference_s, steps_s, strict=True)])
    n = len(steps_s)
    own_sent = (contender.sent_nbytes() - contender.sent_before) / n if link.counted else link.computed_nbytes
    sent, busiest = mean([own_sent]), slowest([own_sent])[0]
    interface = mean(contender.interface_nbytes) if network.interface else None
    split_s: dict[str, float | None] = {f"{part}_s": None for part in SPLIT}
    if link.handle is not None:
        split_s = {part: mean([median(step[part] for step in contender.split_s)]) for part in split_s}
    else:  # DDP does not measure it; what is not compute is waiting
        split_s["wait_s"] = max(0.0, p50 - compute_s)
    goodput_bps = 8 * sent / p50
    limit_bps = network.rate_bps * network.payload_share if network.rate_bps else None
    crossing = _crossing_nbytes(link, busiest, total=sent * dist.get_world_size())
    predicted_s = None
    if limit_bps and network.interface and crossing is not None:
        predicted_s = predicted(
            _layers(link, compute_s, played=facts.get("replayed") is True),
            wire_s=8 * crossing / limit_bps,
            encode_s=split_s["encode_s"] or 0.0,
            decode_s=split_s["decode_s"] or 0.0,
            bucket_nbytes=link.bucket_nbytes,
        )
    return {
        **facts,
        "configuration": contender.name,
        "baseline": contender is baseline,
        **(link.configuration.description() if link.configuration else {}),
        "rate_bps": network.rate_bps,
        "network": network.text,
        "shaped": network.shaped,
        "ranks": dist.get_world_size(),
        "step_n": n,
        "step_p10_s": p10,
        "step_p50_s": p50,
        "step_p90_s": p90,
        "predicted_step_s": predicted_s,
        "speedup": middle,
        "speedup_p10": slow,
        "speedup_p90": fast,
        "compute_s": compute_s,
        "split": split_s,
        "sent_nbytes_a_step": sent,
        "sent_is": sent_is(link.handle.strategy) if link.handle else "computed",
        "interface_nbytes_a_step": interface,
        "goodput_bps": goodput_bps,
        "link_share": goodput_bps / limit_bps if limit_bps else None,
        "cpu_s_a_step": mean(contender.cpu_s),
        "bucket_nbytes": link.bucket_nbytes,
        "note": link.note,
    }


def predicted(
    layers: Sequence[Layer], *, wire_s: float, encode_s: float, decode_s: float, bucket_nbytes: int
) -> float:
    """The simulator's step (sim/overlap.py), in seconds: layers compute, full buckets are sent while backward goes on.

    A bucket has its share, by parameters, of the wire's time and of the codec's. The wire's is a step's bytes over the
    payload's share of the rate; the codec's is as measured, and 0 for torch's hooks, which do not report theirs. Left out:
    latency, waking processes, cores that ranks share. So a measured step is rarely shorter, and a short one much longer.
    """
    numel = sum(layer.parameters for layer in layers)
    codec = CodecCost(lambda elements: elements, encode_s / numel, decode_s / numel)
    step = step_time(
        Workload("step", tuple(layers), "timed"),
        lambda elements: wire_s * elements / numel,
        codec=codec,
        bucket_nbytes=bucket_nbytes,
        first_bucket_nbytes=None,  # DDP makes its first bucket smaller only where nobody names a size
    )
    return step.step_s


def _layers(link: ConnectedModel, compute_s: float, *, played: bool) -> list[Layer]:
    """A replay's layers with their own times. Of a real model only the sum is known: a third of it counts as forward,
    two thirds as backward, spread over the parameters by their size."""
    if played:
        replayed: Any = link.model.module
        return [
            Layer(part.name, prod(part.shape) if part.shape else 0, part.forward_s, part.backward_s)
            for part in replayed.layers
        ]
    sizes = {name: p.numel() for name, p in link.model.named_parameters()}
    a_parameter_s = compute_s / 3 / sum(sizes.values())
    return [Layer(name, size, size * a_parameter_s, 2 * size * a_parameter_s) for name, size in sizes.items()]


def _crossing_nbytes(link: ConnectedModel, busiest: float, *, total: float) -> float | None:
    """The bytes a step that one link carries, one after another: what the busiest rank sends, where all send at once.

    A server's link carries everybody's, in and then out. None where what is sent does not make the step: ranks take turns
    (trees), the answer is wider than the question (star), some steps keep silent (rounds), no parameter is exchanged (shards).
    """
    if not any(True for _ in link.model.parameters()):
        return None
    if link.handle is None:
        return busiest
    strategy = link.handle.strategy
    if str(strategy.when) != "every":
        return None
    scheme = str(strategy.who).partition("(")[0]
    return {"allreduce": busiest, "ring": busiest, "sharded": busiest, "server": total}.get(scheme)


def arguments(description: str) -> tuple[dict[str, Any], WorkerNetwork]:
    """A worker's command line: the spec as a table, and what its network is."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--spec", required=True, type=json.loads, help="a job's table, as JSON")
    parser.add_argument(
        "--network", default={}, type=json.loads, help="text, rate_bps, shaped, interface; as JSON"
    )
    args = parser.parse_args()
    return args.spec, WorkerNetwork(**args.network)
