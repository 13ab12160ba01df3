"""What `star(loss=...)` gains: rounds that do not wait for lost packets or a late rank, against exact recovery.

    make bench-loss                     # or: python benchmarks/bounded_loss.py --rates 200 --json

Four ranks in the lab, the user-space plane in the switch, MTU 1500, 64 packets of a rank on their way. Exact recovery is `star` as it is
(fixed point in int32 lanes), the lossy job what `star(loss=...)` joins (floats, and who is in them). Both take turns, round by round,
without loss, with 1 % and with 5 % of packets lost each way at the ranks' interfaces. Figures are medians, ratios those of the rounds' own
ratios. A time is the slowest rank's. Every sum is held to what it says: exact ones to the sum of all, lossy ones to the sum of the ranks
that are in it, chunk by chunk, the same bits on all ranks.

Then steps: each rank computes (sleeps), and sums; the last rank pauses for 200 ms before each 20th step.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from aggregator_lab import LEAD_S, STAR_SLOTS, Case, Node, nodes, together

from tacit import lab
from tacit.records import host_facts
from tacit.topology import star

WORLD = 4
LOSSES = (0.0, 0.01, 0.05)
SIZES = (65_536, 262_144, 1_048_576)
DEADLINE_MS = 20
PLANE_SLOTS = 8192  # a fourth for a job: how far a late rank may be behind
PAUSE_S, EVERY, STEPS, COMPUTE_S = 0.2, 20, 120, 0.03
STEP_NUMEL = 65_536
LEAST_GAIN = 0.10
KINDS = {"exact": ("I32", 0), "lossy": ("F32", DEADLINE_MS)}


@dataclass
class Contest:
    """Rounds of one size under one loss, both ways in turn."""

    numel: int
    loss: float
    took_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    left_out: int = 0
    parts: int = 0
    right: bool = True

    @property
    def gain(self) -> float:
        """How much less time a round takes."""
        return 1 - median(a / b for a, b in zip(self.took_s["lossy"], self.took_s["exact"], strict=True))


def one_round(contest: Contest, ranks: Sequence[Node], kind: str) -> None:
    what = {"numel": contest.numel, "start_s": time.monotonic() + LEAD_S + contest.numel * 3e-8}
    answers = together(ranks, "lossy" if kind == "lossy" else "sum", name=kind, **what)
    contest.took_s[kind].append(max(answer["took_s"] for answer in answers))
    contest.right &= all(answer["exact"] for answer in answers)
    if kind == "lossy":
        contest.right &= len({answer["crc"] for answer in answers}) == 1
        contest.left_out += answers[0]["left_out"]
        contest.parts += answers[0]["parts"]


def pauses(ranks: Sequence[Node]) -> dict[str, Any]:
    """Steps with a rank that pauses now and then: what a step takes the others."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        what = {"numel": STEP_NUMEL, "steps": STEPS, "compute_s": COMPUTE_S, "late": WORLD - 1}
        what |= {"every": EVERY, "pause_s": PAUSE_S, "start_s": time.monotonic() + LEAD_S}
        answers = together(ranks, "steps", name=kind, **what)
        others = [max(steps) for steps in zip(*(a["step_s"] for a in answers[:-1]), strict=True)]
        late = [s for step, s in enumerate(others) if step % EVERY == EVERY // 2]
        rest = [s for step, s in enumerate(others) if step % EVERY not in range(EVERY // 2, EVERY // 2 + 6)]
        found[kind] = {
            "step_s": round(median(rest), 4),
            "step_with_a_pause_s": round(median(late), 4),
            "longest_step_s": round(max(others), 4),
            "total_s": round(sum(others), 2),
            "skipped_by_the_late_rank": answers[-1]["skipped"],
            "partial_chunks": answers[0]["partial"],
            "same_bits": len({answer["crc"] for answer in answers}) == 1,
        }
    return found


def run(rate_bps: float, args: argparse.Namespace) -> tuple[list[Contest], dict[str, Any]]:
    case = Case(WORLD, rate_bps, 1500)
    network = star(WORLD + 1, rate_bps=rate_bps, latency_s=0.0)
    how = "user" if args.unprivileged else None
    with lab.up(network, how=how) as built, nodes(built, case, PLANE_SLOTS) as (ranks, switch, _):
        control = switch.ask("where")["controls"]["user"]
        for kind, (lanes, deadline_ms) in KINDS.items():
            terms = {"lanes": lanes, "mtu": 1500, "slots": STAR_SLOTS, "runs": False}
            together(ranks, "join", name=kind, control=control, deadline_ms=deadline_ms, **terms)
        contests = [Contest(numel, loss) for loss in LOSSES for numel in SIZES]
        built.raise_priority()
        loss = 0.0
        for turn in range(args.rounds + 1):
            for contest in contests:
                if contest.loss != loss:
                    loss = contest.loss
                    together([*ranks, switch], "lose", share=loss)
                for kind in KINDS if turn % 2 else reversed(KINDS):
                    one_round(contest, ranks, kind)
            print(f"{case}: round {turn} of {args.rounds}", file=sys.stderr, flush=True)
        for contest in contests:  # the first one warms up
            for took_s in contest.took_s.values():
                del took_s[0]
        together([*ranks, switch], "lose", share=0.0)
        return contests, pauses(ranks)


def records(rate_bps: float, contests: Sequence[Contest], paused: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for contest in contests:
        yield {
            "benchmark": "bounded loss",
            "world": WORLD,
            "rate_bps": rate_bps,
            "elements": contest.numel,
            "loss": contest.loss,
            "exact_s": round(median(contest.took_s["exact"]), 5),
            "lossy_s": round(median(contest.took_s["lossy"]), 5),
            "gain": round(contest.gain, 3),
            "left_out": round(contest.left_out / contest.parts, 5),
            "right": contest.right,
            "rounds": len(contest.took_s["exact"]),
        }
    yield {"benchmark": "bounded loss, a rank pauses", "world": WORLD, "rate_bps": rate_bps, **paused}


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"{'Mbit/s':>7}{'elements':>10}{'loss %':>8}{'exact ms':>10}{'lossy ms':>10}{'gain %':>8}{'left out %':>12}"
    for row in rows:
        if "exact" in row:
            continue
        yield (
            f"{row['rate_bps'] / 1e6:>7g}{row['elements']:>10,}{100 * row['loss']:>8g}{1e3 * row['exact_s']:>10.1f}"
            f"{1e3 * row['lossy_s']:>10.1f}{100 * row['gain']:>8.1f}{100 * row['left_out']:>12.2f}"
            f"{'' if row['right'] else '  WRONG SUM'}"
        )
    for row in (row for row in rows if "exact" in row):
        for kind in KINDS:
            own = row[kind]
            yield (
                f"{row['rate_bps'] / 1e6:>7g} Mbit/s, {kind}: a step takes the others {1e3 * own['step_s']:.1f} ms, "
                f"{1e3 * own['step_with_a_pause_s']:.1f} where one rank pauses for {1e3 * PAUSE_S:g} ms, at most "
                f"{1e3 * own['longest_step_s']:.1f}; {own['skipped_by_the_late_rank']} steps of the late rank computed nothing"
                f"{'' if own['same_bits'] else '  DIFFERENT BITS'}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[200], help="of every link, in Mbit/s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--unprivileged", action="store_true", help="in user namespaces")
    parser.add_argument("--json", action="store_true", help="one record a line")
    args = parser.parse_args()
    rows = [record for rate in args.rates for record in records(1e6 * rate, *run(1e6 * rate, args))]
    for line in map(json.dumps, [*rows, {"host": host_facts()}]) if args.json else table(rows):
        print(line)
    if not all(
        row.get("right", True) and all(row[k]["same_bits"] for k in KINDS if k in row) for row in rows
    ):
        sys.exit("a sum was wrong")


if __name__ == "__main__":
    main()
