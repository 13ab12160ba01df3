"""The records that the lab, the demo and the simulator write and the report reads: one frozen type a kind.

    record, unfit = fit({"kind": "timing", "configuration": "plain DDP", "step_p50_s": 0.1})

A key is declared here and nowhere else. Every field has a default: a record may lack what nobody measured, and null means
the same. Writing is strict: a value of another type is an error. Reading is not: such a field counts as missing, and `unfit`
holds a sentence about it. Keys that a type does not declare are kept in the file; kinds without a type are written and read
as plain objects.

`version` is 1 where a record has none: such records do not have `family`, `lossy` and `precision`, which `fit` then takes
from the configuration's name. Everything else asks the record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

VERSION = 2
Number = int | float
T = TypeVar("T", bound="TypedRecord")


class TypedRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What every record has: when it was written, by which run, and the version of the types."""

    time: Number = 0.0
    run: str = ""
    version: int = 1

    @classmethod
    def kind(cls) -> str:
        return str(cls.__struct_config__.tag)


class NetworkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The network of a run."""

    text: str = ""
    label: str = ""
    name: str = ""
    how: str = ""
    hosts: Any = None  # a count, or the hosts one by one
    shaped: bool = False
    rate_bps: Number | None = None

    @property
    def short(self) -> str:
        return self.label or self.text or self.name


def _network_text(network: NetworkFacts | str | None) -> str:
    return network.short if isinstance(network, NetworkFacts) else network or ""


class StartRecord(TypedRecord, frozen=True, kw_only=True, tag="start"):
    """A run begins: the command that repeats it, and the machine it runs on."""

    command: str | None = None
    experiment: str | None = None
    ranks: int | None = None
    tasks: dict[str, str] | None = None
    host: dict[str, Any] | None = None
    network: NetworkFacts | str | None = None


class EndRecord(TypedRecord, frozen=True, kw_only=True, tag="end"):
    """How a run ended: done, interrupted or failed."""

    outcome: str | None = None


class Described(TypedRecord, frozen=True, kw_only=True):
    """A record about one configuration. `family` is "ddp" (DDP, and torch's hooks) or "tacit"; `lossy` is whether what is sent
    is less than the numbers themselves; `precision` is that of the numbers which are sent, where they are sent as they are:
    "fp32", "bf16" or "fp16". `baseline` marks the configuration that the others of its job are measured against."""

    configuration: str = "?"
    baseline: bool = False
    family: str = ""
    lossy: bool = False
    precision: str | None = None

    @property
    def fp32(self) -> bool:
        """Whether this is DDP, or a strategy, that compresses nothing."""
        return not self.lossy and (self.baseline or self.precision == "fp32")

    @property
    def bf16(self) -> bool:
        """Whether the only thing that is done to the numbers is a cast to bf16."""
        return self.precision == "bf16"

    @property
    def tacit(self) -> bool:
        """Whether tacit exchanged the gradients, not DDP or one of torch's hooks."""
        return self.family == "tacit" and not self.baseline


class JobRecord(Described, frozen=True, kw_only=True):
    """A record about one configuration of a lab job."""

    job: str = ""
    workload: str = ""


class SplitTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Where a step's time goes; None where nobody measures it, as in torch's hooks."""

    encode_s: Number | None = None
    wait_s: Number | None = None
    decode_s: Number | None = None
    wire_s: Number | None = None


class TimingRecord(JobRecord, frozen=True, kw_only=True, tag="timing"):
    """Step times of one configuration at one rate."""

    replayed: bool = False
    shaped: bool | None = None
    network: NetworkFacts | str | None = None
    scale: Number = 1
    rate_bps: Number | None = None
    ranks: int | None = None
    step_n: int | None = None
    step_p50_s: Number = 0
    step_p10_s: Number | None = None
    step_p90_s: Number | None = None
    speedup: Number | None = None
    speedup_p10: Number | None = None
    speedup_p90: Number | None = None
    compute_s: Number | None = None
    split: SplitTimes = SplitTimes()
    sent_nbytes_a_step: Number | None = None
    interface_nbytes_a_step: Number | None = None
    goodput_bps: Number | None = None
    link_share: Number | None = None
    cpu_s_a_step: Number | None = None
    bucket_nbytes: Number | None = None
    predicted_step_s: Number | None = None
    note: str = ""
    sent_is: str = ""  # "counted" as the bytes left, or "computed"
    tuned: bool = False  # the bucket size is the best of those tried

    @property
    def network_text(self) -> str:
        return _network_text(self.network)

    @property
    def codec_s(self) -> float | None:
        """Encode and decode of a step; None where nobody measures them, as in torch's hooks."""
        known = [part for part in (self.split.encode_s, self.split.decode_s) if part is not None]
        return sum(known) if known else None

    @property
    def codec_full_s(self) -> float | None:
        """The same on all of the parameters, of which a scaled replay has a part: it grows with them."""
        return None if self.codec_s is None else self.codec_s / self.scale

    @property
    def bucket_tuned(self) -> bool:
        """Whether its bucket size was searched for: DDP's own default loses up to 1.4x."""
        return self.tuned or "tuned" in f"{self.configuration} {self.note}".lower()


class AccuracyRecord(JobRecord, frozen=True, kw_only=True, tag="accuracy"):
    """One seed of one configuration, trained for its accuracy; `steps_to_target` is None where it was not reached."""

    seed: int | str | None = None
    ranks: int | None = None
    steps: int | None = None
    metric: str = "accuracy"
    higher_is_better: bool = True
    curve: tuple[tuple[Number, Number | None], ...] = ()
    target: Number | None = None
    steps_to_target: Number | None = None
    final: Number | None = None

    @property
    def points(self) -> tuple[tuple[Number, Number], ...]:
        """The curve, without points at which training had diverged."""
        return tuple((step, value) for step, value in self.curve if value is not None)


class RoundsPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a training's curve: the metric of the ranks' mean model, and a value for each rank."""

    step: Number | None = None
    metric: Number | None = None
    apart: Number | None = None
    seconds: tuple[Number | None, ...] = ()
    sent_nbytes: tuple[Number | None, ...] = ()
    interface_nbytes: tuple[Number | None, ...] = ()
    exchanges: tuple[Number | None, ...] = ()
    drift: tuple[Number | None, ...] = ()


class RoundsRecord(JobRecord, frozen=True, kw_only=True, tag="rounds"):
    """One strategy trained with one seed from start to end, under a rule of rounds/ or gossip."""

    seed: int | str | None = None
    ranks: int | None = None
    steps: int | None = None
    metric: str = "accuracy"
    higher_is_better: bool = True
    network: str = ""
    shaped: bool = False
    rate_bps: Number | None = None
    seconds: Number = 0
    final: Number | None = None
    apart: Number | None = None
    compute_s: Number | None = None
    communicating: Number | None = None
    sent_nbytes: Number | None = None
    interface_nbytes: Number | None = None
    merge_nbytes: Number | None = None
    exchanges: Number | None = None
    meeting_p50_s: Number | None = None
    meeting_p90_s: Number | None = None
    outcomes: dict[str, Number] = {}
    why: dict[str, Number] = {}
    curve: tuple[RoundsPoint, ...] = ()
    exchange_times_s: tuple[tuple[Number | None, ...], ...] = ()

    @property
    def nbytes(self) -> Number | None:
        """Bytes a rank sent: at its interface, else as counted where they leave."""
        return self.sent_nbytes if self.interface_nbytes is None else self.interface_nbytes


class LimitsRecord(TypedRecord, frozen=True, kw_only=True, tag="limits"):
    """An all-reduce against what the link allows; bytes are a rank's."""

    job: str | None = None
    rate_bps: Number | None = None
    nbytes: Number | None = None
    ranks: Number | None = None
    measured_s: Number | None = None
    theory_s: Number | None = None
    ratio: Number | None = None
    counted_nbytes: Number | None = None
    headers_nbytes: Number | None = None
    interface_nbytes: Number | None = None
    passed: bool | None = None


class CalibrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message's time; it passed between `least_s` and `most_s`."""

    what: str = ""
    name: str = ""
    nbytes: Number | None = None
    measured_s: Number | None = None
    theory_s: Number | None = None
    least_s: Number | None = None
    most_s: Number | None = None
    passed: bool | None = None


class CalibrationRecord(TypedRecord, frozen=True, kw_only=True, tag="calibration"):
    """What the network was before a job ran on it, as the last attempt found it."""

    job: str = ""
    rate_bps: Number | None = None
    rows: tuple[CalibrationRow, ...] = ()
    passed: bool | None = None
    attempts: Number | None = None


class RefusedRecord(TypedRecord, frozen=True, kw_only=True, tag="refused"):
    """A job that was not run at this rate, since calibration did not pass."""

    job: str = ""
    rate_bps: Number | None = None
    why: str = ""


class CountersRecord(TypedRecord, frozen=True, kw_only=True, tag="counters"):
    """What the interfaces counted while a job ran, by node and device."""

    job: str = ""
    rate_bps: Number | None = None
    realtime: bool | None = None
    nodes: dict[str, dict[str, dict[str, Number]]] = {}


class TuningStep(msgspec.Struct, frozen=True, kw_only=True):
    """The step of plain DDP with one bucket size."""

    bucket_nbytes: Number | None = None
    step_p50_s: Number | None = None


class TuningRecord(TypedRecord, frozen=True, kw_only=True, tag="tuning"):
    """The bucket sizes that were tried for plain DDP, and the best one."""

    job: str | None = None
    step_n: int | None = None
    rows: tuple[TuningStep, ...] = ()
    best_nbytes: Number | None = None


class ReplayCheckRecord(TypedRecord, frozen=True, kw_only=True, tag="replay_check"):
    """The step of a replay without communication, over the times it should take."""

    job: str | None = None
    step_n: int | None = None
    ratio: Number | None = None
    passed: bool | None = None


class LeftOutRecord(TypedRecord, frozen=True, kw_only=True, tag="left_out"):
    """A configuration that does not run on this process group."""

    job: str | None = None
    configuration: str = "?"
    why: str = ""


class CostRecord(TypedRecord, frozen=True, kw_only=True, tag="cost"):
    """The simulated time of one schedule; `time_s` is None where the simulator refused it."""

    schedule: str = "?"
    world: Number | None = None
    nbytes: Number | None = None
    network: NetworkFacts | str | None = None
    on: str = ""
    model: str = ""
    vector: str = ""
    time_s: Number | None = None
    bound_s: Number | None = None
    lower_bound_s: Number | None = None
    refused: str | None = None

    @property
    def network_text(self) -> str:
        return _network_text(self.network) or self.on

    @property
    def model_name(self) -> str:
        """The model whose gradients travel; empty where the sweep named a size, which is in `nbytes` too."""
        name = self.model or self.vector
        return "" if name[:1].isdigit() else name


class SimRecord(CostRecord, frozen=True, kw_only=True, tag="sim"):
    """A point of a sweep (`tacit sim sweep`)."""


class TrainingRecord(Described, frozen=True, kw_only=True, tag="training"):
    """One configuration of one task of the demo; `final` is None where it diverged."""

    task: str = "?"
    ranks: int = 1
    steps: int = 0
    step_p50_s: Number = 0.0
    step_p95_s: Number = 0.0
    step_ratio: Number = 1.0
    step_n: int = 0
    sent_nbytes_a_step: Number = 0.0
    sent_is: str = ""
    metric: str = ""
    higher_is_better: bool = False
    final: Number | None = None
    loss: tuple[Number | None, ...] = ()


class PredictedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan expects of a step, and of its parts."""

    step_s: Number | None = None
    low_s: Number | None = None
    high_s: Number | None = None
    compute_s: Number | None = None
    wire_s: Number | None = None
    codec_s: Number | None = None


class AttachedRecord(TypedRecord, frozen=True, kw_only=True, tag="attached"):
    """A rank of a training begins to exchange."""

    rank: int = 0
    world: int = 1
    strategy: str = ""
    host: str = ""
    over: str = ""
    elements: int = 0


class StepRecord(TypedRecord, frozen=True, kw_only=True, tag="step"):
    """One step of one rank of a training. Bytes and seconds are sums since it was attached."""

    rank: int = 0
    step: int = 0
    strategy: str = ""
    steps: int = 0
    sent_nbytes: int = 0
    encode_s: Number = 0.0
    wire_s: Number = 0.0
    decode_s: Number = 0.0
    wait_s: Number = 0.0
    chunks: int = 0  # summed with star(loss=...),
    partial_chunks: int = 0  # and of them those without some rank


class RanksRecord(TypedRecord, frozen=True, kw_only=True, tag="ranks"):
    """What a step of each rank computes without waiting for others, as the ranks exchanged it: medians of some steps."""

    rank: int = 0
    step: int = 0
    own_s: tuple[Number, ...] = ()


class ChosenRecord(TypedRecord, frozen=True, kw_only=True, tag="chosen"):
    """`auto` has chosen a strategy: `how` is probed, cached or checkpoint."""

    rank: int = 0
    step: int = 0
    strategy: str = ""
    bucket_nbytes: int = 0
    how: str = ""
    why: str = ""
    start_up_s: Number = 0.0
    predicted: PredictedStep | None = None


class DriftRecord(TypedRecord, frozen=True, kw_only=True, tag="drift"):
    """The plan of a training no longer holds; `part` is compute, wire or codec."""

    rank: int = 0
    step: int = 0
    part: str = ""
    sentence: str = ""
    expected_s: Number = 0.0
    measured_s: Number = 0.0


class CurveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by size: medians, the spread of the repeats, and CPU seconds of a rank."""

    sizes: tuple[Number, ...] = ()
    p50_s: tuple[Number, ...] = ()
    low_s: tuple[Number, ...] = ()
    high_s: tuple[Number, ...] = ()
    cpu_s: tuple[Number, ...] = ()


class OperationFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of the process group, by bytes."""

    operation: str = ""
    curve: CurveFacts = CurveFacts()


class UseFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that answers a request, and its bytes for each measured number of elements."""

    operation: str = ""
    nbytes: tuple[Number, ...] = ()


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a codec: what it costs before and while it is answered."""

    kind: str = ""
    encode: CurveFacts = CurveFacts()
    owner: CurveFacts = CurveFacts()
    uses: tuple[UseFacts, ...] = ()


class ChoiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy, or one of DDP's hooks, costs the device by elements."""

    choice: str = ""
    numels: tuple[Number, ...] = ()
    requests: tuple[RequestFacts, ...] = ()
    decode: CurveFacts = CurveFacts()
    sent_nbytes: tuple[Number, ...] = ()
    lossy: bool = False
    in_flight: int = 1
    period: Number = 1.0


class CalibratedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange alone, over what its pieces add up to."""

    choice: str = ""
    factor: Number = 1.0
    low: Number = 1.0
    high: Number = 1.0
    elements: int = 0
    held: Number | None = None


class ErrorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a lossy choice on the model's own gradients."""

    choice: str = ""
    nmse: Number = 0.0


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a probe was made on."""

    cpu: str = ""
    cores: int = 0
    memory_nbytes: int = 0
    torch: str = ""
    nodes: int = 1


class PairFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Links between two ranks: tacit.plan.PairRates."""

    typical_bps: Number = 0.0
    slowest_bps: Number = 0.0
    sender: int = 0
    receiver: int = 0


class TableFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A table with sparse gradients: tacit.plan.TouchedTable."""

    name: str = ""
    rows: int = 0
    width: int = 0
    unique: Number = 0.0
    union: int = 0


class ProbeRecord(TypedRecord, frozen=True, kw_only=True, tag="probe"):
    """What `tacit plan` measured: tacit.plan.Probe."""

    world: int = 0
    backend: str = ""
    device: str = "cpu"
    cores: Number = 1.0
    machine: MachineFacts = MachineFacts()
    operations: tuple[OperationFacts, ...] = ()
    costs: tuple[ChoiceFacts, ...] = ()
    calibrations: tuple[CalibratedFacts, ...] = ()
    errors: tuple[ErrorFacts, ...] = ()
    latency_s: Number = 0.0
    at_once_bps: Number = 0.0
    alone_bps: Number = 0.0
    took_s: Number = 0.0
    assumed: str = ""
    model: str = ""
    copy: CurveFacts | None = None
    pairs: PairFacts | None = None
    tables: tuple[TableFacts, ...] = ()
    drift: Number = 1.0


class LayerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of a workload."""

    name: str = ""
    parameters: int = 0
    forward_s: Number = 0.0
    backward_s: Number = 0.0


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model's layers, and where their times are from."""

    name: str = ""
    layers: tuple[LayerFacts, ...] = ()
    source: str = ""


class PlanStepRecord(TypedRecord, frozen=True, kw_only=True, tag="plan_step"):
    """A model's step without an exchange: tacit.plan.RecordedStep."""

    workload: WorkloadFacts = WorkloadFacts()
    other_s: Number = 0.0
    low: Number = 1.0
    high: Number = 1.0
    cpu: Number = 0.0


class BucketFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of tacit's and of DDP's buckets."""

    nbytes: int = 0
    ddp_nbytes: int = 0
    ddp_first_nbytes: int | None = None


class PredictedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted step under one choice."""

    choice: str = ""
    step_s: Number = 0.0
    low_s: Number = 0.0
    high_s: Number = 0.0
    compute_s: Number = 0.0
    wire_s: Number = 0.0
    codec_s: Number = 0.0
    limited_by: str = ""
    sent_nbytes: Number = 0.0
    buckets: BucketFacts = BucketFacts()
    lossy: bool = False
    calibrated: bool = False
    nmse: Number | None = None
    caution: str = ""


class AdviceRecord(TypedRecord, frozen=True, kw_only=True, tag="advice"):
    """What `tacit plan` advises: tacit.plan.Advice."""

    verdict: str = ""
    winner: PredictedFacts = PredictedFacts()
    runner_up: PredictedFacts | None = None
    fastest: PredictedFacts = PredictedFacts()
    margin: Number = 0.0
    margin_low: Number = 0.0
    margin_high: Number = 0.0
    risk: str = ""
    line: str = ""
    predictions: tuple[PredictedFacts, ...] = ()
    notes: tuple[str, ...] = ()


_TYPES: tuple[type[TypedRecord], ...] = (
    StartRecord, EndRecord, TimingRecord, AccuracyRecord, RoundsRecord, LimitsRecord, CalibrationRecord, RefusedRecord,
    CountersRecord, TuningRecord, ReplayCheckRecord, LeftOutRecord, CostRecord, SimRecord, TrainingRecord,
    AttachedRecord, StepRecord, RanksRecord, ChosenRecord, DriftRecord,
    ProbeRecord, PlanStepRecord, AdviceRecord,
)  # fmt: skip
TYPES: Mapping[str, type[TypedRecord]] = {each.kind(): each for each in _TYPES}


def fit(record: Mapping[str, Any], as_type: type[T]) -> tuple[T, list[str]]:
    """The record as a value, and a sentence for each field that is left out because its value has another type."""
    fields = _without_null(plain(record))
    if lacks_family(fields):
        fields = _described_by_name(fields)
    unfit: list[str] = []
    while True:
        try:
            return msgspec.convert(fields, as_type), unfit
        except msgspec.ValidationError as cause:
            field = _field(cause)
            if field not in fields or field == "kind":
                raise
            del fields[field]
            unfit.append(f"{as_type.kind()}.{field} is left out ({_reason(cause)})")


def lacks_family(record: Mapping[str, Any]) -> bool:
    """Whether this is a record about a configuration that has the configuration's name alone, as in version 1."""
    as_type = TYPES.get(str(record.get("kind")))
    return as_type is not None and issubclass(as_type, Described) and record.get("family") is None


def check(record: Mapping[str, Any]) -> None:
    """`TypeError` unless the record fits the type of its kind; a kind without a type is not checked."""
    as_type = TYPES.get(str(record.get("kind")))
    unfit = fit(record, as_type)[1] if as_type else []
    if unfit:
        raise TypeError(f"this record does not fit its type: {'; '.join(unfit)}")


def plain(value: Any) -> Any:
    """`value` as strict JSON has it: NaN and infinity, which a diverged run produces, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _without_null(value: Any) -> Any:
    """`value` without keys that have no value; lists keep theirs, where the place counts."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def _field(cause: msgspec.ValidationError) -> str:
    """The record's own field in which the value lies that does not fit: `curve` of '... - at `$.curve[0][1]`'."""
    found = re.search(r"`\$\.(\w+)", str(cause))
    return found[1] if found else ""


def _reason(cause: msgspec.ValidationError) -> str:
    return str(cause).replace(" - at `$.", " at `")


# Version 1 has the configuration's name alone.
_LOSSY = frozenset({"bf16", "fp16", "half", "powersgd", "topk", "int8", "int4", "thc", "hush", "ef"})
_WHOLE = frozenset({"fp32", "plain", "none"})


def _described_by_name(fields: dict[str, Any]) -> dict[str, Any]:
    """A record without `family` gets what its configuration's name has of `family`, `lossy` and `precision`."""
    words = set(re.findall(r"[a-z0-9]+", str(fields.get("configuration", "")).lower()))
    lossy = words & _LOSSY
    halves = [half for half in ("bf16", "fp16") if lossy == {half}]
    precision = halves[0] if halves else "fp32" if words & _WHOLE and not lossy else None
    family = "ddp" if "ddp" in words else "tacit"
    return {"family": family, "lossy": bool(lossy), "precision": precision} | fields
