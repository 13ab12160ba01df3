"""Tables that stay readable where lines are not a terminal's: in a file or a pipe they are as wide as they need to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_table(table: Table, console: Console | None = None) -> None:
    """On a terminal of its width, with long cells on several lines; elsewhere unbroken, a row a line."""
    from rich.console import Console
    from rich.measure import Measurement

    console = console or Console(highlight=False)
    if not console.is_terminal:
        natural = Measurement.get(console, console.options.update_width(10_000), table).maximum
        console = Console(file=console.file, width=natural, highlight=False)
    console.print(table)
