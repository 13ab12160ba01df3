"""What of a handle is in a checkpoint: which rank's state a rank goes on from, checked from end to end before any of it is used.

    {"tacit_rank3": ({"format": 1, "strategy": ..., "world": 4, "rank": 3, "lane": 0, "step": ..., "seed": ..., "memory": ...},)}

The name is the process's alone, and its value is one leaf (a tuple; torch.distributed.checkpoint would take a dict apart, and a handle
that has not trained yet could not name the parts it wants back). Why: docs/decisions/0012-dcp.md.
"""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.errors import CheckpointError
from tacit.memory import merged_of
from tacit.requests import RULES

FORMAT = 1
_KEY = "tacit_rank"
_LARGEST = 2**63 - 1
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = 120
_DAMAGED = "the checkpoint is damaged: load another, or leave tacit's state out"


@dataclass(frozen=True, slots=True)
class Place:
    """Who loads a state: a rank of those that exchange with each other, and which of several such sets they are.

    `lane` is the first process of the set: with FSDP2 inside hosts, or DDP inside hosts that merge, every place of a host has its own.
    """

    rank: int
    world: int
    lane: int = 0


def key_of(process: int) -> str:
    """The name of one process's state, which no other process's has: torch.distributed.checkpoint takes equal names for replicas."""
    return f"{_KEY}{process}"


def processes_in(names: Iterable[str]) -> list[int]:
    """The processes whose states are among `names`, which may have prefixes (`tacit.tacit_rank3`)."""
    tails = {name.rpartition(".")[2] for name in names}
    return sorted(int(tail.removeprefix(_KEY)) for tail in tails if _is_key(tail))


def pick(state: Any, place: Place, strategy: str, numels: Mapping[str, int]) -> Mapping[str, Any]:
    """The one rank's state to load at `place`, out of a rank's own state, a full state, or a list of every rank's state.

    Same world and own rank: the same bits. Otherwise the states of ALL old ranks are needed, and merged by `merged_of`.
    Every state that counts is checked from end to end first: CheckpointError, and nothing else, for one that cannot be loaded.
    """
    states = _as_list(state)
    for found in states:
        _check_facts(found)
    states = [found for found in states if found.get("lane", place.lane) == place.lane]
    for found in states:
        _check_memory(found, strategy, numels)
    if not states:
        raise CheckpointError(
            f"the checkpoint holds no state of the ranks that rank {place.rank} exchanges with (those beginning with process "
            f"{place.lane}); lay the ranks out as they were when it was saved"
        )
    old_world = states[0]["world"]
    if any(found["world"] != old_world for found in states):
        worlds = sorted({found["world"] for found in states})
        raise CheckpointError(f"the states come from worlds of {worlds} ranks; pass those of one checkpoint")
    ranks = sorted(found["rank"] for found in states)
    if old_world == place.world:
        own = [found for found in states if found["rank"] == place.rank]
        if len(own) > 1:
            raise CheckpointError(
                f"{len(own)} states claim to be rank {place.rank} of {place.world}; pass this rank's own state only"
            )
        if own:
            return own[0]
    if len(ranks) != old_world or ranks != list(range(old_world)):
        raise CheckpointError(
            f"rank {place.rank} of {place.world} cannot resume from ranks {_short(ranks)} of {old_world}: pass a list "
            f"with the states of all {old_world} ranks, or save handle.full_state_dict() once; with torch.distributed.checkpoint "
            f"load handle.resharded(checkpoint)"
        )
    _check_alike([found["memory"] for found in states])
    in_order = sorted(states, key=lambda found: int(found["rank"]))
    return {**in_order[0], "memory": merged_of([found["memory"] for found in in_order])}


def strategy_of(state: Any) -> str:
    """The strategy that a state was written under, for a handle that takes whatever that was."""
    found = _as_list(state)[0]
    need(found, "strategy", isinstance(found.get("strategy"), str), "text")
    return str(found["strategy"])


def auto_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a handle that chose by itself has saved of it: whether it had chosen, and the size of its buckets. Of others the size alone, which
    somebody has chosen; empty where they saved none."""
    saved: Mapping[str, Any] = state.get("auto", {})
    need(state, "auto", isinstance(saved, Mapping), "a dict")
    if saved:
        need(saved, "settled", isinstance(saved.get("settled"), bool), "True or False")
        need(saved, "bucket_nbytes", is_whole(saved.get("bucket_nbytes"), 1), "a whole number of at least 1")
    elif "bucket" in state:
        return {"settled": True, "bucket_nbytes": state["bucket"]}
    return saved


def check_bucket(state: Mapping[str, Any], place: Place, measured: int | None) -> None:
    """Raises CheckpointError where buckets were measured now, and differ from those then: blocks and shards would, and with them the bits."""
    saved = state.get("bucket", measured)
    if measured is not None and saved != measured and state["world"] == place.world:
        raise CheckpointError(
            f"the checkpoint was written with buckets of {saved} bytes, and now {measured} were measured, which would change the bits; attach "
            f"with bucket={saved}"
        )


def check_cut(state: Mapping[str, Any], place: Place, bucket_nbytes: int | None, cut: Sequence[int]) -> None:
    """Raises CheckpointError where buckets of the same size would be cut at other places now than then: what is added in which order would change.

    `cut`: the sizes of DDP's buckets where tacit's are those, else empty.
    """
    saved = state.get("cut", list(cut))
    if list(saved) == list(cut) or state["world"] != place.world:
        return
    if auto_of(state).get("bucket_nbytes") == bucket_nbytes:
        then, now = (f"as DDP's of {sizes[-1]} bytes" if sizes else "by tacit" for sizes in (saved, cut))
        raise CheckpointError(
            f"the checkpoint was written with buckets cut {then}, and now they are cut {now}, which would change the bits; build DDP with the "
            f"bucket_cap_mb it had"
        )


def _as_list(state: Any) -> list[Mapping[str, Any]]:
    """Single ranks' states, whatever they were handed over in."""
    if isinstance(state, Mapping) and "ranks" in state:
        state = state["ranks"]
    given = list(state) if isinstance(state, (list, tuple)) else [state]
    found = [single for part in given for single in _unpacked(part)]
    if not found or not all(isinstance(single, Mapping) and "memory" in single for single in found):
        raise CheckpointError(
            "this is no state of tacit; pass what handle.state_dict() returned, or a list of them"
        )
    return found


def _unpacked(part: Any) -> list[Any]:
    if not isinstance(part, Mapping) or not part or not all(_is_key(name) for name in part):
        return [part]
    return [one[0] if isinstance(one, (list, tuple)) and len(one) == 1 else None for one in part.values()]


def _is_key(name: object) -> bool:
    number = name.removeprefix(_KEY) if isinstance(name, str) and name.startswith(_KEY) else ""
    return number.isascii() and number.isdecimal() and len(number) < 10


# ---- what a state must look like


def _check_facts(state: Mapping[str, Any]) -> None:
    if not is_whole(format_ := state.get("format"), FORMAT, FORMAT):
        raise CheckpointError(
            f"checkpoint format {_short(format_)} is not {FORMAT}; it was written by another tacit"
        )
    need(state, "strategy", isinstance(state.get("strategy"), str), "text")
    need(state, "world", is_whole(state.get("world"), 1), "a whole number of at least 1")
    need(state, "rank", is_whole(state.get("rank"), 0, state["world"] - 1), f"below world={state['world']}")
    need(state, "step", is_whole(state.get("step"), 0), "a whole number of at least 0")
    need(state, "seed", is_whole(state.get("seed"), -_LARGEST), "a whole number")
    need(state, "lane", "lane" not in state or is_whole(state["lane"], 0), "a whole number of at least 0")
    need(
        state, "bucket", "bucket" not in state or is_whole(state["bucket"], 1), "a whole number of at least 1"
    )
    cut = state.get("cut", [])
    sizes = isinstance(cut, list) and len(cut) in (0, 2) and all(is_whole(nbytes, 1) for nbytes in cut)
    need(state, "cut", sizes, "two whole numbers of at least 1, or none")
    need(state, "memory", isinstance(state["memory"], Mapping), "a dict")


def _check_memory(state: Mapping[str, Any], strategy: str, numels: Mapping[str, int]) -> None:
    if (saved := state["strategy"]) != strategy and state["memory"]:
        raise CheckpointError(
            f"the checkpoint was written under {_short(saved)} and this handle runs {strategy!r}; attach the same strategy, "
            f"or start with an empty memory by not loading tacit's state"
        )
    for slot, parts in state["memory"].items():
        if not isinstance(slot, str) or not isinstance(parts, Mapping):
            raise CheckpointError(
                f"memory {_short(slot)} is {_short(parts)}, not a dict of tensors by parameter name; {_DAMAGED}"
            )
        for name, kept in parts.items():
            if isinstance(kept, Mapping):
                _check_tensors(slot, name, kept, numels)
            else:
                _check_vector(slot, name, kept, numels)
        if len({isinstance(kept, Mapping) for kept in parts.values()}) > 1:
            raise CheckpointError(f"memory {slot!r} holds vectors and tensors; {_DAMAGED}")


def _check_tensors(slot: str, name: object, kept: Mapping[Any, Any], numels: Mapping[str, int]) -> None:
    what = f"memory {slot!r} of parameter {_short(name)}"
    if name not in numels:
        raise CheckpointError(
            f"{what} is in the checkpoint, but the parameter does not exist in this model; load the checkpoint of this model or "
            f"leave tacit's state out"
        )
    rule, parts = kept.get("rule"), kept.get("parts")
    if rule not in RULES or not isinstance(parts, Mapping) or kept.keys() != {"rule", "parts"}:
        raise CheckpointError(f"{what} is {_short(kept)}, not a rule and tensors by part; {_DAMAGED}")
    for part, value in parts.items():
        if not isinstance(part, str) or not _is_dense(value):
            raise CheckpointError(
                f"{what}, part {_short(part)}, is {_short(value)}, not a dense tensor; {_DAMAGED}"
            )
        if rule == "mean" and not value.is_floating_point():
            raise CheckpointError(f"{what} is {value.dtype} and has no mean; {_DAMAGED}")
        if value.device.type == "meta" or not bool(value.isfinite().all()):
            raise CheckpointError(f"{what} holds numbers that are not finite; load an older checkpoint")


def _is_dense(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_quantized or value.is_nested) and value.is_contiguous()


def _check_alike(memories: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError unless what the ranks kept can be merged: of one kind, rule, shape and dtype."""
    seen: dict[tuple[str, ...], object] = {}
    for memory in memories:
        for slot, parts in memory.items():
            for name, kept in parts.items():
                tensors = kept["parts"] if isinstance(kept, Mapping) else {}
                facts: dict[tuple[str, ...], object] = {
                    (slot, name): kept["rule"] if isinstance(kept, Mapping) else None
                }
                facts |= {(slot, name, part): (t.shape, t.dtype) for part, t in tensors.items()}
                for key, fact in facts.items():
                    if seen.setdefault(key, fact) != fact:
                        raise CheckpointError(
                            f"memory {slot!r} of parameter {name!r} differs in kind or shape between ranks; {_DAMAGED}"
                        )


def _check_vector(slot: str, name: object, kept: Any, numels: Mapping[str, int]) -> None:
    what = f"memory {slot!r} of parameter {_short(name)}"
    if not isinstance(kept, Tensor) or kept.layout != torch.strided or kept.dtype != torch.float32:
        found = f"a tensor of {kept.dtype}" if isinstance(kept, Tensor) else _short(kept)
        raise CheckpointError(f"{what} is {found}, not a dense float32 tensor; {_DAMAGED}")
    known = numels.get(name) if isinstance(name, str) else None
    if known != kept.numel():
        here = f"has {known} elements" if known is not None else "does not exist"
        raise CheckpointError(
            f"{what} has {kept.numel()} elements in the checkpoint, but the parameter {here} in this model; load the checkpoint "
            f"of this model or leave tacit's state out"
        )
    if kept.device.type == "meta" or not bool(kept.isfinite().all()):
        raise CheckpointError(f"{what} holds numbers that are not finite; load an older checkpoint")


def need(state: Mapping[str, Any], name: str, good: bool, what: str) -> None:
    """Raises CheckpointError unless `good`, which is whether entry `name` of a state is `what` it must be."""
    if not good:
        found = f"is {_short(state[name])}" if name in state else "is missing"
        raise CheckpointError(f"{name!r} {found} in the checkpoint, and must be {what}; {_DAMAGED}")


def need_all(memory: Mapping[str, Mapping[str, Tensor]], slots: Iterable[str], names: Iterable[str]) -> None:
    """Raises CheckpointError unless `memory` holds these slots for all these parameters: where zeros are no beginning."""
    wanted = list(names)
    for slot in slots:
        lacks = next((name for name in wanted if name not in memory.get(slot, {})), None)
        if lacks is not None:
            raise CheckpointError(
                f"memory {slot!r} of parameter {lacks!r} is missing in the checkpoint; {_DAMAGED}"
            )


def is_whole(value: object, least: int, most: int = _LARGEST) -> bool:
    """Whether `value` is an int (no bool) from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _short(value: object) -> str:
    return _BRIEF.repr(value) if not isinstance(value, Tensor) else f"a tensor of {tuple(value.shape)}"
