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


def test_a_table_in_a_pipe_breaks_no_line_and_cuts_no_word(capsys):
    """On 80 columns `bits up` was `b…`, and every claim a row of letters."""
    for words in (["list"], ["table", "--static"]):
        assert main(["codecs", *words]) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert sum("topk(0.01, chunk=bucket) > qsgd" in line for line in out.splitlines()) in (0, 2)
    assert "│ ef(sign)" in out and "contracts to 1 - |x|_1^2 / (d |x|_2^2) of the energy" in out


def test_on_a_narrow_terminal_long_cells_take_several_lines():
    import io

    from rich.console import Console
    from rich.table import Table

    from tacit.cli.wide import print_table

    for terminal, lines in ((True, 8), (False, 5)):
        out = io.StringIO()
        table = Table("codec", "claims")
        table.add_row("topk(share=0.015625, bits=2, chunk=4096)", "contracting")
        print_table(table, Console(file=out, width=40, force_terminal=terminal, color_system=None))
        text = out.getvalue()
        assert "…" not in text and "contracting" in text
        assert (max(map(len, text.splitlines())) <= 40) is terminal
        assert (len(text.splitlines()) > 5) is (lines > 5)


def test_every_must_of_the_survey_is_a_method_with_what_it_sends(capsys):
    """The M rows of the survey's second family, by the name of the codec that is each."""
    assert main(["codecs", "table", "--static", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {
        "half precision", "bfloat16", "FP8 in blocks", "8-bit integers in blocks", "4-bit integers in blocks", "1-bit SGD", "EF-signSGD",
        "signSGD, majority vote", "QSGD", "TernGrad", "THC", "threshold", "top-k", "random-k, shared seed", "DGC", "gTop-k", "PowerSGD",
        "error feedback (EF14)", "EF21", "Qsparse-local", "DeMo",
    } <= set(rows)  # fmt: skip
    assert rows["Qsparse-local"]["when"] == "local(8)"
    assert rows["bfloat16"]["bits_up"] == rows["bfloat16"]["bits_down"] == 16
    assert rows["signSGD, majority vote"]["bits_down"] == 8 + 64 / 1024 and rows["TernGrad"]["requests"] == 2
    assert rows["hush"]["schemes"] == ["allreduce", "sharded", "server", "ring", "star", "gossip"]
    assert rows["EF-signSGD"]["schemes"] == ["sharded", "server"] and rows["EF-signSGD"]["claims"] == [
        "remembers"
    ]


def test_the_page_of_codecs_is_current_in_what_no_machine_changes(capsys):
    page = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
    assert main(["codecs", "table", "--static", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() in page, "run: tacit codecs table --markdown > docs/codecs.md"


def test_the_page_has_a_measured_row_for_every_method_and_a_reason_where_one_is_slow():
    from tacit.codecs.catalogue import METHODS

    page = (Path(__file__).parents[2] / "docs" / "codecs.md").read_text()
    rows = [
        line.strip("| ").split(" | ")
        for line in page.partition("## What it costs")[2].splitlines()
        if line.startswith("| `")
    ]
    assert [row[0].strip("`") for row in rows] == [method.text for method in METHODS]
    for row, method in zip(rows, METHODS, strict=True):
        errors, costs = [float(cell) for cell in row[1:3]], [float(cell) for cell in row[3:5]]
        assert all(error >= 0 for error in errors) and errors[0] < 10
        slow = any(cost / times > 5 for cost, times in zip(costs, method.passes, strict=True))
        assert not slow or (method.why and row[-1] == method.why), method.codec
