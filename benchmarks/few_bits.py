"""What packing, unpacking and adding in few bits cost, against a copy of the same floats in the same rounds: one JSON record a line.

    python benchmarks/few_bits.py --numel 22 --rounds 15

One thread. Median over interleaved rounds of the time of each step, as a multiple of the copy's in the same round. A pass over memory that
reads and writes float32 is 1; packing also draws a random word an element where rounding is stochastic.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from tacit import _core
from tacit.codecs import TernGrad
from tacit.requests import Lanes, TableSum
from tacit.strategy import parse_codec

FORMATS = ("sign", "onebit", "qsgd(levels=1)", "qsgd", "qsgd(levels=127)", "int4", "int8", "natural", "fp8", "fp8(e5m2)", "fp8(rounding=stochastic)")  # fmt: skip
_BLOCK = 1024

Steps = dict[tuple[str, str], Callable[[], object]]


def steps_of(numel: int) -> Steps:
    x, out = torch.randn(numel), torch.empty(numel)
    steps: Steps = {("copy", "copy"): lambda: out.copy_(x)}
    for text in FORMATS:
        format = parse_codec(text).format  # type: ignore[attr-defined]
        data = format.pack(x, 1)
        steps[text, "pack"] = lambda format=format: format.pack(x, 1)
        steps[text, "unpack"] = lambda format=format, data=data: format.unpack(data, numel)
        steps[text, "add"] = lambda format=format, data=data: format.unpack_add(data, out)
    limits, codes = torch.full((-(-numel // _BLOCK),), 2.5), torch.empty(-(-numel // 4), dtype=torch.uint8)
    steps["terngrad", "limits"] = lambda: TernGrad().limits(x)
    steps["terngrad", "pack"] = lambda: _core.pack_ternary(x, _BLOCK, limits, limits, 1, codes)
    for text, table in (("signsgd", (0, 1)), ("terngrad", (0, 1, 2, 1))):
        bits = len(table) // 2
        index = torch.randint(0, 256, (-(-numel * bits // 8),), dtype=torch.uint8)
        request = TableSum(index, table, numel, Lanes(8, 2))
        lanes = torch.zeros(numel, dtype=torch.uint8)
        steps[text, "look up"] = request.look_up
        steps[text, "add"] = lambda request=request, lanes=lanes: request.add(request.index, lanes)
        steps[text, "decode"] = lambda lanes=lanes, bits=bits: _core.decode_votes(
            lanes, 3 - bits, 4, bits == 1, _BLOCK, limits, out
        )
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=22, help="log2 of the elements")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = steps_of(2**options.numel)
    ratios = defaultdict(list)
    for _ in range(options.rounds + 1):
        times = {}
        for step, run in steps.items():
            began = perf_counter()
            run()
            times[step] = perf_counter() - began
        for step, seconds in times.items():
            ratios[step].append(seconds / times["copy", "copy"])
    for (codec, step), found in ratios.items():
        record = {
            "benchmark": "few bits",
            "codec": codec,
            "step": step,
            "copies": round(median(found[1:]), 2),
        }
        print(json.dumps({**record, "numel": 2**options.numel, "simd": _core.simd()}), flush=True)


if __name__ == "__main__":
    main()
