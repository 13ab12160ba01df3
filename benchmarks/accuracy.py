"""Training to equal accuracy: real ranks, several seeds, plain DDP beside every strategy. One JSON record a line.

make bench-accuracy         # or: python benchmarks/accuracy.py --tasks bytes --seeds 1 --steps 100
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

from tacit import launch
from tacit.demo.facts import PLAIN
from tacit.records import host_facts

STRATEGIES = (
    "every / bf16 / allreduce",
    "every / thc(bits=4, granularity=30) / sharded",
    "every / hush / sharded",
    "every / ef(hush) / sharded",
)


def train(task: str, seed: int, steps: int, strategies: tuple[str, ...]) -> Iterator[dict[str, object]]:
    """The finished trainings of one task and seed."""
    found: list[dict[str, object]] = []

    def hear(rank: int, message: dict[str, object]) -> None:
        if message["kind"] == "training":
            found.append(message)
        else:
            print(
                f"{task} seed {seed}: step {message['step']} of {message['steps']}", end="\r", file=sys.stderr
            )

    with tempfile.TemporaryDirectory() as logs:
        arguments = [
            "--tasks",
            task,
            "--seed",
            str(seed),
            "--steps",
            str(steps),
            "--strategies",
            ";".join(strategies),
        ]
        launch.run(
            "tacit.demo.worker", arguments, ranks=4, on_message=hear, log_dir=Path(logs), timeout_s=600
        )
    for message in found:
        stats = message.pop("stats") or {}
        for name in ("loss", "stats", "data_sha256"):
            message.pop(name, None)
        sent = stats.get("sent_by_request") if isinstance(stats, dict) else None
        yield {"benchmark": "accuracy", **message, "sent_by_request": sent}


def summarise(rows: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    for task in dict.fromkeys(str(r["task"]) for r in rows):
        own = [r for r in rows if r["task"] == task]
        base = {r["seed"]: float(str(r["final"])) for r in own if r["configuration"] == PLAIN}
        for configuration in dict.fromkeys(str(r["configuration"]) for r in own):
            finals = {r["seed"]: float(str(r["final"])) for r in own if r["configuration"] == configuration}
            gaps = [finals[seed] - base[seed] for seed in base]
            higher = bool(own[0]["higher_is_better"])
            yield {
                "benchmark": "accuracy summary",
                "task": task,
                "metric": own[0]["metric"],
                "configuration": configuration,
                "mean": round(mean(finals.values()), 4),
                "stdev": round(stdev(finals.values()), 4) if len(finals) > 1 else None,
                "seeds": len(finals),
                "against_plain": f"{100 * mean(gaps):+.2f} points"
                if higher
                else f"{100 * mean(gaps) / mean(base.values()):+.2f} %",
                "sent_nbytes_a_step": round(
                    float(
                        str(own[[r["configuration"] for r in own].index(configuration)]["sent_nbytes_a_step"])
                    )
                ),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="fashion,bytes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: 1400 for fashion, 300 for bytes")
    args = parser.parse_args()
    rows = []
    for task in args.tasks.split(","):
        for seed in range(args.seeds):
            for row in train(
                task, seed, args.steps or {"fashion": 1400, "bytes": 300}.get(task, 200), STRATEGIES
            ):
                rows.append(row)
                print(json.dumps(row), flush=True)
    for row in summarise(rows):
        print(json.dumps({**row, "host": host_facts()["cpu"]}))


if __name__ == "__main__":
    main()
