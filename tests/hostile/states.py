"""Attacks on `handle.load_state_dict`: states that were cut, mixed up or made up."""

import copy
import math
import random
import time

import torch
from toys import deep, own_state

import tacit
from tacit.checkpoints import key_of
from tacit.errors import CheckpointError
from tacit.layout import Layout

VALUES = [
    None, True, -1, 2**70, 1.5, math.nan, math.inf, "text", b"", [], {}, (), [None], {"a": {"a": 1}}, {1: 2}, {"0": -1}, object(),
    torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.full((64,), math.nan),
]  # fmt: skip
GONE = object()


def _paths(state, path=()):
    """Every place of a state, a few parameters of each slot."""
    for index, (key, value) in enumerate(state.items()):
        if len(path) < 2 or index < 2:
            yield (*path, key)
            if isinstance(value, dict):
                yield from _paths(value, (*path, key))


def _changed(state, path, value):
    changed = copy.deepcopy(state)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


def damaged(state):
    """Some hundred states that differ from `state` in one place, and some that are none at all."""
    for path in _paths(state):
        for value in (GONE, *VALUES):
            yield _changed(state, path, value)
        yield _changed(state, (*path[:-1], "unknown"), {"no such parameter": torch.zeros(1)})
    for whole in VALUES:
        yield whole
        yield {key_of(0): whole}
        yield {key_of(0): (whole,)}
        yield [state, whole]
        yield {"ranks": whole}


def same(a, b):
    """Whether two states have the same bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def attack_with_damaged_states(seconds: float, seed: int) -> dict[str, int]:
    """One to four places of a good state damaged at a time: each is loaded or refused, and a refusal changes nothing."""
    rng = random.Random(seed)
    handle = tacit.attach(deep(layers=1), None, "every / ef(int4)", seed=seed)
    layout = Layout.of({name: (numel,) for name, numel in handle.numels.items()})
    handle.memory.of(layout, torch.device("cpu")).vector("residual").copy_(torch.randn(layout.numel))
    good, counts, deadline = own_state(handle), {"states": 0, "refused": 0}, time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = good
        for _ in range(rng.randint(1, 4)):
            state = _changed(state, rng.choice(list(_paths(state))), rng.choice([GONE, *VALUES]))
        counts["states"] += 1
        refusal = _refusal(handle, {key_of(0): (state,)} if rng.random() < 0.5 else state)
        if refusal is None:
            handle.load_state_dict(good)
        else:
            counts["refused"] += 1
            assert "\n" not in refusal
        assert same(own_state(handle), good), state
    handle.close()
    return counts


def _refusal(handle, state):
    try:
        handle.load_state_dict(state)
    except CheckpointError as error:
        return str(error)
    return None


ATTACKS = [attack_with_damaged_states]
