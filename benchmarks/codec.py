"""What the 4-bit codecs cost, against a copy of the same floats measured in the same run: one JSON record a line.

    make bench-codec            # or: python benchmarks/codec.py --sizes 20,22 --table

ns per element, one thread unless named: what a quarter of the interleaved rounds stays below, each the quickest of a few turns,
because neighbours on a shared machine only ever add. Against the copy: the median of the rounds. The cost of an empty call (Python,
binding; 10-20 us) is measured beside it and taken off, so that short vectors show the kernel and not the call.

All memory is in huge pages where the kernel gives them (torch's own THP_MEM_ALLOC_ENABLE=1; set it to 0 to see without): a page of 4 kB
costs a walk through the page tables, which in a virtual machine is a tenth of the work on it. The copy has them too.
"""

import argparse
import json
import os
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is imported

import torch

from tacit import _core
from tacit.codecs import in_torch
from tacit.codecs.hush import GRIDS, _cells, _offsets
from tacit.codecs.tables import clamp_at, stochastic_table
from tacit.records import host_facts

Work = dict[str, Callable[[], object]]


def works(log2: int) -> Work:
    """Everything that is timed on vectors of 2^log2 floats."""
    n = 1 << log2
    torch.manual_seed(0)
    x, y = torch.randn(n), torch.empty(n)
    padded, blocks = _core.hush_padded(n), _core.hush_blocks(n)
    norms, packed, lanes = (
        torch.empty(blocks),
        torch.empty(padded // 2, dtype=torch.uint8),
        torch.empty(padded, dtype=torch.uint8),
    )
    grid = GRIDS[0]
    table, cells, offsets = (
        torch.tensor(grid.table, dtype=torch.uint8),
        _cells(grid),
        _offsets(grid, 1.0, (0, 4, 8, 12)),
    )
    paper, t = torch.tensor(stochastic_table(16, 30, clamp_at(1 / 32)), dtype=torch.uint8), clamp_at(1 / 32)
    nothing = torch.zeros(16, dtype=torch.uint8)
    slices = torch.ones(-(-n // 2**20)) * min(n, 2**20) ** 0.5
    thc_packed = torch.empty(n // 2, dtype=torch.uint8)
    thc_lanes = torch.full((n,), 60, dtype=torch.uint8)

    def encode(kernels=_core, threads: int = 1) -> None:
        kernels.hush_norms(x, norms, threads)
        kernels.hush_encode(x, norms, 1, 2, 0, 1.0, grid.reach, grid.granularity, cells, packed, threads)

    def decode(kernels=_core, threads: int = 1) -> None:
        kernels.hush_decode(lanes, norms, 1, 2, offsets, grid.reach, grid.granularity, y, 1.0, threads)

    def add(threads: int = 1) -> None:
        _core.add_table(
            packed, padded, nothing, lanes, threads
        )  # zeros: lanes that saturate would be counted, slowly

    encode()
    lanes.zero_()
    for _ in range(4):
        _core.add_table(packed, padded, table, lanes, 1)
    found: Work = {
        "copy": lambda: y.copy_(x),
        "hush encode": encode,
        "hush decode": decode,
        "add": add,
        "thc encode": lambda: _core.thc_encode(x, slices, 20, 20, 1, 2, t, paper, 4, thc_packed, 1),
        "thc decode": lambda: _core.thc_decode(thc_lanes, n, 20, 20, 1, slices, t, 30, 4, y, 4.0, 1),
    }
    if log2 >= 20:
        found |= {
            "hush encode, 2 threads": lambda: encode(threads=2),
            "hush decode, 2 threads": lambda: decode(threads=2),
        }
    if log2 == 20:
        found |= {
            "hush encode in torch": lambda: encode(in_torch),
            "hush decode in torch": lambda: decode(in_torch),
        }
    return found


def empty_calls() -> Work:
    """The same calls without an element: what Python and the binding cost."""
    e, b = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    grid, cells, offsets = GRIDS[0], _cells(GRIDS[0]), _offsets(GRIDS[0], 1.0, (0,))
    table = torch.zeros(16, dtype=torch.uint8)
    return {
        "copy": lambda: e.copy_(e),
        "hush encode": lambda: (
            _core.hush_norms(e, e, 1),
            _core.hush_encode(e, e, 1, 2, 0, 1.0, grid.reach, grid.granularity, cells, b, 1),
        )[1],
        "hush decode": lambda: _core.hush_decode(
            b, e, 1, 2, offsets, grid.reach, grid.granularity, e, 1.0, 1
        ),
        "add": lambda: _core.add_table(b, 0, table, b, 1),
    }


def _nothing() -> None:
    pass


def _time(call: Callable[[], object], times: int) -> float:
    start = perf_counter()
    for _ in range(times):
        call()
    return (perf_counter() - start) / times


def _beside(call: Callable[[], object], empty: Callable[[], object], times: int) -> tuple[float, float]:
    """Seconds a call and an empty one, in short turns: a busy machine slows both alike."""
    turns = min(20, times)
    pairs = [(_time(call, times // turns), _time(empty, times // turns)) for _ in range(turns)]
    return min(t for t, _ in pairs), min(t for _, t in pairs)


def measure(log2: int, rounds: int) -> list[dict[str, object]]:
    work, empty = works(log2), empty_calls()
    # The first call pays for what the work before it left in the caches.
    times = max(3, min(2000, (1 << 24) >> log2))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, call in work.items():  # interleaved: whatever else the machine does slows all alike
            seconds[name].append(_beside(call, empty.get(name, _nothing), 1 if "torch" in name else times))

    def ns(name: str) -> float:
        both = zip(*seconds[name], strict=True)
        calls, empties = (quantiles(found, n=4, method="inclusive")[0] for found in both)
        return round((calls - empties) / (1 << log2) * 1e9, 4)

    def against_copy(name: str) -> float:
        rounds_of = zip(seconds[name], seconds["copy"], strict=True)
        return round(median((a - b) / (c - d) for (a, b), (c, d) in rounds_of), 3)

    return [
        {
            "benchmark": "codec",
            "what": name,
            "log2_elements": log2,
            "ns_per_element": ns(name),
            "against_copy": against_copy(name),
            "rounds": rounds,
            "copy_ns_per_element": ns("copy"),
        }
        for name in work
    ]


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    """The figures that the project promises."""
    large = [r for r in rows if int(str(r["log2_elements"])) >= 22]

    def of(what: str, among: list[dict[str, object]], key: str = "against_copy") -> list[float]:
        return [float(str(r[key])) for r in among if r["what"] == what]

    found: dict[str, object] = {"benchmark": "codec summary", "host": host_facts(), "simd": _core.simd()}
    for what in ("hush encode", "hush decode", "add", "thc encode", "thc decode"):
        if ratios := of(what, large):
            found[f"{what} against copy"] = median(ratios)
    for what in ("hush encode", "hush decode"):
        cost = of(what, rows, "ns_per_element")
        found[f"{what} largest / smallest cost by size"] = round(max(cost) / min(cost), 2)
        if two := of(f"{what}, 2 threads", large, "ns_per_element"):
            one = of(what, large, "ns_per_element")
            found[f"{what}, speed-up of 2 threads"] = round(
                median(a / b for a, b in zip(one, two, strict=True)), 2
            )
        if torch_ns := of(f"{what} in torch", rows, "ns_per_element"):
            native = [
                float(str(r["ns_per_element"]))
                for r in rows
                if r["what"] == what and r["log2_elements"] == 20
            ]
            found[f"{what}, torch / native"] = round(torch_ns[0] / native[0], 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", default="10,12,14,16,18,20,22,24,26", help="log2 of the elements, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--table", action="store_true", help="a table for people instead of JSON")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: at least 2")
    torch.set_num_threads(1)
    rows = [row for log2 in args.sizes.split(",") for row in measure(int(log2), args.rounds)]
    if args.table:
        for row in rows:
            print(
                f"2^{row['log2_elements']:<3} {row['what']:<24} {row['ns_per_element']:>9} ns  {row['against_copy']:>8} x copy"
            )
        for key, value in summary(rows).items():
            print(f"{key}: {value}")
        return
    for row in [*rows, summary(rows)]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
