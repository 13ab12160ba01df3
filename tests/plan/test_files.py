"""Probes and steps in files: the same values again, or one sentence."""

import json
from dataclasses import replace

import pytest
from plan_probes import BF16, HERE, INT8, PLAIN, probe

from tacit.errors import ConfigError
from tacit.plan import RecordedStep, advise, load, predict, save
from tacit.plan.values import CalibratedExchange, GradientError
from tacit.sim.workloads import Layer, Workload

STEP = RecordedStep(Workload("one", (Layer("a", 10, 0.1, 0.2),), "by hand"), 0.3, 0.9, 1.1, 0.5)
FOUND = probe(
    PLAIN,
    BF16,
    INT8,
    calibrations=(CalibratedExchange("DDP", 1.0, 0.9, 1.1, 10, 2.0),),
    errors=(GradientError(INT8.choice, 1e-4),),
    model="abc",
)


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "plan.jsonl"
    save(path, replace(FOUND, world=2))
    save(path, STEP, FOUND, advise(FOUND, predict(FOUND, STEP)))
    assert load(path, here=HERE) == (FOUND, STEP)  # the last of each
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == [
        "probe",
        "plan_step",
        "probe",
        "advice",
    ]


def test_a_step_alone_is_enough_to_read(tmp_path):
    save(tmp_path / "plan.jsonl", STEP)
    assert load(tmp_path / "plan.jsonl") == (None, STEP)


def test_a_probe_of_another_machine_is_refused_unless_it_is_asked_for(tmp_path):
    path = tmp_path / "plan.jsonl"
    save(path, FOUND)
    with pytest.raises(ConfigError, match="another machine .cores 4 there and 8 here.; probe again here"):
        load(path, here=replace(HERE, cores=8))
    assert load(path)[0] == FOUND


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds neither a probe nor a recorded step"),
        ('{"kind": "timing", "run": "a", "time": 1}\n', "holds neither"),
        (
            '{"kind": "probe", "run": "a", "time": 1, "world": "many"}\n',
            "probe.world is left out .* probe again",
        ),
        ('{"kind": "probe", "run": "a", "time": 1}\n', "its probe has 0 ranks and 0 choices; probe again"),
        (
            '{"kind": "probe", "run": "a", "time": 1, "world": 4, "costs": [{"choice": "DDP"}]}\n',
            "of 'DDP' is not whole",
        ),
        (
            '{"kind": "probe", "run": "a", "time": 1, "operations": [{"operation": "send"}]}\n',
            "a curve of its probe",
        ),
        ('{"kind": "plan_step", "run": "a", "time": 1}\n', "has no layer"),
    ],
)
def test_a_file_that_is_no_probe_gets_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "plan.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load(path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        load(tmp_path / "none.jsonl")
