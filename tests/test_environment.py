"""Environment variables are read in one module."""

from pathlib import Path

import pytest

import tacit
from tacit import environment

ROOT = Path(tacit.__file__).parent


def test_no_other_file_reads_the_environment() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name == "environment.py":
            continue
        for line in path.read_text().splitlines():
            if "environ" in line.replace("environment", "") or "getenv" in line:
                pytest.fail(f"{name}: {line.strip()}")


def test_unset_variables_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TACIT_SECRET",
        "TACIT_STORE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    assert (environment.run_secret(), environment.store_address()) == ("", "")
    assert (environment.rank(), environment.world_size(), environment.world_size_text()) == (0, 1, "")
    assert environment.master() == ("127.0.0.1", 29500) and not environment.all_ranks_here()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert environment.world_size() == 2 and environment.all_ranks_here()


def test_a_child_inherits_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_STORE", "10.0.0.1:4801")
    found = environment.inherited()
    assert found["TACIT_STORE"] == "10.0.0.1:4801"
    found["TACIT_STORE"] = "changed"
    assert environment.store_address() == "10.0.0.1:4801"
