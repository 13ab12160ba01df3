"""The searched braid against its rivals, each with the options that suit it best, and the bound: the tables of docs/optical.md.

`contest` has every model, ring and rate of the WRHT paper; `with_few_transceivers` limits what a node can send and receive at once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tacit.errors import ConfigError
from tacit.schedules.braid import braid
from tacit.schedules.two_way_ring import two_way_ring
from tacit.sim.bounds import lower_bounds
from tacit.sim.optical import cost
from tacit.sim.studies.papers import GBIT, GBYTE, MODELS, NAMES, NODES
from tacit.sim.studies.rivals import FAMILIES, Rival, tuned
from tacit.sim.studies.search import search
from tacit.sim.workloads import PAPER_PARAMETERS
from tacit.topology import OpticalRing

Row = dict[str, Any]
RIVALS = {
    "wrht_striped": "WRHT, striped, tuned",
    "halving_doubling": "halving-doubling, striped",
    "torus": "torus, striped, tuned",
    "two_way_ring": "two-way ring, striped",
    "wrht_all_to_all": "WRHT with its all-to-all, as published",
    "wrht": "WRHT as published",
}
TRANSCEIVERS = (1, 2, 4, 16, None)


def contest(
    nodes: Sequence[int] = NODES,
    models: Sequence[str] = MODELS,
    rates_bps: Sequence[float] = (GBYTE, GBIT),
    *,
    finalists: int = 8,
) -> Iterator[Row]:
    """A row for every case, in seconds: every rival, the searched braid with its levels and strands, the bound and the ratio to it.

    Yields as it goes: the whole table takes minutes, nearly all of it in the search.
    """
    for world, model, rate_bps in product(nodes, models, rates_bps):
        ring, nbytes = OpticalRing(world, rate_bps=rate_bps), 4 * PAPER_PARAMETERS[model]
        rivals = {name: tuned(name, nbytes, ring) for name in RIVALS}
        row = _case(model, ring) | _searched(nbytes, ring, finalists)
        row |= {f"{name}_s": rival.time_s for name, rival in rivals.items()}
        yield row | _best(rivals.values())


def with_few_transceivers(
    models: Sequence[str] = ("vgg16", "googlenet"), world: int = 1024, *, finalists: int = 8
) -> Iterator[Row]:
    """A row for every number of transceivers: the searched braid, the best of all its rivals, the bound."""
    for model, rate_bps, transceivers in product(models, (GBYTE, GBIT), TRANSCEIVERS):
        ring = OpticalRing(world, rate_bps=rate_bps, transceivers=transceivers)
        nbytes = 4 * PAPER_PARAMETERS[model]
        row = _case(model, ring) | _searched(nbytes, ring, finalists)
        yield row | _best(tuned(name, nbytes, ring) for name in FAMILIES)


def _case(model: str, ring: OpticalRing) -> Row:
    return {
        "model": NAMES[model],
        "world": ring.nodes,
        "rate": "40 GB/s" if ring.rate_bps == GBYTE else "40 Gbit/s",
        "transceivers": ring.transceivers,
    }


def _searched(nbytes: float, ring: OpticalRing, finalists: int) -> Row:
    found = search(ring.nodes, nbytes, ring, finalists=finalists)
    return {
        "braid_s": found.cost.time_s,
        "levels": found.levels,
        "strands": found.strands,
        "stages": found.cost.stage_count,
        "bound_s": found.bounds.combined_s,
        "latency_bound_s": found.bounds.latency_s,
        "node_bound_s": found.bounds.node_s,
        "ratio": found.ratio,
    }


def _best(rivals: Iterable[Rival]) -> Row:
    best = min(rivals, key=lambda rival: rival.time_s)
    return {"best": best.schedule, "best_s": best.time_s}


def case_of(row: Row) -> tuple[float, OpticalRing]:
    """The vector and the ring of a row."""
    model = next(key for key, text in NAMES.items() if text == row["model"])
    rate_bps = GBYTE if row["rate"] == "40 GB/s" else GBIT
    ring = OpticalRing(row["world"], rate_bps=rate_bps, transceivers=row["transceivers"])
    return 4 * PAPER_PARAMETERS[model], ring


def with_propagation_s(row: Row, hop_s: float) -> dict[str, float]:
    """The case of `row` where light takes `hop_s` from node to node: the rivals tuned for it, and the row's braid."""
    nbytes, still = case_of(row)
    ring = replace(still, hop_s=hop_s)
    made = braid(ring.nodes, levels=row["levels"], strands=row["strands"])
    return {name: tuned(name, nbytes, ring).time_s for name in RIVALS} | {
        "braid": cost(made, nbytes, ring, stripe=True).time_s
    }


def standing_ring(row: Row) -> dict[str, float]:
    """The argument against us: a ring's light paths never change. The two-way ring's time if it is set up once and a stage costs
    nothing else, and what a stage may cost (conversion, synchronisation) before it is slower than the row's braid.
    """
    nbytes, ring = case_of(row)
    found = cost(two_way_ring(ring.nodes), nbytes, ring, stripe=True)
    once_s = ring.setup_s + found.time_s - found.latency_s
    return {"time_s": once_s, "break_even_s": (row["braid_s"] - once_s) / found.stage_count}


def bound_of(row: Row) -> float:
    """The combined bound of a row's case, anew."""
    nbytes, ring = case_of(row)
    return lower_bounds(ring.nodes, nbytes, ring).combined_s


# ---- the tables of the page ----

_FIRST = ("model", "nodes", "wavelength")
_BRAID = ("**braid**", "levels, strands (stages)", "bound", "braid / bound")
HEADS = {
    "contest": (*_FIRST, "best rival", "its time", *_BRAID, *RIVALS.values()),
    "transceivers": (*_FIRST, "transceivers", "best rival", "its time", *_BRAID),
}


def markdown(rows: Sequence[Row], table: str = "contest") -> str:
    """A table of the page, in milliseconds; the faster of braid and best rival in bold."""
    heads = HEADS[table]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row["model"], f"{row['world']}", row["rate"]]
        if table == "transceivers":
            cells.append("all" if row["transceivers"] is None else str(row["transceivers"]))
        won = row["braid_s"] <= row["best_s"]
        cells += [f"`{row['best']}`", _ms(row["best_s"], bold=not won), _ms(row["braid_s"], bold=won)]
        cells += [f"`{row['levels']}`, {row['strands']} ({row['stages']})", _ms(row["bound_s"])]
        cells.append(f"{row['ratio']:.2f}")
        cells += [_ms(row[f"{name}_s"]) for name in RIVALS] if table == "contest" else []
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_markdown(text: str, table: str = "contest") -> list[Row]:
    """The rows of a table that `markdown` wrote: what the docs claim, for the test that checks it."""
    lines = [line for line in _between_marks(text, table)[1].splitlines() if line.startswith("|")][2:]
    rows = []
    for line in lines:
        cells = dict(
            zip(HEADS[table], (cell.strip(" *") for cell in line.strip("|").split("|")), strict=True)
        )
        levels, _, rest = cells["levels, strands (stages)"].rpartition(",")
        limit = cells.get("transceivers", "all")
        row: Row = {
            "model": cells["model"],
            "world": int(cells["nodes"]),
            "rate": cells["wavelength"],
            "transceivers": None if limit == "all" else int(limit),
            "best": cells["best rival"].strip("`"),
            "best_s": float(cells["its time"]) / 1e3,
            "braid_s": float(cells["**braid**"]) / 1e3,
            "levels": levels.strip("`"),
            "strands": int(rest.split("(")[0]),
            "stages": int(rest.split("(")[1].strip(" )")),
            "bound_s": float(cells["bound"]) / 1e3,
            "ratio": float(cells["braid / bound"]),
        }
        rows.append(row | {f"{n}_s": float(cells[h]) / 1e3 for n, h in RIVALS.items() if h in cells})
    return rows


def update_docs(path: Path, rows: Sequence[Row], table: str = "contest") -> None:
    """Puts the table between the marks of the page at `path`."""
    before, _, after = _between_marks(path.read_text(encoding="utf-8"), table)
    first, last = _marks(table)
    path.write_text(f"{before}{first}\n{markdown(rows, table)}\n{last}{after}", encoding="utf-8")


def _marks(table: str) -> tuple[str, str]:
    return f"<!-- {table} -->", f"<!-- /{table} -->"


def _between_marks(text: str, table: str) -> tuple[str, str, str]:
    marks = _marks(table)
    before, first, rest = text.partition(marks[0])
    found, second, after = rest.partition(marks[1])
    if not first or not second:
        raise ConfigError(f"the page has no place for the table; mark it with {marks[0]} and {marks[1]}")
    return before, found, after


def _ms(seconds: float, bold: bool = False) -> str:
    return f"**{1e3 * seconds:.4g}**" if bold else f"{1e3 * seconds:.4g}"
