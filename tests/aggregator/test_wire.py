"""A packet is laid out once, in native/wire.h; these bytes may never change without a new TACIT_LAYOUT."""

import struct

import numpy as np
import pytest
from aggregator.clients import some_job

from tacit import _core
from tacit.aggregator.wire import (
    HEADER,
    MAGIC,
    MOST_PAYLOAD,
    MOST_ROWS,
    ROWS_ACK,
    ROWS_HEADER,
    SATURATED,
    VERSION,
    Header,
    LaneType,
    PacketKind,
    RowsHeader,
    after,
    rows_room,
)

GOLDEN = {  # magic kind chunk cookie job world rank lanes place nbytes
    PacketKind.DATA: "a1 01 efbeadde 8877665544332211 03 04 02 05 0980 2800",
    PacketKind.RESULT: "a1 02 efbeadde 8877665544332211 03 04 02 85 0980 a000",
    PacketKind.PROBE: "a1 03 efbeadde 8877665544332211 03 04 02 05 0000 0000",
    PacketKind.ECHO: "a1 04 efbeadde 8877665544332211 03 04 02 05 0000 0000",
    PacketKind.SETTLE: "a1 05 efbeadde 8877665544332211 03 04 02 05 0980 0000",
    PacketKind.UNKNOWN: "a1 06 efbeadde 8877665544332211 03 04 02 05 0980 0000",
    PacketKind.STALE: "a1 07 efbeadde 8877665544332211 03 04 02 05 0980 0000",
    PacketKind.ROWS: "a1 08 efbeadde 8877665544332211 03 04 02 01 0980 2800",
}
ROWS = "00000400 40060000 78563412 05000080"  # length offset next also


@pytest.mark.parametrize("kind", PacketKind, ids=lambda kind: kind.name)
def test_every_kind_has_these_bytes(kind):
    place = 0 if kind in (PacketKind.PROBE, PacketKind.ECHO) else 9 | VERSION
    nbytes = {PacketKind.DATA: 40, PacketKind.RESULT: 160, PacketKind.ROWS: 40}.get(kind, 0)
    lanes = LaneType.TABLE_U16 | (SATURATED if kind is PacketKind.RESULT else 0)
    lanes = ROWS_ACK if kind is PacketKind.ROWS else lanes
    header = Header(MAGIC, kind, 0xDEADBEEF, 0x1122334455667788, 3, 4, 2, lanes, place, nbytes)
    assert header.bytes().hex() == GOLDEN[kind].replace(" ", "")
    assert Header.of(header.bytes()) == header


def test_python_names_what_wire_h_names():
    assert tuple(name for name, _, _ in _core.wire_fields()) == Header._fields
    assert {(kind.name.lower(), kind.value) for kind in PacketKind} == set(_core.wire_kinds())
    assert {(lanes.name.lower(), lanes.value) for lanes in LaneType} == set(_core.wire_lanes())


def test_rows_have_these_bytes_behind_the_header():
    rows = RowsHeader(1 << 18, 1600, 0x12345678, 1 << 31 | 5)
    assert rows.bytes().hex() == ROWS.replace(" ", "")
    assert RowsHeader.of(bytes(22) + rows.bytes()) == rows
    assert tuple(name for name, _, _ in _core.wire_rows_fields()) == RowsHeader._fields
    for index, (_, offset, nbytes) in enumerate(_core.wire_rows_fields()):
        fields = [0] * len(RowsHeader._fields)
        fields[index] = 2 ** (8 * nbytes) - 1
        assert ROWS_HEADER.pack(*fields) == bytes(offset) + b"\xff" * nbytes + bytes(16 - offset - nbytes)


def test_rows_a_packet_by_mtu():
    assert [rows_room(mtu) for mtu in (0, 66, 82, 1500, 3500, 9000, 65535)] == [
        0,
        0,
        16,
        1424,
        3424,
        8928,
        8928,
    ]
    assert MOST_ROWS == 8928 and (_core.WIRE_LOWER_NBYTES + HEADER.size + ROWS_HEADER.size) % 16 == 0


def test_python_packs_where_wire_h_puts_the_fields():
    assert HEADER.size == 22
    for index, (_, offset, nbytes) in enumerate(_core.wire_fields()):
        fields = [0] * len(Header._fields)
        fields[index] = 2 ** (8 * nbytes) - 1
        assert HEADER.pack(*fields) == bytes(offset) + b"\xff" * nbytes + bytes(22 - offset - nbytes)


def test_in_an_ethernet_frame_every_field_and_the_payload_are_aligned():
    lower = _core.WIRE_LOWER_NBYTES
    assert lower == 14 + 20 + 8
    assert (lower + HEADER.size) % 64 == 0
    for name, offset, nbytes in _core.wire_fields():
        assert (lower + offset) % nbytes == 0, name


@pytest.mark.parametrize(
    ("lanes", "elements"),
    [
        (LaneType.U8, (1448, 3448, 8944)),
        (LaneType.U16, (720, 1720, 4472)),
        (LaneType.I32, (360, 856, 2232)),
        (LaneType.TABLE_U8, (1448, 3448, 8944)),
        (LaneType.TABLE_U16, (720, 1720, 4472)),
    ],
)
def test_elements_a_packet_by_lane_type_and_mtu(lanes, elements):
    assert tuple(lanes.elements(mtu) for mtu in (1500, 3500, 9000)) == elements
    for mtu, count in zip((1500, 3500, 9000), elements, strict=True):
        for nbytes in (lanes.data_nbytes(count), lanes.result_nbytes(count)):
            assert nbytes % 4 == 0 and 28 + HEADER.size + nbytes <= mtu
        assert 28 + HEADER.size + lanes.result_nbytes(count + 8) > mtu
    assert lanes.elements(65535) == elements[2]
    assert lanes.elements(57) == 0


def test_indices_take_half_a_byte_up_and_a_lane_down():
    assert LaneType.TABLE_U8.data_nbytes(1448) == 724
    assert LaneType.TABLE_U8.result_nbytes(1448) == 1448
    assert LaneType.TABLE_U16.data_nbytes(720) == 360
    assert LaneType.TABLE_U16.result_nbytes(720) == 1440
    assert max(lanes.result_nbytes(lanes.elements(9000)) for lanes in LaneType) == MOST_PAYLOAD


def test_chunks_are_compared_across_the_wrap():
    assert after(1, 0) and not after(0, 1) and not after(7, 7)
    assert after(0, 2**32 - 1) and not after(2**32 - 1, 0)
    assert after(2**31 + 5, 6) and not after(2**31 + 6, 6)  # half of all numbers lie ahead
    assert after(5, 2**31 + 6)


def test_the_place_of_a_chunk_goes_on_across_the_wrap():
    job = some_job(first_slot=8, slots=4)
    places = [job.place(chunk % 2**32) for chunk in range(2**32 - 5, 2**32 + 5)]
    assert places == [11, *(s | VERSION for s in (8, 9, 10, 11)), 8, 9, 10, 11, 8 | VERSION]
    assert Header.of(job.packet(PacketKind.DATA, 2**32 - 1, 0)).slot == 11
    assert Header.of(job.packet(PacketKind.DATA, 2**32 - 1, 0)).version == 1


def test_lanes_are_little_endian():
    assert struct.unpack("<3i", np.array([1, -2, 3], LaneType.I32.dtype).tobytes()) == (1, -2, 3)
    assert np.array([258], LaneType.TABLE_U16.dtype).tobytes() == b"\x02\x01"
