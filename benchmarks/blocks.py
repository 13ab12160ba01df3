"""Packing and unpacking blocks against memcpy of the same floats: one JSON record a line, or --table.

Every round times memcpy and all the kernels one after another, on one core, so a noisy machine slows them alike;
`ratio_to_memcpy` is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tacit import _core
from tacit.records import host_facts


def kernels(numel: int, block: int) -> dict[tuple[str, str, int], Callable[[], object]]:
    """The operations timed, by (operation, simd, bits); buffers are touched before, so no page fault is timed."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(numel, dtype=np.float32)
    out = np.ones_like(x)
    jobs: dict[tuple[str, str, int], Callable[[], object]] = {("memcpy", "-", 32): lambda: np.copyto(out, x)}

    def job(simd: str, call: Callable[..., object], *args: object) -> Callable[[], object]:
        def run() -> None:
            _core.use_simd(simd)
            call(*args)

        return run

    for bits in (8, 4):
        packed = np.ones(_core.packed_nbytes(numel, bits, block), dtype=np.uint8)
        _core.pack_blocks(x, bits, block, 1, True, packed)
        for simd in _core.simd_variants():
            jobs["pack stochastic", simd, bits] = job(
                simd, _core.pack_blocks, x, bits, block, 1, True, packed
            )
            jobs["pack nearest", simd, bits] = job(simd, _core.pack_blocks, x, bits, block, 1, False, packed)
            jobs["unpack", simd, bits] = job(
                simd, _core.unpack_blocks, packed, numel, bits, block, 1.0, False, out
            )
            jobs["unpack add", simd, bits] = job(
                simd, _core.unpack_blocks, packed, numel, bits, block, 0.5, True, out
            )
    return jobs


def measure(numel: int, block: int, rounds: int) -> list[dict[str, object]]:
    """One record an operation: ns per element (median, and 5th to 95th percentile) and the ratio to memcpy."""
    jobs = kernels(numel, block)
    before = _core.simd()
    ns: dict[tuple[str, str, int], list[float]] = {key: [] for key in jobs}
    for round_ in range(rounds + 1):
        for key, run in jobs.items():
            start = time.perf_counter_ns()
            run()
            if round_:  # the first warms up
                ns[key].append((time.perf_counter_ns() - start) / numel)
    _core.use_simd(before)

    memcpy, host = ns["memcpy", "-", 32], host_facts()
    return [
        {
            "benchmark": "blocks",
            "operation": operation,
            "simd": simd,
            "bits": bits,
            "block": block,
            "numel": numel,
            "n": rounds,
            "p50_ns_per_element": round(statistics.median(times), 4),
            "p5_ns_per_element": round(float(np.percentile(times, 5)), 4),
            "p95_ns_per_element": round(float(np.percentile(times, 95)), 4),
            "ratio_to_memcpy": round(statistics.median(t / m for t, m in zip(times, memcpy, strict=True)), 3),
            "host": host,
        }
        for (operation, simd, bits), times in ns.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON record a line (the default)")
    form.add_argument("--table", action="store_true", help="a table to read")
    parser.add_argument(
        "--numel", type=int, default=1 << 24, help="elements of the vector (default: 64 MB of floats)"
    )
    parser.add_argument("--block", type=int, default=256, help="elements a block (default: 256)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: 15)")
    options = parser.parse_args()

    records = measure(options.numel, options.block, options.rounds)
    if not options.table:
        for record in records:
            print(json.dumps(record))
        return
    print(f"{'operation':<16}{'simd':<10}{'bits':>4}{'ns/element':>12}{'x memcpy':>10}")
    for r in records:
        print(
            f"{r['operation']:<16}{r['simd']:<10}{r['bits']:>4}"
            f"{r['p50_ns_per_element']:>12.3f}{r['ratio_to_memcpy']:>10.2f}"
        )


if __name__ == "__main__":
    main()
