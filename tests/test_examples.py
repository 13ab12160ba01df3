"""The examples are what the README promises: short, two or three lines apart, and they run under torchrun."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

from ranks import printed

from tacit.gossip.store import StoreServer
from tacit.launch import reserved_port

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_adopting_tacit_is_two_or_three_added_lines():
    plain, quick = ((EXAMPLES / name).read_text().splitlines() for name in ("ddp_plain.py", "quickstart.py"))
    changes = [line for line in difflib.ndiff(plain, quick) if line[0] in "+-"]
    assert all(line.startswith("+") for line in changes)
    assert 2 <= len(changes) <= 3
    assert len(quick) <= 40


def accuracy(told):
    return float(re.search(r"accuracy ([0-9.]+)", told)[1])


def test_the_example_trains_under_torchrun(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = subprocess.run(
        [*command, str(EXAMPLES / "quickstart.py")], capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr
    assert accuracy(found.stdout) > 0.88
    assert "sent" in found.stdout


def test_the_example_without_tacit_trains_too(ranks):
    with reserved_port() as port:
        told = "".join(ranks.run(2, printed, str(EXAMPLES / "ddp_plain.py"), [], port))
    assert accuracy(told) > 0.88
    assert "sent" not in told


def test_the_example_that_gossips_ends_with_one_model_on_all_ranks(monkeypatch):
    store = StoreServer(("127.0.0.1", 0), "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / "gossip.py")],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "3", "TACIT_STORE": f"127.0.0.1:{store.address[1]}"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        store.close()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], told
    assert len({accuracy(out) for out, _ in told}) == 1 and accuracy(told[0][0]) > 0.85
    assert len((EXAMPLES / "gossip.py").read_text().splitlines()) <= 40
