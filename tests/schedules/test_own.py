"""A user's own algorithm as data."""

import json

import numpy as np
import pytest
from schedules.cases import ALL

from tacit.errors import ConfigError, ScheduleError
from tacit.schedules import from_data, load, ring, to_data
from tacit.schedules.own import __doc__ as own_doc

PAIR = {"name": "pair", "world": 2, "chunks": 1, "stages": [[[1, 0, 0, 1, "add"]], [[0, 1, 0, 1, "copy"]]]}
BAD_TRANSFERS = [
    [0, 1],
    [0, 1, 0, 1, "mul"],
    [0, 1, 0, 1, ["add"]],
    [0, 1.5, 0, 1, "add"],
    [True, 0, 0, 1, "add"],
    [2**70, 0, 0, 1, "add"],
    {"src": 0},
]


@pytest.mark.parametrize("name", ALL)
def test_every_schedule_survives_the_way_through_json(name):
    schedule = ALL[name](7)
    again = from_data(json.loads(json.dumps(to_data(schedule))))
    again.verify()
    assert (again.name, again.world, again.chunks, again.goal) == (
        schedule.name,
        7,
        schedule.chunks,
        schedule.goal,
    )
    for one, other in zip(schedule.stages(), again.stages(), strict=True):
        for part in ("src", "dst", "chunk", "count", "add"):
            np.testing.assert_array_equal(getattr(one, part), getattr(other, part))


def test_the_example_of_the_docstring_loads_and_verifies(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(own_doc.split("\n\n")[1])
    schedule = load(path)
    schedule.verify()
    assert (schedule.name, schedule.stage_count) == ("pair", 2)


def test_a_file_without_a_name_gives_its_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({k: v for k, v in PAIR.items() if k != "name"}))
    assert load(path).name == "mine"


def test_an_empty_stage_is_a_stage():
    schedule = from_data(PAIR | {"stages": [*PAIR["stages"], []]})
    schedule.verify()
    assert schedule.stage_count == 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"world": 0}, "pair: world=0: give a whole number, from 1 to 1000000"),
        ({"chunks": 0}, "pair: chunks=0: give a whole number, from 1 to 1000000"),
        ({"aggregators": -1}, "pair: aggregators=-1: give a whole number, from 0 to 1000000"),
        ({"goal": "mean"}, "pair: goal='mean': give one of sum, gather, exchange, meet"),
        ({"goal": ["sum"]}, "pair: goal=['sum']: give one of sum, gather, exchange, meet"),
        ({"goal": "gather"}, "pair: 1 chunks; gather among 2 ranks needs 2"),
        ({"name": 3}, "schedule name 3: give a word"),
        (
            {"speed": 9},
            "pair: 'speed' is no key of a schedule; give name, world, chunks, goal, aggregators, stages",
        ),
        ({"stages": 4}, "pair: stages=4: give a list of stages, each a list of transfers"),
        ({"stages": ["x"]}, "pair: stage 0 is 'x'; give a list of transfers"),
        *[
            (
                {"stages": [[[1, 0, 0, 1, "add"], row]]},
                f'pair: stage 0, transfer 1 is {row!r}; give [source, destination, first chunk, how many, "add" or "copy"]',
            )
            for row in BAD_TRANSFERS
        ],
        (
            {"stages": [[[2, 0, 0, 1, "add"]]]},
            "pair: stage 0: the transfer 2 -> 0 (chunks 0..0, add) names a node outside 0..1",
        ),
        (
            {"stages": [[], [[0, 1, 0, 2, "copy"]]]},
            "pair: stage 1: the transfer 0 -> 1 (chunks 0..1, copy) names chunks outside 0..0",
        ),
    ],
)
def test_a_bad_schedule_is_refused_in_one_sentence(change, sentence):
    with pytest.raises(ConfigError) as refused:
        from_data(PAIR | change)
    assert str(refused.value) == sentence


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match="pair: the key 'chunks' is missing; give name, world"):
        from_data({k: v for k, v in PAIR.items() if k != "chunks"})
    with pytest.raises(ConfigError, match="a schedule is a table with name, .*; this is \\[1\\]"):
        from_data([1])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", b"{", "a.json: is no valid JSON \\(.*\\); correct it there"),
        ("a.json", b"[" * 100_000, "a.json: is no valid JSON \\(.*\\); correct it there"),
        ("a.json", b"\xff\xfe", "a.json: is no valid JSON \\(.*\\); correct it there"),
        (
            "a.json",
            b'{"world": 2, "world": 3}',
            "a.json: is no valid JSON \\(of world, world one is given twice\\)",
        ),
        ("a.toml", b"world = 2\nworld = 3", "a.toml: is no valid TOML"),
        ("a.toml", b"world =", "a.toml: is no valid TOML \\(.*\\); correct it there"),
        ("a.yaml", b"", "a.yaml: a schedule is read from a .json or .toml file; rename it"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path / name)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match="none.json: cannot be read \\(No such file or directory\\); check the path"
    ):
        load(tmp_path / "none.json")


def test_a_broken_algorithm_loads_but_does_not_verify():
    broken = from_data(PAIR | {"stages": PAIR["stages"][:1]})
    with pytest.raises(
        ScheduleError, match="pair: rank 1 ends with chunk 0 that lacks the contribution of rank 0"
    ):
        broken.verify()


def test_too_many_transfers_are_not_written_out():
    with pytest.raises(
        ConfigError, match="ring: 33,546,240 transfers are too many to write out; the limit is 1,000,000"
    ):
        to_data(ring(4096))
