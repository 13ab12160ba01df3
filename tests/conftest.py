import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks


def pytest_configure() -> None:
    """Ctrl-C is heard by tests and by what they start, even where a shell runs them in the background and it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files of half a minute and more, the longest first: two workers that take a file at a time then end together.
LONGEST = (
    "schemes/test_star_survives.py", "attachments/test_handle.py", "attachments/test_gossiping.py", "test_resume.py",
    "schemes/test_star.py", "test_shaped_codecs.py", "cli/test_values.py", "cli/test_demo.py", "testing/test_conformance.py", "test_sparse.py", "gossip/test_unequal.py",
    "attachments/test_ddp.py", "gossip/test_exit.py", "codecs/test_hush.py", "attachments/test_merging.py", "test_examples.py",
    "attachments/test_fsdp.py", "attachments/test_guard.py", "hostile/test_gossip.py", "sim/studies/test_search.py",
    "hostile/test_star.py", "lab/network/test_lab.py", "schemes/test_scheduled.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    order = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real rank processes, a few fresh ones for every run."""
    pool = Ranks()
    yield pool
    pool.close()
