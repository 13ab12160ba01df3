"""`tacit store` hosts what ranks that gossip find one another by, until it is stopped."""

import json
import signal
import subprocess
import sys

from torch.distributed import TCPStore

from tacit.cli import main

TACIT = [sys.executable, "-m", "tacit"]


def test_it_serves_until_it_is_asked_to_stop(capsys):
    process = subprocess.Popen([*TACIT, "store", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        port = json.loads(process.stdout.readline())["port"]
        TCPStore("127.0.0.1", port, wait_for_workers=False).set("here", "yes")
        assert TCPStore("127.0.0.1", port, wait_for_workers=False).get("here") == b"yes"
        assert main(["store", "--port", str(port)]) == 2  # somebody is there
        assert f"port {port} cannot be had; choose another" in capsys.readouterr().err
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_none_is_refused(capsys):
    assert main(["store", "--port", "70000"]) == 2
    assert "0 to 65535" in capsys.readouterr().err
