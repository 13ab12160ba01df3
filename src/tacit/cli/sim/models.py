"""`tacit sim models`: what there is to exchange and to compute in a step."""

from __future__ import annotations

import argparse
from typing import Any

from tacit.cli.sim import common
from tacit.units import size_text, time_text


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "models",
        "known models: parameters, layers, estimated times of a step",
        "tacit sim models --batch 64",
    )
    add_compute(parser)
    common.add_json(parser)


def add_compute(parser: argparse.ArgumentParser) -> None:
    """--batch, --flops, --efficiency: what a step's computation is estimated from."""
    parser.add_argument("--batch", type=int, default=32, help="samples a step on a rank (default 32)")
    parser.add_argument(
        "--flops", type=float, default=125e12, help="flop/s of the device (default 125e12: a V100's fp16)"
    )
    parser.add_argument(
        "--efficiency", type=float, default=0.4, help="share of it that is reached (default 0.4)"
    )


def compute_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"batch": args.batch, "flops_per_s": args.flops, "efficiency": args.efficiency}


def run(args: argparse.Namespace) -> int:
    from tacit.sim.workloads import MODELS, workload

    works = [workload(name, **compute_of(args)) for name in MODELS]
    if args.json:
        rows = [
            {"model": w.name, "parameters": w.parameters, "nbytes": 4 * w.parameters, "layers": len(w.layers)}
            | {"forward_s": w.forward_s, "backward_s": w.backward_s, "source": w.source}
            for w in works
        ]
        common.print_json(rows)
        return 0
    out = common.console()
    rows_ = [
        [
            w.name,
            f"{w.parameters:,}",
            size_text(4 * w.parameters),
            str(len(w.layers)),
            time_text(w.forward_s),
            time_text(w.backward_s),
        ]
        for w in works
    ]
    common.print_table(
        out, ["model", "parameters", "float32\ngradients", "layers", "forward", "backward"], rows_
    )
    out.print(f"Sizes are computed from the architecture; times are {works[0].source}.", style="dim")
    return 0
