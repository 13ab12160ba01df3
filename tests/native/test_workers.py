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
