"""Sweeps: a record a point, points that are known are not computed again, 100,000 ranks."""

import json
import os

import pytest

from tacit.cli import main
from tacit.errors import ConfigError
from tacit.records import Recorder
from tacit.sim.studies.sweep import SweepPoint, known, points, sweep


def run(path, todo, **options):
    with Recorder(path) as recorder:
        return list(sweep(todo, recorder, **options))


def test_every_combination_smallest_worlds_first():
    made = points(["ring", "tree"], [8, 4], {"1MB": 10**6, "2MB": 2 * 10**6}, ["star"])
    assert len(made) == 8 and [point.world for point in made] == [4] * 4 + [8] * 4
    assert made[0] == SweepPoint("ring", 4, "1MB", 10**6, "star")


def test_a_record_has_the_cost_its_check_its_bound_and_what_it_took(tmp_path):
    (record,) = run(
        tmp_path / "a.jsonl", points(["ring"], [8], {"80MB": 80_000_000}, ["star(rate=10Gbit, latency=5us)"])
    )
    assert (
        record["time_s"]
        == pytest.approx(14 * (8 * 10e6 / 10e9 + 10e-6))
        == pytest.approx(record["alpha_beta_s"])
    )
    assert (
        record["lower_bound_s"] < record["time_s"]
        and record["stage_count"] == 14
        and record["transfers"] == 112
    )
    assert record["took_s"] > 0 and record["peak_nbytes"] > 1e6
    assert json.loads((tmp_path / "a.jsonl").read_text())["schedule"] == "ring"
    assert record["network"]["rate_bps"] == 10e9 and record["network"]["latency_s"] == pytest.approx(5e-6)


def test_what_is_known_is_not_computed_again_and_a_torn_line_is(tmp_path):
    path = tmp_path / "a.jsonl"
    todo = points(["ring", "tree"], [4, 8], {"1MB": 10**6}, ["star"])
    before = run(path, todo)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:40])
    have = known(path)
    assert len(have) == 2
    after = run(path, todo, have=have)
    assert after[:2] == before[:2] and [r["time_s"] for r in after] == [r["time_s"] for r in before]
    assert len(known(path)) == 4


def test_a_refusal_is_a_record_and_is_tried_again(tmp_path):
    path = tmp_path / "a.jsonl"
    todo = [SweepPoint("direct_all_gather", 5000, "1MB", 10**6, "star")]
    (record,) = run(path, todo)
    assert record["time_s"] is None and "too many" in record["refused"]
    assert known(path) == {}


def test_a_file_that_holds_no_records_is_left_alone(tmp_path):
    path = tmp_path / "diary.txt"
    path.write_text("dear diary\n")
    with pytest.raises(ConfigError, match="holds no record of a sweep"):
        known(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        known(tmp_path)


@pytest.mark.parametrize(
    "foreign",
    [
        '{"a": 1}\n',
        '{"time": 1, "kind": "start", "run": "x", "command": "tacit demo"}\n',
        "5\n",
        "[]\n",
        "null\n",
        "\n",
        '{"name": "package",\n "version": 1}\n',
        "a,b\n1,2\n",
        "\x00\x01",
        2000 * "[",
    ],
)
def test_a_file_that_no_sweep_wrote_is_refused_and_not_touched(foreign, tmp_path, capsys):
    path = tmp_path / "theirs.jsonl"
    path.write_text(foreign)
    words = ["sim", "sweep", "--schedules", "ring", "--worlds", "4", "--sizes", "1kB", "--on", "star"]
    assert main([*words, "--out", str(path)]) == 2
    assert (
        "holds no record of a sweep; name another file, this one would be spoilt" in capsys.readouterr().err
    )
    assert path.read_text() == foreign


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        known(tmp_path / "pipe")


@pytest.mark.parametrize("schedule", ["ring", "wrht", "hierarchical", "tree"])
def test_a_hundred_thousand_ranks(schedule, tmp_path):
    (record,) = run(tmp_path / "a.jsonl", [SweepPoint(schedule, 100_000, "vgg16", 553_430_176, "optical")])
    stages = {"ring": 199_998, "wrht": 6, "hierarchical": 40_014, "tree": 34}
    assert record["stage_count"] == stages[schedule] and record["time_s"] > record["lower_bound_s"]
