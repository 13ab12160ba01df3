"""A package of its own (tests/outside), installed in a temporary folder, adds one of each kind; tacit itself does not know it."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import toys
from ranks import Ranks

import tacit
from tacit.lab import NoNamespacesError, kernel_features

SOURCE = Path(__file__).parent / "outside"
EXPERIMENT = """
network = "line(nodes=2, rate=1Gbit, latency=0us)"
[[job]]
kind = "barriers"
repeats = 3
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package and what an installer writes about it."""
    folder = tmp_path_factory.mktemp("site")
    copied = shutil.copytree(SOURCE, tmp_path_factory.mktemp("source") / "outside")  # builds leave files
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(copied)], capture_output=True
    )
    if done.returncode != 0:  # no pip, or no setuptools, in this environment
        shutil.copytree(SOURCE / "tacit_outside", folder / "tacit_outside")
        _write_facts(folder)
    assert [d.name for d in importlib.metadata.distributions(path=[str(folder)])] == ["tacit-outside"]
    return folder


def _write_facts(folder: Path) -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    facts = folder / f"tacit_outside-{project['version']}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups]
    (facts / "entry_points.txt").write_text("\n".join(lines))


def _tacit(installed: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = [str(installed), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "tacit", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | env,
        capture_output=True,
        text=True,
    )


def _trained(rank: int, world: int, site: str, text: str) -> dict[str, object]:
    sys.path.insert(0, site)
    model = toys.deep(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = toys.loss_of(model, 0, 99).item()
    handle = tacit.attach(model, optimizer, text)
    toys.train(model, optimizer, rank, range(7))
    strategy = str(handle.strategy)
    sent = handle.stats.sent_nbytes
    handle.close()
    return {
        "strategy": strategy,
        "flat": toys.flat(model),
        "sent": sent,
        "first": first,
        "last": toys.loss_of(model, 0, 99).item(),
    }


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("doubling(2) / signmean / gathered", 4),
        ("every / ef(signmean) / gathered", 7),
        ("every / none / gathered", 7),
    ],
)
def test_its_rule_codec_and_scheme_train_on_real_ranks(installed: Path, text: str, rounds: int) -> None:
    a, b = Ranks().run(2, _trained, str(installed), text)
    assert a["strategy"] == text and torch.equal(a["flat"], b["flat"]) and a["last"] < a["first"]
    numel = a["flat"].numel()
    a_round = 4 * numel if "none" in text else 4 + -(-numel // 8)  # to the one other rank
    assert rounds * a_round <= a["sent"] <= rounds * (a_round + 64)  # a few bytes of agreement a round


def test_its_codec_passes_the_conformance_kit(installed: Path) -> None:
    done = _tacit(installed, "codecs", "check", "signmean", "--json")
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_schedule_and_topology_are_simulated(installed: Path) -> None:
    words = ["sim", "cost", "chain", "ring", "--on", "line(nodes=8, rate=1Gbit)", "--size", "1MB"]
    done = _tacit(installed, *words, "--json")
    assert done.returncode == 0, done.stderr
    found = {record["schedule"]: record for record in json.loads(done.stdout)}
    assert found["chain"]["time_s"] == pytest.approx(14 * (0.008 + 5e-6))
    assert found["ring"]["time_s"] > 0


def test_its_schedule_runs_as_a_scheme(installed: Path) -> None:
    a, b = Ranks().run(2, _trained, str(installed), "every / bf16 / chain")
    assert torch.equal(a["flat"], b["flat"]) and a["last"] < a["first"]


def test_its_job_runs_in_a_lab_on_its_topology(installed: Path, tmp_path: Path) -> None:
    try:
        kernel_features()
    except NoNamespacesError as cause:
        pytest.skip(str(cause))
    (tmp_path / "barriers.toml").write_text(EXPERIMENT)
    words = ["lab", "run", str(tmp_path / "barriers.toml"), "--out", str(tmp_path / "out"), "--json"]
    done = _tacit(installed, *words, XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert (result["kind"], result["ranks"], result["n"]) == ("barriers", 2, 3) and result["median_s"] > 0


def test_without_it_its_names_are_unknown_and_with_it_they_are_listed(installed: Path) -> None:
    with pytest.raises(tacit.TacitError, match="unknown codec 'signmean'"):
        tacit.Strategy.parse("every / signmean / sharded")
    done = _tacit(installed, "codecs", "check", "signmen")
    assert "unknown codec 'signmen'; did you mean 'signmean'?" in done.stderr
