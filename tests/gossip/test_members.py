"""Leases in torch's store: who lives, who left, and what happens while the store cannot be reached."""

import pytest
import torch.distributed as dist

from tacit.gossip.members import Members
from tacit.gossip.peers import PeerAddress
from tacit.gossip.store_client import DeadlineClient


def member(store, rank, world=2, **options):
    return Members(
        DeadlineClient(lambda: store), rank, world, beat_s=3600.0, **options
    )  # beats when it looks


def test_a_rank_is_there_from_its_beginning_until_it_leaves():
    store = dist.HashStore()
    zero, one = member(store, 0), member(store, 1)
    assert dict(zero.look()) == {}
    one.begin(PeerAddress("127.0.0.1", 7, "one"))
    assert dict(zero.look()) == {1: PeerAddress("127.0.0.1", 7, "one")}
    one.close()
    assert dict(zero.look()) == {}
    zero.close()


def test_a_beat_that_does_not_change_is_a_lease_that_runs_out_and_the_next_beat_renews_it():
    store = dist.HashStore()
    zero, one = member(store, 0, lease_s=0.0), member(store, 1)
    one.begin(PeerAddress("127.0.0.1", 7, "one"))
    assert dict(zero.look()) == {}  # a lease of no length is always over
    patient = member(store, 0, lease_s=3600.0)
    assert set(patient.look()) == {1}
    for each in (zero, patient, one):
        each.close()


def test_lives_are_counted_and_the_first_claim_holds():
    store = dist.HashStore()
    assert [member(store, 1).life for _ in range(3)] == [1, 2, 3]
    zero = member(store, 0)
    assert zero.claim("who", "0 1") == "0 1" and zero.claim("who", "1") == "0 1"
    assert zero.get("who") == "0 1" and zero.get("nothing") is None
    zero.close()


def test_without_the_store_the_known_are_called_and_with_it_again_the_new():
    store, away = dist.HashStore(), []

    def opened():
        if away:
            raise RuntimeError("no route to host")
        return store

    one = member(store, 1, world=3)
    one.begin(PeerAddress("127.0.0.1", 7, "one"))
    store_client = DeadlineClient(opened)
    zero = Members(store_client, 0, 3, beat_s=3600.0)
    assert set(zero.look()) == {1}
    away.append(True)
    store_client._leave(store_client._worker)  # its connection is lost
    with pytest.warns(
        UserWarning, match=r"store is gone \(no route to host\): rank 0 goes on with the peers it knows"
    ):
        assert set(zero.look()) == {1}
    assert zero.store_lost
    two = member(store, 2, world=3)
    two.begin(PeerAddress("127.0.0.2", 7, "two"))
    assert set(zero.look()) == {1}
    away.clear()
    assert set(zero.look()) == {1, 2} and not zero.store_lost
    for each in (zero, one, two):
        each.close()


def test_a_lease_without_this_runs_proof_is_none_and_a_malformed_one_ends_nothing():
    store = dist.HashStore()
    zero, one = member(store, 0, secret="s" * 16), member(store, 1, secret="another secret..")
    one.begin(PeerAddress("10.0.0.1", 7, "one"))
    with pytest.warns(UserWarning, match="does not prove this run's TACIT_SECRET"):
        assert dict(zero.look()) == {}
    mine = Members(DeadlineClient(lambda: store), 1, 2, beat_s=3600.0, secret="s" * 16)
    mine.begin(PeerAddress("10.0.0.1", 7, "two"))
    assert set(zero.look()) == {1}
    mine._lease = lambda **_: '["beat", 1, 2]'
    mine._look()  # proved, and nonsense
    with pytest.warns(UserWarning, match="lease of rank 1 that cannot be read"):
        assert set(zero.look()) == {1}
    store.set("0/1", "[")  # neither
    assert set(zero.look()) == {1}
    assert zero._refusals.counts["lease"] == 1 and zero._refusals.counts["store value"] >= 2
    zero.close()


def test_without_a_secret_nobody_is_called_at_another_machines_address():
    store = dist.HashStore()
    zero, one = member(store, 0), member(store, 1)
    one.begin(PeerAddress("10.0.0.1", 7, "one"))
    with pytest.warns(UserWarning, match="without TACIT_SECRET only loopback is called"):
        assert dict(zero.look()) == {}
    zero.close()
    one.close()


def test_a_life_is_known_by_its_lease_or_by_its_announcement_and_an_old_one_is_not():
    store = dist.HashStore()
    zero, one = member(store, 0), member(store, 1)
    assert not zero.knows(1, "1-first")
    one.announce("1-first")
    zero._asked_at.clear()
    assert zero.knows(1, "1-first") and not zero.knows(1, "another")
    one.begin(PeerAddress("127.0.0.1", 7, "1-first"))
    zero.look()
    again = member(store, 1)
    again.announce("2-second")
    assert not zero.knows(1, "2-second")  # the store was asked a moment ago
    zero._asked_at.clear()
    assert zero.knows(1, "2-second") and zero.knows(1, "1-first")  # which may still live
    again.begin(PeerAddress("127.0.0.1", 8, "2-second"))
    zero.look()
    assert zero.knows(1, "2-second") and not zero.knows(1, "1-first")
    for each in (zero, again):
        each.close()


def test_an_older_life_displaces_no_newer_one_that_lives():
    store = dist.HashStore()
    zero, old, new = (member(store, rank) for rank in (0, 1, 1))
    old.begin(PeerAddress("127.0.0.1", 7, "9-old"))
    older = store.get("0/1")
    new.begin(PeerAddress("127.0.0.1", 8, "10-new"))
    assert zero.look()[1].incarnation == "10-new"
    store.set("0/1", older)  # a process that was stopped for a minute writes its lease again
    assert zero.look()[1].incarnation == "10-new" and zero.knows(1, "10-new")
    new.look()
    assert zero.look()[1].port == 8
    zero._lease_s = 0.0  # the newer one is silent
    store.set("0/1", older)
    zero.look()
    zero._lease_s = 3600.0
    assert zero.live()[1].incarnation == "9-old"
    new.look()
    assert zero.look()[1].incarnation == "10-new" and not zero.knows(1, "9-old")  # which is over for good now
    for each in (zero, old, new):
        each.close()


def test_when_the_store_is_back_the_others_have_a_lease_of_time_to_find_it_too():
    store = dist.HashStore()
    one = member(store, 1)
    one.begin(PeerAddress("127.0.0.1", 7, "one"))
    zero = member(store, 0, lease_s=60.0)
    assert set(zero.look()) == {1}
    real = zero._swap_leases

    def lost(found):
        raise RuntimeError("no route to host")

    zero._swap_leases = lost
    with pytest.warns(UserWarning, match="store is gone"):
        zero.look()
    zero._seen = {r: (beat, at - 90.0, where) for r, (beat, at, where) in zero._seen.items()}  # 90 s pass
    zero._swap_leases = real
    assert set(zero.look()) == {1} and not zero.store_lost and zero.lost(3600.0) == []
    for each in (zero, one):
        each.close()


def test_a_store_that_outlives_a_run_holds_the_next_one():
    store = dist.HashStore()
    first = member(store, 0)
    first.begin(PeerAddress("127.0.0.1", 7, "zero"))
    first.set("begun", "yes")
    late, other = member(store, 1), member(store, 0)  # the second: rank 0 again
    assert other.life == 2 and set(late.look()) == {0} and not late.all_left
    late.enter(next_run=False)  # nothing new
    assert late.get("begun") == "yes"
    first.close()
    assert not late.look() and late.all_left
    late.enter(next_run=True)
    other.enter(next_run=True)  # both have found the same, and begin one run
    assert (late.life, other.life) == (1, 1)
    assert late.get("begun") is None and late.claim("who", "1") == other.claim("who", "0") == "1"
    third = member(store, 0)
    assert third.life == 2 and third.get("who") == "1"  # who comes now comes to that one
    for each in (late, other, third):
        each.close()
