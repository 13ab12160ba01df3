"""`tacit sim paper wrht`: a paper's reported numbers beside ours, which settings give which, and how far off the rest is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tacit.cli.sim import common
from tacit.errors import ConfigError
from tacit.registry import unknown_name
from tacit.units import time_text

LIGHT = {"ring": "Ring", "h_ring": "H-Ring", "bt": "BT"}
WIRES = {"e_ring": "E-Ring", "rd": "RD"}
RATES = {"40 GB/s": "40 GB/s (320 Gbit/s)", "40 Gbit/s": "5 GB/s (40 Gbit/s)", "": ""}
WRITTEN = {"40 GB/s": ", assumed", "40 Gbit/s": ", as written", "": ""}


def add_parser(actions: Any) -> None:
    parser = common.parser(
        actions,
        "paper",
        "a paper's reported numbers beside ours, both unit readings, and the distance where they differ",
        "tacit sim paper wrht --figures runs/wrht",
    )
    parser.add_argument("paper", metavar="PAPER", help="wrht")
    parser.add_argument(
        "--figures", type=Path, metavar="DIR", help="folder to write the paper's figures into"
    )
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from tacit.sim.studies.papers import wrht, write_figures

    if args.paper != "wrht":
        raise unknown_name("paper", args.paper, ["wrht"])
    if args.figures is not None and args.figures.exists() and not args.figures.is_dir():
        raise ConfigError(f"--figures {args.figures}: this is a file; name a folder")
    with common.waiting("costing every reading"):
        data = wrht()
    paths: list[Path] = []
    if args.figures is not None:
        try:
            paths = write_figures(data, args.figures)
        except OSError as cause:
            raise ConfigError(f"--figures {args.figures}: cannot write there ({cause.strerror})") from cause
    if args.json:
        common.print_json(data | {"figures": [str(path) for path in paths]})
    else:
        _print(data)
        for path in paths:
            print(path)
    return 0


def _print(data: dict[str, Any]) -> None:
    out = common.console()
    print(f"{data['paper']}: by how many per cent WRHT's communication time is below each other's")
    _print_reductions(out, data)
    _print_stages(out, data["stages"])
    _print_times(out, data["times"])
    for note in data["notes"]:
        print(f"- {note}")


def _print_reductions(out: Any, data: dict[str, Any]) -> None:
    reported, later, first = data["reported_percent"], data["later"], data["first"]
    rows = [_reported("later (2023-02), reported", reported["later (2023-02)"])]
    for reading in later["readings"]:
        rows.append(_ours(f"  {reading['label']}", reading))
    rows.append(_ours("  electrical", later["electrical"]))
    rows.append(_reported("first (2022-07), reported", reported["first (2022-07)"]))
    for place, reading in enumerate(first["nearest"]):
        rows.append(
            _ours(
                f"  nearest of {first['readings_tried']:,} readings"
                if not place
                else f"  nearest, number {place + 1}",
                reading,
            )
        )
    rows.append(_ours("  electrical", first["electrical"]))
    heads = ["", *LIGHT.values(), *WIRES.values(), "distance\n(points)", "rate of a\nwavelength", "fitted"]
    common.print_table(out, heads, rows, left=(0, 7, 8))
    poster, ours = reported["poster"], data["poster"]["ours"]
    print(
        f"poster: {poster['optical']} and {poster['electrical']} reported, {ours['optical']:.2f} and {ours['electrical']:.2f} here: "
        f"{data['poster']['is']}"
    )
    print(f"first set: {first['says']}.")
    for key in ("nodes", "models", "wavelengths", "all_to_all", "h_ring_group", "mean"):
        value = first["nearest"][0]["settings"][key]
        print(f"  {key:<14}{', '.join(map(str, value)) if isinstance(value, list | tuple) else value}")
    print()


def _reported(name: str, numbers: dict[str, float]) -> list[str]:
    return [name, *(f"{numbers[key]:g}" if key in numbers else "" for key in (*LIGHT, *WIRES)), "", "", ""]


def _ours(name: str, reading: dict[str, Any]) -> list[str]:
    numbers = [f"{reading['ours'][key]:.2f}" if key in reading["ours"] else "" for key in (*LIGHT, *WIRES)]
    unit = reading["settings"].get("rate", "")
    rate = RATES[unit] + WRITTEN[unit]
    fitted = ", ".join(reading.get("fitted", ())) or "-"
    return [name, *numbers, f"{reading['distance_points']:.2f}", rate, fitted]


def _print_stages(out: Any, rows: list[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        plain, direct = row["wrht"], row["wrht_all_to_all"]
        others = [f"{row[name]['stages']:,}" for name in LIGHT]
        light = [
            str(plain["wavelengths"]),
            str(direct["stages"]),
            str(direct["wavelengths"]),
            f"{plain['hops']:,}",
        ]
        cells.append([f"{row['world']:,}", *others, str(plain["stages"]), *light])
    heads = [
        "nodes",
        *LIGHT.values(),
        "WRHT",
        "its wavelengths",
        "with\nall-to-all",
        "its wavelengths",
        "longest\npath (hops)",
    ]
    common.print_table(out, heads, cells, left=(5, 7), title="stages")


def _print_times(out: Any, rows: list[dict[str, Any]]) -> None:
    names = [*LIGHT, "wrht", "wrht_all_to_all"]
    cells = [
        [
            row["model"],
            f"{row['world']:,}",
            RATES[row["rate"]],
            *(time_text(row[f"{name}_s"]) for name in names),
        ]
        for row in rows
    ]
    heads = ["model", "nodes", "rate of a\nwavelength", *LIGHT.values(), "WRHT", "WRHT with\nall-to-all"]
    common.print_table(out, heads, cells, left=(0, 2), title="times of one all-reduce, both unit readings")
