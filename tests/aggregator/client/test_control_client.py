"""What a rank makes of whoever answers on control's port."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from aggregator.members import SECRET, aggregator, some_terms

from tacit.aggregator.client.control_client import AbsentError, knock
from tacit.aggregator.client.membership import LateError, Membership
from tacit.aggregator.spec import Address
from tacit.errors import ConfigError, TransportError

HELLO = json.dumps({"tacit": 2, "nonce": "ab" * 32}).encode() + b"\n"


@contextmanager
def stranger(serve: Callable[[socket.socket], None]) -> Iterator[Address]:
    """Serves one connection after another, each by the function."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(10)
                    serve(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(15)


def test_an_aggregator_that_knows_the_secret_answers_a_knock():
    with aggregator() as control:
        knock(control.address, SECRET, 10.0)
        with pytest.raises(ConfigError, match="the secret is not one"):
            knock(control.address, "another secret", 10.0)


def test_where_nobody_answers_is_not_the_same_as_where_we_are_not_wanted():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(AbsentError, match="no aggregator listens"):
            knock(nobody.getsockname(), SECRET, 0.2)
    with (
        stranger(lambda connection: time.sleep(1.0)) as at,
        pytest.raises(
            TransportError, match=r"accepts connections and does not greet .* is it an aggregator"
        ) as raised,
    ):
        knock(at, SECRET, 0.2)
    assert not isinstance(raised.value, AbsentError)


def test_who_greets_and_then_sends_nothing_is_named_too():
    def serve(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        time.sleep(1.0)

    with stranger(serve) as at, pytest.raises(TransportError, match="greets and does not answer") as raised:
        knock(at, SECRET, 0.2)
    assert not isinstance(raised.value, AbsentError)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_who_answers_over_ipv6_is_named_as_over_ipv4():
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as silent,
        pytest.raises(TransportError, match="does not greet"),
    ):
        knock(silent.getsockname()[:2], SECRET, 0.2)


@pytest.mark.parametrize(
    "banner",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1]\n", b"\xff\x00\n", b"a" * 9000],
)
def test_another_service_on_the_port_is_called_so(banner):
    talks = stranger(lambda connection: connection.sendall(banner))
    with talks as at, pytest.raises(TransportError, match="is another service, no aggregator"):
        knock(at, SECRET, 10.0)


def test_a_first_message_that_does_not_end_is_cut_off_after_4096_bytes():
    sent = 0

    def serve(connection: socket.socket) -> None:
        nonlocal sent
        for _ in range(1 << 14):
            sent += connection.send(b"a" * 4096)

    with stranger(serve) as at, pytest.raises(TransportError, match="more than 4096 bytes"):
        knock(at, SECRET, 10.0)
    assert sent < 32 << 20  # what the kernel's buffers hold, not all 64 MB


def test_a_refusal_is_printable_and_short_whatever_it_says():
    def serve(connection: socket.socket) -> None:
        connection.sendall(HELLO)
        connection.recv(1 << 14)
        why = "\x1b[2J\r\n" + "x" * 100_000
        connection.sendall(json.dumps({"say": "refused", "why": why}).encode() + b"\n")
        connection.recv(1)

    with stranger(serve) as at, pytest.raises(TransportError) as raised:
        knock(at, SECRET, 10.0)
    assert str(raised.value).isprintable() and len(str(raised.value)) <= 400


def test_who_waits_for_others_in_vain_is_told_that_they_are_late():
    with aggregator() as control, pytest.raises(LateError, match="have not joined"):
        Membership(control.address, SECRET, some_terms(), 0, 4000, timeout_s=0.3)


def test_a_full_aggregator_says_so_at_once_and_that_is_not_lateness():
    one, two = some_terms("one", world=1), some_terms("two", world=1)
    with aggregator(slots=8, jobs=1) as control, Membership(control.address, SECRET, one, 0, 4000):
        began = time.monotonic()
        with pytest.raises(TransportError, match="slots are in use") as raised:
            Membership(control.address, SECRET, two, 0, 4001, timeout_s=60)
        assert not isinstance(raised.value, LateError) and time.monotonic() - began < 30


def test_control_that_accepts_and_is_silent_is_given_up_after_the_greeting():
    with stranger(lambda connection: time.sleep(2.0)) as at:
        began = time.monotonic()
        with pytest.raises(TransportError, match="does not greet within 0.2 s"):
            Membership(at, SECRET, some_terms(), 0, 4000, timeout_s=60, greeting_s=0.2)
        assert time.monotonic() - began < 30
