"""`tacit sim draw`: a schedule as a picture, stage by stage, or its links over time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tacit.cli.sim import common
from tacit.errors import ConfigError


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "draw",
        "draw a schedule stage by stage (on an optical ring: every light on its track), or its links over time",
        "tacit sim draw 'wrht(wavelengths=4)' --world 27 --on 'optical(wavelengths=4)' --out wrht.svg\n"
        "  tacit sim draw tree --on 'two_racks(nodes=16, rate=10Gbit, uplink_rate=2.5Gbit)' --timeline --size 100MB --out tree.html",
    )
    parser.add_argument(
        "schedule", metavar="SCHEDULE", help="a name, name(option=value), or a file of your own"
    )
    common.add_where(parser, needed=False)
    parser.add_argument(
        "--timeline", action="store_true", help="links over time; needs --on, and --size or --model"
    )
    common.add_vector(parser, needed=False)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="picture to write: .svg, .html or .png"
    )


def run(args: argparse.Namespace) -> int:
    from tacit.sim.drawing.draw import draw_stages
    from tacit.sim.drawing.pictures import check_suffix, render
    from tacit.sim.texts import parse_schedule, parse_world

    check_suffix(args.out.suffix)
    if args.timeline and (args.on is None or (args.size is None and args.model is None)):
        raise ConfigError("--timeline needs a network and a vector; give --on, and --size or --model")
    if args.on is None:
        fabric, schedule = None, parse_schedule(args.schedule, parse_world(args.world))
    else:
        (schedule,), fabric = common.schedules_on(args, [args.schedule])
        fabric.prove(schedule)
    if fabric is not None and args.timeline:
        from tacit.sim.drawing.timelines import draw_timeline

        figure = draw_timeline(schedule, common.vector_of(args)[0], fabric, title=args.schedule)
    else:
        figure = draw_stages(schedule, fabric, title=args.schedule)
    common.write_whole(
        args.out, render(figure, args.out.suffix, title=f"{args.schedule} among {schedule.world} ranks")
    )
    print(args.out)
    return 0
