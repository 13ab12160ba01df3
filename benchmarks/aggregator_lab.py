"""What adding in the switch gains: four ranks on shaped links, through both planes, against gloo and against one server.

    make bench-aggregator               # or: python benchmarks/aggregator_lab.py --mtu 3500 --rates 200 --json

A star of the lab at 200 and at 500 Mbit/s; the planes run in the switch, the server (the same user-space plane) on a fifth
host with a link like the others'. All are measured in turn, round by round; figures are medians over the rounds, ratios
those of the rounds' own ratios. A time is the slowest rank's, from an instant that all were told beforehand. Every sum is compared
with the right one, bit by bit. Loss is at the ranks' interfaces, each way.

Then small packets: 4-bit indices at MTU 1500, 8 ranks at 64 Mbit/s and 4 at 200, with the slots that `star` asks for. Ranks hand over
runs of packets (UDP_SEGMENT) if the grant lets them; `runs` are ranks that do so whatever it says, as earlier ones did.

CPU time of a plane is counted as in benchmarks/aggregator_cpu.py (`plane`): threads of the user-space plane with their system calls,
the program of the kernel plane and what it hands over; for each byte that a rank sent.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from tacit import lab
from tacit.aggregator import LaneType
from tacit.lab.network.lab import MASTER_PORT, Lab
from tacit.records import host_facts
from tacit.topology import star

NODE = Path(__file__).with_name("aggregator_node.py")
BELOW_NBYTES = 14 + 20 + 8 + 22  # Ethernet, IPv4, UDP, ours
SLOTS = 16  # of 9 kB, two versions each: the second cache holds them
STAR_SLOTS = 64  # what `star` asks for
SERVER_SLOTS = 16  # the server's link has one queue for the packets of all ranks: more would overflow it
LEAD_S = 0.03  # between the order to start and the start
LOSSES = {0.001: 0.95, 0.01: 0.75, 0.05: 0.35}  # share of packets lost each way: goodput that must remain
GOODPUT, GLOO, SERVER, NARROW, CPU = 0.95, 1.45, 3.8, 5.0, 0.7
SMALL = 0.85  # the kernel plane of the user-space plane, elements a second in small packets

Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A network; `small`: for small packets, and measured with 4-bit indices alone."""

    world: int
    rate_bps: float
    mtu: int
    small: bool = False

    def __str__(self) -> str:
        return f"{self.world} ranks, {self.rate_bps / 1e6:g} Mbit/s, MTU {self.mtu}"


SMALL_CASES = (Case(8, 64e6, 1500, small=True), Case(4, 200e6, 1500, small=True))
SMALL_ELEMENTS = {SMALL_CASES[0]: 262_144, SMALL_CASES[1]: 1_703_936}


# ---- nodes


class Node:
    """A process on a host or in the switch that does as it is told."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str], name: str) -> None:
        self._process, self._log, self.name = process, log, name

    def tell(self, do: str, **what: object) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Answer:
        """Its next answer; what gloo prints is none."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        self._log.seek(0)
        sys.exit(f"{self.name} has ended:\n{self._log.read()[-3000:]}")

    def ask(self, do: str, **what: object) -> Answer:
        self.tell(do, **what)
        return self.hear()


@contextmanager
def nodes(network: Lab, case: Case, slots: int = 512) -> Iterator[tuple[list[Node], Node, Node]]:
    """The ranks, the switch, the server. Whatever happens, they end with the lab. `slots`: of each plane."""
    *hosts, last = network.hosts
    switch = network.switches[0]
    ports = [f"port{i}" for i in range(case.world)]
    master = f"tcp://{hosts[0].address}:{MASTER_PORT}"
    with ExitStack() as stack:

        def start(name: str, interface: str, **order: object) -> Node:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            words = [*network.prefix(name), "env", f"GLOO_SOCKET_IFNAME={interface}", "OMP_NUM_THREADS=1"]
            process = subprocess.Popen(
                [*words, sys.executable, str(NODE), json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(_end, process)
            return Node(process, log, name)

        found = [
            start(
                "switch", "lo", role="planes", address=switch.address, ports=ports, mtu=case.mtu, slots=slots
            ),
            start(last.name, "lo", role="planes", address=last.address, ports=[], mtu=case.mtu),
            *(
                start(
                    h.name,
                    h.device,
                    role="rank",
                    rank=i,
                    world=case.world,
                    address=h.address,
                    device=h.device,
                    master=master,
                )
                for i, h in enumerate(hosts)
            ),
        ]
        for node in found:
            node.hear()
        yield found[2:], found[0], found[1]


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe
        pipe.close()


# ---- what is measured


@dataclass
class Work:
    """One thing that is measured: who adds what, on links that lose how much; and what came of it, round by round."""

    by: str  # "user", "kernel": planes in the switch; "server"; "gloo"
    lanes: LaneType
    numel: int
    loss: float = 0.0
    runs: bool = False  # ranks hand over runs of packets, whatever the grant says
    took_s: list[float] = field(default_factory=list)
    ns_per_byte: list[float] = field(default_factory=list)
    again: list[int] = field(default_factory=list)  # packets that the ranks sent again
    exact: bool = True

    @property
    def job(self) -> str:
        return f"{self.by}{' runs' if self.runs else ''} {self.lanes.name}"

    @property
    def rates(self) -> list[float]:
        """Elements a second."""
        return [self.numel / took_s for took_s in self.took_s]

    def against(self, other: "Work") -> float:
        return median(a / b for a, b in zip(self.rates, other.rates, strict=True))


def works(case: Case, seconds: float, planes: Sequence[str]) -> list[Work]:
    """All of it; vectors of one kind take a plane `seconds`, a server on its own link as long for a share of one rank."""
    if case.small:
        numel = SMALL_ELEMENTS[case]
        found = [Work(plane, LaneType.TABLE_U8, numel) for plane in planes]
        return found + [
            Work(plane, LaneType.TABLE_U8, numel, runs=True) for plane in planes if plane == "kernel"
        ]

    def fitting(lanes: LaneType) -> int:
        return int(seconds * case.rate_bps / (8 * lanes.result_nbytes(8) // 8)) // 64 * 64

    wide = fitting(LaneType.I32)
    found = [Work(plane, LaneType.I32, wide) for plane in planes]
    found += [Work("gloo", LaneType.I32, wide), Work("server", LaneType.I32, wide // case.world // 64 * 64)]
    found += [
        Work(plane, lanes, fitting(lanes)) for lanes in (LaneType.U8, LaneType.TABLE_U8) for plane in planes
    ]
    return found + [Work(plane, LaneType.I32, wide, loss) for loss in LOSSES for plane in planes]


def together(ranks: Sequence[Node], do: str, **what: object) -> list[Answer]:
    for rank in ranks:
        rank.tell(do, **what)
    return [rank.hear() for rank in ranks]


def measure(work: Work, ranks: Sequence[Node], switch: Node) -> None:
    """One round of it."""
    before = switch.ask("used_ns")
    what = {"numel": work.numel, "start_s": time.monotonic() + LEAD_S}
    answers = (
        together(ranks, "gloo", **what)
        if work.by == "gloo"
        else together(ranks, "sum", name=work.job, **what)
    )
    after = switch.ask("used_ns")
    work.took_s.append(max(answer["took_s"] for answer in answers))
    work.exact &= all(answer["exact"] for answer in answers)
    if work.by == "gloo":
        return
    work.again.append(sum(answer["repaired"] + answer["timeouts"] for answer in answers))
    if work.by in after:
        sent = sum(answer["nbytes"] for answer in answers)
        work.ns_per_byte.append((after[work.by] - before[work.by]) / sent)


def run(case: Case, args: argparse.Namespace, tell: Callable[[str], None]) -> list[Work]:
    """Everything in one network."""
    rounds = args.rounds
    network = star(case.world + 1, rate_bps=case.rate_bps, latency_s=0.0).with_links(mtu=case.mtu)
    standing = lab.up(network, how="user" if args.unprivileged else None)
    with standing as built, nodes(built, case) as (ranks, switch, server):
        there = switch.ask("where")
        if there["missing"]:
            tell(f"only the user-space plane is measured: {there['missing']}")
        controls = there["controls"] | {"server": server.ask("where")["controls"]["user"]}
        found = works(case, args.seconds, [kind for kind in controls if kind != "server"])
        for work in found:
            together(ranks, "prepare", lanes=work.lanes.name, numel=work.numel)
        for job, work in {work.job: work for work in found if work.by != "gloo"}.items():
            slots = SERVER_SLOTS if work.by == "server" else STAR_SLOTS if case.small else SLOTS
            how = {"lanes": work.lanes.name, "mtu": case.mtu, "slots": slots, "runs": work.runs}
            together(ranks, "join", name=job, control=controls[work.by], **how)
        hurried = built.raise_priority()
        tell(f"{case}: up, ranks before other processes: {'yes' if hurried else 'no'}")
        loss = 0.0
        for turn in range(rounds + 1):
            for work in found:
                if turn == 0 and work.loss:
                    continue  # the first round warms up
                if work.loss != loss:
                    loss = work.loss
                    together([*ranks, switch], "lose", share=loss)
                measure(work, ranks, switch)
            tell(f"{case}: round {turn} of {rounds}")
        for work in found:
            if not work.loss:
                for figures in (work.took_s, work.ns_per_byte, work.again):
                    del figures[:1]
        return found


# ---- what is said


def limit_bps(lanes: LaneType, mtu: int, rate_bps: float) -> float:
    """Payload bits a second that a link carries in full packets."""
    nbytes = lanes.result_nbytes(lanes.elements(mtu))
    return rate_bps * nbytes / (nbytes + BELOW_NBYTES)


def record(work: Work, case: Case) -> dict[str, Any]:
    goodput_bps = 8 * work.lanes.result_nbytes(8) / 8 * median(work.rates)
    found: dict[str, Any] = {
        "benchmark": "aggregator",
        "world": case.world,
        "rate_bps": case.rate_bps,
        "mtu": case.mtu,
        "by": work.by,
        "runs": work.runs,
        "lanes": "FP32" if work.by == "gloo" else work.lanes.name,
        "loss": work.loss,
        "elements": work.numel,
        "took_s": round(median(work.took_s), 5),
        "elements_per_s": round(median(work.rates)),
        "least_elements_per_s": round(min(work.rates)),
        "most_elements_per_s": round(max(work.rates)),
        "goodput_bps": round(goodput_bps),
        "exact": work.exact,
        "rounds": len(work.took_s),
    }
    if work.by != "gloo":
        found["share_of_limit"] = round(goodput_bps / limit_bps(work.lanes, case.mtu, case.rate_bps), 4)
        found["sent_again"] = round(median(work.again))
    if work.ns_per_byte:
        found["cpu_ns_per_byte"] = round(median(work.ns_per_byte), 3)
    return found


def ratios(found: Sequence[Work], case: Case) -> Iterator[tuple[str, float, float | None]]:
    """What was promised: its name, what was measured, the target (None: only told). CPU is to stay below, all others above."""

    def of(by: str, lanes: LaneType = LaneType.I32, loss: float = 0.0, runs: bool = False) -> Work:
        return next(w for w in found if (w.by, w.lanes, w.loss, w.runs) == (by, lanes, loss, runs))

    planes = [by for by in ("user", "kernel") if any(work.by == by for work in found)]
    if case.small:
        if "kernel" in planes:
            user, kernel, runs = (
                of(by, LaneType.TABLE_U8, runs=runs)
                for by, runs in (("user", False), ("kernel", False), ("kernel", True))
            )
            yield "small packets: kernel, against user", kernel.against(user), SMALL
            yield "small packets: kernel with runs, against without", runs.against(kernel), None
        return
    gloo, server = of("gloo"), of("server")
    for by in planes:
        plain = of(by)
        limit = limit_bps(LaneType.I32, case.mtu, case.rate_bps)
        yield f"{by}: goodput, of the link's payload limit", median(plain.rates) * 32 / limit, GOODPUT
        yield f"{by}: against gloo", plain.against(gloo), GLOO
        yield f"{by}: against one server", plain.against(server), SERVER
        yield f"{by}: 8-bit lanes against gloo", of(by, LaneType.U8).against(gloo), NARROW
        yield f"{by}: 4-bit indices against gloo", of(by, LaneType.TABLE_U8).against(gloo), NARROW
        for loss, target in LOSSES.items():
            name = f"{by}: loss of {100 * loss:g} % each way, of no loss"
            yield name, of(by, loss=loss).against(plain), target
    if "kernel" in planes:
        pairs = zip(of("kernel").ns_per_byte, of("user").ns_per_byte, strict=True)
        yield "CPU time a byte, kernel against user", median(a / b for a, b in pairs), CPU


def summary(runs: dict[Case, list[Work]]) -> dict[str, Any]:
    """One record with every ratio, its target, and whether it was reached."""
    found = [
        {
            "world": case.world,
            "rate_bps": case.rate_bps,
            "mtu": case.mtu,
            "ratio": name,
            "measured": round(measured, 3),
            "target": target,
            "reached": target is None or (measured <= target if target == CPU else measured >= target),
        }
        for case, works_ in runs.items()
        for name, measured, target in ratios(works_, case)
    ]
    return {
        "benchmark": "aggregator summary",
        "exact": all(work.exact for works_ in runs.values() for work in works_),
        "reached": all(each["reached"] for each in found),
        "planes": sorted({work.by for works_ in runs.values() for work in works_} & {"user", "kernel"}),
        "ratios": found,
        "host": host_facts(),
    }


def table(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'ranks':>5}{'Mbit/s':>7}{'MTU':>5}  {'by':<13}{'lanes':<9}{'loss %':>6}{'ms':>8}{'M elements/s':>14}"
        f"{'least-most':>14}{'of limit':>9}{'again':>7}{'ns/byte':>8}"
    )
    for row in rows:
        spread = f"{row['least_elements_per_s'] / 1e6:.2f}-{row['most_elements_per_s'] / 1e6:.2f}"
        yield (
            f"{row['world']:>5}{row['rate_bps'] / 1e6:>7g}{row['mtu']:>5}  {row['by'] + (', runs' if row['runs'] else ''):<13}"
            f"{row['lanes']:<9}{100 * row['loss']:>6g}{1e3 * row['took_s']:>8.1f}"
            f"{row['elements_per_s'] / 1e6:>14.2f}{spread:>14}{row.get('share_of_limit', ''):>9}"
            f"{row.get('sent_again', ''):>7}{row.get('cpu_ns_per_byte', ''):>8}{'' if row['exact'] else '  WRONG SUM'}"
        )
    yield ""
    for each in found["ratios"]:
        sign = "<=" if each["target"] == CPU else ">="
        verdict = "reached" if each["reached"] else "MISSED"
        goal = f"{sign} {each['target']:<5g} {verdict}" if each["target"] is not None else ""
        yield (
            f"{each['world']:>5}{each['rate_bps'] / 1e6:>7g}{each['mtu']:>5}  {each['ratio']:<50}{each['measured']:>8.3f}  {goal}"
        )
    yield f"every sum exact: {'yes' if found['exact'] else 'NO'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[200, 500], help="of every link, in Mbit/s")
    parser.add_argument(
        "--mtu", type=int, default=9000, help="of every link; gloo has the same (1500, 3500, 9000)"
    )
    parser.add_argument("--only-small", action="store_true", help="small packets alone: half a minute")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="that a vector takes a plane, about")
    parser.add_argument(
        "--unprivileged", action="store_true", help="in user namespaces, as for whoever is not root"
    )
    parser.add_argument("--json", action="store_true", help="one record a line, the last one a summary")
    args = parser.parse_args()

    def tell(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    cases = [] if args.only_small else [Case(4, 1e6 * rate, args.mtu) for rate in args.rates]
    runs = {case: run(case, args, tell) for case in (*cases, *SMALL_CASES)}
    rows = [record(work, case) for case, found in runs.items() for work in found]
    found = summary(runs)
    for line in (json.dumps(row) for row in (*rows, found)) if args.json else table(rows, found):
        print(line)
    if not found["exact"]:
        sys.exit("a sum was wrong")


if __name__ == "__main__":
    main()
