"""What codecs cost a rank, against a copy of the same floats measured in the same run: one JSON record a codec.

    python benchmarks/sparse_codecs.py --numel 1048576 --codecs 'ef(randomk(0.05) > hush)' dgc gtopk

Four ranks converse in one process; timed is the first one's own work, each request made (encode) and the last answer taken in (decode), one
thread, its CPU time, the least of interleaved rounds: neighbours on a shared machine only ever add. What adds for others is not timed.
"""

import argparse
import json
from collections.abc import Sequence
from time import thread_time

import torch
from torch import Tensor

from tacit.requests import STEADY_STEP, Codec, LocalMemory, Memory, answer_all, context_for
from tacit.strategy import parse_codec

CODECS = (
    "int4",
    "hush",
    "topk",
    "ef(topk(0.001, chunk=bucket) > none)",
    "ef(threshold(3.29))",  # as many as one of 1000 of a normal distribution
    "ef(randomk(0.01))",
    "ef(randomk(0.05) > hush)",
    "dgc(0.001)",
    "dgc(0.01)",
    "ef(gtopk(0.001))",
    "ef(scalecom(0.01))",
    "omnireduce",
)
WORLD = 4


def turn(
    codec: Codec, inputs: Sequence[Tensor], memories: Sequence[Memory], step: int
) -> tuple[float, float]:
    """Seconds that rank 0 takes to encode and to decode."""
    contexts = [
        context_for(memory, seed=0, step=STEADY_STEP + step, bucket="b", rank=rank, world=WORLD)
        for rank, memory in enumerate(memories)
    ]
    talks = [codec.reduce(x, context) for x, context in zip(inputs, contexts, strict=True)]
    answers, took = [None] * WORLD, list[float]()
    while True:
        began = thread_time()
        try:
            first = talks[0].send(answers[0])
        except StopIteration:
            return sum(took), thread_time() - began
        took.append(thread_time() - began)
        requests = [first, *(talk.send(own) for talk, own in zip(talks[1:], answers[1:], strict=True))]
        answers = answer_all(requests, [context.own_seed for context in contexts])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--numel", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(options.numel, generator=rng) for _ in range(WORLD)]
    memories = {text: [LocalMemory(x) for x in inputs] for text in options.codecs}
    found: dict[str, list[tuple[float, float]]] = {text: [] for text in options.codecs}
    copies, into = list[float](), torch.empty(options.numel)
    for step in range(options.rounds):
        for text in options.codecs:
            for _ in range(3):
                began = thread_time()
                into.copy_(inputs[0])
                copies.append(thread_time() - began)
            found[text].append(turn(parse_codec(text), inputs, memories[text], step))
    copy = min(copies)
    for text, turns in found.items():
        encode, decode = (min(column) for column in zip(*turns, strict=True))
        record = {
            "benchmark": "sparse codecs",
            "codec": text,
            "numel": options.numel,
            "copy_us": round(1e6 * copy, 1),
        }
        print(
            json.dumps(
                record | {"encode_copies": round(encode / copy, 1), "decode_copies": round(decode / copy, 1)}
            )
        )


if __name__ == "__main__":
    main()
