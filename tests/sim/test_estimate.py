"""`tacit.sim.cost`: text and values give the same, and the examples of its docstring and its page run."""

import doctest
import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tacit import sim
from tacit.errors import ConfigError
from tacit.schedules import build
from tacit.sim import estimate
from tacit.sim.fabric import Fabric, parse_fabric
from tacit.sim.workloads import workload
from tacit.topology import OpticalRing

STAR = "star(rate=10Gbit, latency=5us)"


def test_the_example_runs():
    assert doctest.testmod(estimate) == doctest.TestResults(failed=0, attempted=3)


def test_the_example_of_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "simulate.md"
    assert doctest.testfile(str(page), module_relative=False) == doctest.TestResults(failed=0, attempted=5)


def test_text_and_values_cost_the_same():
    text = sim.cost("ring", STAR, "100MB", world=4)
    values = sim.cost(build("ring", 4), parse_fabric(STAR, 4), 1e8)
    assert text.time_s == values.time_s == parse_fabric(STAR, 4).cost(build("ring", 4), 1e8).time_s
    assert text.as_record() == values.as_record() | {"schedule": "ring"}
    network = parse_fabric(STAR, 4).network
    assert sim.cost("ring", network, 1e8).time_s == text.time_s  # as many ranks as hosts


def test_a_workload_is_its_float32_gradients():
    work = workload("vgg16")
    assert (
        sim.cost("ring", STAR, work, world=4).time_s
        == sim.cost("ring", STAR, 4 * work.parameters, world=4).time_s
    )


def test_light_takes_the_stripes_that_are_named():
    ring = OpticalRing(8, 4)
    plain, striped = sim.cost("ring", ring, "1MB"), sim.cost("ring", ring, "1MB", stripe=True)
    assert striped.time_s < plain.time_s
    assert striped.time_s == sim.cost("ring", Fabric(ring, stripe=True), "1MB").time_s
    assert plain.as_record()["light_proven"] and plain.lower_bound_s <= striped.time_s


def test_a_file_brings_its_own_world(tmp_path):
    path = tmp_path / "two.json"
    transfers = [[0, 1, 0, 1, "add"]], [[1, 0, 0, 1, "copy"]]
    path.write_text(json.dumps({"world": 2, "chunks": 1, "stages": transfers}))
    found = sim.cost(str(path), STAR, "1MB")
    assert (found.schedule.world, found.fabric.nodes, found.stage_count) == (2, 2, 2)


def test_a_codec_is_costed_by_its_requests():
    plain, bf16 = (sim.cost("ring", STAR, "1MB", world=4, codec=codec) for codec in (None, "bf16"))
    assert bf16.time_s < plain.time_s and bf16.as_record()["codec"] == "bf16"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda: sim.cost(build("ring", 4), STAR, "1MB", world=8),
            "ring is for 4 ranks, not 8; leave world out",
        ),
        (lambda: sim.cost("ring", Fabric(OpticalRing(8)), "1MB", stripe=True), "a Fabric has stripe"),
        (
            lambda: sim.cost("ring", parse_fabric(STAR, 4).network, "1MB", stripe=True),
            "striping is over wavelengths",
        ),
        (lambda: sim.cost("ring", STAR, -1, world=4), "neither may be negative"),
        (lambda: sim.cost("rong", STAR, "1MB", world=4), "rong"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        wrong()


def test_an_estimate_is_frozen():
    with pytest.raises(FrozenInstanceError):
        sim.cost("ring", STAR, "1MB", world=4).codec = "hush"
