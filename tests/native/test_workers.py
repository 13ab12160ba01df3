"""The threads that the core's loops share: many callers at once, and a fork."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from tacit import _core


def _summed(seed: int, threads: int) -> bytes:
    """Eight shares' worth of random indices, looked up and added."""
    random = np.random.default_rng(seed)
    index = random.integers(0, 256, 2**18, dtype=np.uint8)
    lanes = np.zeros(2**19, np.uint16)
    _core.add_table(index, lanes.size, np.arange(16, dtype=np.uint8), lanes, threads)
    return lanes.tobytes()


def test_callers_that_share_the_threads_get_their_own_sums() -> None:
    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(_summed, range(64), [1 + seed % 5 for seed in range(64)]))
    assert found == [_summed(seed, 1) for seed in range(64)]


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_shares_of_many_units_leave_out_none_and_take_none_twice(threads: int) -> None:
    random, numel = np.random.default_rng(threads), 2**22 + 6
    index = random.integers(0, 256, numel // 2, dtype=np.uint8)
    x, norms = random.standard_normal(2**21, dtype=np.float32), np.ones(2, np.float64)
    table = np.arange(16, dtype=np.uint8)

    def both(threads: int) -> tuple[bytes, bytes]:
        lanes, packed = np.zeros(numel, np.uint16), np.zeros(x.size // 2, np.uint8)
        _core.add_table(index, numel, table, lanes, threads)
        _core.thc_encode(x, norms, 20, 10, 1, 2, 3.0, table, 4, packed, threads)  # 64 blocks a share and more
        return lanes.tobytes(), packed.tobytes()

    assert both(threads) == both(1)


def _in_child(line: Connection) -> None:
    line.send((_summed(7, 3), len(list(Path("/proc/self/task").iterdir()))))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list threads")
def test_a_forked_child_has_threads_of_its_own() -> None:
    expected = _summed(7, 3)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(there,), daemon=True)
    child.start()
    assert here.poll(60), "the child waits for what its parent had"
    assert here.recv() == (expected, 3)
    child.join(60)
    assert child.exitcode == 0
