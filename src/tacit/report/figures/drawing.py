"""How every figure is drawn: SVG text that takes its ink from the page, so one drawing reads well in light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tacit.extras import extra
from tacit.report.text import short, slug

with extra("report"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"  # stands for the page's own text colour; no colour below comes near it
# Mid-tones, distinct by lightness as well as hue (after Paul Tol's "bright" and "muted" sets).
COLOURS = ("#8c8c8c", "#4477cc", "#2fa8c9", "#2f9e62", "#c9a227", "#e07b39", "#c4517f", "#8f6bc0")
WIDTH_IN = 4.4  # narrow enough for a phone to show the text at its own size
SPACED = 0.27  # of a bar's place, from its middle up to its name

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, in the page's font
    "svg.hashsalt": "tacit",  # the same records give the same page
    "text.parse_math": False,  # a $ in a name is a $
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "grid.color": INK,
    "legend.frameon": False,
}


@contextmanager
def canvas(height_in: float) -> Iterator[Figure]:
    """An empty figure of the page's width, in the page's style while the block lasts."""
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, in order: the first is grey, so it should be the baseline."""
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(dict.fromkeys(names))}


def name_bars(axes: Axes, names: Sequence[str], labels: Sequence[str]) -> None:
    """Names and figures stand above the bars, not beside them: a phone has no room for both."""
    across = axes.get_yaxis_transform()
    for place, (name, label) in enumerate(zip(names, labels, strict=True)):
        axes.text(0, place - SPACED, short(name), fontsize=9, transform=across)
        axes.text(1, place - SPACED, label, fontsize=9, transform=across, ha="right")
    axes.set_ylim(len(names) - 0.5, -0.75)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)


def legend(figure: Figure, **options: Any) -> None:
    figure.legend(loc="outside lower left", fontsize=8.5, labelspacing=0.25, **options)


def svg(figure: Figure, name: str) -> str:
    """The figure as an `<svg>` element: no prologue, no metadata, ids made unique by `name`."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{slug(name)}-", text)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg role="img" viewBox="\1">', text, count=1)
    return text.replace("xlink:href", "href")  # HTML knows no xlink prefix


def standalone(drawn: str) -> str:
    """An `<svg>` element of the page as a file of its own, which follows light and dark by itself."""
    style = (
        "<style>svg { color: #1c1e21; font-family: system-ui, sans-serif } text { font-family: inherit !important } "
        "@media (prefers-color-scheme: dark) { svg { color: #e3e5e8 } }</style>"
    )
    head = '<svg xmlns="http://www.w3.org/2000/svg" role="img"'
    return re.sub(r'<svg role="img"([^>]*>)', rf"{head}\g<1>{style}", drawn, count=1)
