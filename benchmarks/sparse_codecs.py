"""What codecs cost a rank, against a copy of the same floats measured in the same run: one JSON record a codec.

    python benchmarks/sparse_codecs.py --numel 1048576 --codecs 'ef(randomk(0.05) > hush)' dgc gtopk

Four ranks converse in one process; timed is the first one's own work, each request made (encode) and the last answer taken in (decode), one
thread, its CPU time, the least of interleaved rounds: neighbours on a shared machine only ever add. What adds for others is not timed.
"""

import argparse
import json

from tacit.layout import Layout
from tacit.strategy import parse_codec
from tacit.testing.costs import costs

CODECS = (
    "int4",
    "hush",
    "topk",
    "ef(topk(0.001, chunk=bucket) > none)",
    "ef(threshold(0.01))",  # about as many as one of 1000 of a normal distribution
    "ef(randomk(0.01))",
    "ef(randomk(0.05) > hush)",
    "dgc(0.001)",
    "dgc(0.01)",
    "ef(gtopk(0.001))",
    "ef(scalecom(0.01))",
    "omnireduce",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--numel", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    found = costs([parse_codec(text) for text in options.codecs], Layout.flat(options.numel), options.rounds)
    for text, cost in zip(options.codecs, found, strict=True):
        record = {
            "benchmark": "sparse codecs",
            "codec": text,
            "numel": options.numel,
            "copy_us": round(1e6 * cost.copy_s, 1),
            "encode_copies": round(cost.encode, 1),
            "decode_copies": round(cost.decode, 1),
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
