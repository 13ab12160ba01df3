import gc
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks


def pytest_configure() -> None:
    """Ctrl-C is heard by tests and by what they start, even where a shell runs them in the background and it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files of half a minute and more, the longest first: workers that take a file at a time then end together.
LONGEST = (
    "schemes/test_star_survives.py", "cli/test_demo.py", "attachments/test_gossiping.py", "test_shaped_codecs.py",
    "schemes/test_star.py", "test_resume.py", "cli/test_values.py", "testing/test_conformance.py", "test_sparse.py",
    "gossip/test_unequal.py", "attachments/test_ddp.py", "gossip/test_exit.py", "codecs/test_hush.py", "attachments/test_merging.py", "test_examples.py",
    "attachments/test_fsdp.py", "attachments/test_guard.py", "hostile/test_gossip.py", "sim/studies/test_search.py",
    "hostile/test_star.py", "lab/network/test_lab.py", "schemes/test_scheduled.py", "attachments/test_handle.py",
)  # fmt: skip

# Shorter ones, whose commands, launchers and networks are real too, or which build C++.
PROCESSES = (
    "aggregator/planes/test_fuzz.py", "aggregator/planes/test_kernel_plane.py", "cli/test_lab.py", "cli/test_serve_rows.py",
    "cli/test_store.py", "cli/test_watch.py", "gossip/test_chaos.py", "hostile/test_aggregator.py", "report/pages/test_browser.py",
    "test_extras.py", "test_launch.py", "test_outside_package.py", "test_stats.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; what is in them, and whatever starts ranks, is slow."""
    here = Path(__file__).parent
    slow = [here / name for name in (*LONGEST, *PROCESSES)]
    if gone := [str(path) for path in slow if not path.exists()]:
        raise pytest.UsageError(f"tests/conftest.py names files that are not there: {', '.join(gone)}")
    order = {path: place for place, path in enumerate(slow)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        if item.path in order or "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What has been imported and collected is no garbage: nobody need look through it again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long each room took, where more than one was tested: a room is a folder of tests/."""
    rooms: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for report in (report for found in terminalreporter.stats.values() for report in found):
        if isinstance(report, pytest.TestReport):
            file = report.nodeid.partition("::")[0].removeprefix("tests/")
            room, inside, _ = file.partition("/")
            rooms[room if inside else "."][report.nodeid] += report.duration
    if len(rooms) < 2 or terminalreporter.config.get_verbosity() < 0:
        return
    terminalreporter.section("seconds a room (of all workers together)")
    seconds = {room: sum(tests.values()) for room, tests in rooms.items()}
    for room in sorted(rooms, key=lambda room: -seconds[room]):
        slowest = max(rooms[room], key=lambda test: rooms[room][test])
        name = slowest.rpartition("/")[2].replace("::", " ")
        longest = f"{rooms[room][slowest]:5.1f} {name[:70]}"
        terminalreporter.write_line(
            f"{room:<13}{len(rooms[room]):6,} tests {seconds[room]:7.1f}   longest {longest}"
        )
    total = sum(len(tests) for tests in rooms.values())
    terminalreporter.write_line(f"{'all':<13}{total:6,} tests {sum(seconds.values()):7.1f}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real rank processes, a few fresh ones for every run."""
    pool = Ranks()
    yield pool
    pool.close()
