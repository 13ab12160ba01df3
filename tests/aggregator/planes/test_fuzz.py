"""Two hundred thousand mutated packets through the C++ plane under ASan and UBSan; `make fuzz` sends ten million."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tacit.aggregator.wire import EVENTS, VERDICTS

ROOT = Path(__file__).parents[3]
CXX = os.environ.get("CXX", "c++")


def sanitizers_missing(folder: Path) -> str:
    """Why the fuzzer cannot be built here; empty if it can."""
    if shutil.which(CXX) is None:
        return f"no C++ compiler: {CXX} is not there"
    (folder / "empty.cpp").write_text("int main() {}\n")
    command = [CXX, "-fsanitize=address,undefined", "empty.cpp", "-o", "empty"]
    tried = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return f"{CXX} has no sanitizers here: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


def test_nothing_from_the_network_reads_or_writes_out_of_bounds(tmp_path):
    if reason := sanitizers_missing(tmp_path):
        pytest.skip(reason)
    # looking for leaks takes ptrace, which containers forbid
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    run = subprocess.run(
        [ROOT / "fuzz" / "run", "200000", "3"], env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr[-4000:]
    counts = {name: int(count) for name, count in (line.split() for line in run.stdout.splitlines()[1:])}
    assert list(counts) == [*VERDICTS, *EVENTS]
    assert min(counts.values()) > 0  # it has been everywhere
    assert sum(counts[name] for name in VERDICTS) == 200_000
