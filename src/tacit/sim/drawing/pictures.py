"""What all pictures of the simulator share: ink that follows the reader's light or dark page, a heading, the file.

A figure is drawn with INK wherever the text's own colour is meant; in .svg and .html it becomes `currentColor`.
"""

from __future__ import annotations

import html
import io
import re
import textwrap
from typing import Any

import numpy as np

from tacit.errors import ConfigError
from tacit.extras import extra
from tacit.schedules.schedule import Schedule
from tacit.sim.fabric import Fabric
from tacit.topology import Ints, Network

with extra("report"):
    import matplotlib
    from matplotlib.figure import Figure

INK = "#010203"  # stands for the reader's text colour, light or dark
GREY = "#73737c"  # a node that takes part; one that does not is a shadow of the ink
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tacit",  # the same picture is the same file
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "legend.frameon": False,
}


def render(figure: Figure, suffix: str, title: str) -> bytes:
    """The figure as a file of that kind: .svg and .html follow the reader's light or dark colours, .png is on white."""
    check_suffix(suffix)
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        if suffix == ".png":
            figure.savefig(file, format="png", dpi=160, facecolor="white")
            return file.getvalue()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", text)  # hundredths of a point are enough, in half the bytes
    text = re.sub(r' transform="rotate\(-0 [^"]*"|\n(?=L |z|")', "", text)
    text = text.replace(INK, "currentColor").replace("xlink:href", "href")
    name = f"<title>{html.escape(title)}</title>"
    colours = "<style>:root{color:#1b1b1f}@media(prefers-color-scheme:dark){:root{color:#e6e6ea}}</style>"
    text = re.sub(r"(<svg [^>]*>)", rf"\1{name}{colours if suffix == '.svg' else ''}", text, count=1)
    return (_page(text, title) if suffix == ".html" else text).encode()


def check_suffix(suffix: str) -> None:
    if suffix not in (".svg", ".html", ".png"):
        raise ConfigError(
            f"a picture is written as .svg, .html or .png, not as {suffix or 'a file without an ending'!r}"
        )


def _page(svg: str, title: str) -> str:
    svg = re.sub(
        r'(<svg [^>]*?)width="[^"]*"',
        r"\1",
        re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1),
        count=1,
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width"><style>:root{color-scheme:light dark}'
        "body{margin:2rem auto;max-width:80rem;padding:0 1rem;font:16px system-ui,sans-serif}svg{width:100%;height:auto}"
        f"</style>{svg}</html>\n"
    )


def heading(figure: Figure, title: str, schedule: Schedule, fabric: Fabric | None, more: str = "") -> None:
    width_in, height_in = figure.get_size_inches()
    title = f"{title} among {schedule.world:,} ranks{more}"
    figure.text(0.2 / width_in, 1 - 0.25 / height_in, title, fontsize=12, weight="bold", va="center")
    if fabric is not None:
        words = "\n".join(textwrap.wrap(fabric.text, int(width_in * 17)))
        figure.text(0.2 / width_in, 1 - 0.4 / height_in, words, fontsize=7.5, va="top", alpha=0.7)


def places(schedule: Schedule, network: Network | None, aggregators_on: str) -> Ints:
    """The node of the picture for every node of the schedule; what has no room was refused when it was costed."""
    if network is None:
        return np.arange(schedule.nodes)
    if aggregators_on in ("switches", "hosts"):
        first = len(network.hosts) if aggregators_on == "switches" else schedule.world
        others = first + np.arange(schedule.aggregators)
    else:
        others = np.full(schedule.aggregators, network.node(aggregators_on))
    return np.concatenate([np.arange(schedule.world), others])
