import json
import sys
from pathlib import Path

from tacit.cli import main

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def test_check_as_json_gives_every_finding(capsys):
    assert main(["codecs", "check", "int4(block=32)", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    errors = [f for f in found["findings"] if f["check"] == "error"]
    assert {f["world"] for f in errors} == {1, 2, 3, 4, 8, 10}
    assert {f["family"] for f in errors} == {
        "gauss",
        "lognormal",
        "blocky",
        "identical",
        "windows",
        "loud",
        "zero",
    }


def test_check_of_a_users_class_and_its_table(capsys):
    assert main(["codecs", "check", "own_codec:Uniform4"]) == 0
    assert "uniform4" in capsys.readouterr().out


def test_a_liar_gives_exit_code_one_and_the_rule(capsys):
    assert main(["codecs", "check", "tests.cli.liar:Liar"]) == 1
    assert "broken" in capsys.readouterr().out


def test_unknown_names_are_one_sentence_and_exit_code_two(capsys):
    for name in ("int9", "nowhere:Codec", "own_codec:Missing"):
        assert main(["codecs", "check", name]) == 2
        error = capsys.readouterr().err
        assert error.startswith("tacit: ") and error.count("\n") == 1


def test_list_shows_bits_and_claims(capsys):
    assert main(["codecs", "list", "--json"]) == 0
    rows = {row["codec"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["int4(block=64)"]["bits"] == 4.5
    assert rows["bf16"]["scheme"] == "allreduce"
    assert main(["codecs", "list"]) == 0
