"""Proofs: a message counts once, in its place, from its side, on its connection."""

import pytest

from tacit.authentication import ForgedError, Proofs, run_secret, value_proof
from tacit.errors import ConfigError


def pair(secret="secret", purpose="test", nonces=("n", "m")):
    return (
        Proofs(secret, purpose, *nonces, "server", "client"),
        Proofs(secret, purpose, *nonces, "client", "server"),
    )


def proof_of(side, *parts):
    made = side.sending()
    for part in parts:
        made.update(part)
    return made.digest()


def accepted(side, proof, *parts):
    made = side.receiving()
    for part in parts:
        made.update(part)
    try:
        side.accept(made, proof)
        return True
    except ForgedError:
        return False


def test_messages_are_accepted_in_their_order_and_cut_to_16_bytes():
    server, client = pair()
    first, second = proof_of(client, b"one"), proof_of(client, b"two")
    assert not accepted(server, second, b"two")  # one was left out
    assert accepted(server, first[:16], b"o", b"ne") and not accepted(server, first, b"one")  # again
    assert accepted(server, second, b"two")
    assert accepted(client, proof_of(server, b"three"), b"three")


def test_what_was_changed_sent_back_moved_or_made_without_the_secret_is_refused():
    server, client = pair()
    proof = proof_of(client, b"one")
    assert not accepted(server, proof, b"One")
    assert not accepted(client, proof, b"one")  # sent back to its sender
    for other in (pair("other"), pair(purpose="more"), pair(nonces=("n", "x")), pair(nonces=("x", "m"))):
        assert not accepted(other[0], proof, b"one")
    for cut in (b"", proof[:8], proof + b"x"):
        assert not accepted(server, cut, b"one")
    assert accepted(server, proof, b"one")


def test_a_value_is_proved_where_it_stands():
    found = {
        value_proof(*words) for words in (("s", "k", "v"), ("s", "k", "w"), ("s", "l", "v"), ("t", "k", "v"))
    }
    assert len(found) == 4
    assert value_proof("s", "a b", "c") != value_proof("s", "a", "b c")


def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("TACIT_SECRET", "")
    assert run_secret() == ""
    monkeypatch.setenv("TACIT_SECRET", "short")
    with pytest.raises(ConfigError, match="5 characters") as caught:
        run_secret()
    assert "short" not in str(caught.value)
