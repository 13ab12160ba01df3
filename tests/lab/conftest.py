"""Labs of the tests are listed in a folder of their own, so nobody's else are seen, ended or cleaned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tacit.lab import NoNamespacesError, kernel_features


@pytest.fixture(scope="session")
def kernel() -> dict[str, str]:
    """What the kernel can do, by trying; tests that need a lab are skipped where this user may not build one."""
    try:
        return kernel_features()
    except NoNamespacesError as cause:
        pytest.skip(str(cause))


@pytest.fixture
def folder(tmp_path: Path, kernel: dict[str, str]) -> Path:
    """Where the labs of one test are listed. It is in the command line of their keepers, so it also marks them."""
    return tmp_path / "labs"
