"""CPU time of the aggregator's planes for each byte summed, side by side: one JSON record a line. Root, clang and libbpf.

    python benchmarks/aggregator_cpu.py            # or --table

Four ranks of the C++ client, a namespace each, behind the ports of a bridge; the plane is in the bridge's namespace. Planes take
turns, round by round; medians over the rounds, of the ratios too. Links are shaped, since on bare virtual links nobody ever cuts
what the user-space plane sends with UDP_SEGMENT, as every real one does.

`plane`: what the plane itself used. Of the user-space plane, its threads (the kernel's work in their system calls included, as is
the delivery of results to the ranks' sockets; the way of packets into its socket is not: 0.01 ns a byte where runs stay whole). Of
the kernel plane, its program as the kernel measures it, and for each packet that it hands over on its return HANDED_OVER_NS.
`all`: ranks and plane together, with the threads that the kernel keeps for network work.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tacit.aggregator import LaneType, PlaneJob, UserPlane
from tacit.aggregator.client.host_stack import Client, SumOutcome
from tacit.aggregator.planes import bpf
from tacit.aggregator.planes.kernel_plane import KernelPlane
from tacit.records import host_facts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # a switch made of namespaces
from aggregator.kernel import Switch

WORLD, SLOTS = 4, 64
# perf: 9 kB into a shaped port's queue (`skb_do_redirect` and below), 20 rounds of 0.5 s at 500 Mbit/s. Less for shorter packets.
HANDED_OVER_NS = 2700


def user_plane_ns() -> int:
    """CPU time of the threads of all user-space planes in this process."""
    return _threads_ns(Path("/proc/self/task"), "tacit-plane")


def _threads_ns(folder: Path, name: str) -> int:
    total = 0
    for comm in folder.glob("[0-9]*/comm"):
        with suppress(OSError):  # it may just have ended
            if comm.read_text().startswith(name):
                total += int((comm.parent / "schedstat").read_text().split()[0])
    return total


def program_ns(program_fd: int) -> int:
    """What a program has used since statistics were turned on."""
    info, nbytes = ctypes.create_string_buffer(256), ctypes.c_uint32(256)
    assert bpf.library().bpf_obj_get_info_by_fd(program_fd, info, ctypes.byref(nbytes)) == 0
    found: int = struct.unpack_from("=Q", info, 192)[0]  # bpf_prog_info.run_time_ns
    return found


def kernel_plane_ns(plane: KernelPlane) -> int:
    """CPU time of the program, and of what the kernel does when it returns: a packet that carries a result goes into its port's
    queue. Nobody's clock has that, so each is counted with what a profile says."""
    program = program_ns(plane._loaded.program_fd("tacit_tc"))
    return program + HANDED_OVER_NS * (plane.carried() + plane.counts()["completed"])


def all_ns() -> int:
    """CPU time of this process, and of the kernel's threads for network work that nobody's time is charged with."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(1e9 * (used.ru_utime + used.ru_stime)) + _threads_ns(Path("/proc"), "ksoftirqd/")


@dataclass
class Bench:
    """Ranks, a plane, and how to read what it used."""

    clients: list[Client]
    plane_ns: Callable[[], int]
    job: PlaneJob

    def round(self, data: np.ndarray, out: np.ndarray, numel: int) -> tuple[float, float]:
        """Nanoseconds of the plane and of all for one byte that a rank sent."""

        def run(rank: int) -> None:
            assert self.clients[rank].reduce(data[rank], out[rank], numel, patience_s=10) is SumOutcome.DONE

        before = self.plane_ns(), all_ns()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = self.plane_ns(), all_ns()
        plane, everything = ((late - early) / data.nbytes for early, late in zip(before, after, strict=True))
        return plane, everything


@contextmanager
def benches(lanes: LaneType, mtu: int, rate_bps: float) -> Iterator[dict[str, Bench]]:
    with ExitStack() as stack:
        switch = stack.enter_context(Switch(WORLD, mtu, rate_bps))
        fd = bpf.library().bpf_enable_stats(0)
        assert fd >= 0
        stack.callback(os.close, fd)
        where = (switch.host, 0)
        user = stack.enter_context(switch.inside(lambda: UserPlane(where, slots=SLOTS)))
        kernel = stack.enter_context(
            switch.inside(lambda: KernelPlane(where, switch.ports, slots=SLOTS, mtu=mtu))
        )
        found = {}
        for name, plane, plane_ns, segment in (
            ("user", user, user_plane_ns, False),
            ("user, ranks segment", user, user_plane_ns, True),
            ("kernel", kernel, lambda: kernel_plane_ns(kernel), False),
        ):
            clients = [
                switch.at(rank, lambda host=host: Client((host, 0))) for rank, host in enumerate(switch.hosts)
            ]
            members = tuple((host, client.port) for host, client in zip(switch.hosts, clients, strict=True))
            table = tuple(range(16)) if lanes.indexed else (0,) * 16
            first = SLOTS // 2 * int(segment)
            job = PlaneJob(
                1 + segment, 99, members, lanes, lanes.elements(mtu), range(first, first + SLOTS // 2), table
            )
            plane.add_job(job)
            for rank, client in enumerate(clients):
                client.start(job, rank, plane.address, segment=segment)
            found[name] = Bench(clients, plane_ns, job)
        yield found


def measure(lanes: LaneType, mtu: int, rate_bps: float, rounds: int, packets: int) -> dict[str, object]:
    numel = packets * lanes.elements(mtu)
    data = np.random.default_rng(0).integers(0, 60, (WORLD, lanes.data_nbytes(numel)), np.uint8)
    if lanes in (LaneType.U16, LaneType.I32):
        data[:, 1::2] = 0  # small numbers: lanes that meet their limit are a fault
    out = np.zeros((WORLD, lanes.result_nbytes(numel)), np.uint8)
    with benches(lanes, mtu, rate_bps) as found:
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        for turn in range(rounds + 1):
            for name, bench in found.items():
                figures = bench.round(data, out, numel)
                if turn:  # the first one warms up
                    taken[name].append(figures)
    rows: dict[str, object] = {}
    for index, what in enumerate(("plane", "all")):
        for name, figures in taken.items():
            rows[f"{what}_ns_per_byte, {name}"] = round(statistics.median(each[index] for each in figures), 3)
        for other in ("user", "user, ranks segment"):
            pairs = zip(taken["kernel"], taken[other], strict=True)
            rows[f"{what}, kernel against {other}"] = round(
                statistics.median(kernel[index] / user[index] for kernel, user in pairs), 3
            )
    return {
        "benchmark": "aggregator cpu",
        "lanes": lanes.name,
        "mtu": mtu,
        "rate_bps": rate_bps,
        "world": WORLD,
        "rounds": rounds,
        **rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--packets", type=int, default=4000, help="of each rank, a round")
    parser.add_argument(
        "--rate", type=float, default=200, help="of every link, in Mbit/s; 0: as fast as it can"
    )
    parser.add_argument("--table", action="store_true", help="a table for people instead of JSON")
    args = parser.parse_args()
    if reason := KernelPlane.missing():
        sys.exit(reason)
    for lanes, mtu in (
        (LaneType.U8, 1500),
        (LaneType.TABLE_U8, 1500),
        (LaneType.I32, 1500),
        (LaneType.I32, 9000),
    ):
        row = measure(lanes, mtu, 1e6 * args.rate, args.rounds, args.packets * 1500 // mtu)
        if args.table:
            print(*(f"{name:<45}{value}" for name, value in row.items()), sep="\n", end="\n\n")
        else:
            print(json.dumps(row | {"host": host_facts()}))


if __name__ == "__main__":
    main()
