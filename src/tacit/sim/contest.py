"""The searched braid against WRHT and the fair baselines, with what nothing can beat beside them: the table of docs/optical.md."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.schedules import Schedule, build
from tacit.schedules.braid import braid
from tacit.schedules.two_way_ring import two_way_ring
from tacit.sim.bounds import lower_bounds
from tacit.sim.cost import Cost
from tacit.sim.optical import cost, rescaled
from tacit.sim.papers import GBIT, GBYTE, MODELS, NAMES, NODES
from tacit.sim.search import search
from tacit.sim.workloads import PAPER_PARAMETERS
from tacit.topology import OpticalRing

_MARKS = ("<!-- contest -->", "<!-- /contest -->")
RIVALS = {
    "wrht": "WRHT",
    "wrht_all_to_all": "WRHT, all-to-all",
    "wrht_striped": "WRHT, both and striped",
    "two_way_ring": "two-way ring, striped",
    "halving_doubling": "halving-doubling, striped",
}


def contest(
    nodes: Sequence[int] = NODES,
    models: Sequence[str] = MODELS,
    rates_bps: Sequence[float] = (GBYTE, GBIT),
    *,
    finalists: int = 8,
) -> Iterator[dict[str, Any]]:
    """A row for every case, in seconds: every rival, the searched braid with its levels and strands, the bound and the ratio to it.

    Yields as it goes: the whole table takes minutes, nearly all of it in the search.
    """
    for world, model, rate_bps in product(nodes, models, rates_bps):
        ring, nbytes = OpticalRing(world, rate_bps=rate_bps), 4 * PAPER_PARAMETERS[model]
        found = search(world, nbytes, ring, finalists=finalists)
        yield {
            "model": NAMES[model],
            "world": world,
            "rate": "40 GB/s" if rate_bps == GBYTE else "40 Gbit/s",
            **{f"{name}_s": rival_s(name, nbytes, ring) for name in RIVALS},
            "braid_s": found.cost.time_s,
            "levels": found.levels,
            "strands": found.strands,
            "stages": found.cost.stage_count,
            "bound_s": found.bounds.combined_s,
            "latency_bound_s": found.bounds.latency_s,
            "node_bound_s": found.bounds.node_s,
            "ratio": found.ratio,
        }


def rival_s(name: str, nbytes: float, ring: OpticalRing) -> float:
    """What a rival takes; light is assigned once for every ring size."""
    return rescaled(
        _unit_cost(name, ring.nodes, ring.wavelengths), nbytes, _unit(ring.nodes, ring.wavelengths), ring
    ).time_s


def with_propagation_s(row: dict[str, Any], hop_s: float) -> dict[str, float]:
    """The case of `row` where light takes `hop_s` from node to node: WRHT, the striped two-way ring, the row's braid."""
    nbytes, ring = _case(row)
    made = {
        "wrht": (_rival("wrht", ring.nodes, ring.wavelengths), False),
        "two_way_ring": (two_way_ring(ring.nodes), True),
        "braid": (braid(ring.nodes, levels=row["levels"], strands=row["strands"]), True),
    }
    return {
        name: cost(schedule, nbytes, ring, stripe=stripe, hop_s=hop_s).time_s
        for name, (schedule, stripe) in made.items()
    }


def standing_ring(row: dict[str, Any]) -> dict[str, float]:
    """The argument against us: a ring's light paths never change. The two-way ring's time if it is set up once and a stage costs
    nothing else, and what a stage may cost (conversion, synchronisation) before it is slower than the row's braid.
    """
    nbytes, ring = _case(row)
    found = cost(two_way_ring(ring.nodes), nbytes, ring, stripe=True)
    once_s = ring.setup_s + found.time_s - found.latency_s
    return {"time_s": once_s, "break_even_s": (row["braid_s"] - once_s) / found.stage_count}


def bound_of(row: dict[str, Any]) -> float:
    """The combined bound of a row's case, anew."""
    nbytes, ring = _case(row)
    return lower_bounds(ring.nodes, nbytes, ring).combined_s


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, in milliseconds."""
    heads = [
        "model",
        "nodes",
        "wavelength",
        *RIVALS.values(),
        "**braid**",
        "levels, strands (stages)",
        "bound",
        "braid / bound",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        times = [_ms(row[f"{name}_s"]) for name in RIVALS]
        cells = [row["model"], f"{row['world']}", row["rate"], *times, f"**{_ms(row['braid_s'])}**"]
        cells += [
            f"`{row['levels']}`, {row['strands']} ({row['stages']})",
            _ms(row["bound_s"]),
            f"{row['ratio']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_markdown(text: str) -> list[dict[str, Any]]:
    """The rows of a table that `markdown` wrote: what the docs claim, for the test that checks it."""
    lines = [line for line in _between_marks(text)[1].splitlines() if line.startswith("|")][2:]
    rows = []
    for line in lines:
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        levels, _, rest = cells[-3].rpartition(",")
        row: dict[str, Any] = {
            "model": cells[0],
            "world": int(cells[1]),
            "rate": cells[2],
            "levels": levels.strip("`"),
        }
        row |= {f"{name}_s": float(cell) / 1e3 for name, cell in zip(RIVALS, cells[3:], strict=False)}
        row |= {
            "braid_s": float(cells[-4]) / 1e3,
            "strands": int(rest.split("(")[0]),
            "stages": int(rest.split("(")[1].strip(" )")),
        }
        rows.append(row | {"bound_s": float(cells[-2]) / 1e3, "ratio": float(cells[-1])})
    return rows


def update_docs(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Puts the table between the marks of the page at `path`."""
    before, _, after = _between_marks(path.read_text(encoding="utf-8"))
    path.write_text(f"{before}{_MARKS[0]}\n{markdown(rows)}\n{_MARKS[1]}{after}", encoding="utf-8")


def _between_marks(text: str) -> tuple[str, str, str]:
    before, first, rest = text.partition(_MARKS[0])
    table, second, after = rest.partition(_MARKS[1])
    if not first or not second:
        raise ConfigError(f"the page has no place for the table; mark it with {_MARKS[0]} and {_MARKS[1]}")
    return before, table, after


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def _case(row: dict[str, Any]) -> tuple[float, OpticalRing]:
    model = next(key for key, text in NAMES.items() if text == row["model"])
    rate_bps = GBYTE if row["rate"] == "40 GB/s" else GBIT
    return 4 * PAPER_PARAMETERS[model], OpticalRing(row["world"], rate_bps=rate_bps)


def _unit(world: int, wavelengths: int) -> OpticalRing:
    return OpticalRing(world, wavelengths, rate_bps=8.0, setup_s=1.0)


@lru_cache(maxsize=64)
def _unit_cost(name: str, world: int, wavelengths: int) -> Cost:
    stripe = name not in ("wrht", "wrht_all_to_all")
    return cost(_rival(name, world, wavelengths), 1.0, _unit(world, wavelengths), stripe=stripe)


def _rival(name: str, world: int, wavelengths: int) -> Schedule:
    if name == "two_way_ring":
        return two_way_ring(world)
    if name == "halving_doubling":
        return build(name, world)
    return build("wrht", world, wavelengths=wavelengths, all_to_all=name != "wrht")
