"""The two-phase commit without sockets: every state and every event."""

import itertools

import pytest

from tacit.gossip.protocol import (
    TRANSITIONS,
    CommitEvent,
    CommitState,
    FollowedMeeting,
    FollowedMeetings,
    LedMeetings,
    Transaction,
    TransitionError,
)


@pytest.mark.parametrize(("state", "event"), itertools.product(CommitState, CommitEvent))
def test_every_event_moves_a_state_by_the_table_or_is_refused(state, event):
    transaction = Transaction("0-a-1", state)
    if (state, event) in TRANSITIONS:
        transaction.apply(event)
        assert transaction.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(TransitionError, match=f"0-a-1 is {state.value}: {event.value} is not allowed"):
            transaction.apply(event)
        assert transaction.state is state


def test_a_decision_is_final():
    for state in (CommitState.COMMITTED, CommitState.ABORTED):
        assert Transaction("m", state).decided and not any(
            (state, event) in TRANSITIONS for event in CommitEvent
        )
    assert not Transaction("m").decided and not Transaction("m", CommitState.IN_DOUBT).decided


def test_a_query_before_the_decision_aborts_and_one_after_it_reports_it():
    led = LedMeetings(kept=2)
    first = led.begin("first")
    assert not led.query(1, "first") and first.state is CommitState.ABORTED
    with pytest.raises(TransitionError):
        led.commit(1, first)
    led.commit(1, led.begin("second"))
    assert led.query(1, "second") and not led.query(2, "second") and not led.query(1, "first")


def test_only_the_last_committed_meetings_of_a_peer_are_kept():
    led = LedMeetings(kept=2)
    for name in "abc":
        led.commit(1, led.begin(name))
    assert [led.query(1, name) for name in "abc"] == [False, True, True]


def prepared(caller=1, incarnation="a"):
    """A called side's ledger, with one prepared meeting."""
    followed, meeting = FollowedMeetings(), FollowedMeeting(f"{caller}-{incarnation}-1", caller, incarnation)
    followed.prepare(meeting)
    return followed, meeting


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_a_followed_meeting_is_applied_once_and_only_if_it_was_committed(cut, committed):
    followed, meeting = prepared()
    if cut:
        followed.disconnect(meeting)
        assert meeting.transaction.state is CommitState.IN_DOUBT and followed.undecided == {1: meeting}
    assert followed.decide(meeting, committed) is committed
    assert meeting.transaction.state is (CommitState.COMMITTED if committed else CommitState.ABORTED)
    assert not followed.undecided and not followed.decide(meeting, True)


def test_a_connection_that_ends_after_the_decision_changes_nothing():
    followed, meeting = prepared()
    followed.decide(meeting, True)
    followed.disconnect(meeting)
    assert meeting.transaction.state is CommitState.COMMITTED


def test_a_caller_has_one_undecided_meeting_at_most():
    followed, meeting = prepared()
    followed.disconnect(meeting)
    with pytest.raises(TransitionError, match="meeting 1-a-1 of rank 1 is in doubt"):
        followed.prepare(FollowedMeeting("1-a-2", 1, "a"))
    followed.prepare(FollowedMeeting("2-b-1", 2, "b"))
    assert sorted(followed.undecided) == [1, 2]


def test_a_meeting_of_an_incarnation_that_is_over_is_aborted_and_one_that_goes_on_is_not():
    followed, meeting = prepared(incarnation="a")
    followed.expire(1, "a")
    followed.expire(2, "b")
    assert followed.undecided == {1: meeting}
    followed.expire(1, "b")
    assert not followed.undecided and meeting.transaction.state is CommitState.ABORTED


def test_a_meeting_that_was_dropped_is_not_decided_any_more():
    followed, meeting = prepared()
    followed.undecided.clear()  # the model was replaced by a checkpoint's
    assert not followed.decide(meeting, True) and not meeting.transaction.decided
