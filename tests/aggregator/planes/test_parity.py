"""The C++ plane does what the specification says, to the byte: on recorded traces, and on anything hypothesis thinks of."""

from functools import cache

import hypothesis.strategies as st
import pytest
from aggregator.clients import INTEGERS, some_job
from aggregator.plane_kinds import NATIVE, SpecPlane
from aggregator.traces import record, replay
from aggregator.trees import record_tree
from hypothesis import given, settings

from tacit.aggregator.wire import Header, PacketKind

SEEDS = range(12)


@cache
def recorded(seed):
    return record(seed, loss=0.02 * seed)


@pytest.fixture(params=SEEDS)
def trace(request):
    return recorded(request.param)


@pytest.mark.parametrize("plane", NATIVE)
def test_a_trace_gives_the_same_answers_and_counts(plane, trace):
    replay(trace, NATIVE[plane](32))


def test_the_traces_hold_every_verdict_and_event():
    counted = [recorded(seed).counts for seed in SEEDS]
    counted += [trace.counts for trace in record_tree(1, loss=0.1, repeats=0.1)]
    of_lossy_jobs = ["passed", "held", "partial"]  # test_lossy.py
    assert [name for name in counted[0] if not any(counts[name] for counts in counted)] == of_lossy_jobs


def test_a_trace_is_the_same_each_time():
    assert record(5, loss=0.1) == recorded(5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.01, 0.2]), repeats=st.sampled_from([0.0, 0.3])
)
def test_any_trace_gives_the_same_answers_and_counts(seed, loss, repeats):
    replay(record(seed, loss=loss, repeats=repeats, chunks=12), NATIVE[f"native-{_fastest()}"](32))


def _fastest() -> str:
    return list(NATIVE)[-1].removeprefix("native-")


# Packets of a tiny job with two slots, in any order whatever, from ranks that keep no rule: small enough to shrink.
@st.composite
def packets(draw, world: int):
    kind = draw(
        st.sampled_from(
            [PacketKind.DATA, PacketKind.DATA, PacketKind.DATA, PacketKind.SETTLE, PacketKind.PROBE]
        )
    )
    chunk = draw(st.integers(-6, 12)) % 2**32
    return kind, chunk, draw(st.integers(0, world - 1)), draw(st.binary(min_size=1, max_size=4))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), lanes=st.sampled_from(INTEGERS), world=st.integers(1, 4))
def test_ranks_that_keep_no_rule_are_treated_alike(data, lanes, world):
    job = some_job(world=world, lanes=lanes, elements=8, slots=2, quorum=data.draw(st.integers(0, world)))
    planes = [SpecPlane(16), *(make(16) for make in NATIVE.values())]
    for plane in planes:
        plane.add_job(job)
    for kind, chunk, rank, seed in data.draw(st.lists(packets(world), max_size=40)):
        payload = (seed * job.data_nbytes)[: job.data_nbytes] if kind is PacketKind.DATA else b""
        packet = job.packet(kind, chunk, rank, payload)
        first, *others = [plane.receive(packet, job.members[rank]) for plane in planes]
        assert all(other == first for other in others), Header.of(packet)
    first, *others = [plane.counted() for plane in planes]
    assert all(other == first for other in others)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), noise=st.binary(max_size=80))
def test_noise_is_treated_alike(data, noise):
    job = some_job(elements=8)
    fields = {
        name: data.draw(st.sampled_from([0, 1, 3, 4, 8, 255]))
        for name in data.draw(st.sets(st.sampled_from(Header._fields)))
    }
    packet = Header.of(job.packet(PacketKind.DATA, 0, 0, bytes(8)))._replace(**fields).bytes() + bytes(8)
    answers = []
    for make in (SpecPlane, *NATIVE.values()):
        plane = make(16)
        plane.add_job(job)
        answers.append(
            [plane.receive(noise, job.members[0]), plane.receive(packet, job.members[0]), plane.counted()]
        )
    assert all(answer == answers[0] for answer in answers)
