"""A rank as simple as it can be, and a network that loses, repeats and reorders: enough to ask a plane for exact sums."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tacit.aggregator.spec import NOBODY, Address, Answers, PlaneJob
from tacit.aggregator.wire import CHUNKS, HEADER, MAGIC, MORE, Header, LaneType, PacketKind
from tacit.codecs.tables import clamp_at, stochastic_table

INTEGERS = tuple(lanes for lanes in LaneType if lanes is not LaneType.F32)  # exact in any order
THC_TABLE = stochastic_table(16, 30, clamp_at(1 / 32))  # as published: tests/codecs/test_thc.py


def some_job(
    id: int = 3,
    world: int = 4,
    lanes: LaneType = LaneType.U8,
    elements: int = 40,
    first_slot: int = 8,
    slots: int = 4,
    quorum: int = 0,
    shards: int = 0,
    absent: int = 0,
    deadline_ms: int = 0,
) -> PlaneJob:
    """A job whose members live at 10.0.<id>.<rank + 1>; the last `absent` of its shards have not joined."""
    present = world + shards - absent
    members = tuple((f"10.0.{id}.{rank + 1}", 4000 + rank) for rank in range(present)) + (NOBODY,) * absent
    table = THC_TABLE if lanes.indexed else (0,) * 16
    cookie = 0x1122334455667788 + id
    return PlaneJob(
        id,
        cookie,
        members,
        lanes,
        elements,
        range(first_slot, first_slot + slots),
        table,
        quorum,
        shards=shards,
        deadline_ms=deadline_ms,
    )


def some_payloads(job: PlaneJob, chunks: int, seed: int, fit: bool = True) -> list[list[bytes]]:
    """Random payloads by rank and chunk; their sums fit the lanes unless told otherwise."""
    rng = np.random.default_rng(seed)
    if job.lanes.indexed:
        data = rng.integers(0, 256, (job.world, chunks, job.data_nbytes), np.uint8)
    else:
        limits, share = np.iinfo(job.lanes.dtype), job.world if fit else 1
        low, high = -(-limits.min // share), limits.max // share
        data = rng.integers(low, high, (job.world, chunks, job.elements), job.lanes.dtype, endpoint=True)
    return [[chunk.tobytes() for chunk in own] for own in data]


def values(job: PlaneJob, payload: bytes) -> np.ndarray:
    """The numbers a payload stands for, looked up one by one."""
    if not job.lanes.indexed:
        return np.frombuffer(payload, job.lanes.dtype).astype(np.int64)
    return np.array([job.table[nibble] for byte in payload for nibble in (byte & 15, byte >> 4)])


def exact_sums(job: PlaneJob, payloads: Sequence[Sequence[bytes]]) -> list[bytes]:
    """What every rank must end with."""
    return [
        np.sum([values(job, payload) for payload in column], axis=0).astype(job.lanes.dtype).tobytes()
        for column in zip(*payloads, strict=True)
    ]


def saying_more(packet: bytes) -> bytes:
    """The same data, from a rank that has more to send."""
    header = Header.of(packet)
    return header._replace(lanes=header.lanes | MORE).bytes() + packet[HEADER.size :]


@dataclass
class Client:
    """One rank of a job. It sends chunk k + S when it has the result of chunk k, and resends what has none when told to."""

    job: PlaneJob
    rank: int
    payloads: Sequence[bytes]
    first_chunk: int = 0
    says_more: bool = False  # a kernel plane may let its results wait then
    results: dict[int, bytes] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)  # how many ranks were in the results

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.payloads)

    @property
    def address(self) -> Address:
        return self.job.members[self.rank]

    def _packet(self, index: int, kind: PacketKind = PacketKind.DATA) -> bytes:
        payload = self.payloads[index] if kind is PacketKind.DATA else b""
        packet = self.job.packet(kind, (self.first_chunk + index) % CHUNKS, self.rank, payload)
        more = kind is PacketKind.DATA and self.says_more and index + 8 < len(self.payloads)
        return saying_more(packet) if more else packet

    def start(self) -> list[bytes]:
        return [self._packet(index) for index in range(min(len(self.job.slots), len(self.payloads)))]

    def outstanding(self) -> list[int]:
        """Chunks that were sent and have no result: their slot's earlier chunks all have one."""
        window = len(self.job.slots)
        return [
            next(i for i in range(slot, len(self.payloads), window) if i not in self.results)
            for slot in range(min(window, len(self.payloads)))
            if any(i not in self.results for i in range(slot, len(self.payloads), window))
        ]

    def resend(self, kind: PacketKind = PacketKind.DATA) -> list[bytes]:
        return [self._packet(index, kind) for index in self.outstanding()]

    def receive(self, packet: bytes) -> list[bytes]:
        """What to send because of a packet from the plane."""
        header = Header.of(packet)
        assert (header.magic, header.cookie, header.job) == (MAGIC, self.job.cookie, self.job.id)
        assert len(packet) == HEADER.size + header.nbytes
        index = (header.chunk - self.first_chunk) % CHUNKS
        if header.kind not in (PacketKind.RESULT, PacketKind.STALE) or index not in self.outstanding():
            return []
        if header.kind == PacketKind.RESULT:
            assert header.place == self.job.place(header.chunk) and header.nbytes == self.job.result_nbytes
            self.counts.add(header.world)
        self.results[index] = packet[HEADER.size :]  # empty: the others settled, and have gone on
        following = index + len(self.job.slots)
        return [self._packet(following)] if following < len(self.payloads) else []

    def sums(self) -> list[bytes]:
        return [self.results[index] for index in range(len(self.payloads))]


@dataclass
class Network:
    """Packets on their way: any may be lost, come twice, or overtake any other."""

    random: Random
    loss: float = 0.0
    repeats: float = 0.0
    reorders: bool = True
    flying: list[tuple[bytes, Address, Address]] = field(default_factory=list)

    def send(self, packet: bytes, source: Address, destination: Address) -> None:
        copies = 1 + (self.random.random() < self.repeats)
        for _ in range(copies):
            if self.random.random() >= self.loss:
                self.flying.append((packet, source, destination))

    def next(self) -> tuple[bytes, Address, Address]:
        return self.flying.pop(self.random.randrange(len(self.flying)) if self.reorders else 0)


PLANE: Address = ("10.0.0.254", 4800)


class Switchboard:
    """Clients of any jobs, a network and a plane. `run` ends when every client is done, and says how often all resent."""

    def __init__(self, plane, clients: Sequence[Client], network: Network, on_packet=None) -> None:
        self.plane, self.clients, self.network = plane, clients, network
        self.on_packet = on_packet or (lambda packet, source, answers: None)

    def run(self, most_rounds: int = 500) -> int:
        for client in self.clients:
            self._send(client, client.start())
        for rounds in range(most_rounds):
            self._deliver()
            if all(client.done for client in self.clients):
                return rounds
            for client in self.clients:
                self._send(client, client.resend())
        late = [(client.job.id, client.rank) for client in self.clients if not client.done]
        raise AssertionError(f"after {most_rounds} rounds (job, rank) {late} still wait")

    def _send(self, client: Client, packets: Sequence[bytes]) -> None:
        for packet in packets:
            self.network.send(packet, client.address, PLANE)

    def _deliver(self) -> None:
        at = {client.address: client for client in self.clients}
        while self.network.flying:
            packet, source, destination = self.network.next()
            if destination == PLANE:
                answers: Answers = self.plane.receive(packet, source)
                self.on_packet(packet, source, answers)
                for answer, to in answers:
                    self.network.send(answer, PLANE, to)
            elif destination in at:
                self._send(at[destination], at[destination].receive(packet))
