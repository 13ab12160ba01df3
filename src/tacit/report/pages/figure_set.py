"""The figures of one page, each under a name of its own: ids stay unique, and `--figures` knows what to call a file."""

from __future__ import annotations

from collections.abc import Callable

from tacit.report.figures import drawing
from tacit.report.pages import html
from tacit.report.text import slug


class FigureSet:
    """The figures drawn so far, by name."""

    def __init__(self) -> None:
        self.drawn: dict[str, str] = {}

    def show(self, words: tuple[str, ...], draw: Callable[[str], str], caption: str) -> str:
        """The `<figure>` that `draw` makes under the name of these words; it is kept for the files."""
        base = name = slug(*words)
        while name in self.drawn:
            name = f"{base}-{sum(known.startswith(base) for known in self.drawn) + 1}"
        self.drawn[name] = draw(name)
        return html.figure(self.drawn[name], caption)

    def files(self) -> dict[str, str]:
        """Each figure as the text of an SVG file."""
        return {name: drawing.standalone(drawn) for name, drawn in self.drawn.items()}
