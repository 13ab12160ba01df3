"""`tacit doctor`: each part is really tried, and one that does not work is named with its way out."""

import json
import socket

import pytest
import torch

from tacit import doctor
from tacit.cli import main
from tacit.errors import ConfigError


def test_what_the_other_tests_need_works_here(capsys):
    assert main(["doctor", "--json", "--require", "core,training,aggregator,report"]) == 0
    parts = {part["name"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert list(parts) == list(doctor.PARTS)
    assert torch.__version__ in parts["training"]["finding"] and "gloo" in parts["training"]["finding"]
    assert all(part["finding"] for part in parts.values())
    assert all(part["way_out"] for part in parts.values() if not part["works"])


def _fails(cause):
    def attempt():
        raise cause

    return attempt


@pytest.fixture
def broken(monkeypatch):
    """Parts that fail in each way that parts may."""
    causes = {
        "ours": ConfigError("the kernel plane needs root; the user-space plane needs no privileges"),
        "kernel": OSError(13, "Permission denied"),
        "package": ImportError("No module named 'jinja2'"),
    }
    monkeypatch.setattr(doctor, "PARTS", {name: ("a test", _fails(cause)) for name, cause in causes.items()})


def test_a_part_that_fails_is_reported_and_the_others_are_tried(broken, capsys):
    assert main(["doctor", "--json"]) == 0
    found = {part["name"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert not any(part["works"] for part in found.values())
    assert found["ours"]["finding"] == "the kernel plane needs root"
    assert found["ours"]["way_out"] == "the user-space plane needs no privileges"
    assert "Permission denied" in found["kernel"]["finding"] and "jinja2" in found["package"]["finding"]


def test_a_required_part_that_fails_is_exit_code_3(broken, capsys):
    assert main(["doctor", "--require", "kernel, ours"]) == 3
    assert "is required: ours, kernel" in capsys.readouterr().err


def test_a_part_that_is_none_is_refused_in_a_sentence(capsys):
    assert main(["doctor", "--require", "labb"]) == 2
    assert "--require 'labb': no such part; did you mean 'lab'? there are core" in capsys.readouterr().err


def test_a_host_whose_name_is_loopback_is_told_to_name_an_interface(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")  # as Debian writes it
    part = next(part for part in doctor.examine() if part.name == "network")
    assert not part.works or ("GLOO_SOCKET_IFNAME=" in part.way_out and "127.0.1.1" in part.way_out)
