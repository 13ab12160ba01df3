"""What a packet costs in the aggregator's user-space plane, without sockets, against a copy of its payload: one JSON record a line.

    python benchmarks/aggregator_plane.py            # or --table

One core. Ranks take turns chunk by chunk, so with 4 ranks a packet is 1/4 of a write, 3/4 of an addition and 1/4 of a result
that is copied out. Packets of rows go from each member to the next. Every round times the copy and all kinds one after another;
medians, and the median of the ratios.
"""

import argparse
import json
import statistics
import time

import numpy as np

from tacit import _core
from tacit.aggregator import LaneType, PacketKind, PlaneJob
from tacit.aggregator.wire import CHUNKS, HEADER, ROWS_HEADER, RowsHeader, rows_room
from tacit.records import host_facts

LOWER: int = _core.WIRE_LOWER_NBYTES
SLOTS = 16  # with 4 ranks, a window is as many packets as the plane takes in one call: they lie in the second cache


class Load:
    """A job's packets of one window, a row each and aligned as in a frame; `next` turns them into the next window's."""

    def __init__(self, lanes: LaneType, mtu: int, world: int) -> None:
        members = tuple(("10.0.0.1", 4000 + rank) for rank in range(world))
        table = tuple(range(16)) if lanes.indexed else (0,) * 16
        self.job = job = PlaneJob(1, 99, members, lanes, lanes.elements(mtu), range(SLOTS), table)
        self.plane = _core.Plane(SLOTS)
        self.plane.add_job(job.id, job.cookie, members, lanes, job.elements, 0, SLOTS, world, bytes(table))
        self.order = [(chunk, rank) for chunk in range(SLOTS) for rank in range(world)]
        self.sources = [members[rank] for _, rank in self.order]
        self.nbytes, self.elements = job.data_nbytes, job.elements
        size = HEADER.size + job.data_nbytes
        self.frames = np.zeros((len(self.order), -(-(LOWER + size) // 64) * 64), np.uint8)
        self.packets = self.frames[:, LOWER : LOWER + size]
        payload = np.random.default_rng(0).integers(0, 60, (len(self.order), job.data_nbytes), np.uint8)
        if lanes is LaneType.U16 or lanes is LaneType.I32:
            payload[:, 1::2] = 0  # small numbers: lanes that meet their limit are slower, and a fault
        self.packets[:, HEADER.size :] = payload
        self.source, self.copy = payload, np.ones_like(payload)
        self.first = 0

    def next(self) -> None:
        for row, (chunk, rank) in enumerate(self.order):
            header = self.job.packet(PacketKind.DATA, (self.first + chunk) % CHUNKS, rank)
            self.packets[row, : HEADER.size] = np.frombuffer(header, np.uint8)
        nbytes = np.array([self.job.data_nbytes], "<u2").view(np.uint8)
        self.packets[:, HEADER.size - 2 : HEADER.size] = nbytes
        self.first += SLOTS

    def packet_ns(self) -> float:
        self.next()
        self.plane.receive_rows(self.packets, self.sources)  # warms up what the other loads have driven out
        self.next()
        answers, ns = self.plane.receive_rows(self.packets, self.sources)
        assert answers == len(self.order), self.plane.counts()
        return ns / len(self.order)

    def copy_ns(self) -> float:
        np.copyto(self.copy, self.source)
        start = time.perf_counter_ns()
        np.copyto(self.copy, self.source)
        return (time.perf_counter_ns() - start) / len(self.order)


class RowsLoad(Load):
    """The same of rows."""

    def __init__(self, mtu: int, world: int) -> None:
        super().__init__(LaneType.U8, mtu, world)
        self.nbytes, self.elements = rows_room(mtu), rows_room(mtu) // 4
        size = HEADER.size + ROWS_HEADER.size + self.nbytes
        self.frames = np.ones((len(self.order), -(-(LOWER + size) // 64) * 64), np.uint8)
        self.packets = self.frames[:, LOWER : LOWER + size]
        self.source = np.ascontiguousarray(self.packets[:, HEADER.size + ROWS_HEADER.size :])
        self.copy = np.ones_like(self.source)

    def next(self) -> None:
        fields = RowsHeader(1 << 20, 0, self.first % CHUNKS, 0)
        for row, (chunk, rank) in enumerate(self.order):
            number = (self.first + chunk) % CHUNKS
            packet = self.job.rows(rank, (rank + 1) % self.job.world, number, 0, fields, bytes(self.nbytes))
            self.packets[row] = np.frombuffer(packet, np.uint8)
        self.first += SLOTS


def measure(rounds: int, world: int) -> list[dict[str, object]]:
    loads: dict[tuple[str, int], Load] = {}
    for mtu in (1500, 9000):
        loads |= {
            (lanes.name, mtu): Load(lanes, mtu, world) for lanes in LaneType if lanes is not LaneType.F32
        }
        loads["ROWS", mtu] = RowsLoad(mtu, world)
    plane: dict[tuple[str, int], list[float]] = {key: [] for key in loads}
    copy: dict[tuple[str, int], list[float]] = {key: [] for key in loads}
    for _ in range(rounds):
        for key, load in loads.items():
            copy[key].append(load.copy_ns())
            plane[key].append(load.packet_ns())
    return [
        {
            "benchmark": "aggregator plane",
            "lanes": lanes,
            "mtu": mtu,
            "world": world,
            "elements": load.elements,
            "payload_nbytes": load.nbytes,
            "ns_per_packet": round(statistics.median(plane[lanes, mtu]), 1),
            "gbyte_per_s": round(load.nbytes / statistics.median(plane[lanes, mtu]), 2),
            "elements_per_ns": round(load.elements / statistics.median(plane[lanes, mtu]), 2),
            "copy_ns_per_packet": round(statistics.median(copy[lanes, mtu]), 1),
            "against_copy": round(
                statistics.median(a / b for a, b in zip(plane[lanes, mtu], copy[lanes, mtu], strict=True)), 2
            ),
            "rounds": rounds,
        }
        for (lanes, mtu), load in loads.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--table", action="store_true", help="a table for people instead of JSON")
    args = parser.parse_args()
    for row in measure(args.rounds, args.world):
        if args.table:
            print(
                f"{row['lanes']:<10} MTU {row['mtu']:<5} {row['ns_per_packet']:>7} ns  {row['gbyte_per_s']:>6} GB/s  "
                f"{row['elements_per_ns']:>6} elements/ns  {row['against_copy']:>6} x copy of its payload"
            )
        else:
            print(json.dumps(row | {"simd": _core.simd(), "host": host_facts()}))


if __name__ == "__main__":
    main()
