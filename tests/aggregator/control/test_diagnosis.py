"""What `status` says first. Every way to hang has its sentence, with who, how much and what to do."""

import json
from dataclasses import replace

import pytest
from aggregator.members import aggregator, joined, some_terms, until
from aggregator.statuses import some_job_status, some_stats, some_status

from tacit.aggregator.control.diagnosis import REASON_HINTS, Diagnosis, diagnose
from tacit.aggregator.control.protocol import REASONS
from tacit.aggregator.control.status import EVENTS, TAKEN, AggregatorStatus, EndedJob
from tacit.aggregator.planes.stats import RankStats
from tacit.aggregator.wire import VERDICTS

GOOD, LATE, NEVER = RankStats(15, 0.2, 0), RankStats(3, 3.4, 12), RankStats(0, None, 12)


def first(now: AggregatorStatus, earlier: AggregatorStatus | None = None) -> Diagnosis:
    return diagnose(now, earlier)[0]


def bad(now: AggregatorStatus, earlier: AggregatorStatus | None = None) -> list[str]:
    return [finding.sentence for finding in diagnose(now, earlier) if not finding.well]


def test_a_rank_that_stopped_sending_is_named() -> None:
    stats = some_stats(unfinished=12, ranks=(GOOD, GOOD, LATE), wrote=15, added=18, completed=3)
    expected = "job 'x' waits for rank 2: 12 chunks lack only it, its last packet came 3.4 s ago"
    assert bad(some_status(some_job_status(stats))) == [expected]


def test_a_rank_that_never_sent_is_named_with_its_address() -> None:
    stats = some_stats(unfinished=12, ranks=(GOOD, GOOD, NEVER), wrote=12, added=12)
    (told,) = bad(some_status(some_job_status(stats)))
    assert told == (
        "job 'x' waits for rank 2: 12 chunks lack only it, no packet of it has ever come: "
        "check that 10.0.0.3:4000 can send to UDP port 4800"
    )


def test_several_late_ranks_are_named_the_most_awaited_first() -> None:
    ranks = (replace(LATE, missing=1), GOOD, LATE)
    (told,) = bad(some_status(some_job_status(some_stats(unfinished=12, ranks=ranks, wrote=12))))
    assert (
        told == "job 'x' waits for rank 2: 12 chunks lack it, its last packet came 3.4 s ago; also for rank 0"
    )


@pytest.mark.parametrize(("gone", "expected"), [("lost", "it was lost"), ("left", "it has left the job")])
def test_a_rank_that_is_gone_is_not_expected_to_send(gone: str, expected: str) -> None:
    stats = some_stats(unfinished=12, ranks=(GOOD, GOOD, LATE), wrote=12)
    told = bad(some_status(some_job_status(stats, quorum=2, **{gone: (2,)})))
    assert f"job 'x' waits for rank 2: 12 chunks lack only it, {expected}" in told


def test_a_lossy_job_names_the_rank_that_is_left_out_most() -> None:
    ranks = (GOOD, replace(GOOD, left_out=2), replace(GOOD, left_out=1200))
    stats = some_stats(ranks=ranks, wrote=15, completed=20_000, partial=1201)
    told = [finding.sentence for finding in diagnose(some_status(some_job_status(stats, deadline_ms=20)))]
    assert (
        "job 'x' is lossy: 1,201 chunks (6 %) went out without some rank, 1,200 of them without rank 2"
        in told
    )


def test_no_packet_at_all_points_at_the_port() -> None:
    stats = some_stats(ranks=(RankStats(0, None, 0),) * 3)
    (told,) = bad(some_status(some_job_status(stats)))
    assert told == (
        "no packet of job 'x' has arrived since it began 7 s ago: if its ranks are sending, "
        "check that UDP port 4800 is open between them and the aggregator"
    )


@pytest.mark.parametrize("reason", [name for name in VERDICTS if name not in TAKEN])
def test_packets_that_are_all_dropped_are_told_with_the_reason(reason: str) -> None:
    stats = some_stats(ranks=(RankStats(0, None, 0),) * 3, **{reason: 9})
    (told,) = bad(some_status(some_job_status(stats)))
    assert told.startswith(f"packets of job 'x' arrive, but all are dropped, most as {reason!r}: ")
    assert told.endswith(REASON_HINTS[reason]) and len(REASON_HINTS[reason]) > 20


def test_ranks_that_have_not_joined_are_named() -> None:
    job = some_job_status(None, world=4, members=(("10.0.0.1", 4000), None, None, ("10.0.0.4", 4000)))
    (told,) = bad(some_status(job))
    assert told.startswith("job 'x' waits for ranks 1 and 2 of 4 to join, since 7 s")


def test_what_moves_is_well_even_while_somebody_is_late() -> None:
    before = some_status(some_job_status(some_stats(99.0, 12, (GOOD, GOOD, LATE), wrote=12, completed=3)))
    stats = some_stats(100.0, 12, (GOOD, GOOD, LATE), wrote=12, completed=50)
    found = diagnose(some_status(some_job_status(stats)), before)
    assert found == [Diagnosis("job 'x' runs: 50 chunks done; most waited for is rank 2", True)]


def test_what_does_not_move_is_told_although_packets_still_come() -> None:
    ranks = (GOOD, GOOD, replace(LATE, idle_s=0.01))
    before = some_status(some_job_status(some_stats(99.0, 12, ranks, wrote=12, completed=3)))
    now = some_status(some_job_status(some_stats(100.0, 12, ranks, wrote=12, completed=3)))
    assert bad(now, before) == [
        "job 'x' waits for rank 2: 12 chunks lack only it, its last packet came 10 ms ago"
    ]


def test_a_job_at_rest_is_well() -> None:
    stats = some_stats(ranks=(RankStats(9, 5.0, 0),) * 3, wrote=9, added=18, completed=9)
    told = first(some_status(some_job_status(stats)))
    assert (
        told.well
        and told.sentence
        == "job 'x' is at rest: its last packet came 5 s ago, 9 chunks are done and none unfinished"
    )


def test_the_rest_is_told_too() -> None:
    stats = some_stats(ranks=(GOOD,) * 3, wrote=5, added=10, completed=5, source=1, saturated=2, duplicate=7)
    now = some_status(
        some_job_status(stats, lost=(1,), quorum=2),
        counts=some_stats(job=4, magic=3).counts,
        sockets={"overrun": 1234, "segmented": 7, "unsent": 0},
        refused=dict.fromkeys(REASONS, 2),
        lost_notices=3,
    )
    told = bad(now)
    assert any("goes on without rank 1" in sentence for sentence in told)
    assert any(sentence.startswith("1 packet of job 'x' was dropped as 'source'") for sentence in told)
    assert any(sentence.startswith("in 2 packets of job 'x' a lane met its limit") for sentence in told)
    assert any(
        sentence.startswith("4 packets of no job known here were dropped as 'job'") for sentence in told
    )
    assert any(sentence.startswith("1,234 packets found the receive buffer full") for sentence in told)
    assert any(
        sentence.startswith("7 packets came as uncut runs (UDP_SEGMENT) and were dropped")
        for sentence in told
    )
    assert not any("could not be sent" in sentence for sentence in told)
    assert any(sentence.startswith("3 sentences of its log could not be written") for sentence in told)
    assert "2 admissions were refused: the secret was wrong" in told
    assert not any("duplicate" in sentence for sentence in told)  # loss on the way is nobody's fault
    earlier = replace(now, counts=dict(now.counts))
    assert not any("no job known here" in sentence for sentence in bad(now, earlier))  # no news


def test_without_jobs_it_says_what_became_of_the_last() -> None:
    assert first(some_status()) == Diagnosis("no job is here: no rank has joined yet", True)
    ended = EndedJob("x", "rank 2 of job 'x' is lost: it was silent for 10 s", False, 4.0, 60.0, 7)
    told = first(some_status(ended=(ended,)))
    assert not told.well
    assert (
        told.sentence
        == "no job is here; the last one, 'x', ended 4 s ago: rank 2 of job 'x' is lost: it was silent for 10 s"
    )


def test_every_verdict_is_explained_or_needs_no_explanation() -> None:
    assert set(REASON_HINTS) | set(TAKEN) == set(VERDICTS)
    assert EVENTS == ("completed", "saturated", "abandoned", "partial")


def test_a_reading_survives_its_journey_as_json() -> None:
    with aggregator() as control, joined(control.address, some_terms()) as ranks:
        ranks[0].send(0)
        until(lambda: control.status().counts["wrote"] == 1)
        now = control.status()
    assert AggregatorStatus.of(json.loads(json.dumps(now.as_dict()))) == now


def test_real_ranks_of_which_one_never_sends() -> None:
    with aggregator() as control, joined(control.address, some_terms()) as ranks:
        assert "no packet of job 'run' has arrived" in first(control.status()).sentence
        ranks[0].send(0)
        ranks[1].send(0)
        until(lambda: control.status().counts["added"] == 1)
        now = control.status()
        assert (
            "job 'run' waits for rank 2: 1 chunk lacks only it, no packet of it has ever come"
            in first(now).sentence
        )
        ranks[2].send(0)
        until(lambda: control.status().counts["completed"] == 1)
        assert bad(control.status(), now) == []
