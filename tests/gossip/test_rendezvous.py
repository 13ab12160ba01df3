"""Where a rank listens, and as what others know it."""

import socket
import warnings

import pytest

from tacit.errors import ConfigError
from tacit.gossip import rendezvous
from tacit.gossip.rendezvous import Endpoint, listening, own_endpoint

SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("TACIT_HOST", "TACIT_STORE", "MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_address_is_the_one_that_leads_to_the_store(monkeypatch):
    assert own_endpoint(SECRET) == Endpoint("127.0.0.1", "127.0.0.1")
    for name, text in (("MASTER_ADDR", "localhost"), ("TACIT_STORE", "127.0.0.1:29400")):
        monkeypatch.setenv(name, text)
        assert own_endpoint(SECRET) == Endpoint("127.0.0.1", "127.0.0.1")


def test_a_name_that_is_this_machine_here_is_passed_on_as_a_name(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert own_endpoint(SECRET) == Endpoint("node0", "")
    with listening(own_endpoint(SECRET)) as server:
        assert server.getsockname()[0] == "0.0.0.0"


def test_who_knows_better_says_so(monkeypatch):
    monkeypatch.setenv("TACIT_STORE", "127.0.0.1:29400")
    monkeypatch.setenv("TACIT_HOST", "10.0.0.7")
    assert own_endpoint(SECRET) == Endpoint("10.0.0.7", "")


def test_a_store_of_the_sixth_version_can_be_named():
    assert rendezvous._split("[::1]:29400") == ("::1", 29400)
    with pytest.raises(ConfigError, match="write host:port"):
        rendezvous._split("29400")


def test_an_address_of_another_machine_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"cannot listen at 192.0.2.1 .*TACIT_HOST"):
        listening(Endpoint("192.0.2.1", "192.0.2.1"))


def test_without_a_secret_a_rank_is_not_reachable_from_other_machines(monkeypatch):
    assert own_endpoint("") == Endpoint("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("TACIT_HOST", "10.0.0.7")
    with pytest.raises(ConfigError, match=r"reachable at 10.0.0.7, .*export TACIT_SECRET=\$\(openssl rand"):
        own_endpoint("")
    monkeypatch.delenv("TACIT_HOST")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setattr(rendezvous, "_source_towards", lambda host: "192.0.2.7")  # another machine's store
    with pytest.raises(ConfigError, match="reachable at 192.0.2.7"):
        own_endpoint("")


def test_without_a_secret_ranks_of_one_machine_meet_at_loopback_whatever_the_store_is_called(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setattr(rendezvous, "_source_towards", lambda host: "192.0.2.1")  # this machine's own address
    with pytest.warns(UserWarning, match="serves loopback only"):
        assert own_endpoint("") == Endpoint("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # torchrun: nobody else needs to reach it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert own_endpoint("") == Endpoint("127.0.0.1", "127.0.0.1")
