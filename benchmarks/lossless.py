"""Whether bf16 with entropy-coded exponents would pay: what it would save on real gradients, and what a Huffman coder costs. One JSON record a line.

    python benchmarks/lossless.py

A bf16 number is a sign and 7 bits of mantissa, which look random, and 8 bits of exponent, which do not. `share` is the size against bf16 with
the exponents as a Huffman coder leaves them (zlib, which codes 128 kB at a time), `entropy_share` with an ideal one. `break_even_bps`: the link
below which a rank on one core gains by coding, where all of what it sends and receives in a sharded sum would be coded.
"""

import json
import time
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from real_gradients import points

POINTS = (5, 60)
WORLD = 4


def planes(x: torch.Tensor) -> tuple[bytes, bytes]:
    """Exponents, and signs with mantissas, a byte an element each."""
    bits = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    exponent = (bits >> 7 & 0xFF).astype(np.uint8)
    rest = (bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8)
    return exponent.tobytes(), rest.tobytes()


def entropy(data: bytes) -> float:
    """Bits a byte."""
    share = np.bincount(np.frombuffer(data, np.uint8), minlength=256) / len(data)
    return float(-(share[share > 0] * np.log2(share[share > 0])).sum())


def coded(data: bytes, rounds: int = 3) -> tuple[bytes, float, float]:
    """Huffman-coded, and the least CPU seconds to code and to decode."""
    encode, decode = list[float](), list[float]()
    for _ in range(rounds):
        began = time.thread_time()
        coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        packed = coder.compress(data) + coder.flush()
        encode.append(time.thread_time() - began)
        began = time.thread_time()
        back = zlib.decompress(packed, -15)
        decode.append(time.thread_time() - began)
        assert back == data
    return packed, min(encode), min(decode)


def measure(task: str) -> Iterator[dict[str, object]]:
    for step, (gradient, *_) in points(task, POINTS):
        exponent, rest = planes(gradient)
        packed, encode_s, decode_s = coded(exponent)
        numel = gradient.numel()
        share = (len(packed) + len(rest)) / (2 * numel)
        part = (WORLD - 1) / WORLD
        # a sharded sum: code all but the own shard, decode the others' payloads of it; code the sum, decode the others' sums
        work_s = (part + 1 / WORLD) * encode_s + 2 * part * decode_s
        saved_bits = 2 * part * 16 * numel * (1 - share)
        yield {
            "benchmark": "lossless",
            "task": task,
            "step": step,
            "numel": numel,
            "share": round(share, 4),
            "entropy_share": round((entropy(exponent) / 8 + 1) / 2, 4),
            "random_plane_entropy_bits": round(entropy(rest), 3),
            "encode_ns": round(1e9 * encode_s / numel, 2),
            "decode_ns": round(1e9 * decode_s / numel, 2),
            "break_even_bps": round(saved_bits / work_s),
            # a payload whose length depends on the numbers can be gathered today, not sharded: (n - 1) of them instead of 2 (n - 1) / n
            "gathered_against_sharded": {n: round(n * share / 2, 3) for n in (2, 3, 4, 8)},
        }


def main() -> None:
    torch.set_num_threads(1)
    for task in ("fashion", "bytes"):
        for record in measure(task):
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
