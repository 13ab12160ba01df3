"""`tacit store` hosts what ranks that gossip find one another by, until it is stopped, for those that know the secret."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tacit.cli import main
from tacit.errors import TransportError
from tacit.gossip.store import StoreClient

TACIT = [sys.executable, "-m", "tacit"]
SECRET = "0123456789abcdef" * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_whoever_knows_the_secret_until_it_is_asked_to_stop(capsys, number):
    process = subprocess.Popen(
        [*TACIT, "store", "--listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TACIT_SECRET": SECRET},
    )  # fmt: skip
    try:
        found = json.loads(process.stdout.readline())
        assert found["host"] == "127.0.0.1"
        store = StoreClient("127.0.0.1", found["port"], SECRET)
        store.set("here", "yes")
        assert StoreClient("127.0.0.1", found["port"], SECRET).get("here") == b"yes"
        for wrong in ("", "another secret of 29 letters."):
            with pytest.raises(TransportError, match="give it and all ranks the same TACIT_SECRET"):
                StoreClient("127.0.0.1", found["port"], wrong).get("here")
        assert main(["store", "--listen", f"127.0.0.1:{found['port']}"]) == 2  # somebody is there
        assert "cannot be listened on" in capsys.readouterr().err
        process.send_signal(number)
        assert process.wait(20) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_without_a_secret_it_binds_loopback_and_refuses_anything_else(capsys, monkeypatch):
    monkeypatch.delenv("TACIT_SECRET", raising=False)
    for host in ("0.0.0.0", "192.0.2.1", "example.invalid"):
        assert main(["store", "--listen", f"{host}:29400"]) == 2
        said = capsys.readouterr().err
        assert host in said and "export TACIT_SECRET=$(openssl rand -hex 32)" in said
    with pytest.raises(SystemExit):
        main(["store", "--help"])
    assert "(default 127.0.0.1:29400)" in " ".join(capsys.readouterr().out.split())


def test_without_a_secret_it_names_whom_it_serves_and_how_to_serve_others():
    process = subprocess.Popen(
        [*TACIT, "store", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "TACIT_SECRET"},
    )  # fmt: skip
    try:
        assert "the store is at 127.0.0.1:" in process.stdout.readline()
        said = process.stdout.readline()
        assert "serves loopback only" in said and "export TACIT_SECRET=$(openssl rand -hex 32)" in said
    finally:
        process.kill()
        process.communicate()


def test_a_secret_that_can_be_guessed_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("TACIT_SECRET", "hello")
    assert main(["store"]) == 2
    said = capsys.readouterr().err
    assert "5 characters" in said and "hello" not in said


@pytest.mark.parametrize("text", ["127.0.0.1:70000", "29400", ":29400", "a:b"])
def test_an_address_that_is_none_is_refused(capsys, text):
    assert main(["store", "--listen", text]) == 2
    assert "write a host and a port from 0 to 65535" in capsys.readouterr().err
