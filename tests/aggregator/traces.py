"""Packet traces that the specification wrote down: what came in, what went out, what was counted. Any plane can replay them.

`record(seed)` is the same on every machine: the kernel plane's tests take the same traces as the C++ plane's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from aggregator.clients import INTEGERS, Client, Network, Switchboard, exact_sums, some_job, some_payloads
from aggregator.plane_kinds import AnyPlane, SpecPlane

from tacit.aggregator.spec import Address, Answers, PlaneJob
from tacit.aggregator.wire import CHUNKS, HEADER, ROWS_ACK, Header, PacketKind, RowsHeader

SLOTS = 32


@dataclass(frozen=True)
class Trace:
    """`answers[i]` and `verdicts[i]` belong to `packets[i]`."""

    jobs: tuple[PlaneJob, ...]
    packets: tuple[tuple[bytes, Address], ...]
    answers: tuple[Answers, ...]
    counts: dict[str, int]
    job_counts: dict[int, dict[str, int]]


def replay(trace: Trace, plane: AnyPlane) -> None:
    """Holds `plane` to the trace, packet by packet; the order of a result's copies is the plane's own affair."""
    for job in trace.jobs:
        plane.add_job(job)
    for step, ((packet, source), expected) in enumerate(zip(trace.packets, trace.answers, strict=True)):
        answers = plane.receive(packet, source)
        assert sorted(answers) == sorted(expected), (
            f"packet {step}: {packet[: HEADER.size].hex()} from {source}"
        )
    assert plane.counted() == trace.counts
    for job in trace.jobs:
        assert plane.counted_of(job.id) == trace.job_counts[job.id]


def record(
    seed: int, *, loss: float = 0.05, repeats: float = 0.05, spoiled: float = 0.3, chunks: int = 24
) -> Trace:
    """Two jobs at once, across a lossy network that reorders, with strangers, spoiled packets and rows in between.

    The first job starts shortly before its chunks wrap and must end with exact sums; in the second, lanes meet their limits,
    ranks give up a chunk or settle for a quorum now and then, and one of two shards has not joined.
    """
    random = Random(seed)
    lanes, others = random.choice(INTEGERS), random.choice(INTEGERS)
    world, window = random.randint(1, 6), random.choice([1, 2, 4, 8])
    first = some_job(3, world, lanes, random.choice([8, 40, 136]), first_slot=16, slots=window)
    second = some_job(
        200, random.randint(2, 4), others, 24, first_slot=0, slots=2, quorum=1, shards=2, absent=1
    )
    plane = SpecPlane(SLOTS)
    for job in (first, second):
        plane.add_job(job)
    payloads = {job.id: some_payloads(job, chunks, seed, fit=job is first) for job in (first, second)}
    starts = {first.id: 2**32 - random.randint(1, 3 * window), second.id: random.randrange(2**32)}
    clients = [
        Client(job, rank, payloads[job.id][rank], starts[job.id])
        for job in (first, second)
        for rank in range(job.world)
    ]
    packets: list[tuple[bytes, Address]] = []
    written: list[Answers] = []

    def note(packet: bytes, source: Address, answers: Answers) -> None:
        packets.append((packet, source))
        written.append(answers)
        if random.random() < spoiled:
            worse, elsewhere = _spoil(random, packets, clients)
            packets.append((worse, elsewhere))
            written.append(plane.receive(worse, elsewhere))

    network = Network(random, loss, repeats, reorders=random.random() < 0.7)
    Switchboard(plane, clients, network, note).run()
    for client in clients[: first.world]:
        assert client.sums() == exact_sums(first, payloads[first.id])
    return Trace(
        (first, second),
        tuple(packets),
        tuple(written),
        plane.counted(),
        {job.id: plane.counted_of(job.id) for job in (first, second)},
    )


def _spoil(
    random: Random, packets: Sequence[tuple[bytes, Address]], clients: Sequence[Client]
) -> tuple[bytes, Address]:
    """A packet that nobody meant: replayed, damaged, foreign, or rows or a settle of the second job.

    The first job's chunk stays what it was: with the right key, a chunk of the future ends the sum in its cell.
    """
    packet, source = random.choice(packets)
    header, payload = Header.of(packet.ljust(HEADER.size, b"\0")), packet[HEADER.size :]
    match random.randrange(11):
        case 0:
            return packet, source  # replayed
        case 1:
            return packet[: random.randrange(len(packet) + 1)], source
        case 2:
            return packet + random.randbytes(random.randrange(1, 50)), source
        case 3:
            return packet, random.choice(clients).address
        case 4:
            damaged = bytearray(packet[: HEADER.size])
            if len(damaged) == HEADER.size:
                damaged[random.choice([0, 1, *range(6, len(damaged))])] ^= 1 << random.randrange(8)
            return bytes(damaged) + payload, source
        case 5:
            safe = [name for name in Header._fields if name != "chunk" or header.job == clients[-1].job.id]
            name = random.choice(safe)
            return header._replace(
                **{name: random.choice([0, 1, 2, 127, 128, 255])}
            ).bytes() + payload, source
        case 6:
            shorter = payload[: random.randrange(len(payload) + 1)]
            return header._replace(nbytes=len(shorter)).bytes() + shorter, source
        case 7:
            job, ahead = clients[-1].job, random.choice(clients[-1].outstanding() or [0])
            chunk = (clients[-1].first_chunk + ahead + 2 * len(job.slots)) % CHUNKS  # gives its cell's sum up
            rank = random.randrange(job.world)
            return job.packet(PacketKind.DATA, chunk, rank, bytes(job.data_nbytes)), job.members[rank]
        case 8 | 9:
            job = clients[-1].job
            sender, receiver = random.randrange(len(job.members)), random.randrange(len(job.members) + 1)
            rows = RowsHeader(*(random.randrange(2**32) for _ in range(4)))
            payload, flags = (
                random.randbytes(random.choice([0, 1, 24, 1424])),
                random.choice([0, 0, 0, ROWS_ACK]),
            )
            packet = job.rows(
                sender, receiver, random.randrange(CHUNKS), random.randrange(2**16), rows, payload, flags
            )
            return packet, job.members[sender]
        case _:
            client = clients[-1]
            kind = random.choice([PacketKind.PROBE, PacketKind.SETTLE, PacketKind.SETTLE])
            waiting = client.resend(kind) or [client.job.packet(kind, 0, client.rank)]
            return random.choice(waiting), client.address
