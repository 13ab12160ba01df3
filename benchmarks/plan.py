"""How well `tacit plan` predicts: predicted steps against measured ones, on links that are shaped, and on loopback.

    make bench-plan                     # 24 set-ups, about 20 minutes;   ARGS=--quick: 4 of them, about 3 minutes
    make bench-plan ARGS=--realtime     # as root, on a machine that does other things too

A set-up is a link and a model: VGG16 and ResNet50 replayed (sleeps, real exchanges), a transformer trained (real computation on cores that the
ranks share). For each: one probe (under a minute), a prediction of three baselines and some strategies, and then steps of all of them in turn, and
once more with everything connected anew: how far the two are apart is what no prediction can be better than. No figure of a step is used for a
prediction. Counted are pairs of set-up and choice whose prediction is within 10 % and 15 % of the
measured median, and set-ups in which the choice advised is the measured best, or at most 5 % behind it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from setups import Row, add_setup_arguments, measured

from tacit.records import host_facts

RATES = ("50Mbit", "100Mbit", "200Mbit", "300Mbit", "500Mbit", "700Mbit", "1Gbit", "loopback")
MODELS = ("vgg16", "resnet50", "bytes")
STRATEGIES = ("bf16 / allreduce", "int8", "int4", "hush", "lowrank(8)")
QUICK = {"rates": ("100Mbit", "1Gbit"), "models": ("vgg16", "bytes"), "steps": 4}
WITHIN = (0.10, 0.15)
BEHIND = 0.05
STEADY = 1.15  # other programs slowed the computation by more: neither prediction nor measurement is of this machine


def run(rate: str, args: argparse.Namespace, folder: Path) -> list[Row]:
    """All models on one link."""
    order = {
        "models": args.models,
        "strategies": [_written(each) for each in args.strategies],
        "steps": args.steps,
        "budget_s": args.budget,
        "realtime": args.realtime,
    }
    return measured("plan_node", rate, order, folder, _print_setup, realtime=args.realtime)


def _written(strategy: str) -> str:
    """As a prediction names it."""
    from tacit.strategy import Strategy

    return str(Strategy.parse(strategy))


def judged(setups: Sequence[Row]) -> Row:
    """The figures over all set-ups, and over those in which the computation stayed what it was when it was recorded."""
    steady = [each for each in setups if 1 / STEADY < each["measured_compute_s"] / each["compute_s"] < STEADY]
    return {**figures(setups), "steady": figures(steady) if steady else None}


def figures(setups: Sequence[Row]) -> Row:
    """Counts and medians."""
    pairs = [row for setup in setups for row in setup["rows"]]
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in pairs]
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in pairs]
    behind = [_behind(setup) for setup in setups]
    apart = [abs(first / last - 1) for first, last in (row["pass_s"] for row in pairs)]
    return {
        "setups": len(setups),
        "pairs": len(pairs),
        "median_error": median(errors),
        **{f"within_{100 * share:.0f}_percent": sum(e <= share for e in errors) for share in WITHIN},
        "inside_interval": sum(inside),
        "measured_twice_apart_median": median(apart),
        **{
            f"measured_twice_apart_{100 * share:.0f}_percent": sum(a > share for a in apart)
            for share in WITHIN
        },
        "chosen_best_or_close": sum(each <= BEHIND for each in behind),
        "most_behind": max(behind),
        "probe_p50_s": median(setup["probe_s"] for setup in setups),
    }


def _behind(setup: Row) -> float:
    """How much longer the chosen one's measured step is than the best one's."""
    steps_s = {row["choice"]: row["measured_s"] for row in setup["rows"]}
    return steps_s[setup["chosen"]] / min(steps_s.values()) - 1


def _print_setup(setup: Row) -> None:
    print(
        f"\n{setup['network']}, {setup['model']}: compute {1e3 * setup['compute_s']:.0f} ms (then {1e3 * setup['measured_compute_s']:.0f}), probe {setup['probe_s']:.0f} s, "
        f"advised {setup['chosen']} ({100 * _behind(setup):+.0f} % behind the best)",
        file=sys.stderr,
    )
    for row in setup["rows"]:
        off = row["predicted_s"] / row["measured_s"] - 1
        print(
            f"  {row['choice']:36} predicted {1e3 * row['predicted_s']:7.1f} ms ({1e3 * row['low_s']:.0f} to {1e3 * row['high_s']:.0f})  "
            f"measured {1e3 * row['measured_s']:7.1f} ms ({' and '.join(f'{1e3 * s:.0f}' for s in row['pass_s'])})  {100 * off:+6.1f} %  "
            f"{row['limited_by']}",
            file=sys.stderr,
        )


def plot(setups: Sequence[Row], path: Path) -> None:
    """Predicted against measured, a point a pair, and the band of 15 %."""
    from tacit.report.figures.drawing import standalone
    from tacit.report.figures.plan import predicted_against_measured

    points = [
        (row["measured_s"], row["predicted_s"], row["choice"], setup["network"])
        for setup in setups
        for row in setup["rows"]
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(standalone(predicted_against_measured(points, WITHIN[1], path.stem)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_setup_arguments(parser, rates=RATES, models=MODELS)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument(
        "--steps", type=int, default=6, help="timed steps of each choice, in each of two measurements"
    )
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of a probe")
    parser.add_argument("--quick", action="store_true", help="4 set-ups, about 3 minutes")
    parser.add_argument("--out", type=Path, help="a folder for setups.jsonl and the plot")
    args = parser.parse_args()
    if args.quick:
        args.rates, args.models, args.steps = list(QUICK["rates"]), list(QUICK["models"]), QUICK["steps"]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        setups = [setup for rate in args.rates for setup in run(rate, args, Path(folder))]
    summary = {
        "benchmark": "plan",
        **judged(setups),
        "took_s": time.monotonic() - start,
        "host": host_facts(),
    }
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"kind": "plan_setup", **setup}) for setup in setups]
        (args.out / "setups.jsonl").write_text(
            "\n".join([*lines, json.dumps({"kind": "plan_summary", **summary})]) + "\n"
        )
        plot(setups, args.out / "predicted.svg")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
