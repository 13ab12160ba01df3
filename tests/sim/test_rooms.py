"""The simulator's rooms: plan imports sim, drawing and studies import the core, and no door leads back."""

import re
import subprocess
import sys
from pathlib import Path

import tacit.sim

ROOM = Path(tacit.sim.__file__).parent


def doors(path: Path) -> set[str]:
    """Every tacit module that a file imports, lazy imports too."""
    return set(re.findall(r"^\s*(?:from|import) (tacit[\w.]*)", path.read_text(), re.MULTILINE))


def test_the_simulator_imports_no_planner():
    for path in ROOM.rglob("*.py"):
        assert not any(name.startswith("tacit.plan") for name in doors(path)), path


def test_the_core_imports_neither_drawing_nor_studies():
    for path in ROOM.glob("*.py"):
        assert not any(name.startswith(("tacit.sim.drawing", "tacit.sim.studies")) for name in doors(path)), (
            path
        )


def test_every_core_module_starts_without_torch_and_matplotlib():
    names = ", ".join(f"tacit.sim.{path.stem}" for path in ROOM.glob("*.py") if path.stem != "__init__")
    code = f"import sys, {names}; sys.exit(bool({{'torch', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
