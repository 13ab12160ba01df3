"""Your own algorithm as data: JSON or TOML in, a Schedule out, and back.

    name = "pair"
    world = 2
    chunks = 1             # how many pieces the vector is cut in
    goal = "sum"           # sum (default), gather, exchange, meet: see Schedule
    aggregators = 0        # nodes from `world` on that only add (default 0)
    stages = [
        [[1, 0, 0, 1, "add"]],     # a stage: transfers [source, destination, first chunk, how many, add or copy]
        [[0, 1, 0, 1, "copy"]],
    ]

The form is checked here; `schedule.verify()` then proves that it reaches its `goal`.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from tacit.errors import ConfigError
from tacit.schedules.schedule import Goal, Phase, Schedule, Stage, check_option, is_whole
from tacit.schedules.verify import check_form

_KEYS = ("name", "world", "chunks", "goal", "aggregators", "stages")
_MOST = 1_000_000  # of anything that is written out
_VERBS = {"add": True, "copy": False}


def load(path: str | Path) -> Schedule:
    """The schedule in a .json or .toml file; its name is the file's unless it gives one. Not verified yet."""
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {".json": _from_json, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: a schedule is read from a .json or .toml file; rename it")
    try:
        data = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be read ({cause.strerror}); check the path") from cause
    except (ValueError, RecursionError) as cause:
        raise ConfigError(
            f"{path}: is no valid {path.suffix[1:].upper()} ({cause}); correct it there"
        ) from cause
    if isinstance(data, dict):
        data.setdefault("name", path.stem)
    return from_data(data)


def _from_json(text: str) -> Any:
    """As json.loads, but a key that is given twice is refused, as in TOML."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError(f"of {', '.join(key for key, _ in pairs)} one is given twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table)


def from_data(data: Any) -> Schedule:
    """The schedule that `data`, the dictionary of such a file, describes. Not verified yet."""
    if not isinstance(data, dict):
        raise ConfigError(f"a schedule is a table with {', '.join(_KEYS)}; this is {_short(data)}")
    name, goal, stages = data.get("name", "own"), data.get("goal", "sum"), data.get("stages")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"schedule name {_short(name)}: give a word")
    unknown = [key for key in data if key not in _KEYS]
    missing = [key for key in ("world", "chunks", "stages") if key not in data]
    if unknown or missing:
        what = f"{unknown[0]!r} is no key of a schedule" if unknown else f"the key {missing[0]!r} is missing"
        raise ConfigError(f"{name}: {what}; give {', '.join(_KEYS)}")
    world = check_option(name, "world", data["world"], least=1, most=_MOST)
    chunks = check_option(name, "chunks", data["chunks"], least=1, most=_MOST)
    aggregators = check_option(name, "aggregators", data.get("aggregators", 0), least=0, most=_MOST)
    if goal not in get_args(Goal):
        raise ConfigError(f"{name}: goal={_short(goal)}: give one of {', '.join(get_args(Goal))}")
    if not isinstance(stages, list):
        raise ConfigError(f"{name}: stages={_short(stages)}: give a list of stages, each a list of transfers")
    phases = tuple(Phase(_stage(name, number, stage)) for number, stage in enumerate(stages))
    schedule = Schedule(name, world, chunks, phases, goal, aggregators)
    check_form(schedule)
    return schedule


def to_data(schedule: Schedule) -> dict[str, Any]:
    """`schedule` as the dictionary that `from_data` reads, its stages written out; notes are left out."""
    if schedule.transfer_count > _MOST:
        raise ConfigError(
            f"{schedule.name}: {schedule.transfer_count:,} transfers are too many to write out; the limit is {_MOST:,}, so take fewer ranks"
        )
    return {
        "name": schedule.name,
        "world": int(schedule.world),
        "chunks": int(schedule.chunks),
        "goal": schedule.goal,
        "aggregators": int(schedule.aggregators),
        "stages": [_rows(stage) for stage in schedule.stages()],
    }


def _stage(name: str, number: int, rows: Any) -> Stage:
    if not isinstance(rows, list):
        raise ConfigError(f"{name}: stage {number} is {_short(rows)}; give a list of transfers")
    for place, row in enumerate(rows):
        if not _is_transfer(row):
            raise ConfigError(
                f'{name}: stage {number}, transfer {place} is {_short(row)}; give [source, destination, first chunk, how many, "add" or "copy"]'
            )
    src, dst, chunk, count, verb = zip(*rows, strict=True) if rows else ((),) * 5
    return Stage.of(src, dst, chunk, count, [_VERBS[v] for v in verb])


def _is_transfer(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != 5 or row[4] not in ("add", "copy"):
        return False
    return all(is_whole(value) and abs(value) < 2**31 for value in row[:4])


def _rows(stage: Stage) -> list[list[Any]]:
    numbers = zip(*(a.tolist() for a in (stage.src, stage.dst, stage.chunk, stage.count)), strict=True)
    return [[*row, "add" if add else "copy"] for row, add in zip(numbers, stage.add.tolist(), strict=True)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
