"""The examples are what the README promises: short, two or three lines apart, and they run under torchrun."""

import contextlib
import difflib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Forked
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


def test_the_example_of_a_mesh_trains_on_two_hosts_of_two(ranks):
    assert len((EXAMPLES / "hsdp.py").read_text().splitlines()) <= 40
    with reserved_port() as port:
        told = "".join(ranks.run(4, printed, str(EXAMPLES / "hsdp.py"), [], port))
    assert accuracy(told) > 0.88
    assert "group gradients" in told


def test_the_example_that_gossips_ends_with_one_model_on_all_ranks(monkeypatch):
    store = StoreServer(("127.0.0.1", 0), "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = [
        Forked(
            [str(EXAMPLES / "gossip.py")],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "3", "TACIT_STORE": f"127.0.0.1:{store.address[1]}"},
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


def clicks(rank, world, how):
    sys.path.insert(0, str(EXAMPLES))
    import ctr

    with contextlib.redirect_stdout(io.StringIO()):
        return ctr.train(how, seed=0, steps=60)


def test_the_click_model_is_as_good_in_shards_and_with_4_bits_as_in_one_process(ranks):
    alone = ranks.run(1, clicks, "none")[0]
    assert alone > 0.66
    for how in ("shards", "int4"):
        found = ranks.run(2, clicks, how)
        assert found[0] == found[1] and abs(found[0] - alone) < 0.002, how
    lines = (EXAMPLES / "ctr.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


def test_the_click_log_has_the_law_that_it_states():
    sys.path.insert(0, str(EXAMPLES))
    from click_log import KEYS, ClickLog, auc

    log = ClickLog()
    keys, numbers, clicked = log.draw(50_000, torch.Generator().manual_seed(1))
    for column, count in zip(keys.unbind(1), KEYS, strict=True):
        assert column.min() >= 0 and column.max() < count
        share = (column == 0).float().mean().item()
        assert share == pytest.approx(1 / float((torch.arange(1.0, count + 1) ** -1.05).sum()), rel=0.05)
    assert torch.equal(keys, ClickLog().draw(50_000, torch.Generator().manual_seed(1))[0])
    assert 0.75 < log.best(keys, numbers, clicked) < 0.82
    assert auc(torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])) == 0.875
    assert auc(torch.zeros(100), (torch.arange(100) % 2).float()) == 0.5


def test_the_n_gram_model_trains_on_real_text(ranks):
    with reserved_port() as port:
        told = "".join(ranks.run(2, printed, str(EXAMPLES / "ngrams.py"), [], port))
    losses = re.findall(r"loss ([0-9.]+), sent (\d+)", told)
    assert len({loss for loss, _ in losses}) == 1 and float(losses[0][0]) < 1.6
    assert int(losses[0][1]) < 300_000  # of a table of 67 MB
