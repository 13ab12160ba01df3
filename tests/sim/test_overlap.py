"""The step's timeline, solved by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.errors import ConfigError
from tacit.schedules import ring
from tacit.sim.electrical import cost
from tacit.sim.overlap import CodecCost, step_time
from tacit.sim.workloads import Layer, Workload, workload
from tacit.topology import star

# Three layers of 1000 elements (4000 bytes), forward 1 s each, backward 2 s each: gradients at 5, 7 and 9 s.
THREE = Workload("three", tuple(Layer(name, 1000, 1.0, 2.0) for name in "abc"), "by hand")


def one_each(transfer_s, **options):
    return step_time(THREE, transfer_s, bucket_nbytes=4000, first_bucket_nbytes=4000, **options)


def spans(step, kind):
    return [(event.name, event.start_s, event.stop_s) for event in step.events if event.kind == kind]


def test_a_free_exchange_leaves_the_computation():
    step = one_each(lambda nbytes: 0.0)
    assert (step.step_s, step.exposed_s, step.forward_s, step.backward_s) == (9, 0, 3, 6)
    assert spans(step, "forward") == [("a", 0, 1), ("b", 1, 2), ("c", 2, 3)]
    assert spans(step, "backward") == [("c", 3, 5), ("b", 5, 7), ("a", 7, 9)]


def test_what_fits_between_two_gradients_is_hidden_but_for_the_last():
    step = one_each(lambda nbytes: 1.5)
    assert spans(step, "transfer") == [("bucket 0", 5, 6.5), ("bucket 1", 7, 8.5), ("bucket 2", 9, 10.5)]
    assert step.exposed_s == 1.5 and step.transfer_s == 4.5


def test_a_bucket_waits_for_the_transfer_before_it():
    step = one_each(lambda nbytes: 5.0)
    assert spans(step, "transfer") == [("bucket 0", 5, 10), ("bucket 1", 10, 15), ("bucket 2", 15, 20)]
    assert step.exposed_s == 11


def test_one_bucket_hides_nothing():
    step = step_time(THREE, lambda nbytes: nbytes / 4000, first_bucket_nbytes=None)
    assert [bucket.layers for bucket in step.buckets] == [("c", "b", "a")]
    assert step.exposed_s == 3


def test_encoding_transfer_and_decoding_of_neighbours_overlap():
    codec = CodecCost(lambda numel: numel, encode_s_per_element=1e-3, decode_s_per_element=5e-4)
    step = one_each(lambda nbytes: nbytes / 500, codec=codec)  # 1 s, 2 s and 0.5 s a bucket
    assert spans(step, "encode") == [("bucket 0", 5, 6), ("bucket 1", 7, 8), ("bucket 2", 9, 10)]
    assert spans(step, "transfer") == [("bucket 0", 6, 8), ("bucket 1", 8, 10), ("bucket 2", 10, 12)]
    assert spans(step, "decode") == [("bucket 0", 8, 8.5), ("bucket 1", 10, 10.5), ("bucket 2", 12, 12.5)]
    assert step.step_s == 12.5 and step.codec_s == 4.5


def test_one_codec_encodes_and_decodes_in_the_order_of_arrival():
    codec = CodecCost(lambda numel: numel, encode_s_per_element=3e-3, decode_s_per_element=1e-3)
    step = one_each(lambda nbytes: 0.0, codec=codec)
    done = sorted(
        (e.start_s, e.stop_s, e.kind, e.name) for e in step.events if e.kind in ("encode", "decode")
    )
    assert [(kind, name) for _, _, kind, name in done] == [
        ("encode", "bucket 0"), ("encode", "bucket 1"), ("decode", "bucket 0"), ("encode", "bucket 2"),
        ("decode", "bucket 1"), ("decode", "bucket 2"),
    ]  # fmt: skip
    assert step.step_s == 5 + 3 * 3 + 3 * 1


def test_the_slowest_rank_sets_the_pace():
    step = one_each(lambda nbytes: 1.0, slowest=2.0)
    assert step.forward_s + step.backward_s == 18 and step.step_s == 19


def test_the_cost_is_asked_once_for_each_size():
    asked = []
    step_time(workload("beit_l"), lambda nbytes: asked.append(nbytes) or 0.0)
    assert len(asked) == len(set(asked)) < 8


def test_buckets_are_cut_as_ddp_cuts_them_the_first_one_small():
    buckets = step_time(workload("vgg16"), lambda nbytes: 0.0).buckets
    assert [bucket.layers[0] for bucket in buckets[:3]] == ["fc8", "fc7", "fc6"]
    assert sum(bucket.elements for bucket in buckets) == 138_357_544
    assert all(bucket.nbytes == 4 * bucket.elements for bucket in buckets)


@settings(max_examples=50, deadline=None)
@given(
    layers=st.lists(
        st.tuples(st.integers(0, 3000), st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=12
    ),
    bucket_nbytes=st.integers(1, 20_000),
    rate=st.floats(1e-5, 1e-2),
    codec=st.floats(0, 1e-3),
)
def test_nothing_happens_twice_at_once_and_nothing_before_its_cause(layers, bucket_nbytes, rate, codec):
    made = Workload("any", tuple(Layer(str(i), *layer) for i, layer in enumerate(layers)), "drawn")
    step = step_time(
        made, lambda b: rate * b, codec=CodecCost(lambda n: 4 * n, codec, codec), bucket_nbytes=bucket_nbytes
    )
    for kinds in ({"forward", "backward"}, {"encode", "decode"}, {"transfer"}):
        ordered = sorted((e.start_s, e.stop_s) for e in step.events if e.kind in kinds)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(ordered))
    sent = {e.name: e.start_s for e in step.events if e.kind == "transfer"}
    for i, bucket in enumerate(step.buckets):
        assert sent[f"bucket {i}"] >= bucket.ready_s + codec * bucket.elements - 1e-9
    assert sum(bucket.elements for bucket in step.buckets) == made.parameters
    serial = made.forward_s + made.backward_s + step.transfer_s + step.codec_s
    assert made.forward_s + made.backward_s - 1e-9 <= step.step_s <= serial + 1e-9


def test_a_real_pair_a_tenth_of_the_bytes_exposes_less():
    network, schedule = star(16), ring(16)

    def transfer_s(nbytes):
        return cost(schedule, nbytes, network).time_s

    plain = step_time(workload("resnet50"), transfer_s)
    small = step_time(workload("resnet50"), transfer_s, codec=CodecCost(lambda numel: numel * 2 // 5))
    assert small.step_s < plain.step_s and small.as_record()["payload_nbytes"] * 10 == pytest.approx(
        plain.as_record()["payload_nbytes"], rel=1e-4
    )


def test_buckets_of_no_size_get_one_sentence():
    with pytest.raises(ConfigError, match="buckets of 0 bytes, .* all must be above 0"):
        step_time(THREE, lambda nbytes: 0.0, bucket_nbytes=0)
