"""The examples are what the README promises: short, two or three lines apart, and they run under torchrun."""

import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_adopting_tacit_is_two_or_three_added_lines():
    plain, quick = ((EXAMPLES / name).read_text().splitlines() for name in ("ddp_plain.py", "quickstart.py"))
    changes = [line for line in difflib.ndiff(plain, quick) if line[0] in "+-"]
    assert all(line.startswith("+") for line in changes)
    assert 2 <= len(changes) <= 3
    assert len(quick) <= 40


@pytest.mark.parametrize("name", ["ddp_plain.py", "quickstart.py"])
def test_the_example_trains_under_torchrun(name, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / name),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    accuracy = float(re.search(r"accuracy ([0-9.]+)", found.stdout)[1])
    assert accuracy > 0.88
    assert ("sent" in found.stdout) == (name == "quickstart.py")
