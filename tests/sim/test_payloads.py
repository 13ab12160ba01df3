"""What codecs say, costed request by request."""

import pytest

from tacit.errors import PairingError
from tacit.schedules import build, ring
from tacit.sim.fabric import parse_fabric
from tacit.sim.payloads import PayloadSize, costs, of_codec, plain

STAR = parse_fabric("star(rate=8Gbit, latency=0us)", 4)  # 1 GB/s


def time_s(schedule, payloads):
    return sum(cost.time_s for cost in costs(schedule, payloads, STAR))


def test_a_plain_vector_is_one_sum():
    assert time_s(ring(4), plain(1e6)) == pytest.approx(1.5e-3)


def test_a_codec_without_tables_is_its_payload():
    assert of_codec("bf16", 1000, ring(4)) == (PayloadSize("Sum", 2000, 2000),)


def test_indices_ride_as_lanes_where_they_are_added_in_flight():
    (_, flying), (_, served) = (
        of_codec("hush", 1 << 20, ring(4)),
        of_codec("hush", 1 << 20, build("sharded", 4)),
    )
    assert flying.up_nbytes == flying.down_nbytes == served.down_nbytes == 2 * served.up_nbytes


def test_a_payload_that_grows_is_costed_up_and_down():
    assert time_s(build("sharded", 4), [PayloadSize("TableSum", 1e6, 2e6)]) == pytest.approx(0.75e-3 + 1.5e-3)
    assert time_s(build("star", 4), [PayloadSize("TableSum", 1e6, 2e6)]) == pytest.approx(1e-3 + 2e-3)


@pytest.mark.parametrize(
    ("codec", "schedule"), [("int8", "ring"), ("int4", "star"), ("bf16", "ring_all_gather")]
)
def test_a_pairing_that_cannot_work_is_refused(codec, schedule):
    with pytest.raises(PairingError):
        of_codec(codec, 1000, build(schedule, 4))
    assert of_codec("int8", 1000, build("sharded", 4))[0].up_nbytes == 1000 + 4 * 4


@pytest.mark.parametrize("codec", ["lowrank(8)", "by_shape(matrix=topk, rest=int8)"])
def test_a_codec_that_sends_by_shapes_is_refused(codec):
    with pytest.raises(PairingError, match="a workload has only their number"):
        of_codec(codec, 1000, build("sharded", 4))
