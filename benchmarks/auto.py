"""`auto` against every fixed choice, on a slow, a middle and a fast link. One JSON record at the end, a table on stderr.

    make bench-auto                     # 6 set-ups, about 8 minutes;   ARGS=--quick: 2 of them, about 2 minutes

A set-up is a link and a model: VGG16 replayed (sleeps, real exchanges) and a transformer trained (real computation on cores that the ranks share).
`auto` first goes its course alone (steps without a codec, probe, steps that confirm); what that took beyond as many steps of its choice is its
start-up cost. Then steps of all choices are taken in turn, `auto` among them. `behind` is how much longer its median step is than the
best fixed choice's.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from setups import Row, add_setup_arguments, measured

from tacit.records import host_facts

RATES = ("50Mbit", "300Mbit", "loopback")
MODELS = ("vgg16", "bytes")
FIXED = (
    "fp32",
    "bf16",
    "every / none / allreduce",
    "every / bf16 / allreduce",
    "every / int8(block=256) / sharded",
    "every / int4(block=64) / sharded",
    "every / hush / sharded",
)
QUICK: dict[str, Any] = {"rates": ["100Mbit", "loopback"], "models": ["vgg16"], "steps": 6}
MOST_BEHIND = 0.05


def run(rate: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """All models on one link."""
    order = {
        "models": args.models,
        "fixed": FIXED,
        "auto": args.auto,
        "steps": args.steps,
    }
    return measured("auto_node", rate, order, folder, _print_setup, realtime=args.realtime)


def _print_setup(setup: Row) -> None:
    steps = setup["steps_p50_s"]
    print(
        f"\n{setup['network']}, {setup['model']}: {100 * setup['behind']:+.1f} % behind the best, start-up {setup['start_up_s']:.1f} s "
        f"({setup['course_steps']} steps)\n  {setup['chosen']}",
        file=sys.stderr,
    )
    for name, step_s in sorted(steps.items(), key=lambda item: item[1]):
        print(f"  {name:36} {1e3 * step_s:8.1f} ms  {step_s / min(steps.values()):.2f} x", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_setup_arguments(parser, rates=RATES, models=MODELS)
    parser.add_argument("--auto", default="auto", help="auto, or with options: auto(lossy=False)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each choice")
    parser.add_argument("--quick", action="store_true", help="2 set-ups, about 2 minutes")
    parser.add_argument("--out", type=Path, help="a file for the set-ups, JSON Lines")
    args = parser.parse_args()
    if args.quick:
        args.rates, args.models, args.steps = QUICK["rates"], QUICK["models"], QUICK["steps"]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        setups = [setup for rate in args.rates for setup in run(rate, args, Path(folder))]
    behind = [setup["behind"] for setup in setups]
    summary = {
        "benchmark": "auto",
        "setups": len(setups),
        "within_5_percent": sum(each <= MOST_BEHIND for each in behind),
        "most_behind": max(behind),
        "start_up_s": [round(setup["start_up_s"], 2) for setup in setups],
        "chosen": [setup["strategy"] for setup in setups],
        "took_s": time.monotonic() - start,
        "host": host_facts(),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"kind": "auto_setup", **setup}) for setup in setups]
        args.out.write_text("\n".join([*lines, json.dumps({"kind": "auto_summary", **summary})]) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
