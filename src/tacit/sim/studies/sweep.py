"""Many costs in a row, one record a point: schedules x worlds x vectors x networks. What a file holds already is skipped.

with Recorder("runs/sweep.jsonl") as recorder:
    for record in sweep(points(["ring", "wrht"], [1024, 4096], {"vgg16": 552_000_000}, ["optical"]), recorder):
        ...
"""

from __future__ import annotations

import json
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from tacit.errors import ConfigError
from tacit.records import Record, Recorder, TornRecordWarning, read
from tacit.sim.fabric import parse_fabric
from tacit.sim.texts import parse_schedule

KIND, COMMAND = "sim", "tacit sim sweep"
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One configuration to cost: a schedule, a vector, a number of ranks and a network."""

    schedule: str
    world: int
    vector: str  # the model's name, or the size as text
    nbytes: int
    on: str
    stripe: bool = False


def points(
    schedules: Sequence[str],
    worlds: Sequence[int],
    vectors: Mapping[str, int],
    networks: Sequence[str],
    stripe: bool = False,
) -> list[SweepPoint]:
    """Every combination, smallest worlds first: what is cheap is known early."""
    every = product(sorted(worlds), networks, vectors.items(), schedules)
    return [
        SweepPoint(schedule, world, name, nbytes, on, stripe) for world, on, (name, nbytes), schedule in every
    ]


def known(path: Path) -> dict[SweepPoint, Record]:
    """The points whose time is in the file already; a line that cannot be read counts as missing.

    Refuses a file that no sweep wrote: records would be added to it, and spoil it.
    """
    if not path.exists() or path.is_char_device():  # /dev/null holds nothing
        return {}
    try:
        _check_ours(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TornRecordWarning)
            records = read(path)
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be read ({cause.strerror}); name another file") from cause
    names = tuple(SweepPoint.__dataclass_fields__)
    return {
        SweepPoint(**{name: entry[name] for name in names}): entry
        for entry in records
        if _is_ours(entry)
        and entry.get("time_s") is not None
        and all(isinstance(entry.get(name), str | int) for name in names)
    }


def _check_ours(path: Path) -> None:
    """The first line of a sweep's file is one of its records."""
    if not path.is_file() and not path.is_dir():
        raise ConfigError(f"{path}: is no file; name another one")
    with path.open("rb") as file:
        first = file.readline(_LONGEST_LINE)
    if not first:
        return
    try:
        ours = _is_ours(json.loads(first))
    except (ValueError, RecursionError):
        ours = False
    if not ours:
        raise ConfigError(f"{path}: holds no record of a sweep; name another file, this one would be spoilt")


def _is_ours(entry: object) -> bool:
    if not isinstance(entry, dict) or not {"time", "run"} <= entry.keys():
        return False
    return entry.get("kind") == KIND or (entry.get("kind"), entry.get("command")) == ("start", COMMAND)


def sweep(
    todo: Iterable[SweepPoint],
    recorder: Recorder,
    *,
    have: Mapping[SweepPoint, Record] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Record]:
    """The record of every point, as it is made: its cost, or the sentence that refused it. Those in `have` come as they are.

    `took_s` is the time of building, proving the light of and costing the schedule; `peak_nbytes` the most memory that this
    process has used so far.
    """
    for point in todo:
        if have and point in have:
            yield have[point]
        else:
            yield recorder.record(KIND, **asdict(point), **_answer(point, clock))


def peak_nbytes() -> int:
    """The most memory this process has used so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _answer(point: SweepPoint, clock: Callable[[], float]) -> Record:
    start_s = clock()
    try:
        fabric = parse_fabric(point.on, point.world, stripe=point.stripe)
        schedule = parse_schedule(point.schedule, point.world, fabric.ring)
        fabric.prove(schedule)
        cost = fabric.cost(schedule, point.nbytes)
        found: Record = {
            "network": fabric.as_record(),
            "time_s": cost.time_s,
            "latency_s": cost.latency_s,
            "stage_count": cost.stage_count,
            "transfers": schedule.transfer_count,
            "alpha_beta_s": fabric.alpha_beta_s(schedule, cost),
            "lower_bound_s": fabric.lower_bound_s(schedule, point.nbytes),
        }
    except ConfigError as refusal:
        found = {"time_s": None, "refused": str(refusal)}
    return found | {"took_s": clock() - start_s, "peak_nbytes": peak_nbytes()}
