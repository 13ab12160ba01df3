"""What the 4-bit codecs cost, against a copy of the same floats measured in the same run: one JSON record a line.

    make bench-codec            # or: python benchmarks/codec.py --sizes 20,22 --table

ns per element, one thread unless named: what a quarter of the interleaved rounds stays below, each the quickest of a few turns,
because neighbours on a shared machine only ever add. Against the copy: the median of the rounds. The cost of an empty call (Python,
binding; 1-3 us) is measured beside it and taken off, so that short vectors show the kernel and not the call.

Low rank is timed by shape and rank, in the same rounds, beside the work of torch's PowerSGD hook without its communication. These codecs
send and add factors; the adding is not timed.

All memory is in huge pages where the kernel gives them (torch's own THP_MEM_ALLOC_ENABLE=1; set it to 0 to see without): a page of 4 kB
costs a walk through the page tables, which in a virtual machine is a tenth of the work on it. The copy has them too.
"""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch when it is imported

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from tacit import _core
from tacit.codecs import in_torch
from tacit.codecs.hush import GRIDS, _cells, _offsets
from tacit.codecs.tables import clamp_at, stochastic_table
from tacit.records import host_facts

Work = dict[str, Callable[[], object]]
Calls = tuple[Callable[[], object], Callable[[], object]]

LOW_RANK, HOOK = "lowrank encode + decode", "torch PowerSGD hook"
PROMISED = (1024, 4096, 8)  # rows, columns, rank


@dataclass(frozen=True)
class Case:
    """A vector of 2^log2 floats, or a matrix and the rank it is sent in."""

    numel: int
    log2: int | None = None
    rows: int = 0
    columns: int = 0
    rank: int = 0

    def facts(self) -> dict[str, object]:
        if self.log2 is not None:
            return {"log2_elements": self.log2}
        return {"rows": self.rows, "columns": self.columns, "rank": self.rank}

    def __str__(self) -> str:
        return f"2^{self.log2}" if self.log2 is not None else f"{self.rows}x{self.columns} rank {self.rank}"

    def times(self, name: str) -> int:
        """Calls a round. A dozen at least: the first pays for what the work before it left in the caches, and two threads want both
        cores of a shared machine to themselves for once."""
        if name.endswith("in torch"):
            return 1
        return max(4 if name == HOOK else 12, min(2000, (1 << 26) // self.numel))


def works(log2: int) -> Work:
    """Everything that is timed on vectors of 2^log2 floats."""
    n = 1 << log2
    torch.manual_seed(0)
    x, y = torch.randn(n), torch.empty(n)
    padded, blocks = _core.hush_padded(n), _core.hush_blocks(n)
    norms, packed, lanes = (
        torch.empty(blocks, dtype=torch.float64),
        torch.empty(padded // 2, dtype=torch.uint8),
        torch.empty(padded, dtype=torch.uint8),
    )
    grid = GRIDS[0]
    table = torch.tensor(grid.table, dtype=torch.uint8)
    encode, decode = hush(_core, x, y, norms, packed, lanes)
    encode()
    lanes.zero_()
    for _ in range(4):
        _core.add_table(packed, padded, table, lanes, 1)

    slices = torch.ones(-(-n // 2**20), dtype=torch.float64) * min(n, 2**20) ** 0.5
    thc_encode, thc_decode = thc(
        x, y, slices, torch.empty(n // 2, dtype=torch.uint8), torch.full((n,), 60, dtype=torch.uint8)
    )
    found: Work = {
        "copy": lambda: y.copy_(x),
        "hush encode": encode,
        "hush decode": decode,
        "add": adder(packed, lanes),
        "thc encode": thc_encode,
        "thc decode": thc_decode,
    }
    if log2 >= 20:
        encode, decode = hush(_core, x, y, norms, packed, lanes, threads=2)
        found |= {"hush encode, 2 threads": encode, "hush decode, 2 threads": decode}
    if log2 == 20:
        encode, decode = hush(in_torch, x, y, norms, packed, lanes)
        found |= {"hush encode in torch": encode, "hush decode in torch": decode}
    return found


def empty_calls() -> Work:
    """The same calls without an element: what Python and the binding cost."""
    e, other, b = torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.uint8)
    norms = e.double()
    encode, decode = hush(_core, e, e, norms, b, b)
    encode_by_two, decode_by_two = hush(_core, e, e, norms, b, b, threads=2)
    thc_encode, thc_decode = thc(e, e, norms, b, b)
    return {
        "copy": lambda: e.copy_(other),
        "hush encode": encode,
        "hush decode": decode,
        "hush encode, 2 threads": encode_by_two,
        "hush decode, 2 threads": decode_by_two,
        "add": adder(b, b),
        "thc encode": thc_encode,
        "thc decode": thc_decode,
    }


def hush(
    kernels: Any, x: Tensor, y: Tensor, norms: Tensor, packed: Tensor, lanes: Tensor, threads: int = 1
) -> Calls:
    """Calls that encode `x` and decode into `y`."""
    grid = GRIDS[0]
    x_, y_, norms_, packed_, lanes_, cells, offsets = (
        handed(kernels, t)
        for t in (x, y, norms, packed, lanes, _cells(grid), _offsets(grid, 1.0, (0, 4, 8, 12)))
    )

    def encode() -> None:
        kernels.hush_norms(x_, norms_, threads)
        kernels.hush_encode(x_, norms_, 1, 2, 0, 1.0, grid.reach, grid.granularity, cells, packed_, threads)

    def decode() -> None:
        kernels.hush_decode(lanes_, norms_, 1, 2, offsets, grid.reach, grid.granularity, y_, 1.0, threads)

    return encode, decode


def thc(x: Tensor, y: Tensor, slices: Tensor, packed: Tensor, lanes: Tensor) -> Calls:
    t, numel = clamp_at(1 / 32), x.numel()
    table = handed(_core, torch.tensor(stochastic_table(16, 30, t), dtype=torch.uint8))
    x_, y_, slices_, packed_, lanes_ = (handed(_core, each) for each in (x, y, slices, packed, lanes))
    return (
        lambda: _core.thc_encode(x_, slices_, 20, 20, 1, 2, t, table, 4, packed_, 1),
        lambda: _core.thc_decode(lanes_, numel, 20, 20, 1, slices_, t, 30, 4, y_, 4.0, 1),
    )


def low_rank_works(shape: tuple[int, int], ranks: list[int]) -> dict[Case, Work]:
    """Everything that is timed on a matrix: a copy of it, this codec and the hook, for each rank."""
    rows, columns = shape
    torch.manual_seed(0)
    x, e, out = torch.randn(rows * columns), torch.zeros(rows * columns), torch.empty(rows * columns)
    hook_x, hook_e = x.clone(), torch.zeros_like(x)
    found: dict[Case, Work] = {}
    for rank in (rank for rank in ranks if rank <= min(shape)):
        found[Case(rows * columns, None, rows, columns, rank)] = {
            "copy": lambda: out.copy_(x),
            LOW_RANK: low_rank(x, e, out, rows, columns, rank),
            f"{LOW_RANK}, 2 threads": low_rank(x, e, out, rows, columns, rank, threads=2),
            HOOK: power_sgd(hook_x.view(1, rows, columns), hook_e.view(1, rows, columns), rank),
        }
    return found


def low_rank(
    x: Tensor, e: Tensor, out: Tensor, rows: int, columns: int, rank: int, threads: int = 1
) -> Callable[[], object]:
    """A call that does all of a step's work on `x`, factors in 4 bits, as if this rank were alone."""
    p, q, start = torch.empty(rank, rows), torch.empty(rank, columns), torch.randn(rank, columns)
    x_, e_, out_, p_, q_, start_ = (handed(_core, t) for t in (x, e, out, p, q, start))
    factors = [
        (f.reshape(-1), handed(_core, torch.empty(_core.packed_nbytes(f.size, 4, 64), dtype=torch.uint8)))
        for f in (p_, q_)
    ]

    def to_wire_and_back(factor: Any, packed: Any) -> None:
        _core.pack_blocks(factor, 4, 64, 1, False, packed)
        _core.unpack_blocks(packed, factor.size, 4, 64, 1.0, False, factor)

    def step() -> None:
        _core.low_rank_left(x_, e_, start_, p_, threads)
        to_wire_and_back(*factors[0])
        _core.low_rank_orthonormalize(p_, 1)
        _core.low_rank_right(x_, e_, p_, q_, threads)
        to_wire_and_back(*factors[1])
        _core.low_rank_finish(x_, e_, p_, q_, q_, out_, threads)
        start_[:] = q_
        _core.low_rank_orthonormalize(start_, 2)

    return step


def power_sgd(x: Tensor, error: Tensor, rank: int) -> Callable[[], object]:
    """A call that does to `x` what torch's powerSGD_hook.py does to a bucket of one matrix, but for communication: the same operations,
    allocations included. The update stays in `x`, so the sum with the error is the same at every call."""
    p, q = torch.empty(1, x.shape[1], rank), torch.randn(1, x.shape[2], rank)
    errors = {0: error}

    def step() -> None:
        x.add_(errors[0])
        copy = x.detach().clone()
        _orthogonalize(q, 0)
        torch.bmm(x, q, out=p)
        _orthogonalize(p, 0)
        torch.bmm(x.transpose(1, 2), p, out=q)
        torch.bmm(p, q.div_(1).transpose(1, 2), out=x)
        errors[0] = copy - x

    return step


def adder(packed: Tensor, lanes: Tensor) -> Callable[[], object]:
    """Adds zeros: lanes that saturate would be counted, slowly."""
    packed_, lanes_, zeros = (handed(_core, t) for t in (packed, lanes, torch.zeros(16, dtype=torch.uint8)))
    return lambda: _core.add_table(packed_, lanes_.size, zeros, lanes_, 1)


def handed(kernels: Any, tensor: Tensor) -> Any:
    """`tensor` as `kernels` take it soonest: a tensor takes 4 us to change hands, its array 0.2 us."""
    return tensor.numpy() if kernels is _core else tensor


def _nothing() -> None:
    pass


def _time(call: Callable[[], object], times: int) -> float:
    start = perf_counter()
    for _ in range(times):
        call()
    return (perf_counter() - start) / times


def _beside(call: Callable[[], object], empty: Callable[[], object], times: int) -> tuple[float, float]:
    """Seconds a call and an empty one, in short turns: a busy machine slows both alike."""
    several = max(1, times // 50)
    pairs = [(_time(call, several), _time(empty, several)) for _ in range(times // several)]
    return min(t for t, _ in pairs), min(t for _, t in pairs)


def measure(
    sizes: list[int], shapes: list[tuple[int, int]], ranks: list[int], rounds: int
) -> list[dict[str, object]]:
    """Records of all that is timed. Cases take turns, as the works on each: whatever else the machine does slows all alike."""
    timed, empty = {Case(1 << log2, log2): works(log2) for log2 in sizes}, empty_calls()
    for shape in shapes:
        timed |= low_rank_works(shape, ranks)
    seconds: dict[tuple[Case, str], list[tuple[float, float]]] = defaultdict(list)
    for done in range(rounds):
        if sys.stderr.isatty():  # no bar that moves by itself: its thread would want a core
            print(f"round {done + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
        for case, work in timed.items():
            for name, call in work.items():
                seconds[case, name].append(_beside(call, empty.get(name, _nothing), case.times(name)))

    def ns(case: Case, name: str) -> float:
        both = zip(*seconds[case, name], strict=True)
        calls, empties = (quantiles(found, n=4, method="inclusive")[0] for found in both)
        return round((calls - empties) / case.numel * 1e9, 4)

    def against_copy(case: Case, name: str) -> float:
        rounds_of = zip(seconds[case, name], seconds[case, "copy"], strict=True)
        return round(median((a - b) / (c - d) for (a, b), (c, d) in rounds_of), 3)

    return [
        {
            "benchmark": "codec",
            "what": name,
            "case": str(case),
            **case.facts(),
            "ns_per_element": ns(case, name),
            "against_copy": against_copy(case, name),
            "rounds": rounds,
            "copy_ns_per_element": ns(case, "copy"),
        }
        for case, name in seconds
    ]


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    """The figures that the project promises."""

    def by_size(what: str, key: str = "ns_per_element") -> dict[int, float]:
        return {
            int(str(r["log2_elements"])): float(str(r[key]))
            for r in rows
            if r["what"] == what and "log2_elements" in r
        }

    found: dict[str, object] = {"benchmark": "codec summary", "host": host_facts(), "simd": _core.simd()}
    for what in ("hush encode", "hush decode", "add", "thc encode", "thc decode"):
        if ratios := [ratio for log2, ratio in by_size(what, "against_copy").items() if log2 >= 22]:
            found[f"{what} against copy"] = median(ratios)
    for what in ("hush encode", "hush decode"):
        if not (cost := by_size(what)):
            continue
        found[f"{what} largest / smallest cost by size"] = round(max(cost.values()) / min(cost.values()), 2)
        if by_two := by_size(f"{what}, 2 threads"):
            faster = {f"2^{log2}": round(cost[log2] / ns, 2) for log2, ns in by_two.items()}
            found[f"{what}, speed-up of 2 threads, median of sizes"] = round(median(faster.values()), 2)
            found[f"{what}, speed-up of 2 threads by size"] = faster
        for log2, ns in by_size(f"{what} in torch").items():
            found[f"{what}, torch / native"] = round(ns / cost[log2], 1)
    return found | low_rank_summary(rows)


def low_rank_summary(rows: list[dict[str, object]]) -> dict[str, object]:
    cost = {
        str(r["what"]): (float(str(r["ns_per_element"])), r["against_copy"])
        for r in rows
        if (r.get("rows"), r.get("columns"), r.get("rank")) == PROMISED
    }
    if LOW_RANK not in cost:
        return {}
    return {
        "lowrank rank 8 1024x4096 against copy": cost[LOW_RANK][1],
        "lowrank rank 8 1024x4096, speed-up of 2 threads": round(
            cost[LOW_RANK][0] / cost[f"{LOW_RANK}, 2 threads"][0], 2
        ),
        "torch PowerSGD hook / lowrank": round(cost[HOOK][0] / cost[LOW_RANK][0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        default="10,12,14,16,18,20,22,24,26",
        help="log2 of the elements, separated by commas, or nothing",
    )
    parser.add_argument(
        "--shapes", default="256x256,1024x1024,1024x4096,4096x4096", help="matrices of low rank, or nothing"
    )
    parser.add_argument("--ranks", default="1,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--table", action="store_true", help="a table for people instead of JSON")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: at least 2")
    torch.set_num_threads(1)
    sizes = [int(log2) for log2 in args.sizes.split(",") if log2]
    shapes = [(int(rows), int(columns)) for rows, columns in re.findall(r"(\d+)x(\d+)", args.shapes)]
    rows = measure(sizes, shapes, [int(rank) for rank in args.ranks.split(",")], args.rounds)
    if args.table:
        for row in rows:
            print(
                f"{row['case']:<17} {row['what']:<34} {row['ns_per_element']:>9} ns  {row['against_copy']:>8} x copy"
            )
        for key, value in summary(rows).items():
            print(f"{key}: {value}")
        return
    for row in [*rows, summary(rows)]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
