"""Records of a made-up run, for the tests of the report: two tasks, three configurations each."""

from __future__ import annotations

import math
from pathlib import Path

from tacit.records import Record, Recorder, host_facts, read

MB = 1e6
DDP, INT8, INT4 = "plain DDP", "every / int8(block=256) / sharded", "every / int4(block=64) / sharded"
SENT = {DDP: 5 * MB, INT8: 1.25 * MB, INT4: 0.7 * MB}
FINAL = {
    "bytes": {DDP: 2.40, INT8: 2.41, INT4: 2.60},
    "digits": {DDP: 0.95, INT8: 0.948, INT4: 0.951},
}


def write_run(path: Path, final: dict[str, dict[str, float]] = FINAL) -> list[Record]:
    """The records that a run with these final metrics leaves in `path`."""
    ticks = iter(range(1_700_000_000, 1_700_000_100))
    with Recorder(path, clock=lambda: float(next(ticks))) as recorder:
        command = "tacit demo --tasks bytes,digits --ranks 4 --out runs/demo"
        recorder.record(
            "start", command=command, ranks=4, tasks={"bytes": "a <text> task"}, host=host_facts()
        )
        for task, finals in final.items():
            for place, (configuration, value) in enumerate(finals.items()):
                recorder.record("training", **_training(task, configuration, value, place))
        recorder.record("end", outcome="done")
    return read(path)


def _training(task: str, configuration: str, final: float, place: int) -> Record:
    return {
        "task": task,
        "configuration": configuration,
        "ranks": 4,
        "steps": 60,
        "step_p50_s": 0.010 + 0.002 * place,
        "step_p95_s": 0.014 + 0.003 * place,
        "step_ratio": 1 + 0.2 * place,
        "step_n": 50,
        "sent_nbytes_a_step": SENT[configuration],
        "sent_is": "computed" if configuration == DDP else "counted",
        "loss": [2 + 3 * math.exp(-step / 15) + 0.05 * place for step in range(60)],
        "metric": "test accuracy" if task == "digits" else "validation loss",
        "higher_is_better": task == "digits",
        "final": final,
        "replica_spread": 0.0,
    }
