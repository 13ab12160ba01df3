"""The keyed store: what torch's does for gossip, for those who know the secret, within limits."""

import socket
from contextlib import closing, contextmanager

import pytest

from tacit.authentication import decode
from tacit.errors import ConfigError, TransportError
from tacit.gossip import store as stores
from tacit.gossip.members import Members
from tacit.gossip.store import StoreClient, StoreServer
from tacit.gossip.store_client import DeadlineClient, StoreError

SECRET = "the secret of these tests"


@contextmanager
def serving(secret=SECRET):
    with closing(StoreServer(("127.0.0.1", 0), secret)) as server:
        yield server


def client_of(server, secret=SECRET, prefix=""):
    return StoreClient(*server.address, secret, prefix=prefix)


def test_operations_are_those_of_torchs_stores():
    with serving() as server, closing(client_of(server)) as store:
        store.set("a", "1")
        assert store.get("a") == b"1" and store.check(["a"]) and not store.check(["a", "b"])
        assert store.add("n", 2) == 2 and store.add("n", -5) == -3
        assert store.compare_set("c", "", "first") == store.compare_set("c", "", "second") == b"first"
        assert store.compare_set("c", "first", "third") == b"third"
        assert store.get_all(["a", "none", *[f"k{k}" for k in range(500)]]) == [b"1", *[None] * 501]
        with closing(client_of(server, prefix="run/")) as other:
            assert not other.check(["a"])
            other.set("a", "2")
        assert store.get("run/a") == b"2" and store.get("a") == b"1"


def test_a_wrong_secret_changes_nothing_and_is_told_why():
    with serving() as server:
        for secret in ("", SECRET + "!"):
            with pytest.raises(TransportError, match="the same TACIT_SECRET"):
                client_of(server, secret).set("a", "1")
        assert server.counts["refused"] == 2
        with closing(client_of(server)) as store:
            assert not store.check(["a"])


def test_a_server_that_does_not_know_the_secret_is_not_believed():
    with serving("another secret") as server:
        store_client = DeadlineClient(lambda: client_of(server), answer_s=5.0)
        with pytest.raises(StoreError, match="refused this rank"):
            store_client.ask(lambda store: store.get("a"))
        store_client.close()


def test_a_recorded_request_is_refused_when_it_is_sent_again():
    with serving() as server:
        with closing(client_of(server)) as store:
            sent = []
            real = store._socket

            class Recorded:
                def sendall(self, data):
                    sent.append(data)
                    real.sendall(data)

            store._socket = Recorded()
            store.set("a", "1")
            store.set("a", "2")
            real.sendall(sent[1])  # the same line again, in the same connection
            assert store._lines.readline() == b""
            store._socket = real
        with socket.create_connection(server.address) as again:  # and as the first of another
            again.sendall(sent[0])
            lines = again.makefile("rb")
            assert "nonce" in decode(lines.readline()) and "refused" in decode(lines.readline())
        with closing(client_of(server)) as store:
            assert store.get("a") == b"2"


def test_limits_hold_and_the_store_still_answers(monkeypatch):
    monkeypatch.setattr(stores, "MOST_KEYS", 3)
    monkeypatch.setattr(stores, "MOST_NBYTES", 1000)
    with serving() as server, closing(client_of(server)) as store:
        for key, value in (("a", "x" * 20000), ("k" * 300, "1")):
            with pytest.raises(TransportError, match="at most"):
                store.set(key, value)
        for key in "abc":
            store.set(key, "1")
        with pytest.raises(TransportError, match=r"full \(3 keys"):
            store.set("d", "1")
        with pytest.raises(TransportError, match="full"):
            store.set("a", "x" * 1000)
        store.set("a", "x" * 100)
        assert store.get("a") == b"x" * 100
        with pytest.raises(TransportError, match="at most 128 keys"):
            store._ask({"do": "get", "keys": ["a"] * 129})


def test_strangers_are_cut_off_the_oldest_first_and_members_stay(monkeypatch):
    monkeypatch.setattr(stores, "MOST_STRANGERS", 4)
    with serving() as server, closing(client_of(server)) as store:
        store.set("a", "1")
        idle = [socket.create_connection(server.address) for _ in range(40)]
        try:
            assert store.get("a") == b"1"
            with closing(client_of(server)) as late:
                assert late.get("a") == b"1"
            assert server.counts["cut off"] >= 36
        finally:
            for connection in idle:
                connection.close()


def test_a_stranger_that_sends_nothing_is_left_after_the_greeting(monkeypatch):
    monkeypatch.setattr(stores, "GREETING_S", 0.05)
    with serving() as server, socket.create_connection(server.address) as silent:
        silent.settimeout(20)
        lines = silent.makefile("rb")
        assert "nonce" in decode(lines.readline()) and lines.readline() == b""
        assert server.counts["silent"] == 1


def test_without_a_secret_only_loopback_is_served():
    with serving("") as server, closing(client_of(server, "")) as store:
        store.set("a", "1")
    with pytest.raises(ConfigError, match="set TACIT_SECRET here and for all ranks"):
        StoreServer(("0.0.0.0", 0), "")


def test_members_find_one_another_in_it():
    from tacit.gossip.peers import PeerAddress

    with serving() as server:
        found = [
            Members(
                DeadlineClient(lambda: client_of(server, prefix="x/")), rank, 2, beat_s=3600.0, secret=SECRET
            )
            for rank in range(2)
        ]
        found[1].begin(PeerAddress("10.0.0.1", 7, "one"))
        assert found[0].look() == {1: PeerAddress("10.0.0.1", 7, "one")}
        assert found[0].claim("who", "0 1") == found[1].claim("who", "1") == "0 1"
        for member in found:
            member.close()
