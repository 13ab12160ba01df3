"""A rank of tests/plan/test_probing.py: it probes, and says when its first look at the links is over."""

import json
import time

import torch.distributed as dist

from tacit.errors import ConfigError
from tacit.plan import probing

LINKS_CHANGE_S = 0.5


def say(kind: str, **fields: str) -> None:
    print(json.dumps({"kind": kind, **fields}), flush=True)


def main() -> None:
    cost_of = probing.cost_of

    def later(choice, world, **more):
        if dist.get_rank() == 0:
            say("looked")
        time.sleep(LINKS_CHANGE_S)
        return cost_of(choice, world, **more)

    probing.cost_of = later
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
