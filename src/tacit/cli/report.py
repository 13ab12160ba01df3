"""`tacit report RUN...`: records in, one page out; beside it, where asked, JSON, CSV and the figures as files."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import ConfigError

if TYPE_CHECKING:
    from tacit.report.model.tables import TableRow


def add_parser(subparsers: Any) -> None:
    """Adds `report` and its options to the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="make one HTML page of what runs recorded",
        description="Makes one self-contained HTML page of the last run in each record file: the verdict first, then "
        "time to accuracy, step times, bytes, limits and the command to run it again.",
        epilog="example:\n  tacit report runs/thc --out docs/thc.html --figures docs/images",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a record file (JSONL), or a run's folder"
    )
    parser.add_argument(
        "--out", type=Path, help="the page to write (default: report.html beside the first RUN)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all tables as JSON, and write them beside the page"
    )
    parser.add_argument("--csv", action="store_true", help="write each table as a CSV file beside the page")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write each figure there as an SVG file")


def run(args: argparse.Namespace) -> int:
    """Reads, builds, and only then writes: all files or none."""
    from tacit.report.model import runs
    from tacit.report.pages.files import write_all

    loaded = runs.load(args.runs)
    out = _out(args, [Path(run.path) for run in loaded])

    from tacit.report.pages.page import compose

    report = compose(loaded)
    files = {out: report.html}
    values = {**report.as_dict(), "report": str(out)}
    if args.json:
        files[out.with_suffix(".json")] = json.dumps(values, indent=1) + "\n"
    if args.csv:
        files |= {out.with_name(f"{out.stem}-{name}.csv"): _csv(rows) for name, rows in report.tables.items()}
    if args.figures:
        files |= {args.figures / f"{name}.svg": svg for name, svg in report.figures.items()}
    write_all(files)
    for note in (note for run in loaded for note in run.notes):
        print(f"tacit: {note}", file=sys.stderr)
    print(json.dumps(values) if args.json else _closing_lines(report.verdicts, list(files)))
    return 0


def _out(args: argparse.Namespace, inputs: list[Path]) -> Path:
    """Where the page goes; refused before any work where it cannot."""
    first: Path = args.runs[0]
    out: Path = args.out or (first if first.is_dir() else first.parent) / "report.html"
    if out.is_dir():
        raise ConfigError(f"--out {out}: this is a folder; name the page, for example {out / 'report.html'}")
    if out.suffix not in (".html", ".htm"):
        raise ConfigError(f"--out {out}: the page is HTML; name it {out.with_suffix('.html')}")
    if args.figures and args.figures.exists() and not args.figures.is_dir():
        raise ConfigError(f"--figures {args.figures}: this is a file; name a folder")
    if out.resolve() in {path.resolve() for path in inputs}:
        raise ConfigError(f"--out {out}: this is one of the runs; name another file")
    return out


def _csv(rows: list[TableRow]) -> str:
    """Rows as CSV: a value for each run becomes a column for each, lists and the like become JSON."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _flat(row: TableRow) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{name} {key}": item for key, item in value.items()}
        elif not isinstance(value, list):  # curves stay in the JSON
            flat[name] = value
    return flat


def _closing_lines(verdicts: dict[str, list[str]], files: list[Path]) -> str:
    summary = "\n".join(
        f"{f'{name}: ' if len(verdicts) > 1 else ''}{sentence}"
        for name, sentences in verdicts.items()
        for sentence in sentences
    )
    more = f" (and {len(files) - 1} files more)" if len(files) > 1 else ""
    return f"{summary}\n\nreport   {files[0]}{more}"
