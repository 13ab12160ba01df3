"""Two levels of planes in one network that loses, repeats and reorders; what each plane met is written down as a trace."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from aggregator.clients import INTEGERS, Client, Network, exact_sums, some_job, some_payloads
from aggregator.plane_kinds import AnyPlane, SpecPlane
from aggregator.traces import Trace

from tacit.aggregator.spec import Address, Answers, PlaneJob, Upstream
from tacit.aggregator.wire import CHUNKS, HEADER, Header, LaneType, PacketKind

PARENT: Address = ("10.9.0.254", 4800)
SLOTS = 64


def rack_address(rack: int) -> Address:
    return f"10.9.0.{rack + 1}", 4800


def some_tree(
    lanes: LaneType, worlds: tuple[int, ...], elements: int = 40, windows: tuple[int, int] = (4, 4)
) -> tuple[PlaneJob, list[PlaneJob]]:
    """The job at the parent and those of the racks, of so many ranks each; windows of a rack, and of the parent."""
    own, above = windows
    top = replace(
        some_job(9, len(worlds), lanes.above, elements, first_slot=16, slots=above),
        members=tuple(rack_address(rack) for rack in range(len(worlds))),
        below=sum(worlds),
    )
    racks = [
        replace(
            some_job(30 + rack, world, lanes, elements, slots=own),
            upstream=Upstream(PARENT, top, rack),
        )
        for rack, world in enumerate(worlds)
    ]
    return top, racks


@dataclass
class Written:
    """What one plane was sent and what it answered."""

    job: PlaneJob
    plane: AnyPlane
    packets: list[tuple[bytes, Address]]
    answers: list[Answers]

    def receive(self, packet: bytes, source: Address) -> Answers:
        answers = self.plane.receive(packet, source)
        self.packets.append((packet, source))
        self.answers.append(answers)
        return answers

    @property
    def trace(self) -> Trace:
        counted = {self.job.id: self.plane.counted_of(self.job.id)}
        return Trace((self.job,), tuple(self.packets), tuple(self.answers), self.plane.counted(), counted)


class Tree:
    """Ranks, racks and a parent. `run` ends when every rank has every sum."""

    def __init__(
        self,
        lanes: LaneType,
        worlds: tuple[int, ...],
        *,
        make: Callable[[int], AnyPlane] = SpecPlane,
        make_parent: Callable[[int], AnyPlane] | None = None,
        chunks: int = 23,
        seed: int = 0,
        loss: float = 0.0,
        repeats: float = 0.0,
        reorders: bool = True,
        first_chunk: int = 0,
        fit: bool = True,
        elements: int = 40,
        windows: tuple[int, int] = (4, 4),
        spoiled: float = 0.0,
    ) -> None:
        self.random, self.spoiled = Random(seed), spoiled
        self.network = Network(self.random, loss, repeats, reorders)
        self.top, self.racks = some_tree(lanes, worlds, elements, windows)
        whole = some_job(world=sum(worlds), lanes=lanes, elements=elements)
        payloads = some_payloads(whole, chunks, seed, fit)
        self.exact = exact_sums(whole, payloads)
        self.planes = {PARENT: Written(self.top, (make_parent or make)(SLOTS), [], [])}
        self.clients: dict[Address, tuple[Client, Address]] = {}
        mine = iter(payloads)
        for rack, job in enumerate(self.racks):
            self.planes[rack_address(rack)] = Written(job, make(SLOTS), [], [])
            for rank in range(job.world):
                client = Client(job, rank, next(mine), first_chunk)
                self.clients[client.address] = (client, rack_address(rack))
        for written in self.planes.values():
            written.plane.add_job(written.job)

    def run(self, most_rounds: int = 500) -> "Tree":
        for client, at in self.clients.values():
            self._send(client.start(), client.address, at)
        for _ in range(most_rounds):
            self._deliver()
            if all(client.done for client, _ in self.clients.values()):
                return self
            for client, at in self.clients.values():
                self._send(client.resend(), client.address, at)
        raise AssertionError(f"not all ranks have their sums after {most_rounds} rounds")

    def _send(self, packets: list[bytes], source: Address, to: Address) -> None:
        for packet in packets:
            self.network.send(packet, source, to)

    def _deliver(self) -> None:
        while self.network.flying:
            packet, source, to = self.network.next()
            if to in self.clients:
                client, at = self.clients[to]
                self._send(client.receive(packet), to, at)
                continue
            written = self.planes[to]
            for answer, destination in written.receive(packet, source):
                self.network.send(answer, to, destination)
            if self.random.random() < self.spoiled:
                written.receive(*self._spoil(written))  # whatever it answers is lost

    def _spoil(self, written: Written) -> tuple[bytes, Address]:
        """A packet that nobody meant; never a chunk of the future with the right key, which ends a sum by right."""
        packet, source = self.random.choice(written.packets)
        header, payload = Header.of(packet.ljust(HEADER.size, b"\0")), packet[HEADER.size :]
        match self.random.randrange(6):
            case 0:
                return packet, source  # replayed
            case 1:
                return packet[: self.random.randrange(len(packet) + 1)], source
            case 2:
                return packet, self.random.choice([*self.clients, *self.planes])
            case 3:
                name = self.random.choice([name for name in Header._fields if name != "chunk"])
                value = self.random.choice([0, 1, 2, 9, 10, 17, 18, 30, 128, 129, 255])
                return header._replace(**{name: value}).bytes() + payload, source
            case 4:
                shorter = payload[: self.random.randrange(len(payload) + 1)]
                return header._replace(nbytes=len(shorter)).bytes() + shorter, source
            case _:
                chunk = (header.chunk + self.random.choice([-8, -4, 0])) % CHUNKS
                rank = self.random.randrange(written.job.world)
                return written.job.packet(PacketKind.SETTLE, chunk, rank), written.job.members[rank]

    @property
    def ranks(self) -> list[Client]:
        return [client for client, _ in self.clients.values()]

    def counted(self, at: Address) -> dict[str, int]:
        return {name: count for name, count in self.planes[at].plane.counted().items() if count}


def record_tree(seed: int, **options) -> list[Trace]:
    """What the parent and each rack met, in the specification's words; sums must have been exact."""
    random = Random(seed)
    lanes = random.choice(INTEGERS)
    worlds = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    own = random.choice([1, 2, 4])
    terms = {"elements": random.choice([8, 40, 136]), "windows": (own, own * random.choice([1, 2]))}
    tree = Tree(lanes, worlds, seed=seed, first_chunk=2**32 - random.randint(1, 3 * own), **terms, **options)
    tree.run()
    if options.get("fit", True):
        assert all(client.sums() == tree.exact for client in tree.ranks)
    return [written.trace for written in tree.planes.values()]
