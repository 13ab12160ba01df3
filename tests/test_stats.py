import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tacit.errors import ConfigError
from tacit.stats import Losses, Stats
from tacit.transports.process_group import ring_nbytes


def _filled() -> Stats:
    stats = Stats()
    stats.sent("Sum", "0", 1000)
    stats.sent("Max", "control", 4)
    stats.sent("Sum", "biases", 500)
    with stats.timed("encode"):
        pass
    stats.stepped(numel=77)
    return stats


def test_bytes_are_split_by_request_and_by_group_and_add_up():
    d = json.loads(json.dumps(_filled().as_dict()))
    assert d["sent_nbytes"] == 1504
    assert d["sent_by_request"] == {"Sum": 1500, "Max": 4}
    assert d["sent_by_group"] == {"0": 1000, "control": 4, "biases": 500}
    assert d["steps"] == 1 and d["encode_s"] > 0 and d["wait_s"] == 0


def test_the_table_shows_totals_and_a_step():
    text = str(_filled())
    assert (
        "sent                 1.5 kB      1.5 kB" in text and "group biases" in text and "wait time" in text
    )


def test_figures_reach_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _filled().to_tensorboard(str(tmp_path))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Scalars("tacit/sent_nbytes")[0].value == 1504
    assert read.Scalars("tacit/sent_by_request/Sum")[0].value == 1500


def test_without_tensorboard_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        _filled().to_tensorboard(str(tmp_path))


@pytest.mark.parametrize("world", [2, 3, 4, 7])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 1000])
def test_a_ring_sends_every_chunk_but_one_twice(world, numel):
    total = sum(ring_nbytes(numel, 4, world, rank) for rank in range(world))
    assert total == 2 * (world - 1) * numel * 4


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare for a namespace"
)
def test_the_bytes_we_count_are_the_bytes_the_kernel_sees():
    """Four ranks alone in a network namespace: loopback counts every byte of them, and headers."""
    script = Path(__file__).with_name("loopback_bytes.py")
    command = f"ip link set lo up && {sys.executable} {script}"
    found = subprocess.run(
        ["unshare", "-n", "sh", "-c", command], capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr
    for line in found.stdout.splitlines():
        row = json.loads(line)
        assert row["counted"] < row["seen"] < 1.03 * row["counted"], row
    assert len(found.stdout.splitlines()) == 4


def test_losses_are_counted_and_more_than_was_said_is_warned_of_once_by_rank_0(caplog):
    first, second = Losses(0.01, 4, 0), Losses(0.01, 4, 1)
    for losses in (first, second):
        for _ in range(10):
            losses.add([0, 0, 2, 5], chunks=400, partial=7)  # 0.44 % of all parts
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == (
            losses is second
        )
        for _ in range(10):
            losses.add([0, 0, 0, 40], chunks=400, partial=40)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and "more than loss=0.01; most of it is rank 3's" in warned[0].getMessage()
    stats = Stats()
    stats.losses = first
    assert stats.as_dict() | {"chunks": 8000, "partial_chunks": 470} == stats.as_dict()
    assert stats.as_dict()["left_out_by_rank"] == {"0": 0, "1": 0, "2": 20, "3": 450}
    assert "chunks without a rank" in str(stats) and "5.9 %" in str(stats)
    assert "chunks" not in Stats().as_dict()
