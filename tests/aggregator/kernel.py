"""The kernel plane as tests drive it: real frames over a virtual link, or packets handed to the program by hand.

Everything happens in network namespaces without a name, which end with the threads and sockets that use them.
"""

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from pyroute2 import IPRoute

from tacit.aggregator.addresses import address_text
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.planes import bpf
from tacit.aggregator.planes.kernel_plane import KernelPlane
from tacit.aggregator.spec import NOBODY, Address, Answers, PlaneJob
from tacit.aggregator.wire import HEADER, MAGIC, Header, PacketKind
from tacit.lab.network.namespaces import NEWNET, setns, unshare

PLANE: Address = ("10.0.0.254", 4800)
OUR_MAC = bytes([2, 0, 0, 0, 0, 1])
ETH_P_ALL, ETH_P_IP = 3, 0x0800
SO_RCVBUFFORCE = 33
LOWER = struct.Struct("!6s6sH BBHHHBBH4s4s HHHH")  # Ethernet, IPv4, UDP
NOBODYS_JOB = 90  # no bit away from the jobs of the traces
Entry = Literal["tc", "xdp"]
Result = TypeVar("Result")


def in_new_network(work: Callable[[], Result]) -> Result:
    """What `work` returns, which runs in a thread and a network namespace of its own."""
    return _in_thread(lambda: unshare(NEWNET), work)


def in_network(fd: int, work: Callable[[], Result]) -> Result:
    """The same in the network namespace that `fd` is open on."""
    return _in_thread(lambda: setns(fd, NEWNET), work)


def this_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _in_thread(enter: Callable[[], None], work: Callable[[], Result]) -> Result:
    outcome: list[Any] = []

    def run() -> None:
        try:
            enter()
            outcome.extend((work(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


# ---- frames


def mac_of(host: str) -> bytes:
    return bytes([2, 0]) + socket.inet_aton(host)


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame_of(packet: bytes, source: Address, to: Address = PLANE) -> bytes:
    udp_nbytes = 8 + len(packet)
    ip = (0x45, 0, 20 + udp_nbytes, 7, 0x4000, 64, 17)
    hosts = (socket.inet_aton(source[0]), socket.inet_aton(to[0]))
    check = checksum(struct.pack("!BBHHHBBH4s4s", *ip, 0, *hosts))
    macs = (OUR_MAC, mac_of(source[0]), ETH_P_IP)
    return LOWER.pack(*macs, *ip, check, *hosts, source[1], to[1], udp_nbytes, 0) + packet


def answer_in(frame: bytes) -> tuple[bytes, Address]:
    """The packet and its destination, if the frame is right in every field below."""
    to_mac, from_mac, kind, *ip, source, target, from_port, to_port, udp_nbytes, check = LOWER.unpack_from(
        frame
    )
    host = socket.inet_ntoa(target)
    packet = frame[LOWER.size :]
    assert (to_mac, from_mac, kind) == (mac_of(host), OUR_MAC, ETH_P_IP)
    assert ip[:7] == [0x45, 0, 20 + udp_nbytes, 0, 0x4000, 64, 17] and checksum(frame[14:34]) == 0
    assert (socket.inet_ntoa(source), from_port, check) == (*PLANE, 0) and udp_nbytes == 8 + len(packet)
    return packet, (host, to_port)


# ---- a port and its other end


def listen_at(name: str, protocol: int) -> socket.socket:
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
    found.bind((name, protocol))
    found.settimeout(30)
    return found


def make_link(ends: tuple[str, str], mtu: int = 65535) -> None:
    with IPRoute() as routes:
        routes.link("add", ifname=ends[0], kind="veth", peer={"ifname": ends[1]})
        for name in ends:
            routes.link("set", index=socket.if_nametoindex(name), mtu=mtu, state="up")


@contextmanager
def on_one_cpu() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Wire:
    """A plane at one end of a link, all ranks at the other: what a host with one interface sees."""

    def __init__(self, slots: int, entry: Entry) -> None:
        make_link(("port", "ranks"))
        self.ranks = listen_at("ranks", ETH_P_IP)
        self.plane = KernelPlane(PLANE, ["port"], slots=slots, entry=entry, mtu=9000)
        self.asked = 0

    def exchange(self, packet: bytes, source: Address) -> Answers:
        """What comes back before the answer to a question that everybody gets an answer to."""
        self.asked += 1
        question = Header(MAGIC, PacketKind.PROBE, self.asked, 0, NOBODYS_JOB, 1, 0, 1, 0, 0).bytes()
        with on_one_cpu():  # whose queues keep the order
            self.ranks.send(frame_of(packet, source))
            self.ranks.send(frame_of(question, ("10.255.0.1", 9)))
        answers = []
        while True:
            answer, to = answer_in(self.ranks.recv(65535))
            if len(answer) >= HEADER.size and Header.of(answer).job == NOBODYS_JOB:
                assert Header.of(answer)[:3] == (MAGIC, PacketKind.UNKNOWN, self.asked)
                return answers
            answers.append((answer, to))


@cache
def shared_wire(slots: int, entry: Entry) -> Wire:
    """Until the tests end: loading takes the verifier most of a second."""
    return in_new_network(lambda: Wire(slots, entry))


class WiredPlane:
    """A kernel plane behind the face of tests/aggregator/plane_kinds.py.

    Members say a word when their job is added, so that the plane knows where they are; it is not counted here, nor are the
    questions of the wire. Answers are sorted by port, which is by rank.
    """

    def __init__(self, slots: int, entry: Entry) -> None:
        self.wire = shared_wire(slots, entry)
        self.plane = self.wire.plane
        for job in self.plane.jobs():
            self.plane.remove_job(job)
        self.before = self._counts()
        self.probes: dict[int, int] = {}

    def _counts(self) -> dict[str, int]:
        counts = self.plane.counts()
        return counts | {"job": counts["job"] - self.wire.asked}

    def add_job(self, job: PlaneJob) -> None:
        self.plane.add_job(job)
        present = [(rank, member) for rank, member in enumerate(job.members) if member != NOBODY]
        for rank, member in present:
            self.wire.exchange(job.packet(PacketKind.PROBE, 0, rank), member)
        self.before["echoed"] += len(present)
        self.probes[job.id] = len(present)

    def remove_job(self, id: int) -> None:
        self.plane.remove_job(id)

    def receive(self, packet: bytes, source: Address) -> Answers:
        return sorted(self.wire.exchange(packet, source), key=lambda answer: answer[1][1])

    def counted(self) -> dict[str, int]:
        return {name: count - self.before[name] for name, count in self._counts().items()}

    def counted_of(self, job: int) -> dict[str, int]:
        stats = self.plane.stats(job)
        return stats.counts | {"echoed": stats.counts["echoed"] - self.probes[job]}


# ---- a switch


class Switch:
    """A bridge with a port for each rank, a namespace each: 10.7.0.254 is the bridge, 10.7.0.1 rank 0. A context manager."""

    host = "10.7.0.254"

    def __init__(self, ranks: int, mtu: int = 1500, rate_bps: float = 0) -> None:
        self.rate_bps = rate_bps  # of every link, both ways; 0: as fast as it can
        self.ports = [f"port{rank}" for rank in range(ranks)]
        self.hosts = [f"10.7.0.{rank + 1}" for rank in range(ranks)]
        self.network = in_new_network(this_network)
        self.networks = [in_new_network(this_network) for _ in range(ranks)]
        in_network(self.network, lambda: self._build(mtu))
        for fd, host in zip(self.networks, self.hosts, strict=True):
            in_network(fd, lambda host=host: self._start("link", host))

    def _build(self, mtu: int) -> None:
        with IPRoute() as routes:
            routes.link("add", ifname="bridge", kind="bridge")
            bridge = socket.if_nametoindex("bridge")
            for port, fd in zip(self.ports, self.networks, strict=True):
                peer = {"ifname": "link", "net_ns_fd": fd, "mtu": mtu}
                routes.link("add", ifname=port, kind="veth", mtu=mtu, peer=peer)
                routes.link("set", index=socket.if_nametoindex(port), master=bridge, state="up")
                self._shape(routes, port)
        self._start("bridge", self.host)

    def _start(self, name: str, host: str) -> None:
        with IPRoute() as routes:
            index = socket.if_nametoindex(name)
            routes.addr("add", index=index, address=host, prefixlen=24)
            routes.link("set", index=index, state="up")
            if name == "link":
                self._shape(routes, name)

    def _shape(self, routes: IPRoute, name: str) -> None:
        if self.rate_bps:
            options = {"rate": int(self.rate_bps / 8), "burst": 16384, "limit": 4 << 20}
            routes.tc("add", "tbf", socket.if_nametoindex(name), 0x10000, **options)

    def inside(self, work: Callable[[], Result]) -> Result:
        return in_network(self.network, work)

    def at(self, rank: int, work: Callable[[], Result]) -> Result:
        return in_network(self.networks[rank], work)

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (self.network, *self.networks):
            os.close(fd)


@contextmanager
def controlled_plane(
    switch: Switch, secret: str, *, slots: int, mtu: int = 1500
) -> Iterator[tuple[KernelPlane, str, list[tuple[str, str]]]]:
    """A plane under control in the switch, its address, and for each rank a file to enter its namespace by, with its own address there."""
    with ExitStack() as opened:

        def serve() -> tuple[KernelPlane, Address]:
            where = (switch.host, 0)
            plane = opened.enter_context(KernelPlane(where, switch.ports, slots=slots, mtu=mtu))
            control = opened.enter_context(ControlServer(plane, where, [secret], kind="kernel"))
            return plane, control.address

        plane, address = switch.inside(serve)
        files = [f"/proc/{os.getpid()}/fd/{fd}" for fd in switch.networks]
        yield plane, address_text(address), list(zip(files, switch.hosts, strict=True))


@contextmanager
def served(
    ranks: int, *, mtu: int = 1500, entry: Entry = "tc", slots: int = 64
) -> Iterator[tuple[Switch, KernelPlane]]:
    """A switch, and a plane on its ports."""
    with Switch(ranks, mtu) as switch:
        plane = switch.inside(
            lambda: KernelPlane((switch.host, 0), switch.ports, slots=slots, entry=entry, mtu=mtu)
        )
        with plane:
            yield switch, plane


def compute_checksums(name: str) -> None:
    """Turns off that this interface leaves them to whoever comes after it."""
    turned_off = bytearray(struct.pack("=II", 0x17, 0))  # ETHTOOL_STXCSUM
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        where = (ctypes.c_char * len(turned_off)).from_buffer(turned_off)
        fcntl.ioctl(any_socket, 0x8946, struct.pack("=16sQ8x", name.encode(), ctypes.addressof(where)))


def bad_checksums() -> int:
    """Of UDP packets that came to this network namespace."""
    lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Udp:"))
    return int(values[names.index("InCsumErrors")])


# ---- without a link: packets handed to the program


class _TestRun(ctypes.Structure):
    """struct bpf_test_run_opts."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("data_in", ctypes.c_char_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_char_p),
        ("ctx_out", ctypes.c_void_p),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("cpu", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32),
    )


UNSPEC, SHOT, REDIRECT = 0xFFFFFFFF, 2, 7  # what a program of tc returns


def run_by_hand(program_fd: int, frame: bytes, ifindex: int) -> tuple[int, bytes]:
    """What the tc program returns for this frame, and what has become of it. To be called where the interface is."""
    out, context = ctypes.create_string_buffer(65536), bytearray(192)
    struct.pack_into("=I", context, 40, ifindex)  # __sk_buff.ifindex
    options = _TestRun(ctypes.sizeof(_TestRun), frame, ctypes.addressof(out), len(frame), 65536)
    options.ctx_in, options.ctx_size_in, options.repeat = bytes(context), len(context), 1
    assert bpf.library().bpf_prog_test_run_opts(program_fd, ctypes.byref(options)) == 0
    return options.retval, out.raw[: options.data_size_out]


class HandedPlane(WiredPlane):
    """The tc program without a link: copies leave through a device that shows them as they go, the last answer is what
    the program made of its packet. Strictly one after another. To be used within one namespace."""

    class Hand:
        def __init__(self, slots: int) -> None:
            make_link(("sink", "drain"))
            self.shown = listen_at("sink", ETH_P_ALL)
            self.shown.setblocking(False)
            self.plane = KernelPlane(PLANE, ["sink"], slots=slots, mtu=1500)
            self.program = self.plane._loaded.program_fd("tacit_tc")
            self.ifindex = socket.if_nametoindex("sink")
            self.asked = 0

        def exchange(self, packet: bytes, source: Address) -> Answers:
            returned, frame = run_by_hand(self.program, frame_of(packet, source), self.ifindex)
            assert returned in (SHOT, REDIRECT)
            frames = [frame] if returned == REDIRECT else []
            while True:
                try:
                    frames.append(self.shown.recv(65535))
                except BlockingIOError:
                    return [answer_in(each) for each in frames if each[12:14] == b"\x08\x00"]

    def __init__(self, slots: int) -> None:
        self.wire = HandedPlane.Hand(slots)
        self.plane = self.wire.plane
        self.before = self._counts()
        self.probes = {}
