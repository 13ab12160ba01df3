"""The steps of a script, recorded by hooks while it trains."""

import pytest
import torch
from torch import nn

import tacit
from tacit.errors import ConfigError
from tacit.plan import load, recording
from tacit.plan.step_recorder import WARMUP, StepRecorder


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


def hooks_of(model):
    modules = [*model._forward_pre_hooks, *(h for m in model.modules() for h in m._forward_hooks)]
    return modules + [h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or ())]


def test_a_loop_inside_of_the_block_is_recorded(tmp_path):
    model, path = net(), tmp_path / "plan.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, optimizer, path):
        train(model, optimizer, WARMUP + 3)
    _, step = load(path)
    assert [(layer.name, layer.parameters) for layer in step.workload.layers] == [("0", 40), ("2", 18)]
    assert "median of 3 steps" in step.workload.source and step.other_s > 0
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in step.workload.layers)
    assert step.low <= 1 <= step.high and not hooks_of(model)


def test_times_add_up_to_the_clock(tmp_path):
    ticks = iter(range(1000))
    model = net()
    recorder = StepRecorder(model, None, tmp_path / "plan.jsonl", steps=2, clock=lambda: float(next(ticks)))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), WARMUP + 2)
    recorder._book()
    step = recorder.step()
    assert (step.workload.forward_s, step.workload.backward_s) == (2, 4)  # two layers; four parameters


def test_a_script_that_attaches_records_without_a_change(tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    monkeypatch.setenv("TACIT_PLAN", f"record:{path}")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tacit.attach(model, optimizer, "none"):
        train(model, optimizer, WARMUP + 11)
    assert load(path)[1].workload.parameters == 58 and not hooks_of(model)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TACIT_PLAN", f"record:{tmp_path}/file/mine.jsonl")
    with pytest.raises(ConfigError, match="mine.jsonl: cannot be written"):
        tacit.attach(net(), None, "none")
    monkeypatch.setenv("TACIT_PLAN", "recrod")
    with pytest.raises(ConfigError, match="TACIT_PLAN='recrod': write record"):
        tacit.attach(net(), None, "none")


def test_too_few_steps_get_one_sentence(tmp_path):
    model = net()
    with (
        pytest.raises(ConfigError, match="no step was recorded: 4 steps"),
        recording(model, path=tmp_path / "plan.jsonl"),
    ):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert not hooks_of(model)
    with pytest.raises(ConfigError, match="steps=0"):
        StepRecorder(model, None, tmp_path / "plan.jsonl", steps=0)


def test_a_record_that_cannot_be_written_costs_the_record_and_not_the_training(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "folder"
    monkeypatch.setenv("TACIT_PLAN", f"record:{folder}/mine.jsonl")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tacit.attach(model, optimizer, "none"):
        assert not any(folder.iterdir())
        folder.rmdir()
        folder.write_text("")  # in the middle of the training
        train(model, optimizer, WARMUP + 12)
    assert "the recorded step is lost, and training goes on" in caplog.text and not hooks_of(model)
