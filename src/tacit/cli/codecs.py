"""`tacit codecs`: `list` the codecs there are, `table` of all methods with papers and costs, `check` whether each keeps its contract."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.requests import Codec
    from tacit.testing import Finding

DEFAULT = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8(rounding=nearest)",
    "int4",
    "int4(rounding=nearest)",
    "fp8",
    "natural",
    "qsgd",
    "terngrad",
    "terngrad(clip=0)",
    "onebit",
    "sign",
    "signsgd",
    "twobit",
    "thc",
    "hush",
    "topk",
    "topk > int8",
    "topk(0.001, chunk=bucket) > none",
    "threshold(0.1)",
    "randomk",
    "randomk(0.5, unbiased=True)",
    "randomk(0.05) > hush",
    "gtopk(0.01)",
    "scalecom",
    "omnireduce(16)",
    "dgc",
    "lowrank(2)",
    "lowrank(2, p=hush, q=hush, rest=hush)",
    "ef(bf16)",
    "ef(int8)",
    "ef(int4(rounding=nearest))",
    "ef(hush)",
    "ef(sign)",
    "ef(sign, decay=0.8)",
    "ef(twobit)",
    "ef(topk, decay=0.95)",
    "ef(topk > int8)",
    "ef21(topk)",
    "ef(gtopk(0.01))",
    "ef(scalecom)",
    "dct",
    "dct > bf16",
    "ef(dct, decay=0.999)",
    "exact(ef(sign), until=1000)",
)


def add_parser(subparsers: Any) -> None:
    """Adds the verb to the command's parser."""
    parser = subparsers.add_parser(
        "codecs",
        help="list the codecs, compare all methods in a table, or check what codecs claim",
        epilog="example: tacit codecs check 'ef(int4(block=64))'",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser(
        "list", help="every codec, its wire and its claims", epilog="example: tacit codecs list"
    )
    table = actions.add_parser(
        "table",
        help="every method: paper, formula, bits, error on real gradients, cost, and what carries it",
        epilog="example: tacit codecs table --markdown > docs/codecs.md",
    )
    form = table.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of tables")
    form.add_argument("--markdown", action="store_true", help="print the page docs/codecs.md")
    table.add_argument(
        "--static",
        action="store_true",
        help="only what needs no measuring (with --markdown: without its title)",
    )
    checked = actions.add_parser(
        "check",
        help="hold codecs to what they claim; exit code 1 if one lies",
        epilog="example: tacit codecs check 'int8(block=512)'   or   tacit codecs check mypackage.mymodule:MyCodec",
    )
    checked.add_argument("name", nargs="?", help="a codec as in a strategy, or module:Class; default: all")
    for action in (listed, checked):
        action.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0, or 1 if a codec breaks a rule."""
    if args.action == "table":
        return _table(args)
    return _list(args.json) if args.action == "list" else _check(args.name, args.json)


def _list(as_json: bool) -> int:
    from rich.table import Table

    from tacit.cli.wide import print_table
    from tacit.layout import Layout
    from tacit.requests import declared_nbytes
    from tacit.shapes import requests_of
    from tacit.strategy import default_scheme, parse_codec

    matrix = Layout.of({"matrix": (1024, 1024)})
    rows = []
    for text in DEFAULT:
        codec = parse_codec(text)
        traits = codec.traits
        claims = [
            name
            for name in ("summable", "unbiased", "contracting", "remembers", "varies")
            if getattr(traits, name)
        ]
        bits = down = 8 * declared_nbytes(codec, matrix) / matrix.numel
        if traits.lanes is not None:
            asked = requests_of(codec, matrix.numel, 4, matrix)
            down = 8 * sum(each.down_nbytes for each in asked) / matrix.numel
        rows.append(
            {
                "codec": str(codec),
                "bits": bits,
                "bits_down": down,
                "scheme": str(default_scheme(codec)),
                "claims": ", ".join(claims),
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    table = Table(
        "codec",
        "bits up",
        "down",
        "default scheme",
        "claims",
        caption="bits an element of a 1024 x 1024 matrix; down: among 4 ranks",
    )
    for row in rows:
        table.add_row(
            str(row["codec"]),
            f"{row['bits']:.4g}",
            f"{row['bits_down']:.4g}",
            str(row["scheme"]),
            str(row["claims"]),
        )
    print_table(table)
    return 0


def _table(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from tacit.cli import codecs_table as methods
    from tacit.cli.wide import print_table

    rows = methods.rows()
    with Console(stderr=True).status("measuring") as status:
        measured = None if args.static else methods.measure(lambda phase: status.update(phase))
    if args.json:
        print(json.dumps(methods.as_json(rows, measured), indent=1))
    elif args.markdown:
        print(methods.static_markdown(rows) if measured is None else methods.markdown(rows, measured))
    else:
        parts = [
            ("what it is", methods.what_it_is(rows, lambda method: method.paper), None),
            ("what it sends", methods.what_it_sends(rows), methods.SENDS),
        ]
        if measured is not None:
            parts.append(("what it costs", methods.what_it_costs(rows, measured), methods.costs_note()))
        for title, (heads, cells), note in parts:
            table = Table(*heads, title=title, title_justify="left")
            for row in cells:
                table.add_row(*(cell.replace("[", "\\[") for cell in row))
            print_table(table)
            if note:
                print(note, end="\n\n")
    return 0


def _check(name: str | None, as_json: bool) -> int:
    from rich.progress import track

    from tacit.testing import CHECKS, check

    codecs = [_find(name)] if name else [_find(text) for text in DEFAULT]
    work = [(codec, rule) for codec in codecs for rule in CHECKS]
    bar = track(work, description="checking", transient=True, disable=as_json or not sys.stdout.isatty())
    findings = [finding for codec, rule in bar for finding in check(codec, only=[rule])]
    if as_json:
        print(
            json.dumps(
                {"passed": all(f.passed for f in findings), "findings": [f.as_dict() for f in findings]}
            )
        )
    else:
        _print(findings, [str(codec) for codec in codecs])
    return 0 if all(f.passed for f in findings) else 1


def _print(findings: "list[Finding]", codecs: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tacit.cli.wide import print_table

    table = Table("codec", "rules kept", "NMSE n=4 gauss", "lognormal", "blocky", "identical")
    for codec in codecs:
        own = [f for f in findings if f.codec == codec]
        error = {f.family: f.value for f in own if f.check == "error" and f.world == 4}
        figures = [
            f"{error[k]:.2e}" if error.get(k) is not None else "-"
            for k in ("gauss", "lognormal", "blocky", "identical")
        ]
        table.add_row(codec, f"{sum(f.passed for f in own)} of {len(own)}", *figures)
    print_table(table)
    console = Console()
    for finding in findings:
        if not finding.passed:
            console.print(
                f"[red]broken[/red] {finding.codec}: {finding.check}: {finding.why}", highlight=False
            )


def _find(name: str) -> "Codec":
    """The codec that `name` means; a module is looked for in the working folder too."""
    from importlib import import_module

    from tacit.errors import ConfigError
    from tacit.strategy import parse_codec

    module, colon, member = name.partition(":")
    if not colon:
        return parse_codec(name)
    sys.path.insert(0, "")
    try:
        codec: Codec = getattr(import_module(module), member)()
    except (ImportError, AttributeError, TypeError, ValueError) as cause:
        raise ConfigError(
            f"codec {name!r} cannot be made ({cause}); write module:Class of a class without needed options"
        ) from cause
    if not all(hasattr(codec, part) for part in ("traits", "nbytes", "reduce")):
        raise ConfigError(
            f"{name!r} is no codec: it lacks traits, nbytes or reduce; see docs/write-a-codec.md"
        )
    return codec
