"""With the base install alone training works, and what needs more names the command that installs it."""

import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"matplotlib", "pyroute2"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""
TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import tacit

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tacit.attach(model, optimizer, "int8 / sharded")
torch.manual_seed(dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
print(sum(p.double().sum().item() for p in model.parameters()))
del model, optimizer  # before their group, see docs/attach.md
dist.destroy_process_group()
"""


def _python(code: str, *args: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", BLOCK + code, *args]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_ranks_train_with_the_base_install(tmp_path: Path) -> None:
    ranks = [_python(TRAIN, str(tmp_path / "store"), str(rank)) for rank in range(2)]
    ended = [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks]
    assert [code for _, _, code in ended] == [0, 0], ended
    assert ended[0][0] == ended[1][0] != ""


def test_importing_tacit_loads_no_optional_package_and_no_torch() -> None:
    code = "import sys, tacit; sys.exit(bool({'torch', 'matplotlib', 'pyroute2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import tacit.report.figures.drawing", "report"),
        ("import tacit.report.pages.page", "report"),
        ("import tacit.sim.drawing.draw", "report"),
        ("import tacit.sim.drawing.timelines", "report"),
        ("import tacit.lab.network.wiring", "lab"),
        ("import tacit.extras; tacit.extras.require('lab')", "lab"),
    ],
)
def test_a_missing_extra_names_the_command_that_installs_it(code: str, name: str) -> None:
    process = _python(code)
    last = process.communicate(timeout=60)[1].splitlines()[-1]
    assert process.returncode == 1
    package = {"report": "matplotlib", "lab": "pyroute2"}[name]
    assert f"{package}, which is not installed; install it with: pip install 'tacit[{name}]'" in last


def test_the_command_prints_the_sentence_and_nothing_else(tmp_path: Path) -> None:
    code = "from tacit.cli import main; sys.exit(main(sys.argv[1:]))"
    process = _python(code, "demo", "--loopback", "--steps", "1", "--out", str(tmp_path / "run"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "") and not (tmp_path / "run").exists()
    assert err.splitlines()[-1].endswith("install it with: pip install 'tacit[report]'")
