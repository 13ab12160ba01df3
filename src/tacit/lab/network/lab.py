"""A network from namespaces, for as long as a `with` runs.

with lab.up(star(4, rate_bps=100e6)) as hosts:
    hosts.command("h0", ["ping", "-c1", hosts["h1"].address])
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tacit.errors import did_you_mean
from tacit.lab.errors import LabError, NoNamespacesError
from tacit.lab.network import exec_in_host, lab_list
from tacit.lab.network.keeper import How, KeeperSpec, Ready
from tacit.lab.network.plan import ADDED_DELAY_S, NetworkPlan, at_rate, plan
from tacit.launch import RankSpec
from tacit.topology import Network
from tacit.units import time_text

END_S = 10.0
MASTER_PORT = 29500  # in namespaces of their own, hosts have all ports free

# Not -m: what it sends must be of tacit.lab.network.keeper's classes, not of __main__'s.
_KEEPER = "from tacit.lab.network.keeper import main; main()"

Counters = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True, slots=True)
class Host:
    """A host or a switch: its address, and the interface that holds it. A switch is known to the hosts at its ports."""

    name: str
    address: str
    device: str


class Lab:
    """A network that is up. `how` is "root", "user" (user namespaces), or "unshaped": loopback, nothing limited."""

    def __init__(
        self,
        network: Network,
        built: NetworkPlan,
        how: str,
        init: int = 0,
        connection: Connection | None = None,
    ) -> None:
        self.network = self._first = network
        self.plan = built
        self.how = how
        self.init = init
        self._connection = connection
        self.hosts = tuple(
            Host(host.name, host.address, host.device) if connection else Host(host.name, "127.0.0.1", "lo")
            for host in built.hosts
        )
        self.switches = tuple(Host(switch.name, switch.address, "bridge") for switch in built.switches)

    @property
    def shaped(self) -> bool:
        return self.how != "unshaped"

    @property
    def rate_bps(self) -> float:
        """Of the slowest link."""
        return min((cable.shaper.rate_bps for cable in self.plan.cables), default=0.0)

    def __getitem__(self, name: str) -> Host:
        for host in (*self.hosts, *self.switches):
            if host.name == name:
                return host
        raise LabError(unknown_host(name, [host.name for host in self.hosts]))

    def command(
        self, host: str, arguments: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Runs a command on a host, or in a switch, to its end, as `subprocess.run` does."""
        return subprocess.run([*self.prefix(host), *arguments], **options)

    def rank_specs(self, ranks_per_host: int = 1, *, realtime: bool = False) -> list[RankSpec]:
        """Where each rank runs, for `launch.run`: hosts in order, `ranks_per_host` on each.

        Where there are cores for all, each rank has its own; on fewer the kernel moves them about. `realtime` puts a
        rank before all ordinary processes from its start, where this user may; `raise_priority` does it later.
        """
        ranks = len(self.hosts) * ranks_per_host
        return [self._rank_spec(rank, ranks, ranks_per_host, realtime) for rank in range(ranks)]

    def prefix(self, name: str, *, realtime: bool = False) -> tuple[str, ...]:
        """The arguments that, put before a command, run it on a host or in a switch."""
        self._no_loopback("a command on a host")
        return exec_in_host.prefix(self.init, self[name].name, realtime=realtime)

    def raise_priority(self) -> bool:
        """Every process and thread in the lab goes before all ordinary ones of this machine; False where not allowed.

        For ranks once they have imported what they need: their times are then their own on a shared machine.
        """
        try:
            for thread in _threads_in(self.init) if self.shaped else ():
                with suppress(ProcessLookupError):
                    os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(exec_in_host.REALTIME))
        except PermissionError:
            return False
        return self.shaped

    def counters(self) -> Counters:
        """By node and device, since the lab came up; read in its namespaces.

        `tx_nbytes`, `rx_nbytes`, `..._packets` are the interface's own: one header a packet, and a packet is what the
        kernel hands down, up to gso_max_size. `qdisc_nbytes`, `qdisc_packets` are the shaper's: a header a segment, as
        on a real wire; `qdisc_drops` did not fit its queue.
        """
        return {} if self._connection is None else self._ask("counters")

    def reshape(self, network: Network) -> None:
        """The same hosts, switches and links with other rates, while everything runs; for connections made from now on."""
        built = plan(network)
        same = [
            (a.a, a.b, a.mtu, a.loss, a.shaper.delay_s) == (b.a, b.b, b.mtu, b.loss, b.shaper.delay_s)
            for a, b in zip(built.cables, self.plan.cables, strict=False)
        ]
        if built.hosts != self.plan.hosts or built.switches != self.plan.switches or not all(same):
            raise LabError(
                f"{network} differs from {self.network} in more than rates; leave this lab and bring up another"
            )
        if self._connection is not None:
            self._ask("reshape", built)
        self.network, self.plan = network, built

    def set_rate(self, rate_bps: float | None) -> None:
        """Every link at one rate; None: the network as it was built."""
        self.reshape(self._first if rate_bps is None else at_rate(self._first, rate_bps))

    def facts(self) -> dict[str, Any]:
        """What was built, for a record: how, and each link with its shaper."""
        return {
            "text": str(self.network),
            "label": str(self.network) if self.shaped else "loopback",
            "how": self.how,
            "shaped": self.shaped,
            "hosts": len(self.hosts),
            "host_names": [host.name for host in self.hosts],
            "gso_nbytes": self.plan.gso_nbytes,
            "links": [
                {
                    "a": cable.a.node,
                    "b": cable.b.node,
                    "rate_bps": cable.shaper.rate_bps,
                    "burst_nbytes": cable.shaper.burst_nbytes,
                    "queue_nbytes": cable.shaper.queue_nbytes,
                    "added_delay_s": cable.shaper.delay_s,
                    "mtu": cable.mtu,
                    "loss": cable.loss,
                }
                for cable in self.plan.cables
            ]
            if self.shaped
            else [],
        }

    def _rank_spec(self, rank: int, ranks: int, per_host: int, realtime: bool) -> RankSpec:
        host = self.hosts[rank // per_host]
        env = {
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "GLOO_SOCKET_IFNAME": host.device,
        }
        if not self.shaped:
            return RankSpec((), env)
        env |= {"MASTER_ADDR": self.hosts[0].address, "MASTER_PORT": str(MASTER_PORT)}
        cores = cores_of(rank, ranks)
        return RankSpec(exec_in_host.prefix(self.init, host.name, cores=cores, realtime=realtime), env)

    def _ask(self, *request: object) -> Any:
        self._no_loopback("this")
        assert self._connection is not None
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, OSError) as cause:
            raise LabError("the lab has gone: its keeper was ended from outside") from cause
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _no_loopback(self, what: str) -> None:
        if not self.shaped:
            raise LabError(f"{what} needs namespaces, and this run is on loopback (unshaped)")


@contextmanager
def up(
    network: Network, *, how: How | None = None, fallback: bool = False, folder: Path | None = None
) -> Iterator[Lab]:
    """The network, built; taken down on any exit, the end of this process by SIGKILL included.

    Root builds it as root, others in a user namespace; `how` insists on one. Where neither is allowed this raises
    `NoNamespacesError`, or with `fallback` gives loopback, which limits nothing (`lab.how == "unshaped"`).
    """
    built = plan(network)
    folder = lab_list.prepare(folder or lab_list.default_folder())
    _check_kernel(network, built, how)
    with ExitStack() as stack:
        try:
            connection, ready = stack.enter_context(_keeper(built, how, folder, str(network)))
        except NoNamespacesError:
            if not fallback:
                raise
            yield Lab(network, built, "unshaped")
            return
        answer = _received(connection)
        if isinstance(answer, Exception):
            raise answer
        yield Lab(network, built, ready.how, ready.init, connection)


def kernel_features(how: How | None = None) -> dict[str, str]:
    """What the kernel can do for a lab, tried in a throw-away one: by name an empty text, or why not."""
    with _keeper(None, how) as (connection, _):
        answer = _received(connection)
        if isinstance(answer, Exception):
            raise answer
        found: dict[str, str] = answer
        return found


def cores_of(rank: int, ranks: int) -> tuple[int, ...]:
    """The cores of a rank: its even share of those this process may use; none named if there are fewer than ranks.

    Two ranks pinned to one of two cores would wait for each other while the other core is idle.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks
    return tuple(cores[rank * share : (rank + 1) * share])


def _threads_in(init: int) -> Iterator[int]:
    """Every thread in the PID namespace whose process 1 is `init`, without `init` itself."""
    namespace = Path(f"/proc/{init}/ns/pid").stat().st_ino
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or another user's
            if (process / "ns/pid").stat().st_ino == namespace and process.name != str(init):
                yield from [int(task.name) for task in (process / "task").iterdir()]


def unknown_host(name: str, hosts: Sequence[str]) -> str:
    """The sentence about a host that is not there."""
    hint = did_you_mean(name, hosts).strip() or f"its hosts are {', '.join(hosts)}"
    return f"the lab has no host {name!r}; {hint}"


def _check_kernel(network: Network, built: NetworkPlan, how: How | None) -> None:
    """Refuses before anything is built what this kernel was seen not to have."""
    if not built.needs:
        return
    try:
        found = kernel_features(how)
    except NoNamespacesError:
        return  # up() raises it
    if "netem" in built.needs and found["netem"]:
        late = max(cable.shaper.delay_s for cable in built.cables)
        raise LabError(
            f"{network} asks for a delay of {time_text(late)}, and this kernel has no netem ({found['netem']}); "
            f"set latency below {time_text(ADDED_DELAY_S)} (nothing is added then), or use a kernel with sch_netem"
        )
    if "nft" in built.needs and found["nft"]:
        raise LabError(
            f"{network} asks for packet loss, and this kernel has no nft numgen ({found['nft']}); "
            f"set loss to 0, or use a kernel with nf_tables"
        )


@contextmanager
def _keeper(
    built: NetworkPlan | None, how: How | None, folder: Path | None = None, name: str = ""
) -> Iterator[tuple[Connection, Ready]]:
    here, there = socket.socketpair()
    with here, there:
        hosts = tuple(host.name for host in built.hosts) if built else ()
        spec = KeeperSpec(there.fileno(), os.getpid(), how, str(folder), name, hosts)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _KEEPER, json.dumps(asdict(spec))],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is the caller's
        )
        there.close()
        connection: Connection = Connection(here.detach())
        try:
            answer = _received(connection)
            if isinstance(answer, Exception):
                raise answer
            connection.send(built)
            yield connection, answer
        finally:
            connection.close()  # process 1 of the lab ends, and all others with it
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError) as cause:
        raise LabError("the lab's keeper ended before the network was up") from cause
