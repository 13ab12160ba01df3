"""A checkpoint of sharded tables as files, one an owner: rows-0-of-2.pt, rows-1-of-2.pt. Any number of owners reads them again."""

import errno
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tacit.errors import CheckpointError


def write(folder: Path, state: dict[str, Any]) -> str:
    """One owner's part, whole or not at all. Returns why it could not be written; "" if it was."""
    path = folder / _name(state["rank"], state["world"])
    beside = path.with_suffix(".new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # before it takes the place of an older part
        beside.replace(path)
        _sync(folder)
    except (OSError, RuntimeError) as cause:  # torch has its own for a full disk
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        return f"{path} cannot be written ({' '.join(str(cause).split())[:200]}); save into another folder"
    return ""


def read(folder: Path, part: int, count: int) -> list[dict[str, Any]]:
    """This owner's part where `count` owners wrote, else those of all."""
    paths = sorted(folder.glob("rows-*-of-*.pt"))
    counts = {path.stem.rpartition("-of-")[2] for path in paths}
    if len(counts) != 1:
        there = "no part" if not counts else f"parts of {' and of '.join(sorted(counts))} owners"
        raise CheckpointError(
            f"{folder} has {there} of a checkpoint of sharded tables, seen from owner {part} of {count}; load a folder that one save() wrote"
        )
    if (own := folder / _name(part, count)).is_file():
        return [_read(own)]
    states = [_read(path) for path in paths]
    if len({state["checkpoint"] for state in states}) > 1:
        raise CheckpointError(
            f"{folder} has parts of different checkpoints; load a folder that one save() wrote"
        )
    return states


def _sync(folder: Path) -> None:
    """The names in it outlast a power cut, too."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as cause:  # some network and user file systems sync files alone: the part is there
        if cause.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


def _name(part: int, count: int) -> str:
    return f"rows-{part}-of-{count}.pt"


def _read(path: Path) -> dict[str, Any]:
    try:
        # Mapped, not read: of the parts of all owners only the rows that this one goes on with take memory.
        found = torch.load(path, weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as cause:
        raise CheckpointError(
            f"{path} cannot be read ({' '.join(str(cause).split())[:200]}); load another checkpoint"
        ) from cause
    if not isinstance(found, dict) or not isinstance(found.get("checkpoint"), str):
        raise CheckpointError(
            f"{path} is no part of a checkpoint that tables.save() wrote; load another folder"
        )
    return found
