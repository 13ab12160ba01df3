"""`tacit plan`: advice from a probe, from a file, or from a link's rate alone; bad input gets one sentence."""

import json

import pytest
from plan_probes import BF16, INT8, PLAIN, probe

from tacit.cli import main
from tacit.plan import RecordedStep, save
from tacit.plan.models import digest_of_model, machine_here
from tacit.sim.workloads import Layer, Workload

WORK = Workload("mine", (Layer("a", 1_000_000, 0.1, 0.2), Layer("b", 1_000_000, 0.1, 0.2)), "by hand")


@pytest.fixture
def file(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "plan.jsonl"
    found = probe(PLAIN, BF16, INT8, model=digest_of_model(WORK))
    values = {name: getattr(found, name) for name in found.__slots__} | {"machine": machine_here()}
    save(path, type(found)(**values), RecordedStep(WORK))
    return path


def failure(capsys, *words):
    assert main(["plan", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tacit: ") and error.count("\n") == 1
    return error


def test_a_file_is_advised_on_and_the_page_shows_it(file, tmp_path, capsys):
    page, out = tmp_path / "plan.html", tmp_path / "out.jsonl"
    assert main(["plan", "--from", str(file), "--html", str(page), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert (
        f"use {INT8.choice}" in shown
        and "tacit.attach(model, optimizer" in shown
        and "not judged on your task" in shown
    )
    html = page.read_text()
    assert f"use {INT8.choice}" in html and "all_reduce float32" in html and "<svg" in html
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == [
        "probe",
        "plan_step",
        "advice",
    ]


def test_json_has_every_prediction(file, capsys):
    assert main(["plan", "--from", str(file), "--json", "--lossless"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["winner"]["choice"] == "DDP bf16" and len(found["predictions"]) == 3
    assert main(["plan", "--from", str(file), "--json", "--what-if", "link=100Gbit world=8"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert there["world"] == 8 and there["winner"]["choice"] == "DDP"
    assert there["winner"]["step_s"] < found["winner"]["step_s"] and "by formula" in there["notes"][0]


def test_a_link_alone_is_enough(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = [
        "plan",
        "--model",
        "vgg16",
        "--link",
        "100Mbit",
        "--world",
        "4",
        "--strategies",
        "int4",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    steps = {each["choice"]: each["step_s"] for each in found["predictions"]}
    assert set(steps) == {"DDP", "DDP fp16", "DDP bf16", "every / int4(block=64) / sharded"}
    assert steps["DDP"] == pytest.approx(138357544 * 4 * 1.5 * 8 / (100e6 * 0.9565), rel=0.1)
    assert (
        found["winner"]["choice"] == "every / int4(block=64) / sharded" and "by formula" in found["notes"][0]
    )


def test_without_strategies_what_cannot_be_measured_is_left_out_with_a_note(capsys, monkeypatch, caplog):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    texts = ("DDP", "every / gtopk(share=0.001) / sharded", "every / none / server")
    monkeypatch.setattr("tacit.plan.candidates.every_choice", lambda world: texts)
    assert main(["plan", "--model", "vgg16", "--link", "100Mbit", "--world", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["choice"] for each in found["predictions"]} == set(texts[:2])
    assert "every / none / server is left out" in caplog.text


def test_what_cannot_be_planned_gets_one_sentence(file, tmp_path, capsys):
    assert "there are no ranks to probe: start them" in failure(capsys, "--model", "vgg16")
    assert "--html plan.txt: the page is HTML" in failure(capsys, "--html", "plan.txt")
    assert "cannot be opened" in failure(capsys, "--from", tmp_path / "none.jsonl")
    assert "write link=25Gbit" in failure(capsys, "--from", file, "--what-if", "faster=yes")
    assert "--link and --world are for plans without a probe" in failure(
        capsys, "--from", file, "--link", "1Gbit"
    )
    assert "world=1" in failure(capsys, "--model", "vgg16", "--link", "1Gbit", "--world", "1")
    assert "unknown model" in failure(capsys, "--from", file, "--model", "vgg61")
    assert "there is no model to plan for" in failure(
        capsys, "--link", "1Gbit", "--world", "2", "--strategies", "none"
    )


def test_a_probe_of_another_machine_is_refused_unless_it_is_asked_for(file, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    save(other, probe(PLAIN, INT8), RecordedStep(WORK))
    assert "was probed on another machine (CPU a CPU there" in failure(capsys, "--from", other)
    assert main(["plan", "--from", str(other), "--elsewhere", "--json"]) == 0
