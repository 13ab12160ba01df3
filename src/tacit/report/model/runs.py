"""Runs as the report takes them: record files read and checked, the last run of each."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tacit import records
from tacit.errors import ConfigError
from tacit.record_types import TYPES, VERSION, EndRecord, StartRecord, T, fit, lacks_family
from tacit.records import Record, TornRecordWarning
from tacit.report.text import counted

SIMULATED = frozenset({"cost", "sim"})
FIGURES = frozenset({"timing", "accuracy", "rounds", "limits", "calibration", "training"}) | SIMULATED
"""The kinds of records that a page can be made of."""
_UNFINISHED = {
    "interrupted": "This run was interrupted",
    "failed": "This run failed before its end",
    "no end": "This run did not record its end: it was killed, or it still runs",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run's records, oldest first; `label` is its own on the page, `notes` are sentences on what was left out."""

    label: str
    id: str
    path: str
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()

    @property
    def start(self) -> StartRecord:
        """How it began; empty where that was not recorded."""
        return next(iter(self.typed(StartRecord)), StartRecord())

    @property
    def outcome(self) -> str | None:
        """How it ended, as recorded, or 'no end'; None where no end belongs: a sweep, or records without a start."""
        ends = self.typed(EndRecord)
        if ends:
            return ends[-1].outcome or "no end"
        return "no end" if self.of("start") and self.of(*(FIGURES - SIMULATED)) else None

    @property
    def unfinished(self) -> str:
        """A sentence on a run that did not come to its end; empty for one that did."""
        if self.outcome in (None, "done"):
            return ""
        how = _UNFINISHED.get(str(self.outcome), f"This run ended otherwise than done ({self.outcome})")
        return f"{how}; what it had recorded stands here."

    def typed(self, as_type: type[T]) -> list[T]:
        """The records of this type, as values."""
        return [fit(record, as_type)[0] for record in self.of(as_type.kind())]

    def of(self, *kinds: str) -> list[Record]:
        return [record for record in self.records if record["kind"] in kinds]


def load(paths: Sequence[str | Path]) -> list[Run]:
    """The runs that these files or run folders hold, each under a label of its own; `ConfigError` names what is wrong."""
    found = {run.id: run for run in (_load(Path(path)) for path in paths)}
    return label(list(found.values()))


def label(runs: Sequence[Run]) -> list[Run]:
    """The runs, with where they come from added to a label that two of them share, or their ids."""
    shared = {run.label for run in runs if [other.label for other in runs].count(run.label) > 1}
    names = [f"{run.label} ({_name(run.path)})" for run in runs]
    told = names if len(set(names)) == len(runs) else [f"{run.label} {run.id}" for run in runs]
    return [
        replace(run, label=name) if run.label in shared else run for run, name in zip(runs, told, strict=True)
    ]


def of_records(found: Sequence[Record], path: str = "", notes: Sequence[str] = ()) -> Run:
    """The run that measured last among `found`; an earlier one is left out, with a note.

    What was simulated is kept from all runs: a sweep adds to a file what the file does not hold yet.
    """
    figures = [record for record in found if record["kind"] in FIGURES]
    last = (figures or found)[-1]["run"] if found else ""
    own = tuple(record for record in found if record["run"] == last or record["kind"] in SIMULATED)
    others = {record["run"] for record in figures if record["kind"] not in SIMULATED} - {last}
    left = (
        [f"{path or 'the file'} holds {counted(len(others), 'earlier run')}, left out here"] if others else []
    )
    run = Run("", str(last), path, own, (*notes, *left))
    return replace(run, label=run.start.experiment or _name(path) or str(last))


def _load(path: Path) -> Run:
    file = _file(path)
    found, notes = _read(file)
    known = [record for record in found if record["kind"] in FIGURES]
    if not known:
        kinds = ", ".join(sorted({str(record["kind"]) for record in found}))
        raise ConfigError(
            f"{file}: its records ({kinds}) hold nothing to report; name a run with {', '.join(sorted(FIGURES))}"
        )
    return of_records(found, str(file), notes)


def _file(path: Path) -> Path:
    if path.is_dir():
        inside = sorted(path.glob("*.jsonl"))
        named = path / "records.jsonl"
        if named in inside or len(inside) == 1:
            return named if named in inside else inside[0]
        held = f"it holds {len(inside)} of them" if inside else "it holds none"
        raise ConfigError(
            f"{path}: a run folder has one record file, records.jsonl, and {held}; name the file"
        )
    if not path.exists():
        raise ConfigError(
            f"{path}: there is no such file or folder; name a run's records.jsonl or its folder"
        )
    return path


def _read(file: Path) -> tuple[list[Record], list[str]]:
    """The records of a file, and the notes on it."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TornRecordWarning)
            lines: list[tuple[int, Any]] = records.read_lines(file)
    except OSError as cause:
        raise ConfigError(f"{file}: cannot be read ({cause.strerror})") from cause
    torn = sum(issubclass(warning.category, TornRecordWarning) for warning in caught)
    found = [(number, line) for number, line in lines if _is_record(line)]
    for number, record in found:
        _check_version(file, number, record)
    if not lines and not torn:
        raise ConfigError(f"{file}: this file is empty; a run that was recorded has at least one line")
    if not found:
        raise ConfigError(
            f"{file}: no line of this file is a record; a record is a JSON object with kind, run and time"
        )
    strange = torn + len(lines) - len(found)
    notes = (
        [f"{file}: {strange} of {torn + len(lines)} lines are no records and were skipped"] if strange else []
    )
    notes += _by_name(file, [record for _, record in found])
    return [record for _, record in found], notes + [note for place in found for note in _unfit(file, *place)]


def _check_version(file: Path, number: int, record: Record) -> None:
    """Refuses records of a version that does not exist yet: what their fields mean is not known here."""
    version = record.get("version", 1)
    if isinstance(version, int) and version > VERSION:
        raise ConfigError(
            f"{file}: line {number} is a record of version {version}, and this tacit reads versions up to {VERSION}; "
            "report it with the tacit that wrote it"
        )


def _by_name(file: Path, found: Sequence[Record]) -> list[str]:
    """A sentence on records of version 1, which are upgraded while they are read."""
    old = sum(record.get("version", 1) == 1 and lacks_family(record) for record in found)
    whose = f"{counted(old, 'record')} of version 1: family, precision and loss are taken from the configurations' names"
    return [f"{file}: {whose}"] if old else []


def _unfit(file: Path, number: int, record: Record) -> list[str]:
    """A sentence for each field of a record that does not fit its type; such a field counts as missing."""
    as_type = TYPES.get(record["kind"])
    return [f"{file}: line {number}: {why}" for why in (fit(record, as_type)[1] if as_type else ())]


def _is_record(line: Any) -> bool:
    fields = {"kind": str, "run": str, "time": int | float}
    return isinstance(line, dict) and all(isinstance(line.get(key), of) for key, of in fields.items())


def _name(path: str) -> str:
    """What a file is called among others: its folder, where the file has the name they all have."""
    file = Path(path)
    return file.resolve().parent.name if file.name == "records.jsonl" else file.stem
