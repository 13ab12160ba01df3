"""The electrical simulator against SimGrid (Debian's python3-simgrid): an independent fat tree, routing and sharing."""

import json
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tacit.schedules import Phase, Schedule, Stage, recursive_doubling, ring
from tacit.sim.electrical import SimGridFactors, cost
from tacit.topology import Network, fat_tree

PYTHON = "/usr/bin/python3"  # Debian builds it for its own Python, not for a virtual environment's
RATE, LATENCY = 10e9, 5e-6


@cache
def _missing() -> str:
    try:
        found = subprocess.run([PYTHON, "-c", "import simgrid"], capture_output=True, text=True)
    except OSError as cause:
        return str(cause)
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


@pytest.fixture(autouse=True)
def _simgrid():
    if _missing():
        pytest.skip(f"SimGrid is not here ({_missing()}); apt-get install python3-simgrid")


def simgrid_s(k: int, schedule: Schedule, nbytes: float, path: Path, *options: str) -> float:
    """SimGrid's own k-ary fat tree, with its D-mod-k routing."""
    half, hosts = k // 2, k**3 // 4
    (path / "fat_tree.xml").write_text(
        f"""<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="c" prefix="h" radical="0-{hosts - 1}" suffix="" speed="1Gf" bw="{RATE / 8}Bps" lat="{LATENCY}s"
    topology="FAT_TREE" topo_parameters="3;{half},{half},{k};1,{half},{half};1,1,1" sharing_policy="SPLITDUPLEX"/>
</platform>"""
    )
    chunk = nbytes / schedule.chunks
    stages = [
        (p.times, [(int(s), int(d), round(c * chunk)) for s, d, c in zip(p.stage.src, p.stage.dst, p.stage.count, strict=True)])
        for p in schedule.phases
    ]  # fmt: skip
    job = {"platform": str(path / "fat_tree.xml"), "hosts": hosts, "stages": stages, "options": options}
    script = str(Path(__file__).parent / "simgrid_run.py")
    done = subprocess.run(
        [PYTHON, script], input=json.dumps(job), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(json.loads(done.stdout))


def network(k: int) -> Network:
    return fat_tree(k, RATE, LATENCY)


@pytest.mark.parametrize("make", [ring, recursive_doubling], ids=["ring", "recursive_doubling"])
@pytest.mark.parametrize("nbytes", [100_000, 10_000_000, 1_000_000_000])
def test_ring_and_recursive_doubling_on_a_fat_tree_agree_within_3_percent(make, nbytes, tmp_path):
    """They agree to a millionth: SimGrid's factors are latency, rate, acknowledgements and its weights by round trip."""
    ours = cost(make(16), nbytes, network(4), simgrid=SimGridFactors()).time_s
    theirs = simgrid_s(4, make(16), nbytes, tmp_path)
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("make", [ring, recursive_doubling], ids=["ring", "recursive_doubling"])
def test_without_cross_traffic_two_factors_do(make, tmp_path):
    ours = cost(make(16), 1e7, network(4).scaled(rate=0.97, latency=13.01)).time_s
    theirs = simgrid_s(4, make(16), 1e7, tmp_path, "--cfg=network/crosstraffic:0")
    assert ours == pytest.approx(theirs, rel=0.03)


def test_recursive_doubling_needs_three_factors_only(tmp_path):
    ours = cost(recursive_doubling(128), 1e7, network(8).scaled(rate=0.97 / 1.05, latency=13.01)).time_s
    assert ours == pytest.approx(simgrid_s(8, recursive_doubling(128), 1e7, tmp_path), rel=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_random_transfers_that_collide_agree_too(seed, tmp_path):
    rng = np.random.default_rng(seed)
    src = np.arange(16).repeat(2)
    dst = (src + rng.integers(1, 16, 32)) % 16
    _, once = np.unique(src * 16 + dst, return_index=True)
    stage = Stage.of(src[once], dst[once], count=rng.integers(1, 5, len(once)))
    schedule = Schedule("random", 16, 5, (Phase(stage),))
    theirs = simgrid_s(4, schedule, 1e7, tmp_path)
    assert cost(schedule, 1e7, network(4), simgrid=SimGridFactors()).time_s == pytest.approx(theirs, rel=1e-6)
