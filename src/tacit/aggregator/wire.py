"""Packets of the aggregator, as Python reads them: format, names and numbers come from native/wire.h through tacit._core.

Why they look like this: docs/decisions/0008-aggregator-wire.md.
"""

from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from tacit import _core

HEADER = Struct(_core.WIRE_FORMAT)
MAGIC: int = _core.WIRE_MAGIC
VERSION: int = _core.WIRE_VERSION  # in `place`: the chunk's phase is odd
SATURATED: int = _core.WIRE_SATURATED  # in `lanes` of a result
MORE: int = _core.WIRE_MORE  # in `lanes` of data: a rank has more to send
MOST_JOBS: int = _core.WIRE_MOST_JOBS
MOST_RANKS: int = _core.WIRE_MOST_RANKS
MOST_SLOTS: int = _core.WIRE_MOST_SLOTS
MOST_PAYLOAD: int = _core.WIRE_MOST_PAYLOAD
ROWS_HEADER = Struct(_core.WIRE_ROWS_FORMAT)  # behind the header of ROWS
ROWS_ACK: int = _core.WIRE_ROWS_ACK  # in `lanes` of ROWS: an acknowledgement alone
MOST_ROWS: int = _core.WIRE_MOST_ROWS  # bytes of a message in a packet
VERDICTS = tuple(_core.wire_verdicts())  # every packet is counted under one of them
EVENTS = tuple(_core.wire_events())  # counted beside it
CHUNKS = 2**32


class PacketKind(IntEnum):
    """What a packet is. DATA, PROBE and SETTLE go to a plane, ROWS to another member; the others come from a plane."""

    DATA = 1
    RESULT = 2
    PROBE = 3
    ECHO = 4
    SETTLE = 5
    UNKNOWN = 6
    STALE = 7
    ROWS = 8


class LaneType(IntEnum):
    """What a payload holds. The tables send 4-bit indices up, and get sums of what they stand for. F32 is added in order of arrival:
    all ranks get the same bits, but another run may get others; the user plane alone has it."""

    U8 = 1
    U16 = 2
    I32 = 3
    TABLE_U8 = 4
    TABLE_U16 = 5
    F32 = 6

    @property
    def dtype(
        self,
    ) -> np.dtype[np.uint8] | np.dtype[np.uint16] | np.dtype[np.int32] | np.dtype[np.float32]:
        """The type of a sum."""
        if self is LaneType.F32:
            return np.dtype(np.float32)
        if self in (LaneType.U8, LaneType.TABLE_U8):
            return np.dtype(np.uint8)
        return np.dtype(np.int32) if self is LaneType.I32 else np.dtype("<u2")

    @property
    def indexed(self) -> bool:
        return self in (LaneType.TABLE_U8, LaneType.TABLE_U16)

    @property
    def above(self) -> "LaneType":
        """What sums of it are to another plane: indices were looked up."""
        return {LaneType.TABLE_U8: LaneType.U8, LaneType.TABLE_U16: LaneType.U16}.get(self, self)

    @property
    def largest(self) -> int:
        """The limit of a lane; of integers."""
        limits: np.iinfo[Any] = np.iinfo(self.dtype)
        return int(limits.max)

    def data_nbytes(self, elements: int) -> int:
        """Payload on the way up."""
        return elements * _core.wire_bits(self)[0] // 8

    def result_nbytes(self, elements: int) -> int:
        """Payload on the way down."""
        return elements * _core.wire_bits(self)[1] // 8

    def elements(self, mtu: int) -> int:
        """Elements that fit into one packet both ways, on a path of this MTU; a multiple of 8."""
        return _core.wire_elements(self, mtu)


class Header(NamedTuple):
    """The fields of a packet, in their order on the wire. In ROWS, `world` is the member that receives it."""

    magic: int
    kind: int
    chunk: int
    cookie: int
    job: int
    world: int
    rank: int
    lanes: int
    place: int
    nbytes: int

    @staticmethod
    def of(packet: bytes) -> "Header":
        """The header that `packet` starts with; struct.error if it is shorter."""
        return Header(*HEADER.unpack_from(packet))

    def bytes(self) -> bytes:
        return HEADER.pack(*self)

    @property
    def slot(self) -> int:
        return self.place & ~VERSION

    @property
    def version(self) -> int:
        return int(self.place & VERSION != 0)


class RowsHeader(NamedTuple):
    """The fields that follow in a packet of ROWS: where its payload belongs in a message, and what has come the other way."""

    length: int  # of the whole message, in bytes
    offset: int  # of this payload in it
    next: int  # its sender has all packets of the opposite flow before this number
    also: int  # bit i: and number next + 1 + i

    @staticmethod
    def of(packet: bytes) -> "RowsHeader":
        """What follows the header of `packet`; struct.error if it is too short."""
        return RowsHeader(*ROWS_HEADER.unpack_from(packet, HEADER.size))

    def bytes(self) -> bytes:
        return ROWS_HEADER.pack(*self)


def rows_room(mtu: int) -> int:
    """Bytes of a message that fit into one packet of ROWS, on a path of this MTU; a multiple of 16."""
    return _core.wire_rows_room(mtu)


def after(a: int, b: int) -> bool:
    """Whether chunk `a` comes after chunk `b`: numbers wrap, so that 0 comes after 4294967295."""
    return 0 < (a - b) % CHUNKS < CHUNKS // 2
