"""`tacit sim step`: the time of a training step, with what hides behind the backward pass and what does not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.cli.sim import common, models
from tacit.units import parse_time, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tacit.schedules import Schedule
    from tacit.sim.fabric import Fabric
    from tacit.sim.overlap import CodecCost, StepTime
    from tacit.sim.payloads import PayloadSize


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "step",
        "the time of a training step, the exchange overlapped with the backward pass",
        "tacit sim step --model VGG16 --on 'star(rate=10Gbit, latency=5us)' --world 16 --schedule ring --bucket 25MB --codec hush",
    )
    parser.add_argument(
        "--model", required=True, help="VGG16 (see tacit sim models), a .json of recorded layers, module:name"
    )
    parser.add_argument(
        "--schedule", default="ring", help="a name, name(option=value), or a file (default ring)"
    )
    common.add_where(parser)
    parser.add_argument(
        "--bucket", default="25MiB", help="bytes of gradients that travel together (default 25MiB, as DDP)"
    )
    parser.add_argument(
        "--codec", help="encode it with a codec, as in a strategy: hush, bf16 (this imports torch)"
    )
    parser.add_argument(
        "--encode", default="0ns", help="the codec's time an element to encode: 0.5ns (default 0ns)"
    )
    parser.add_argument("--decode", default="0ns", help="and to decode (default 0ns)")
    parser.add_argument(
        "--slowest",
        type=float,
        default=1.0,
        help="how many times as long the slowest rank computes (default 1)",
    )
    models.add_compute(parser)
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="write the step's timeline: .svg, .html or .png"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.sim.overlap import DDP_FIRST_BUCKET_NBYTES, step_time

    bucket_nbytes = common.size_of(args.bucket, "--bucket")
    work = common.model_of(args.model, **models.compute_of(args))
    (schedule,), fabric = common.schedules_on(args, [args.schedule])
    fabric.prove(schedule)
    codec, transfer_s = _codec(args, schedule, fabric)
    first_nbytes = min(bucket_nbytes, DDP_FIRST_BUCKET_NBYTES)
    step = step_time(
        work,
        transfer_s,
        codec=codec,
        bucket_nbytes=bucket_nbytes,
        first_bucket_nbytes=first_nbytes,
        slowest=args.slowest,
    )
    if args.draw is not None:
        from tacit.sim.drawing.pictures import render
        from tacit.sim.drawing.timelines import draw_step

        common.write_whole(
            args.draw, render(draw_step(step), args.draw.suffix, title=f"{work.name}: one step")
        )
    if args.json:
        about = {
            "schedule": args.schedule,
            "world": schedule.world,
            "network": fabric.as_record(),
            "codec": args.codec,
        }
        common.print_json(about | {"source": work.source} | step.as_record())
    else:
        _print(args, step, fabric, schedule, work.source)
    return 0


def _codec(
    args: argparse.Namespace, schedule: Schedule, fabric: Fabric
) -> tuple[CodecCost, Callable[[int], float]]:
    """What the codec makes of a bucket, and how long its payloads take; sizes are remembered, since the times are looked up by size."""
    from tacit.sim.overlap import CodecCost
    from tacit.sim.payloads import costs, of_codec, plain

    asked: dict[int, tuple[PayloadSize, ...]] = {}

    def nbytes(elements: int) -> int:
        payloads = plain(4 * elements) if args.codec is None else of_codec(args.codec, elements, schedule)
        total = round(sum(payload.up_nbytes for payload in payloads))
        asked[total] = payloads
        return total

    def transfer_s(total: int) -> float:
        return sum(cost.time_s for cost in costs(schedule, asked[total], fabric))

    return CodecCost(nbytes, parse_time(args.encode), parse_time(args.decode)), transfer_s


def _print(args: argparse.Namespace, step: StepTime, fabric: Fabric, schedule: Schedule, source: str) -> None:
    compute_s = step.forward_s + step.backward_s
    payload = sum(bucket.nbytes for bucket in step.buckets)
    out = common.console()
    codec = f"{args.codec}: {time_text(step.codec_s)} in all" if args.codec else "none: float32"
    if args.codec and not step.codec_s:
        codec = f"{args.codec}: its own time is not counted; give --encode and --decode"
    hidden_s = step.transfer_s + step.codec_s - step.exposed_s
    facts = [
        ("model", f"{step.workload}, times {source}"),
        ("schedule", f"{args.schedule} among {schedule.world:,} ranks"),
        ("on", fabric.text),
        ("codec", codec),
        ("", ""),
        (
            "step",
            f"{time_text(step.step_s)}, {step.step_s / compute_s:.3g}x of its computation"
            if compute_s
            else time_text(step.step_s),
        ),
        (
            "computation",
            f"{time_text(compute_s)}: forward {time_text(step.forward_s)}, backward {time_text(step.backward_s)}",
        ),
        ("exchange", f"{time_text(step.transfer_s)} for {size_text(payload)} in {len(step.buckets)} buckets"),
        ("hidden", f"{time_text(max(0.0, hidden_s))} of it, behind the backward pass"),
        ("exposed", time_text(step.exposed_s)),
    ]
    common.print_facts(facts)
    sent = {event.name: event for event in step.events if event.kind == "transfer"}
    rows = []
    for index, bucket in enumerate(step.buckets):
        event, layers = sent[f"bucket {index}"], bucket.layers
        held = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        times_s = (bucket.ready_s, event.start_s, event.stop_s)
        rows.append(
            [str(index), held, f"{bucket.elements:,}", size_text(bucket.nbytes), *map(time_text, times_s)]
        )
    common.print_table(
        out, ["bucket", "layers", "elements", "payload", "ready", "sent from", "to"], rows, left=(1,)
    )
