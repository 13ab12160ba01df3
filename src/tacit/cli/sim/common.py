"""What the actions of `tacit sim` share: options, tables, files that are there whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.errors import ConfigError
from tacit.units import parse_size, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from tacit.schedules import Schedule
    from tacit.sim.fabric import Fabric
    from tacit.sim.workloads import Workload

MOST_NBYTES = 10**18
ON_HELP = "network: star(rate=10Gbit, latency=5us), optical(wavelengths=64, rate=40GB/s, setup=25us), ... or a .toml file"


def parser(actions: Any, name: str, help_: str, example: str) -> argparse.ArgumentParser:
    """A parser for one action, with its example."""
    made: argparse.ArgumentParser = actions.add_parser(
        name,
        help=help_,
        description=help_[0].upper() + help_[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for action in (None, "store"):  # before any option is added: both stand for the same action
        made.register("action", action, Once)
    return made


class Once(argparse._StoreAction):
    """Stores an option's value, and refuses to be given another; argparse would silently take the last."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given: set[str] = namespace.__dict__.setdefault("_given", set())
        if option_string is not None and self.dest in given:
            parser.error(f"{option_string} is given twice; keep one of them")
        given.add(self.dest)
        super().__call__(parser, namespace, values, option_string)


def add_json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_where(made: argparse.ArgumentParser, *, on: str | None = None, needed: bool = True) -> None:
    """--on, --world, --stripe, --aggregators-on."""
    default = f" (default {on})" if on else ""
    made.add_argument(
        "--on", metavar="NETWORK", default=on, required=needed and on is None, help=ON_HELP + default
    )
    made.add_argument("--world", metavar="N", help="ranks (default: as many as the network has hosts)")
    add_use(made)


def add_use(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--stripe", action="store_true", help="spread transfers over idle wavelengths (optical)"
    )
    made.add_argument(
        "--aggregators-on",
        metavar="WHERE",
        default="switches",
        help="where nodes that only add sit: switches (default), hosts, or the name of a node",
    )


def add_vector(made: argparse.ArgumentParser, *, needed: bool = True) -> None:
    """--size or --model."""
    vector = made.add_mutually_exclusive_group(required=needed)
    vector.add_argument("--size", help="bytes of the vector, with a unit: 552MB")
    vector.add_argument(
        "--model", help="or a model's float32 gradients: VGG16 (see tacit sim models), a .json, module:name"
    )


def vector_of(args: argparse.Namespace) -> tuple[int, str]:
    """The bytes of the vector, and what they are."""
    if args.size is not None:
        nbytes = size_of(args.size, "--size")
        return nbytes, size_text(nbytes)
    work = model_of(args.model)
    nbytes = 4 * work.parameters
    return nbytes, f"{size_text(nbytes)} ({work.parameters:,} float32 parameters of {work.name})"


def model_of(text: str, **options: Any) -> Workload:
    """The workload that `text` names; a torch model that comes with inputs is timed here and now."""
    from tacit.sim.texts import parse_model

    def record(model: Any, inputs: Sequence[Any], name: str) -> Workload:
        from tacit.plan import record_workload  # imports torch

        return record_workload(model, inputs, name=name)

    return parse_model(text, record=record, **options)


def size_of(text: str, option: str) -> int:
    """The bytes that an option gives."""
    nbytes = parse_size(text)
    if not 1 <= nbytes <= MOST_NBYTES:
        raise ConfigError(f"{option} {text}: give 1B or more, up to {size_text(MOST_NBYTES)}")
    return nbytes


def fabric_of(args: argparse.Namespace, world: int | None) -> Fabric:
    from tacit.sim.fabric import parse_fabric

    return parse_fabric(args.on, world, stripe=args.stripe, aggregators_on=args.aggregators_on)


def schedules_on(args: argparse.Namespace, texts: Sequence[str]) -> tuple[list[Schedule], Fabric]:
    """The schedules and the network they are costed on; ranks are those of --world, else of a file, else of the network."""
    from tacit.schedules import load
    from tacit.sim.texts import parse_schedule, parse_world

    world = parse_world(args.world)
    own = [load(text) for text in texts if text.endswith((".json", ".toml"))]
    if world is None and own:
        world = own[0].world
    fabric = fabric_of(args, world)
    world = fabric.nodes if world is None else world
    return [parse_schedule(text, world, fabric.ring) for text in texts], fabric


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False))


def some(count: int, noun: str) -> str:
    """`1 chunk`, `1,024 chunks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


@contextmanager
def waiting(for_what: str) -> Iterator[None]:
    """A spinner on a terminal while something takes seconds; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(for_what):
        yield


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Prints a line for each name and its text, the texts aligned."""
    width = max(len(name) for name, _ in facts) + 2
    for name, text in facts:
        print(f"{name:<{width}}{text}".rstrip())


def print_table(
    out: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Sequence[int] = (0,),
    title: str | None = None,
) -> None:
    """A table; columns are right-aligned but for `left`."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, head in enumerate(heads):
        at_left = place in left
        table.add_column(head, justify="left" if at_left else "right", no_wrap=not at_left, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    out.print(table)


def write_whole(path: Path, data: str | bytes) -> None:
    """The file at once: nothing half-written is ever at `path`."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data.encode() if isinstance(data, str) else data)
        part.replace(path)
    except OSError as cause:
        with suppress(OSError):
            part.unlink()
        raise ConfigError(
            f"{path}: cannot be written ({cause.strerror}); name a file in a folder of yours"
        ) from cause
