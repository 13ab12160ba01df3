"""The gain of hot rows added in the network over plain shards: over the number of servers, and over the skew."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from tacit.extras import extra
from tacit.sim.drawing.pictures import INK, STYLE
from tacit.sim.popularity import ZIPF_ROWS, Popularity, zipf
from tacit.sim.rows import PAYS_FROM, RowsJob, gain_on_ranks, gains

with extra("report"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SKEWS = (0.7, 0.9, 1.05, 1.2)
_STEPS = 16  # numbers of hot rows in a doubling: powers of two alone make a saw-tooth
_COLOURS = ("#4477cc", "#2fa8c9", "#2f9e62", "#c9a227", "#e07b39", "#c4517f")


def draw_gain(popularity: Popularity, job: RowsJob) -> Figure:
    """Two panels: a line for every skew over servers, a line for every number of servers over skew; `popularity` is dashed."""
    style = STYLE | {"axes.spines.left": True, "axes.grid": True, "grid.alpha": 0.15, "grid.color": INK}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9.4, 3.9), layout="constrained")
        over_servers, over_skew = figure.subplots(1, 2, sharey=True)
        _over_servers(over_servers, popularity, job)
        _over_skew(over_skew, popularity, job)
        over_servers.set_ylabel("plain shards' time over that with the best H")
        for axes in (over_servers, over_skew):
            axes.axhline(PAYS_FROM, color=INK, lw=0.8, ls=":", alpha=0.6)
            axes.legend(fontsize=7.5)
        figure.suptitle(
            f"gain of hot rows: {job.world:,} ranks, batch {job.batch:,} x {job.features:,}, d = {job.width}",
            fontsize=10,
        )
        return figure


def servers_of(world: int) -> list[int]:
    """1, 2, 4, ... and as many as ranks."""
    return sorted({1 << power for power in range(world.bit_length())} | {world})


def _over_servers(axes: Axes, popularity: Popularity, job: RowsJob) -> None:
    servers = servers_of(job.world)
    for skew, colour in zip(SKEWS, cycle(_COLOURS)):
        axes.plot(
            servers,
            gains(zipf(skew), job, servers, _STEPS),
            color=colour,
            marker="o",
            ms=3,
            lw=1.4,
            label=f"s = {skew:g}",
        )
    axes.plot(
        servers, gains(popularity, job, servers, _STEPS), color=INK, ls="--", lw=1.2, label=_short(popularity)
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(servers, [f"{count:,}" for count in servers])
    axes.set_xlabel(
        "servers, each with a link as a rank's" if job.rate_bps == job.server_rate_bps else "servers"
    )


def _over_skew(axes: Axes, popularity: Popularity, job: RowsJob) -> None:
    skews = [float(skew) for skew in np.linspace(0.5, 1.4, 19)]
    laws = [zipf(skew) for skew in skews]
    servers = servers_of(job.world)
    found = np.array([gains(law, job, servers, _STEPS) for law in laws])
    for place, (count, colour) in enumerate(zip(servers, cycle(_COLOURS))):
        some = "1 server" if count == 1 else f"{count:,} servers"
        axes.plot(skews, found[:, place], color=colour, lw=1.4, label=some)
    axes.plot(
        skews,
        [gain_on_ranks(law, job, _STEPS) for law in laws],
        color=INK,
        lw=1.2,
        label="a shard on every rank",
    )
    if popularity.skew is not None:
        here = gains(popularity, job, [job.servers], _STEPS)
        axes.plot(
            [popularity.skew],
            here,
            color=INK,
            marker="D",
            ms=4,
            ls="",
            label=f"{_short(popularity)}, S = {job.servers:,}",
        )
    axes.set_xlabel("skew s of a Zipf law over 5 million rows")


def _short(popularity: Popularity) -> str:
    return (
        popularity.text.rpartition("/")[2]
        .replace(f", rows={ZIPF_ROWS}", "")
        .replace(f"(rows={ZIPF_ROWS})", "")
    )
