"""The house: who may know whom, and who starts without torch."""

import ast
import subprocess
import sys
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
FORBIDDEN = {
    "codecs": {"transports", "exchange", "attachments", "strategy", "cli", "report", "lab", "sim"},
    "requests": {"codecs", "transports", "exchange", "attachments", "strategy"},
    "transports": {"codecs", "exchange", "attachments", "strategy", "rounds"},
    "exchange": {"attachments", "strategy", "codecs"},
    "report": {
        "attachments",
        "strategy",
        "codecs",
        "transports",
        "exchange",
        "requests",
        "memory",
        "demo",
        "lab",
    },
}


def _imports(path: Path) -> set[str]:
    """Modules imported when the file is loaded; imports inside functions are lazy, and TYPE_CHECKING never runs."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                visit(node.body + node.orelse)
            elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
                visit(node.body)

    visit(ast.parse(path.read_text()).body)
    return found


def _files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) or [p for p in [ROOT / f"{room}.py"] if p.exists()]


@pytest.mark.parametrize("room", FORBIDDEN)
def test_no_door_goes_against_the_way_of_a_gradient(room):
    assert _files(room)
    for path in _files(room):
        used = {name.split(".")[1] for name in _imports(path) if name.startswith("tacit.")}
        assert not used & FORBIDDEN[room], path


@pytest.mark.parametrize("room", [room for room in TORCHLESS if _files(room)])
def test_rooms_that_need_no_torch_start_without_it(room):
    code = f"import sys, tacit.{room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_plain_import_runs_nothing():
    code = "import sys, tacit; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_public_names_are_these_and_all_resolve():
    assert tacit.__all__ == [
        "Codec", "Conversation", "Gather", "Handle", "Heard", "Lanes", "Max", "Payload", "Strategy", "Sum", "TableSum",
        "TacitError", "Total", "Traits", "Turn", "attach", "loop_back", "register_codec", "serve",
    ]  # fmt: skip
    for name in tacit.__all__:
        assert getattr(tacit, name) is not None
    with pytest.raises(AttributeError):
        _ = tacit.nothing
