"""The pipeline, against steps that are worked out by hand."""

import pytest

from tacit.errors import ConfigError
from tacit.plan.pipeline import BucketJob, Segment, Work, play


def job(encode, wire, decode=0.0):
    return BucketJob((Work(encode),), (Work(wire),), Work(decode))


def step(*seconds, end=()):
    """Segments that release a job each; then one that waits for all."""
    own = [Segment(Work(s), (i,)) for i, s in enumerate(seconds)]
    return [*own, Segment(Work(sum(end)), needs=tuple(range(len(seconds))))]


def test_one_bucket_is_computed_encoded_sent_and_decoded():
    times = play(step(3.0), [job(1.0, 5.0, 2.0)])
    assert times.step_s == pytest.approx(3 + 1 + 5 + 2)
    assert (times.training_s, times.codec_s, times.wire_s) == pytest.approx((3, 3, 5))


def test_the_next_bucket_is_encoded_while_the_last_one_travels():
    assert play(step(1.0, 1.0), [job(1.0, 4.0), job(1.0, 4.0)]).step_s == pytest.approx(1 + 1 + 4 + 4)
    assert play(step(1.0, 10.0), [job(1.0, 4.0), job(1.0, 4.0)]).step_s == pytest.approx(
        11 + 1 + 4
    )  # the first is hidden


def test_an_answer_is_decoded_before_the_next_bucket_is_encoded():
    # encoded until 1 and 3; the answers, of 2 and 4, are decoded from 3 to 5; only then the third is encoded, until 7
    jobs = [job(1.0, 1.0, 1.0), job(2.0, 1.0, 1.0), job(2.0, 1.0, 1.0)]
    assert play(step(0.0, 0.0, 0.0), jobs).step_s == pytest.approx(7 + 1 + 1)


def test_a_bucket_with_two_requests_keeps_the_next_one_from_the_wire():
    two = BucketJob((Work(1.0), Work(3.0)), (Work(1.0), Work(2.0)))
    # request 1 from 1 to 2; encoded again from 2 (the other bucket's encoding ends there) to 5; request 2 until 7; then the other's
    assert play(step(0.0, 0.0), [two, job(1.0, 4.0)]).step_s == pytest.approx(1 + 1 + 3 + 2 + 4)


def test_two_operations_under_way_share_the_wire():
    jobs = [job(0.0, 4.0), job(0.0, 4.0)]
    assert play(step(0.0, 0.0), jobs, in_flight=2, together=0.5).step_s == pytest.approx(8)
    assert play(step(0.0, 0.0), jobs, in_flight=2, together=0.8).step_s == pytest.approx(5)


def test_threads_that_want_more_cores_than_there_are_slow_one_another_down():
    busy = [BucketJob((Work(2.0, 1.0),), (Work(0.0),))]
    segments = [Segment(Work(0.0), (0,)), Segment(Work(2.0, 1.0)), Segment(Work(0.0), needs=(0,))]
    assert play(segments, busy, cores=2).step_s == pytest.approx(2)
    assert play(segments, busy, cores=1).step_s == pytest.approx(4)
    # four ranks on two cores: each was measured with half a core, and has it to itself no more
    half = [BucketJob((Work(2.0, 0.5),), (Work(0.0),))]
    segments = [Segment(Work(0.0), (0,)), Segment(Work(2.0, 0.5)), Segment(Work(0.0), needs=(0,))]
    assert play(segments, half, cores=0.5).step_s == pytest.approx(4)
    waiting = [BucketJob((Work(0.0),), (Work(2.0, 0.0),))]  # what only waits takes nothing from anybody
    assert play(segments, waiting, cores=0.5).step_s == pytest.approx(2)


def test_an_exchange_that_is_held_back_goes_on_when_the_computation_has_ended():
    segments = [Segment(Work(0.0), (0,)), Segment(Work(4.0)), Segment(Work(0.0), needs=(0,))]
    assert play(segments, [job(0.0, 6.0)]).step_s == pytest.approx(6)
    assert play(segments, [job(0.0, 6.0)], held=0.5).step_s == pytest.approx(4 + 6 - 2)


def test_a_hook_of_ddp_runs_in_the_training_thread():
    hooked = BucketJob((Work(0.0),), (Work(3.0),), hook=Work(1.0))
    assert play(step(2.0, 2.0), [hooked, hooked]).step_s == pytest.approx(
        2 + 1 + 3 + 3
    )  # the second ends at 6 in the training thread


def test_what_cannot_end_is_refused():
    with pytest.raises(ConfigError, match="waits for a job that nothing releases"):
        play([Segment(Work(1.0), needs=(0,))], [job(1.0, 1.0)])
    with pytest.raises(ConfigError, match="give one for each"):
        BucketJob((Work(1.0),), (Work(1.0), Work(1.0)))
