"""A checkpoint of sharded tables as files: on the disk before it counts, and read without the memory of all parts."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tacit.errors import CheckpointError
from tacit.rows import folders

ROWS = 1 << 17  # of a part: 8 MB


def write(folder: Path, parts: int, rows: int = ROWS) -> None:
    for part in range(parts):
        weights = torch.full((rows, 16), float(part))
        state = {"rank": part, "world": parts, "checkpoint": "c0ffee", "weights": weights}
        assert folders.write(folder, state) == ""


def own_nbytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def test_parts_of_all_owners_take_only_the_memory_of_the_rows_that_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 4)
    before = own_nbytes()
    states = folders.read(tmp_path, 0, 3)
    mine = [state["weights"][::4].clone() for state in states]
    assert [part[0, 0].item() for part in mine] == [0.0, 1.0, 2.0, 3.0]
    grown, whole = own_nbytes() - before, 4 * ROWS * 64
    assert grown < whole / 2  # a quarter was copied


def test_a_part_is_on_the_disk_before_it_takes_the_place_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(file: int) -> None:
        done.append(Path(f"/proc/self/fd/{file}").resolve().name)
        sync(file)

    def replaced(path: Path, to: Path) -> Any:
        done.append("replace")
        return replace(path, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write(tmp_path, 1, rows=4)
    assert done == ["rows-0-of-1.new", "replace", tmp_path.name]


def test_a_part_that_cannot_be_written_leaves_the_older_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, rows=4)

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    state = {"rank": 0, "world": 1, "checkpoint": "another", "weights": torch.zeros(4, 16)}
    assert "cannot be written ([Errno 28] No space left on device)" in folders.write(tmp_path, state)
    assert [path.name for path in tmp_path.iterdir()] == ["rows-0-of-1.pt"]
    assert folders.read(tmp_path, 0, 1)[0]["checkpoint"] == "c0ffee"


def test_a_file_system_that_syncs_no_folder_has_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def files_alone(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").resolve().is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(file)

    monkeypatch.setattr(os, "fsync", files_alone)
    write(tmp_path, 1, rows=4)
    assert folders.read(tmp_path, 0, 1)[0]["checkpoint"] == "c0ffee"


def test_a_part_that_ends_early_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, 2, rows=4)
    path = tmp_path / "rows-1-of-2.pt"
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="rows-1-of-2.pt cannot be read"):
            folders.read(tmp_path, 0, 3)
