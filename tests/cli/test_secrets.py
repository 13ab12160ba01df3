"""A secret on the command line, where none belongs, is in no error: those of the parser name the option only."""

from contextlib import suppress

import pytest

from tacit.cli import _without_secrets, build_parser, main

SECRET = "0123456789abcdef-long-enough"
VERBS = [
    [],
    ["aggregate"],
    ["aggregate", "status"],
    ["store"],
    ["demo"],
    ["report"],
    ["sim"],
    ["lab"],
    ["codecs"],
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize(
    "name", ["secret", "secert", "secrets", "aggregator-secret", "password", "token", "api-key"]
)
def test_no_error_of_the_parser_quotes_a_secret(verb, name, capsys, monkeypatch):
    monkeypatch.setenv("TACIT_AGGREGATOR", "127.0.0.1:1")
    written = [[f"--{name}", SECRET], [f"--{name}={SECRET}"], [f"-{name}", SECRET], [f"{name}={SECRET}"]]
    for words in written[: 3 if verb == ["report"] else 4]:  # a file may have such a name
        with suppress(SystemExit):
            assert main([*verb, *words]) == 2
        printed = capsys.readouterr()
        assert SECRET not in printed.out + printed.err and printed.err


def test_the_option_and_what_else_is_unknown_are_named(capsys):
    for words, named in (
        (["store", "--secert", SECRET], "--secert"),
        (["store", f"thc / star(secret='{SECRET}')"], "thc / star(secret='...'"),
        (["store", "--key", SECRET], "--key"),
        (["store", "--lisen", "127.0.0.1:1"], "--lisen 127.0.0.1:1"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        error = capsys.readouterr().err
        assert SECRET not in error and f"unrecognized arguments: {named}" in error


def test_a_command_for_a_host_of_the_lab_is_left_as_it_is():
    parsed = build_parser().parse_args(_without_secrets(["lab", "shell", "h0", "--command", "KEY=1 make"]))
    assert parsed.command == "KEY=1 make"
