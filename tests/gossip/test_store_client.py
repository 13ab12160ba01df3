"""A store that hangs is left behind, and nobody waits for it longer than they said."""

import threading

import pytest

from tacit.gossip.store_client import DeadlineClient, StoreError


def test_a_client_that_hangs_is_left_and_the_next_question_opens_another():
    opened, hang = [], threading.Event()

    def open_store():
        opened.append(len(opened))
        return opened[-1]

    store_client = DeadlineClient(open_store, answer_s=5.0)
    assert store_client.ask(lambda store: store) == 0
    with pytest.raises(StoreError, match="does not answer"):
        store_client.ask(lambda store: hang.wait(), seconds=0.01)
    assert store_client.ask(lambda store: store) == 1
    assert opened == [0, 1]
    hang.set()
    store_client.close()


def test_one_that_is_still_connecting_is_not_doubled():
    opened, go = [], threading.Event()

    def open_store():
        opened.append(1)
        go.wait()
        return "store"

    store_client = DeadlineClient(open_store, answer_s=5.0)
    for _ in range(3):
        with pytest.raises(StoreError):
            store_client.ask(lambda store: store, seconds=0.01)
    go.set()
    assert store_client.ask(lambda store: store) == "store"
    assert len(opened) == 1
    store_client.close()


def test_a_line_that_was_closed_opens_no_other():
    opened = []
    store_client = DeadlineClient(lambda: opened.append(1), answer_s=5.0)
    store_client.ask(lambda store: store)
    store_client.close()
    with pytest.raises(StoreError, match="has left the store"):
        store_client.ask(lambda store: store)
    assert opened == [1]


def test_a_failure_is_renamed_and_the_line_opens_again():
    tries = []

    def open_store():
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("no route\nto host")
        return "store"

    store_client = DeadlineClient(open_store, answer_s=5.0)
    with pytest.raises(StoreError, match="no route to host"):
        store_client.ask(lambda store: store)
    assert store_client.ask(lambda store: store) == "store"
    with pytest.raises(StoreError, match="ValueError"):
        store_client.ask(lambda store: (_ for _ in ()).throw(ValueError()))
    assert store_client.ask(lambda store: store) == "store" and len(tries) == 3
    store_client.close()
