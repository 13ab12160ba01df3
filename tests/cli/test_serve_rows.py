"""`tacit serve-rows`: what it needs, and how it ends before its time. What it serves is in tests/rows."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from tacit.cli import main

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_outside_of_a_job_it_names_what_is_missing(capsys, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    assert main(["serve-rows"]) == 2
    said = capsys.readouterr().err
    assert "WORLD_SIZE and MASTER_ADDR and MASTER_PORT not set" in said and said.count("\n") == 1


@pytest.mark.parametrize("words", [["--servers", "0"], ["--wait", "0s"], ["--wait", "soon"]])
def test_options_that_cannot_be_are_refused(capsys, words):
    assert main(["serve-rows", *words]) == 2
    assert words[1] in capsys.readouterr().err


def test_the_help_has_a_whole_job(capsys):
    with pytest.raises(SystemExit):
        main(["serve-rows", "--help"])
    assert "RANK=4 tacit serve-rows --servers 2" in capsys.readouterr().out


def test_ctrl_c_ends_it_while_it_waits():
    with socket.create_server(("127.0.0.1", 0)) as store:  # which accepts, and never answers
        port = store.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "tacit", "serve-rows"], stderr=subprocess.PIPE, text=True,
            env=os.environ | dict(zip(NAMES, ("1", "2", "127.0.0.1", str(port)), strict=True)),
        )  # fmt: skip
        try:
            store.settimeout(60)
            store.accept()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
            assert process.stderr.read() == "tacit: interrupted; the ranks lose this row server, and end\n"
        finally:
            process.kill()
            process.communicate()
