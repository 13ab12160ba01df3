"""The house: who may know whom, and who starts without torch."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tacit

ROOT = Path(tacit.__file__).parent
TORCHLESS = (
    "schedules",
    "topology",
    "sim",
    "lab",
    "report",
    "records",
    "units",
    "errors",
    "cli",
    "launch",
    "aggregator",
    "authentication",
)
# Every room of the tree, top down: each imports rooms below it and never one above, lazily or not.
WAY = (
    "cli", "doctor",
    "lab", "demo", "report",
    "attachments", "plan", "sim", "rows", "checkpoints", "testing", "gossip", "exchange", "buckets", "memory",
    "optim", "shapes", "strategy", "rounds", "codecs", "schemes", "transports", "aggregator", "keyed_server", "schedules", "sparse",
    "requests", "recycled", "layout", "stats", "records", "record_types", "launch", "topology_files", "topology", "grammar", "registry",
    "redaction", "authentication", "units", "environment", "extras", "errors", "_core",
)  # fmt: skip
# The rooms inside of a room, and what each may import of the others; files that lie beside them count as "".
INNER = {
    "lab": {"experiments": {"network", ""}, "network": {""}},
    "report": {"pages": {"figures", "model", ""}, "figures": {"model", ""}, "model": {""}},
    "aggregator": {"control": {"client", "planes", ""}, "client": {""}, "planes": {""}},
    "sim": {"studies": {""}, "drawing": {""}, "": set()},  # the core knows neither
}
# What a room must not know although it lies below, and why.
FORBIDDEN = {
    "report": (
        set(WAY) - {"records", "record_types", "units", "extras", "errors"},
        "a report reads records, not what wrote them",
    ),
    "lab": ({"report", "plan", "attachments", "exchange"}, "it runs scripts that attach, and writes records"),
    "sim": (
        {"codecs", "schemes", "transports", "rounds"},
        "it asks a strategy for the shapes of its requests",
    ),
    "gossip": (
        {"strategy", "exchange", "transports"},
        "it is given a codec and a trigger, and has sockets of its own",
    ),
    "rows": (
        {"strategy", "rounds", "codecs", "schemes", "exchange", "gossip", "buckets", "memory"},
        "rows travel as they are, between the ranks that look them up and those that own them",
    ),
    "exchange": ({"strategy", "codecs", "rounds"}, "it drives any codec through any channel"),
    "rounds": ({"codecs", "schemes", "transports"}, "when to communicate does not depend on how"),
    "codecs": (
        {"schemes", "transports", "aggregator", "schedules"},
        "a codec makes requests; anybody may answer them",
    ),
    "transports": ({"requests", "schedules", "layout"}, "bytes are bytes"),
    "aggregator": ({"requests", "schedules"}, "it adds integers, and runs without torch"),
}


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module of tacit that the file imports, lazily too, and where; what only type checkers see does not count."""
    tree = ast.parse(path.read_text())
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    unseen = {id(inner) for test in tests for inner in ast.walk(test)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if id(node) not in unseen:
            yield from ((name, node.lineno) for name in names if name.startswith("tacit."))


def _files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) or [p for p in [ROOT / f"{room}.py"] if p.exists()]


def test_every_room_has_its_place_on_the_way():
    rooms = {path.stem for path in ROOT.glob("*.py")} | {
        path.parent.name for path in ROOT.glob("*/__init__.py")
    }
    assert rooms - {"__init__", "__main__"} == set(WAY) - {"_core"}


@pytest.mark.parametrize("room", WAY[:-1])
def test_no_door_goes_against_the_way_of_a_gradient(room):
    below = WAY[WAY.index(room) :]
    unknown, why = FORBIDDEN.get(room, (set(), ""))
    for path in _files(room):
        for name, line in _imports(path):
            used = name.split(".")[1]
            if used in WAY and used != room:
                assert used in below, f"{path}:{line}: {room} imports {used}, which is above it"
                assert used not in unknown, f"{path}:{line}: {room} imports {used}: {why}"


@pytest.mark.parametrize(("room", "inner"), [(room, inner) for room in INNER for inner in INNER[room]])
def test_no_door_inside_a_room_goes_against_its_way(room, inner):
    folders = {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
    assert folders == set(INNER[room]) - {""}
    may = INNER[room][inner]
    for path in (ROOT / room / inner).glob("**/*.py" if inner else "*.py"):
        for name, line in _imports(path):
            _, used_room, used, *_ = [*name.split("."), "", ""]
            if used_room == room and used != inner and (used in folders or inner):
                assert (used if used in folders else "") in may, (
                    f"{path}:{line}: {room}/{inner} imports {name}"
                )


@pytest.mark.parametrize("room", [room for room in TORCHLESS if _files(room)])
def test_rooms_that_need_no_torch_start_without_it(room):
    code = f"import sys, tacit.{room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_class_name_is_used_for_two_ideas():
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {
        name: found for name, found in places.items() if len(found) > 1
    } == {}  # exceptions go here, with the reason


def test_a_plain_import_runs_nothing():
    code = "import sys, tacit; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_public_names_are_these_and_all_resolve():
    assert tacit.__all__ == [
        "Codec", "Context", "Conversation", "Gather", "Handle", "Lanes", "Max", "Merge", "Payload", "Reduced", "Strategy",
        "Sum", "TableSum", "TacitError", "Total", "Traits", "attach", "loop_back", "mesh_backend", "mesh_handle",
        "register_codec", "serve",
    ]  # fmt: skip
    for name in tacit.__all__:
        assert getattr(tacit, name) is not None
    with pytest.raises(AttributeError):
        _ = tacit.nothing
