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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tacit import lab, launch
from tacit.records import host_facts
from tacit.topology import star
from tacit.units import parse_rate

RANKS = 4
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
Row = dict[str, Any]


def run(rate: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """All models on one link."""
    rate_bps = None if rate == "loopback" else parse_rate(rate)
    order = {
        "rate_bps": rate_bps,
        "models": args.models,
        "fixed": FIXED,
        "auto": args.auto,
        "steps": args.steps,
    }
    found: list[Row] = []
    raised: list[bool] = []
    with ExitStack() as stack:
        env = {"PYTHONPATH": str(Path(__file__).parent)}
        specs = [launch.RankSpec((), {**env, "GLOO_SOCKET_IFNAME": "lo"})] * RANKS
        network = None
        if rate_bps is not None:
            network = stack.enter_context(lab.up(star(RANKS, rate_bps=rate_bps, latency_s=0.0)))
            specs = [launch.RankSpec(s.prefix, {**s.env, **env}) for s in network.rank_specs()]

        def came(rank: int, message: launch.Message) -> None:
            if network is not None and args.realtime and not raised:
                raised.append(network.raise_priority())
            if message.get("kind") == "setup":
                message.pop("kind")
                found.append({"network": rate, **message})
                _print_setup(found[-1])

        launch.run(
            "auto_node",
            [json.dumps(order)],
            ranks=RANKS,
            on_message=came,
            log_dir=folder / rate,
            rank_specs=specs,
        )
    return found


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
    parser.add_argument(
        "--rates", nargs="+", default=list(RATES), help="links, with their units, or loopback"
    )
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="known models, replayed; tasks of the demo, trained"
    )
    parser.add_argument("--auto", default="auto", help="auto, or with options: auto(lossy=False)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each choice")
    parser.add_argument("--quick", action="store_true", help="2 set-ups, about 2 minutes")
    parser.add_argument(
        "--realtime", action="store_true", help="ranks before all other processes of this machine (root)"
    )
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
