"""What rows become on the wire, headers included, and what a switch needs that touches each register array once a packet.

    process group (TCP)   66 bytes of Ethernet, IPv4 and TCP a segment of at most MTU - 52
    lanes (aggregator)    42 bytes of Ethernet, IPv4 and UDP and the header of 22 (native/wire.h) a packet of at most MTU - 50;
                          whole rows, their lanes packed one behind the other, a multiple of 8 lanes a packet
    ROWS (cold rows)      the same 64 bytes and the 16 of the rows part a packet of at most MTU - 66; whole keys and rows; every
                          flow between a rank and a shard fills packets of its own

A shaped link of the lab charges the same bytes: the frame with its Ethernet header, without preamble, checksum and gap.
Acknowledgements ride in the 16 bytes; one that travels alone goes against the direction that limits, and is not counted.
"""

from dataclasses import dataclass
from math import ceil

TCP_NBYTES = 14 + 20 + 32  # with timestamps
UDP_NBYTES = 14 + 20 + 8
IP_UDP_NBYTES = 20 + 8  # what counts against the MTU
HEADER_NBYTES = 22
ROWS_PART_NBYTES = 16
MOST_PAYLOAD_NBYTES = 8944  # of a packet, whatever the MTU
LANES_MULTIPLE = 8
LANE_BITS = 32


@dataclass(frozen=True, slots=True)
class RowFraming:
    """Payload to bytes on the wire at an MTU. Without `headers` a payload is all that is counted."""

    mtu: int = 1500
    headers: bool = True

    @property
    def payload_nbytes(self) -> int:
        """The most that a packet of the aggregator takes."""
        return min(self.mtu - IP_UDP_NBYTES - HEADER_NBYTES, MOST_PAYLOAD_NBYTES)

    @property
    def rows_nbytes(self) -> int:
        """The most keys and values of a ROWS packet, in bytes."""
        return self.payload_nbytes - ROWS_PART_NBYTES

    def lanes_in_packet(self, bits_down: int = LANE_BITS) -> int:
        return self.payload_nbytes * 8 // bits_down // LANES_MULTIPLE * LANES_MULTIPLE

    def stream(self, nbytes: float) -> float:
        """Bytes of a TCP stream that carries `nbytes`."""
        if not self.headers:
            return nbytes
        return nbytes + TCP_NBYTES * ceil(nbytes / (self.mtu - TCP_NBYTES + 14))

    def lanes(
        self, elements: float, *, bits: int = LANE_BITS, bits_down: int = LANE_BITS, unit: int = 1
    ) -> float:
        """Bytes of `elements` lanes of `bits`, packed by whole units of `unit` where one fits into a packet."""
        payload = elements * bits / 8
        if not self.headers:
            return payload
        fit = self.lanes_in_packet(bits_down)
        full = fit // unit * unit or fit
        return payload + (UDP_NBYTES + HEADER_NBYTES) * ceil(elements / full)

    def rows(self, count: float, unit_nbytes: int, flows: float) -> float:
        """Bytes of `count` keys or rows that go to `flows` others in equal parts; a flow without any has no packet."""
        payload = count * unit_nbytes
        if not self.headers or not flows:
            return payload
        packets = min(flows * ceil(count / flows / (self.rows_nbytes // unit_nbytes)), ceil(count))
        return payload + (UDP_NBYTES + HEADER_NBYTES + ROWS_PART_NBYTES) * packets


@dataclass(frozen=True, slots=True)
class SwitchNeed:
    """What a switch needs that reaches each of its register arrays once while a packet passes (one 32-bit lane an array).

    A packet of k rows of d lanes needs k d arrays, lane j in array j mod A. With A arrays it passes

        passes = ceil(k d / A)          times through the pipeline, and its port adds at 1 / passes of its rate;
        k_1    = floor(A / d)           rows fit into a packet of one pass; 0: one row alone passes ceil(d / A) times.
    """

    arrays: int  # A
    rows_in_packet: int  # k, at this MTU
    passes: int
    rows_in_one_pass: int  # k_1
    passes_of_one_row: int
    one_pass_nbytes_ratio: (
        float | None
    )  # bytes on the wire, packets of one pass over full ones; None if no row fits


def switch_need(framing: RowFraming, width: int, arrays: int) -> SwitchNeed:
    """The passes of a packet of rows of `width` lanes on a switch with `arrays` register arrays."""
    most = max(1, framing.lanes_in_packet() // width)
    one_pass = min(arrays // width, most)
    head = UDP_NBYTES + HEADER_NBYTES
    ratio = (4 * width + head / one_pass) / (4 * width + head / most) if one_pass else None
    lanes = min(most * width, framing.lanes_in_packet())
    return SwitchNeed(arrays, most, ceil(lanes / arrays), one_pass, ceil(width / arrays), ratio)
