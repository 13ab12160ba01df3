"""What a plan is made of, as frozen values: what was measured (`Probe`), what follows from it (`Prediction`), what to do (`Advice`).

No torch and no process group: a probe that was written to a file is read, predicted from and advised on anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import Literal

from tacit.errors import ConfigError
from tacit.sim.workloads import Workload

BASELINES = ("DDP", "DDP fp16", "DDP bf16")
"""Choices that are not strategies: DistributedDataParallel as it is, and with torch's own hooks."""

SPARSE_ALONE = "has sparse tables alone, and steps are predicted from dense gradients; `tacit sim rows` has the times of tables"

Limit = Literal["compute", "wire", "codec"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size, as measured: medians with the spread of the repeats, and the CPU seconds that one rank spent meanwhile.

    Linear between two sizes; below the first as the first, beyond the last with the last two sizes' slope.
    """

    sizes: tuple[float, ...]  # bytes or elements, rising
    p50_s: tuple[float, ...]
    low_s: tuple[float, ...]
    high_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def at(self, size: float) -> float:
        return line(self.sizes, self.p50_s, size)

    def low(self, size: float) -> float:
        return line(self.sizes, self.low_s, size)

    def high(self, size: float) -> float:
        return line(self.sizes, self.high_s, size)

    def cpu(self, size: float) -> float:
        return line(self.sizes, self.cpu_s, size)

    def scaled(self, factor: float) -> Curve:
        """The same, `factor` times as long."""
        times = (self.p50_s, self.low_s, self.high_s, self.cpu_s)
        return Curve(self.sizes, *(tuple(factor * s for s in each) for each in times))


def line(sizes: tuple[float, ...], values: tuple[float, ...], size: float) -> float:
    """The value at `size` of a line through the points."""
    if len(sizes) == 1 or size <= sizes[0]:
        return values[0]
    place = min(bisect_right(sizes, size), len(sizes) - 1)
    (a, b), (low, high) = sizes[place - 1 : place + 1], values[place - 1 : place + 1]
    slope = (high - low) / (b - a)
    if size > sizes[-1]:
        slope = max(slope, 0.0)
    return low + slope * (size - a) if size <= b else high + slope * (size - b)


def share_of(sizes: tuple[float, ...], nbytes: tuple[float, ...], size: float) -> float:
    """Bytes at `size`: as `line`, and below the first size in proportion."""
    if size < sizes[0]:
        return nbytes[0] * size / sizes[0]
    return line(sizes, nbytes, size)


@dataclass(frozen=True, slots=True)
class OperationCurve:
    """One operation of the process group, as tacit or DDP uses it, by the bytes of one message.

    "all_reduce DTYPE" and "all_reduce DTYPE x2" (two under way, each) by the whole payload; "all_to_all short" and "all_to_all
    long" by the bytes for one peer; "send" by the bytes for the next rank, all ranks at once; "send alone" from rank 0 to rank 1.
    """

    operation: str
    curve: Curve


@dataclass(frozen=True, slots=True)
class OperationUse:
    """An operation in the answer to a request, and the bytes it moves there for each of the measured numbers of elements."""

    operation: str
    nbytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestCost:
    """One request of a codec: encoding before it, operations that answer it, and the CPU of the rank that adds, in the wire thread."""

    kind: str
    encode: Curve  # by elements, as `owner`
    owner: Curve
    uses: tuple[OperationUse, ...]


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """What a choice costs this device for a vector of so many elements, beside the wire. All ranks measured it at the same time.

    Of DDP's hooks the casts are `encode` and `decode`, and run in the training thread and in the process group's.
    """

    choice: str  # a strategy, or one of BASELINES
    numels: tuple[float, ...]
    requests: tuple[RequestCost, ...]
    decode: Curve
    sent_nbytes: tuple[float, ...]
    lossy: bool
    in_flight: int = 1  # operations under way at a time
    period: float = (
        1.0  # steps from one exchange to the next; above 1 models are exchanged between steps, not gradients
    )


@dataclass(frozen=True, slots=True)
class CalibratedExchange:
    """One exchange of the model alone: how long it took, over what the pieces add up to; and one beside a computation."""

    choice: str
    factor: float
    low: float
    high: float
    elements: int  # that were exchanged: on slow links a part of the model
    held: float | None = None  # share of its speed that it loses beside a computation, where that was tried


@dataclass(frozen=True, slots=True)
class GradientError:
    """The error of a lossy choice on the model's own gradients: |sum - exact|^2 / |exact|^2, over all recorded buckets."""

    choice: str
    nmse: float


@dataclass(frozen=True, slots=True)
class PairRates:
    """Payload bits a second from one rank to another, while every rank sends to one and receives from one."""

    typical_bps: float  # the median of all pairs
    slowest_bps: float
    sender: int  # of the slowest pair
    receiver: int


@dataclass(frozen=True, slots=True)
class TouchedTable:
    """A table with sparse gradients, and how much of it a step touches."""

    name: str
    rows: int
    width: int
    unique: float  # rows that one rank touches, in the mean of the ranks
    union: int  # rows that some rank touches


@dataclass(frozen=True, slots=True)
class ProbedMachine:
    """Where a probe was made: enough to notice another machine."""

    cpu: str
    cores: int
    memory_nbytes: int
    torch: str
    nodes: int  # machines that the ranks ran on

    def differs(self, other: ProbedMachine) -> str:
        """What is not the same, as words; "" where nothing is."""
        pairs = (
            ("CPU", self.cpu, other.cpu),
            ("cores", self.cores, other.cores),
            ("memory in GiB", round(self.memory_nbytes / 2**30), round(other.memory_nbytes / 2**30)),
        )
        return ", ".join(f"{name} {a} there and {b} here" for name, a, b in pairs if a != b)


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured of ranks, links and codecs: everything that `predict` needs beside the model's step.

    Args:
        world: Ranks.
        backend: Of the process group.
        device: "cpu", or the accelerator's kind.
        cores: CPU cores that a rank has on average: fewer than 1 where ranks share them.
        machine: Where it was made.
        operations: The process group's own operations by size.
        costs: Encoding, adding and decoding by size, a choice each.
        calibrations: Exchanges alone, if any were run.
        errors: Of lossy choices on the model's own gradients, if there were any.
        latency_s: Of a message of few bytes to the next rank, all at once.
        at_once_bps: Payload bits a second to the next rank, all ranks at once.
        alone_bps: The same, rank 0 to rank 1 while the others are silent: more than `at_once_bps` where an uplink is shared.
        took_s: The probe itself.
        assumed: What of it was computed, not measured; "" where nothing was.
        model: Digest of the model that was calibrated and whose gradients were compared; "" without one.
        copy: Seconds to copy gradients into DDP's buckets, by elements; None where that was not measured.
        tables: With sparse gradients; they are in no prediction, and the advice has the rows model's times of them.
        pairs: How fast the links between two ranks are; None where that was not measured.
        drift: The computation at the end of the probe over that of the recorded step: apart from 1 where the machine is busy.
    """

    world: int
    backend: str
    device: str
    cores: float
    machine: ProbedMachine
    operations: tuple[OperationCurve, ...]
    costs: tuple[StrategyCost, ...]
    calibrations: tuple[CalibratedExchange, ...] = ()
    errors: tuple[GradientError, ...] = ()
    latency_s: float = 0.0
    at_once_bps: float = 0.0
    alone_bps: float = 0.0
    took_s: float = 0.0
    assumed: str = ""
    model: str = ""
    copy: Curve | None = None
    pairs: PairRates | None = None
    tables: tuple[TouchedTable, ...] = ()
    drift: float = 1.0

    def operation(self, name: str) -> Curve:
        """The curve of an operation; raises ConfigError where it was not measured."""
        for each in self.operations:
            if each.operation == name:
                return each.curve
        raise ConfigError(f"the probe has not measured {name!r}; probe again with the strategies you ask for")

    def cost(self, choice: str) -> StrategyCost:
        """What a choice costs; raises ConfigError where it was not measured."""
        for each in self.costs:
            if each.choice == choice:
                return each
        known = ", ".join(each.choice for each in self.costs)
        raise ConfigError(f"the probe has not measured {choice!r}; probe again with it, or choose of {known}")

    def calibration(self, choice: str) -> CalibratedExchange | None:
        return next((each for each in self.calibrations if each.choice == choice), None)

    def without_model(self) -> Probe:
        """What of it holds for any model."""
        return replace(self, calibrations=(), errors=(), model="", tables=(), drift=1.0)


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """How gradients are cut: tacit's buckets, and DDP's, which decide when gradients reach tacit's.

    Args:
        nbytes: tacit's, as in `attach(bucket=)`.
        ddp_nbytes: DDP's, as in `bucket_cap_mb`.
        ddp_first_nbytes: DDP's first; None: as the others, which DDP does where `bucket_cap_mb` is given.
    """

    nbytes: int = 4 << 20
    ddp_nbytes: int = 25 << 20
    ddp_first_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A model's step without any exchange, with all ranks computing at the same time; the slowest rank's.

    Args:
        workload: Layers with their times.
        other_s: What of a step is neither forward nor backward: the optimizer.
        low: The fastest decile of steps over the median.
        high: The slowest decile of steps over the median.
        cpu: CPU seconds of one rank a second of computation.
    """

    workload: Workload
    other_s: float = 0.0
    low: float = 1.0
    high: float = 1.0
    cpu: float = 0.0

    @property
    def compute_s(self) -> float:
        return self.workload.forward_s + self.workload.backward_s + self.other_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """The step under one choice.

    Args:
        choice: A strategy as text, or one of BASELINES.
        step_s: The step's time; with probability of about 80 % between `low_s` and `high_s`.
        low_s: See `step_s`.
        high_s: See `step_s`.
        compute_s: The same step without an exchange.
        wire_s: How long the wire is in use, hidden or not.
        codec_s: The same of encoding, adding and decoding.
        limited_by: What most of the step waits for.
        sent_nbytes: Payload bytes that leave a rank in a step.
        buckets: How gradients are cut.
        lossy: Whether less is sent than the numbers themselves.
        calibrated: Whether an exchange of this choice was run alone.
        nmse: Error on the model's own gradients; None where nobody measured it.
        caution: What this prediction does not know; "" where there is nothing to add.
    """

    choice: str
    step_s: float
    low_s: float
    high_s: float
    compute_s: float
    wire_s: float
    codec_s: float
    limited_by: Limit
    sent_nbytes: float
    buckets: BucketSizes = field(default_factory=BucketSizes)
    lossy: bool = False
    calibrated: bool = False
    nmse: float | None = None
    caution: str = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to use, and why.

    Args:
        verdict: One sentence.
        winner: What to use.
        runner_up: The next best of another kind; None where there is one choice alone.
        fastest: The shortest predicted step, which need not be the winner: where intervals overlap, the one that loses less is.
        margin: How much longer the runner-up's step is than the winner's, as a share.
        margin_low: The least of it that the intervals allow; below 0 nobody can distinguish the two.
        margin_high: The most of it.
        risk: What the winner may cost in accuracy.
        line: Python to paste.
        predictions: All, fastest first.
        notes: Sentences: what was assumed, where the probe looked odd.
    """

    verdict: str
    winner: Prediction
    runner_up: Prediction | None
    fastest: Prediction
    margin: float
    margin_low: float
    margin_high: float
    risk: str
    line: str
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()
