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


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real rank processes, a few fresh ones for every run."""
    pool = Ranks()
    yield pool
    pool.close()
