"""A rank of tests/plan/test_probing.py: it probes, and waits for another link before its last look at it: until a file is there."""

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from tacit.errors import ConfigError
from tacit.plan import probing

MOST_S = 60.0


def say(kind: str, **fields: str) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def main() -> None:
    look, looks, changed = probing.reference, [], Path(sys.argv[1])

    def look_later(bench, nbytes):
        if looks and dist.get_rank() == 0:
            say("looked")
        until_s = time.monotonic() + MOST_S
        while looks and not changed.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        looks.append(nbytes)
        return look(bench, nbytes)

    probing.reference = look_later
    dist.init_process_group("gloo")
    try:
        probing.probe(None, ["DDP"])
        say("believed")
    except ConfigError as refused:
        say("refused", sentence=str(refused))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
