"""What of hot rows is in a checkpoint, under "hot" of a rank's state: which of its rows are hot, and how often each was touched.

{"steps": 150, "time": [exponent, touches, steps of ranks], "tables": {"user": {"hot": int64 [h], "counts": float32 [n]}}}

`counts` are in the order of the rank's keys. Copies of other ranks' rows are in none. In another world counting begins anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from tacit.checkpoints import is_whole
from tacit.errors import CheckpointError
from tacit.rows.checkpoint import Rules, SavedRows


@dataclass(frozen=True, slots=True)
class SavedTable:
    """Of one table: this rank's hot keys, ascending, and the counts of all its rows."""

    hot: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class SavedHot:
    """Of one rank: steps that were made, the time by which counts fade, and its tables."""

    steps: int
    time: list[float]
    tables: Mapping[str, SavedTable]

    def as_state(self) -> dict[str, Any]:
        """For state_dict()."""
        tables = {name: {"hot": part.hot, "counts": part.counts} for name, part in self.tables.items()}
        return {"steps": self.steps, "time": self.time, "tables": tables}


def pick_hot(state: Any, found: Mapping[str, SavedRows], rules: Rules) -> SavedHot | None:
    """This rank's part of a state that checkpoint.pick has taken rows from; None if it has none, or in another world."""
    given = list(state) if isinstance(state, list | tuple) else [state]
    own = [each for each in given if (each["world"], each["rank"]) == (rules.world, rules.rank)]
    if len(own) != 1 or own[0].get("hot") is None:
        return None
    hot = own[0]["hot"]
    if not isinstance(hot, Mapping) or not is_whole(hot.get("steps"), 0):
        raise _wrong("no whole number of steps")
    time = hot.get("time")
    if not isinstance(time, list) or len(time) != 3 or not all(_is_time(each) for each in time):
        raise _wrong("no time of three numbers")
    tables = hot.get("tables")
    if not isinstance(tables, Mapping) or set(tables) != set(found):
        raise _wrong("other tables than its rows")
    return SavedHot(hot["steps"], time, {name: _picked(name, tables[name], found[name]) for name in found})


def _picked(name: str, part: Any, rows: SavedRows) -> SavedTable:
    hot, counts = (part.get("hot"), part.get("counts")) if isinstance(part, Mapping) else (None, None)
    if not isinstance(hot, Tensor) or hot.ndim != 1 or hot.dtype != torch.int64:
        raise _wrong(f"no vector of int64 keys of table {name!r}")
    if bool((hot[1:] <= hot[:-1]).any()) or not bool(torch.isin(hot, rows.keys).all()):
        raise _wrong(f"keys of table {name!r} that do not increase, or have no row")
    if not isinstance(counts, Tensor) or counts.dtype != torch.float32 or counts.shape != rows.keys.shape:
        raise _wrong(f"no float32 count for each row of table {name!r}")
    if not bool((counts.isfinite() & (counts >= 0)).all()):
        raise _wrong(f"counts of table {name!r} that are no numbers of 0 or more")
    return SavedTable(hot, counts)


def _is_time(value: object) -> bool:
    return isinstance(value, float | int) and isfinite(value) and value >= 0


def _wrong(what: str) -> CheckpointError:
    return CheckpointError(f"the hot rows in the checkpoint have {what}; it is damaged, load another")
