"""Jobs with shards behind their ranks, and rows between all of them: who is admitted, reached, awaited, lost and named."""

import json
from dataclasses import replace

import pytest
from aggregator.members import SECRET, aggregator, joined, some_terms, sum_exactly, until
from aggregator.statuses import some_job_status, some_stats, some_status

from tacit.aggregator import LaneType
from tacit.aggregator.client import membership
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.diagnosis import diagnose
from tacit.aggregator.control.metrics import render
from tacit.aggregator.control.parent import Parent
from tacit.aggregator.control.status import AggregatorStatus, dropped
from tacit.aggregator.naming import members_text, size_text
from tacit.aggregator.planes.stats import RankStats
from tacit.aggregator.wire import PacketKind
from tacit.cli import main
from tacit.errors import ConfigError, TransportError

TERMS = some_terms(world=2, shards=2)


def test_ranks_and_shards_get_one_job_send_rows_and_only_ranks_are_in_sums() -> None:
    with aggregator() as control, joined(control.address, TERMS) as members:
        assert len({member.job for member in members}) == 1
        job = members[0].job
        assert (job.world, job.shards, len(job.members)) == (2, 2, 4)
        assert [member.membership.rows for member in members] == [True] * 4
        assert [member.membership.job_ranks for member in members] == [2] * 4
        for sender in range(4):
            for receiver in {0, 1, 2, 3} - {sender}:
                packet = members[sender].send_rows(receiver, bytes([sender, receiver]) * 700)
                assert members[receiver].socket.recvfrom(65536) == (packet, members[0].membership.plane)
        sum_exactly(members[:2], chunks=20, seed=1)
        members[3].send(0, PacketKind.PROBE)
        assert members[3].socket.recv(65536)[1] == PacketKind.ECHO
        members[3].send(0)
        until(lambda: control.status().counts["rank"] == 1)
        now = control.status()
        assert (now.counts["forwarded"], now.counts["completed"], now.counts["unreached"]) == (12, 20, 0)
        assert dropped(now.counts) == {"rank": 1}


def test_rows_that_come_in_a_batch_leave_in_a_batch_and_all_arrive() -> None:
    """Longer ones in runs that the kernel cuts: what is received is what was sent, in some order."""
    with aggregator() as control, joined(control.address, TERMS) as members:
        sent = []
        for message in range(40):
            sent += [
                members[0].send_rows(2, bytes(1424), message),
                members[1].send_rows(2, bytes(message), message),
            ]
        assert sorted(members[2].socket.recv(65536) for _ in sent) == sorted(sent)
        assert control.plane.sockets()["unsent"] == 0


def test_jobs_without_shards_pass_on_rows_between_their_ranks() -> None:
    with aggregator() as control, joined(control.address, some_terms()) as ranks:
        packet = ranks[0].send_rows(2)
        assert ranks[2].membership.rows and ranks[2].socket.recv(65536) == packet
        ranks[0].send_rows(3), ranks[0].send_rows(0)
        until(lambda: control.status().counts["world"] == 2)


def test_a_job_waits_for_its_shards_and_names_them() -> None:
    with aggregator() as control:
        with pytest.raises(TransportError) as caught:
            Membership(control.address, SECRET, TERMS, 3, 4000, timeout_s=0.2)
        assert str(caught.value).startswith(
            "ranks 0 and 1, shard 0 of 2 ranks and 2 shards have not joined job 'run' within 0.2 s"
        )
        assert control.status().free_slots == 32


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (63, "shards=63: a job has at most 64 members, and 2 of them are ranks; start fewer shards"),
        (-1, "shards=-1: a job has at most 64 members"),
    ],
)
def test_more_members_than_a_plane_can_name_are_refused(shards: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        some_terms(world=2, shards=shards)
    assert some_terms(world=2, shards=62).members == 64


def test_control_refuses_the_same_of_whoever_asks_for_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusal(terms: Terms, rank: int, **changes: object) -> str:
        monkeypatch.setattr(Terms, "as_message", lambda self: asked)
        asked = {name: getattr(terms, name) for name in Terms.__slots__} | changes
        with pytest.raises(ConfigError) as caught:
            Membership(control.address, SECRET, terms, rank, 4000, timeout_s=5)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    with aggregator() as control:
        assert "shards=63: a job has at most 64 members" in refusal(TERMS, 0, shards=63)
        assert "these are no terms of a job" in refusal(TERMS, 0, shards="2")
        assert "these are no terms of a job" in refusal(TERMS, 0, shards=True)
        assert "job 'run' has members 0 to 2" in refusal(TERMS, 3, shards=1)
        assert not control.status().jobs and control.status().refused["terms"] == 4
    with pytest.raises(ConfigError, match="rank=4: the members of job 'run' are 0 to 3"):
        Membership(control.address, SECRET, TERMS, 4, 4000)


def test_members_that_disagree_about_shards_are_told_so() -> None:
    with aggregator() as control, joined(control.address, TERMS) as members:
        with pytest.raises(TransportError, match="job 'run' runs already"):
            Membership(control.address, SECRET, replace(TERMS, shards=1), 2, 4000, timeout_s=0.1)
        assert all(member.membership.alive for member in members)


def test_shards_need_one_aggregator_and_ranks_of_a_tree_learn_that_rows_do_not_reach_all() -> None:
    with aggregator() as top, aggregator(parent=Parent(top.address, 0, 1)) as below:
        with pytest.raises(
            ConfigError, match="shards=2: rows go through one aggregator, and this one has another above"
        ):
            Membership(below.address, SECRET, TERMS, 0, 4000, timeout_s=5)
        with joined(below.address, some_terms(world=2)) as ranks:
            assert [rank.membership.rows for rank in ranks] == [False, False]
    with pytest.raises(ConfigError, match="shards=1: rows go through one aggregator"):
        Terms("run", 2, LaneType.I32, 40, 8, relayed=True, shards=1)


def test_an_older_aggregator_is_no_place_for_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    joins = membership._join

    def without_rows(*arguments):
        client, grant = joins(*arguments)
        return client, {name: value for name, value in grant.items() if name != "rows"}

    monkeypatch.setattr(membership, "_join", without_rows)
    with aggregator() as control:
        words = "does not pass on rows, and job 'run' has 2 shards"
        with pytest.raises(ConfigError, match=words), joined(control.address, TERMS):
            pass
        with joined(control.address, some_terms("another")) as ranks:
            assert not ranks[0].membership.rows


# ---- leases, and who is gone


def test_a_shard_that_is_lost_ends_the_job_and_is_named_to_all() -> None:
    with aggregator() as control, joined(control.address, TERMS) as members:
        members[3].membership._client.hang_up()
        for member in members[:3]:
            until(lambda member=member: not member.membership.alive)
            assert member.membership.lost == (3,) and not member.membership.well
            assert (
                member.membership.why
                == "shard 1 of job 'run' is lost: its connection closed without a message"
            )
        now = control.status()
        assert not now.jobs and now.lost_ranks == 1 and not now.ended[0].well


def test_a_silent_shard_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    with aggregator(lease_s=0.5) as control, joined(control.address, TERMS) as members:
        monkeypatch.setattr(members[2].membership._client, "send", lambda message: None)
        until(lambda: not members[0].membership.alive)
        assert members[0].membership.why == "shard 0 of job 'run' is lost: it was silent for 0.5 s"


def test_a_quorum_of_ranks_is_no_quorum_of_shards() -> None:
    with aggregator() as control, joined(control.address, some_terms(world=3, quorum=2, shards=1)) as members:
        members[2].membership._client.hang_up()
        until(lambda: all(member.membership.lost == (2,) for member in (*members[:2], members[3])))
        assert members[0].membership.alive
        members[3].membership._client.hang_up()
        until(lambda: not members[0].membership.alive)
        assert members[0].membership.why.startswith("rank 2, shard 0 of job 'run' are lost")


def test_a_job_is_over_for_its_shards_when_all_ranks_have_left() -> None:
    with aggregator() as control, joined(control.address, TERMS) as members:
        members[0].membership.leave()
        until(lambda: members[2].membership.left == (0,))
        assert members[2].membership.alive and not members[2].membership.well
        members[1].membership.leave()
        for shard in members[2:]:
            until(lambda shard=shard: not shard.membership.alive)
            assert shard.membership.well and shard.membership.why == "all ranks have left"
        now = control.status()
        assert now.ended[0].well and now.lost_ranks == 0 and now.free_slots == 32
        members[2].membership.leave()
        assert members[2].membership.why == "all ranks have left"


# ---- status, metrics, diagnosis


def test_status_and_metrics_have_shards_and_rows() -> None:
    with aggregator() as control, joined(control.address, TERMS) as members:
        for _ in range(3):
            members[2].send_rows(0, bytes(62))
            members[0].socket.recv(65536)
        now = control.status()
        assert AggregatorStatus.of(json.loads(json.dumps(now.as_dict()))) == now
        (job,) = now.jobs
        assert (job.world, job.shards, len(job.members), len(job.stats.ranks)) == (2, 2, 4, 4)
        assert [own.packets for own in job.stats.ranks] == [0, 0, 3, 0]
        assert job.stats.received_nbytes == job.stats.answered_nbytes == 300
        text = render(now)
        own = f'{{job="run",id="{job.id}"'
        assert f"tacit_aggregator_job_shards{own}}} 2" in text
        assert f'tacit_aggregator_job_packets_total{own},verdict="forwarded"}} 3' in text
        assert f'tacit_aggregator_rank_packets_total{own},rank="2"}} 3' in text
        assert f'tacit_aggregator_rank_missing_chunks{own},rank="2"}}' not in text
        assert 'tacit_aggregator_dropped_packets_total{reason="unreached"} 0' in text
        assert diagnose(now)[0].sentence == "job 'run' runs: 0 chunks done, 3 packets of rows passed on"
        members[2].send_rows(1)
        members[1].socket.recv(65536)
        later = control.status()
        assert (
            later.jobs[0].stats.rates(job.stats).moves and later.jobs[0].stats.rates(job.stats).rows_per_s > 0
        )


def test_the_command_names_shards(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TACIT_AGGREGATOR_SECRET", SECRET)
    with aggregator() as control, joined(control.address, TERMS) as members:
        members[2].send_rows(0)
        members[0].socket.recv(65536)
        at = f"127.0.0.1:{control.address[1]}"
        assert main(["aggregate", "status", "--at", at, "--over", "10ms"]) == 0
    told = capsys.readouterr().out
    assert (
        "4 of 4" in told and "shard 0" in told and "shard 1" in told and "1 packet of rows passed on" in told
    )


def test_who_is_awaited_or_silent_is_named_in_diagnoses() -> None:
    gathering = some_job_status(None, world=2, shards=1, members=(("10.0.0.1", 4000), None, None))
    assert (
        "waits for rank 1, shard 0 of 2 ranks and 1 shard to join"
        in diagnose(some_status(gathering))[0].sentence
    )
    ranks = (RankStats(9, 0.1, 0), RankStats(9, 0.1, 0), RankStats(0, None, 0))
    stats = some_stats(ranks=ranks, forwarded=5, unreached=4)
    told = diagnose(some_status(some_job_status(stats, world=2, shards=1)))
    assert told[0].sentence.startswith(
        "4 packets of rows of job 'x' were dropped, and nothing has ever come from shard 0: check"
    )
    assert not told[0].well and told[1].well


def test_members_have_names() -> None:
    assert members_text([0, 2, 3], 2) == "rank 0, shards 0 and 1"
    assert members_text([1], 2, "rack") == "rack 1" and members_text([2], 2) == "shard 0"
    assert size_text(1, 0) == "1 rank" and size_text(4, 1) == "4 ranks and 1 shard"
