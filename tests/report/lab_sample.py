"""Records of a made-up lab run, close to what 4 workers on 2 cores gave (shared/papers/lab.md), for the report's tests.

    python tests/report/lab_sample.py runs/sample    # to look at: then `tacit report runs/sample`

Nothing in it is random: noise comes from a sine, so every figure a test asserts can be computed by hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tacit.records import Record, Recorder, host_facts, read

MB, MBIT = 1e6, 1e6
FP32, FP16, BF16, POWER = "plain DDP", "DDP fp16 hook", "DDP bf16 hook", "DDP PowerSGD rank 2"
THC, HUSH, INT8 = (
    "every / thc(bits=4, granularity=30) / sharded",
    "every / hush / sharded",
    "every / int8(block=256) / sharded",
)
CONFIGURATIONS = (FP32, FP16, BF16, POWER, INT8, THC, HUSH)
SHARE = {FP32: 1.0, FP16: 0.5, BF16: 0.5, POWER: 0.0075, INT8: 0.256, THC: 0.191, HUSH: 0.191}
CODEC_S_A_MB = {FP32: 0.0, FP16: 2e-4, BF16: 2e-4, POWER: 4e-3, INT8: 6e-4, THC: 1.1e-3, HUSH: 8e-4}
FINAL = {FP32: 0.898, FP16: 0.899, BF16: 0.899, POWER: 0.885, INT8: 0.898, THC: 0.897, HUSH: 0.898}
PACE = {FP32: 60.0, FP16: 60.0, BF16: 60.0, POWER: 85.0, INT8: 60.0, THC: 64.0, HUSH: 61.0}
TARGET, STEPS, SEEDS = 0.885, 468, (0, 1, 2)
CNN, VGG = "fashion-mnist cnn", "vgg16"
COMPUTE_S = {CNN: 0.125, VGG: 0.240}
GRADIENT_NBYTES = {CNN: 6.52 * MB, VGG: 55.3 * MB}


def write_run(
    path: Path,
    *,
    rates: Sequence[float] = (100 * MBIT, 200 * MBIT, 1000 * MBIT),
    workloads: Sequence[str] = (CNN, VGG),
    configurations: Sequence[str] = CONFIGURATIONS,
    shaped: bool = True,
    refused: Sequence[float] = (),
    experiment: str = "thc",
    slower: float = 1.0,
    limits: bool = True,
    run: str | None = None,
    outcome: str | None = "done",
) -> list[Record]:
    """The records that such a run leaves in `path`; `slower` multiplies every communication, no `outcome`: it was killed."""
    ticks = iter(range(1_794_800_000, 1_794_900_000, 7))
    with Recorder(path, run=run, clock=lambda: float(next(ticks))) as recorder:
        network = {
            "text": "star of 4 hosts, 100 to 1000 Mbit, MTU 1500, cubic",
            "hosts": 4,
            "shaped": shaped,
            "label": "star(4)" if shaped else "loopback",
        }
        command = f"tacit lab run experiments/{experiment}.toml --out {path.parent.name}"
        recorder.record("start", command=command, experiment=experiment, host=host_facts(), network=network)
        for rate in rates if shaped else ():
            recorder.record("calibration", **calibration(rate, rate not in refused))
        for rate in rates if limits else ():
            for nbytes in (1 * MB, 10 * MB, 50 * MB):
                recorder.record("limits", **limit(rate, nbytes))
        for workload in workloads:
            for rate in rates:
                job = f"{workload} {rate / MBIT:g}"
                plain = step_s(workload, FP32, rate, slower)
                tried = [
                    {"bucket_nbytes": size, "step_p50_s": f * plain}
                    for size, f in ((4 << 20, 1), (25 << 20, 1.2))
                ]
                recorder.record("tuning", job=job, step_n=5, rows=tried, best_nbytes=4 << 20)
                if workload == VGG:
                    recorder.record("replay_check", job=job, step_n=40, ratio=1.004, passed=True)
                for configuration in configurations:
                    figures = timing(workload, configuration, rate, shaped=shaped, slower=slower)
                    recorder.record("timing", **figures, network=network["label"])
        if CNN in workloads:
            for configuration in configurations:
                for seed in SEEDS:
                    recorder.record("accuracy", **accuracy(configuration, seed))
        if outcome:
            recorder.record("end", outcome=outcome)
    return read(path)


def step_s(workload: str, configuration: str, rate: float, slower: float = 1.0) -> float:
    """The median step: compute, and the part of encode, wire and decode that compute does not hide."""
    codec, wire = _beside(workload, configuration, rate, slower)
    hidden = 0.35 * COMPUTE_S[workload] if workload == VGG else 0.0
    return COMPUTE_S[workload] + max(0.0, codec + wire - hidden) + 0.004


def timing(
    workload: str, configuration: str, rate: float, *, shaped: bool = True, slower: float = 1.0
) -> Record:
    codec, wire = _beside(workload, configuration, rate, slower)
    step, plain = step_s(workload, configuration, rate, slower), step_s(workload, FP32, rate, slower)
    sent = 1.5 * SHARE[configuration] * GRADIENT_NBYTES[workload]
    tacit = configuration in (INT8, THC, HUSH)
    split = {
        "encode_s": 0.6 * codec,
        "wait_s": step - COMPUTE_S[workload] - 0.004,
        "decode_s": 0.4 * codec,
        "wire_s": wire,
    }
    figures: dict[str, Any] = {
        "job": f"{workload} {rate / MBIT:g}",
        "workload": workload,
        "replayed": workload == VGG,
        "scale": 0.1 if workload == VGG else 1,
        "configuration": configuration,
        "baseline": configuration == FP32,
        "rate_bps": rate,
        "shaped": shaped,
        "ranks": 4,
        "step_n": 40,
        "step_p10_s": 0.985 * step,
        "step_p50_s": step,
        "step_p90_s": 1.02 * step,
        "speedup": plain / step,
        "speedup_p10": 0.98 * plain / step,
        "speedup_p90": 1.02 * plain / step,
        "compute_s": COMPUTE_S[workload],
        "sent_nbytes_a_step": sent,
        "sent_is": "counted" if tacit else "computed",
        "interface_nbytes_a_step": 1.012 * sent + 4000,
        "goodput_bps": 8 * sent / step,
        "link_share": 8 * sent / step / rate,
        "cpu_s_a_step": 0.02 + codec + sent / 1.5e9,
        "bucket_nbytes": (4 << 20) if configuration != POWER else None,
        "note": "one bucket" if configuration == POWER else "",
    }
    hidden = {} if tacit else dict.fromkeys(("encode_s", "decode_s", "wire_s"))  # DDP does not tell them
    figures["split"] = split | hidden
    if configuration != POWER:
        figures["predicted_step_s"] = step * (1 + 0.07 * math.sin(9 * step))
    return figures


def accuracy(configuration: str, seed: int) -> Record:
    curve = [[step, _value(configuration, seed, step)] for step in range(26, STEPS + 1, 26)]
    reached = next((step for step, value in curve if value >= TARGET), None)
    return {
        "job": "accuracy",
        "workload": CNN,
        "configuration": configuration,
        "seed": seed,
        "ranks": 4,
        "steps": STEPS,
        "metric": "test accuracy",
        "higher_is_better": True,
        "curve": curve,
        "target": TARGET,
        "steps_to_target": reached,
        "final": curve[-1][1],
    }


def calibration(rate: float, passed: bool = True) -> Record:
    theory = {int(n): 8 * n / (0.9565 * rate) for n in (30_000, 100_000, 1e6)}
    off = 1.021 if passed else 0.41
    limits = {n: {"least_s": 0.8 * t, "most_s": 1.05 * t + 0.0005} for n, t in theory.items()}
    rows = [
        {"nbytes": n, "measured_s": off * t, "theory_s": t, **limits[n], "passed": passed}
        for n, t in theory.items()
    ]
    return {"rate_bps": rate, "rows": rows, "passed": passed, "attempts": 1 if passed else 3}


def counters(drops: int) -> Record:
    """Two links of which the first lost `drops` packets, one less on the way back."""
    lost = {"qdisc_packets": 1_560_067, "qdisc_drops": drops}
    return {"h0": {"eth0": lost}, "switch": {"port0": lost | {"qdisc_drops": drops - 1}}}


def limit(rate: float, nbytes: float) -> Record:
    theory, sent = 8 * 1.5 * nbytes / rate, 1.5 * nbytes
    measured = theory * 1.046 + 0.002
    headers = 66 * sent / 16_000
    return {
        "rate_bps": rate,
        "nbytes": int(nbytes),
        "ranks": 4,
        "measured_s": measured,
        "theory_s": theory,
        "ratio": measured / theory,
        "counted_nbytes": int(sent),
        "interface_nbytes": int(1.003 * (sent + headers)),
        "headers_nbytes": int(headers),
    }


def write_costs(path: Path) -> list[Record]:
    """A sweep of the simulator: three schedules over four sizes on an optical ring."""
    with Recorder(path) as recorder:
        recorder.record(
            "start", command="tacit sim sweep experiments/wrht.toml", experiment="wrht", host=host_facts()
        )
        for nbytes in (1e6, 1e7, 1e8, 1e9):
            for schedule, stages, per_byte in (
                ("ring", 1022, 2.0),
                ("tree", 18, 9.0),
                ("wrht(w=64)", 4, 3.0),
            ):
                figures = {"schedule": schedule, "world": 512, "nbytes": nbytes, "bound_s": 8 * nbytes / 40e9}
                time_s = 25e-6 * stages + per_byte * 8 * nbytes / 40e9
                recorder.record(
                    "cost", **figures, time_s=time_s, network="optical ring(512, 64 λ)", model="optical"
                )
    return read(path)


def _beside(workload: str, configuration: str, rate: float, slower: float) -> tuple[float, float]:
    """Seconds a step of the codec, and of the wire."""
    nbytes = GRADIENT_NBYTES[workload]
    codec = CODEC_S_A_MB[configuration] * nbytes / MB * (0.25 if workload == VGG else 1)
    return codec, slower * (8 * 1.5 * SHARE[configuration] * nbytes / (0.93 * rate) + 0.004)


def _value(configuration: str, seed: int, step: int) -> float:
    risen = FINAL[configuration] - 0.55 * math.exp(-step / PACE[configuration])
    noise = 0.004 * math.exp(-step / 300) * math.sin(step / 11 + 7 * seed + len(configuration))
    return round(risen + noise + 0.001 * (seed - 1), 4)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "records.jsonl").unlink(missing_ok=True)
    write_run(folder / "records.jsonl")
