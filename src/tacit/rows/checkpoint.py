"""What of sharded tables is in a checkpoint: the rows a rank owns, in the order of their keys, checked from end to end before any is used.

{"format": 1, "world": 4, "rank": 3, "optimizer": "RowAdagrad", "adding": "rank order", "tables": {"user": {
    "width": 16, "range": 1000000, "dtype": "float32", "padding": None, "init": "Normal(std=1.0)", "seed": 0,
    "steps": 7, "exponent": ..., "exponents": [...], "keys": int64 [n], "weights": [n, 16], "state": {"squares": [n]}}}}
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tacit.checkpoints import is_whole, need
from tacit.errors import CheckpointError
from tacit.rows.adding import NOTHING, Adder
from tacit.rows.optimizers import RowOptimizer
from tacit.rows.shard import Shard
from tacit.rows.table import Table

log = logging.getLogger("tacit")

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Rules:
    """What a checkpoint must have been written under."""

    optimizer: RowOptimizer
    adding: str
    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The rows of one table that this rank goes on with."""

    steps: int
    exponent: int
    exponents: list[int]
    keys: Tensor
    weights: Tensor
    state: dict[str, Tensor]


def saved(shards: Mapping[str, Shard], adders: Mapping[str, Adder], rules: Rules) -> dict[str, Any]:
    """One rank's state: a copy."""
    return {
        "format": FORMAT,
        "world": rules.world,
        "rank": rules.rank,
        "optimizer": type(rules.optimizer).__name__,
        "adding": rules.adding,
        "tables": {name: _saved(shard, adders[name]) for name, shard in shards.items()},
    }


def _saved(shard: Shard, adder: Adder) -> dict[str, Any]:
    keys, weights, state = shard.export()
    known = {"steps": shard.steps, "exponent": adder.own, "exponents": list(adder.history)}
    return {**_facts(shard.table), **known, "keys": keys, "weights": weights, "state": state}


def _facts(table: Table) -> dict[str, Any]:
    return {
        "width": table.width,
        "range": table.keys,
        "dtype": str(table.dtype).removeprefix("torch."),
        "padding": table.padding,
        "init": str(table.init),
        "seed": table.seed,
    }


def pick(states: Any, tables: Mapping[str, Table], rules: Rules) -> dict[str, SavedRows]:
    """This rank's rows out of its own state (same world) or of all ranks' (any world); raises CheckpointError, and nothing else."""
    given = list(states) if isinstance(states, list | tuple) else [states]
    if not given or not all(isinstance(state, Mapping) and "tables" in state for state in given):
        raise CheckpointError(
            "this is no state of sharded tables; pass what tables.state_dict() returned, or a list of them"
        )
    for state in given:
        _check_facts(state, rules)
        _check_tables(state, tables, rules.optimizer)
    worlds = {state["world"] for state in given}
    if len(worlds) > 1:
        raise CheckpointError(
            f"the states come from worlds of {sorted(worlds)} ranks; pass those of one checkpoint"
        )
    _check_alike(given, tables)
    ranks, old_world = sorted(state["rank"] for state in given), worlds.pop()
    own = [state for state in given if state["rank"] == rules.rank]
    if old_world == rules.world and len(own) == 1:
        given = own
    elif ranks != list(range(old_world)):
        raise CheckpointError(
            f"rank {rules.rank} of {rules.world} cannot resume from ranks {ranks} of {old_world}: pass a list with the states of all "
            f"{old_world} ranks"
        )
    found = {
        name: _merged([state["tables"][name] for state in given], table, rules)
        for name, table in tables.items()
    }
    _warn_of_broken(found, rules)
    return found


def moment(found: Mapping[str, SavedRows]) -> list[tuple[str, int, list[int]]]:
    """What the parts of one checkpoint have in common: each table's steps and exponents."""
    return [(name, rows.steps, rows.exponents) for name, rows in found.items()]


def _check_alike(given: Sequence[Mapping[str, Any]], tables: Mapping[str, Table]) -> None:
    """Raises CheckpointError unless all states were saved after the same step."""
    for name in tables:
        parts = [state["tables"][name] for state in given]
        steps = sorted({part["steps"] for part in parts})
        if len(steps) > 1 or any(part["exponents"] != parts[0]["exponents"] for part in parts):
            after = f"steps {steps}" if len(steps) > 1 else f"step {steps[0]} of different runs"
            raise CheckpointError(
                f"the states were saved after {after} of table {name!r}; pass those of one checkpoint"
            )


def _warn_of_broken(found: Mapping[str, SavedRows], rules: Rules) -> None:
    """Rows with a number that is not finite may be in a checkpoint: a gradient made them so, and other rows are trained on."""
    broken = []
    for name, rows in found.items():
        finite = rows.weights.isfinite().all(1)
        for values in rows.state.values():
            finite &= values.isfinite().all(1) if values.ndim > 1 else values.isfinite()
        if count := int((~finite).sum()):
            broken.append(f"{count} of table {name!r}")
    if broken:
        log.warning(
            "the checkpoint has rows with NaN or infinite numbers: %s, on owner %d of %d; they stay as they are, so load an older checkpoint "
            "if they should be trained",
            ", ".join(broken),
            rules.rank,
            rules.world,
        )


def restore(found: Mapping[str, SavedRows], shards: Mapping[str, Shard], adders: Mapping[str, Adder]) -> None:
    """Puts what `pick` returned in the place of all rows."""
    for name, rows in found.items():
        shard, adder = shards[name], adders[name]
        shard.clear()
        shard.put(rows.keys, rows.weights, rows.state)
        shard.steps, adder.own, adder.history = rows.steps, rows.exponent, rows.exponents


def _merged(parts: Sequence[Mapping[str, Any]], table: Table, rules: Rules) -> SavedRows:
    """Of each part the rows that this rank owns now."""
    kept = []
    for part in parts:
        order, counts = table.by_owner(part["keys"], rules.world)
        mine = order.split(counts)[rules.rank]
        kept.append(
            (part["keys"][mine], part["weights"][mine], {n: t[mine] for n, t in part["state"].items()})
        )
    names = rules.optimizer.state
    return SavedRows(
        max(part["steps"] for part in parts),
        max(part["exponent"] for part in parts),
        list(parts[0]["exponents"]),
        torch.cat([keys for keys, _, _ in kept]),
        torch.cat([weights for _, weights, _ in kept]),
        {name: torch.cat([state[name] for _, _, state in kept]) for name in names},
    )


# ---- what a state must look like


def _check_facts(state: Mapping[str, Any], rules: Rules) -> None:
    if not is_whole(found := state.get("format"), FORMAT, FORMAT):
        raise CheckpointError(
            f"checkpoint format {found!r} of sharded tables is not {FORMAT}; it was written by another tacit"
        )
    need(state, "world", is_whole(state.get("world"), 1), "a whole number of at least 1")
    need(state, "rank", is_whole(state.get("rank"), 0, state["world"] - 1), f"below world={state['world']}")
    need(state, "tables", isinstance(state["tables"], Mapping), "a dict")
    for name, wanted in (("optimizer", type(rules.optimizer).__name__), ("adding", rules.adding)):
        need(state, name, isinstance(state.get(name), str), "text")
        if state[name] != wanted:
            raise CheckpointError(
                f"the checkpoint was written with {name} {state[name]!r} and these tables have {wanted!r}; shard them with the same {name}"
            )


def _check_tables(state: Mapping[str, Any], tables: Mapping[str, Table], optimizer: RowOptimizer) -> None:
    if (found := set(state["tables"])) != set(tables):
        raise CheckpointError(
            f"the checkpoint has the tables {sorted(map(str, found))} and this model {sorted(tables)}; load the checkpoint of this model"
        )
    for name, table in tables.items():
        part = state["tables"][name]
        if not isinstance(part, Mapping):
            raise CheckpointError(f"table {name!r} of the checkpoint is no dict; load another checkpoint")
        for fact, wanted in _facts(table).items():
            if fact not in part or part[fact] != wanted:
                raise CheckpointError(
                    f"the checkpoint is of another table {name!r}: its {fact} is {part.get(fact)!r}, and here it is {wanted!r}; load the "
                    f"checkpoint of this model"
                )
        _check_rows(name, part, table, optimizer, state["rank"], state["world"])


def _check_rows(
    name: str, part: Mapping[str, Any], table: Table, optimizer: RowOptimizer, rank: int, world: int
) -> None:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(
            f"table {name!r} of rank {rank} in the checkpoint {what}; it is damaged, load another"
        )

    exponents = part.get("exponents")
    if not is_whole(part.get("steps"), 0) or not is_whole(part.get("exponent"), NOTHING, 2**31):
        raise wrong("has no whole number of steps, or no exponent")
    if not isinstance(exponents, list) or not all(is_whole(each, NOTHING, 2**31) for each in exponents):
        raise wrong("has no list of exponents")
    keys = part.get("keys")
    if not _is(keys, (len(keys) if isinstance(keys, Tensor) and keys.ndim else -1,), torch.int64):
        raise wrong("has no vector of int64 keys")
    assert isinstance(keys, Tensor)
    if bool((keys[1:] <= keys[:-1]).any()):
        raise wrong("has keys that do not increase")
    if table.keys is not None and len(keys) and (int(keys[0]) < 0 or int(keys[-1]) >= table.keys):
        raise wrong(f"has the key {int(keys[0] if keys[0] < 0 else keys[-1])}, beyond {table.keys - 1}")
    if table.by_owner(keys, world)[1][rank] != len(keys):
        raise wrong("has keys that this rank does not own")
    shapes = {"weights": (len(keys), table.width)}
    state = part.get("state")
    if not isinstance(state, Mapping) or set(state) != set(optimizer.state):
        raise wrong(f"has no state of {type(optimizer).__name__}")
    for what, value, dtype in [
        ("weights", part.get("weights"), table.dtype),
        *((n, t, torch.float32) for n, t in state.items()),
    ]:
        shape = shapes["weights"] if what == "weights" or optimizer.state[what] else (len(keys),)
        if not _is(value, shape, dtype):
            raise wrong(f"has {what} that are not {dtype} of shape {shape}")


def _is(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"
    return dense and tuple(value.shape) == shape and value.dtype == dtype
