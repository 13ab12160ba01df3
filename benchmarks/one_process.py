"""Accuracy of codecs with no network and no lab: the lab's `accuracy` job from a command line, one training after another.

    python benchmarks/one_process.py --task bytes --steps 1200 --seeds 0 1 2 --codecs none int4 'lowrank(8)'

Several can run side by side. One JSON record a training and line; `bytes_share` is what a rank hands over, against float32.
"""

import argparse
import json

import torch

from tacit.demo.tasks import BUILDERS
from tacit.lab.experiments.jobs.accuracy import train
from tacit.lab.experiments.jobs.specs import Accuracy
from tacit.strategy import Strategy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(BUILDERS), default="bytes")
    parser.add_argument("--codecs", nargs="+", default=["none", "int4", "lowrank(8)"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--bucket", type=int, default=1 << 20, help="bytes of a bucket")
    parser.add_argument("--judge-every", type=int, default=40)
    parser.add_argument("--target", type=float, help="metric whose first step is recorded")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = BUILDERS[options.task]()
    spec = Accuracy(
        task=options.task,
        strategies=tuple(options.codecs),
        train_steps=options.steps,
        judge_every=options.judge_every,
        target=options.target,
        bucket_nbytes=options.bucket,
    )
    for seed in options.seeds:
        for text in options.codecs:
            found = train(spec, task, Strategy.parse(text), seed, options.world)
            print(json.dumps({"benchmark": "one process", "codec": text, **found}), flush=True)


if __name__ == "__main__":
    main()
