"""What runs on a node of `benchmarks/aggregator_lab.py`: a rank on a host, or planes in the switch or on a server's host.

Orders come in, answers go out, one JSON object a line. The nodes share the machine's clock, so an order says when to start.
"""

import json
import os
import sys
import time
import zlib
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from aggregator_cpu import kernel_plane_ns, user_plane_ns
from numpy.typing import NDArray
from pyroute2 import IPRoute
from pyroute2.netlink.nfnetlink.nftsocket import NFT_MSG_NEWCHAIN, nft_chain_msg
from pyroute2.nftables.expressions import genex, verdict

from tacit.aggregator import LaneType, UserPlane
from tacit.aggregator.client.host_stack import Client, SumOutcome
from tacit.aggregator.client.membership import Membership, Terms
from tacit.aggregator.control.server import ControlServer
from tacit.aggregator.planes import bpf
from tacit.aggregator.planes.kernel_plane import KernelPlane
from tacit.lab.network.wiring import _nft, _one_in
from tacit.schemes import presence

SECRET = "benchmark"
PLANE_SLOTS = 512
MOST_SLOTS = 1 << 14
MTU = 1500  # of lossy jobs
GROUP_S = timedelta(seconds=60)
PATIENCE_S = 10.0
WAYS = {"down": 0, "up": 1}  # nft's hooks at a rank's interface: what arrives, what leaves
LOSSY_GSO_NBYTES = 2900  # one packet a message, so that a lost message is a lost packet (as the lab does)

Numbers = NDArray[Any]


# ---- planes


class Planes:
    """A user-space plane, and where `ports` are named a kernel plane on them, each with its control."""

    def __init__(self, address: str, ports: list[str], mtu: int, slots: int = PLANE_SLOTS) -> None:
        self._stack = ExitStack()
        self._ports, self._gso_nbytes = ports, 0
        self.planes: dict[str, UserPlane | KernelPlane] = {
            "user": self._stack.enter_context(UserPlane((address, 0), slots=slots))
        }
        self.missing = KernelPlane.missing() if ports else ""
        if ports and not self.missing:
            self._stack.enter_context(_bpf_statistics())
            self.planes["kernel"] = self._stack.enter_context(
                KernelPlane((address, 0), ports, slots=slots, mtu=mtu)
            )
        self._controls = {
            kind: self._stack.enter_context(ControlServer(plane, (address, 0), [SECRET], kind=kind))
            for kind, plane in self.planes.items()
        }

    def where(self) -> dict[str, Any]:
        """The controls' addresses, by kind of plane; and why there is no kernel plane, if so."""
        controls = {kind: control.address for kind, control in self._controls.items()}
        return {"controls": controls, "missing": self.missing}

    def used_ns(self) -> dict[str, Any]:
        """CPU time that each plane has used, as benchmarks/aggregator_cpu.py counts it."""
        used = {"user": user_plane_ns()}
        if isinstance(kernel := self.planes.get("kernel"), KernelPlane):
            used["kernel"] = kernel_plane_ns(kernel)
        return used

    def lose(self, share: float) -> dict[str, Any]:
        """Ranks lose packets, not runs of packets that nobody has cut yet."""
        with IPRoute() as netlink:
            for port in self._ports:
                index = netlink.link_lookup(ifname=port)[0]
                self._gso_nbytes = self._gso_nbytes or netlink.get_links(index)[0].get_attr(
                    "IFLA_GSO_MAX_SIZE"
                )
                netlink.link("set", index=index, gso_max_size=LOSSY_GSO_NBYTES if share else self._gso_nbytes)
        return {}

    def close(self) -> None:
        self._stack.close()


def _bpf_statistics() -> ExitStack:
    """The kernel measures its programs for as long as this is open."""
    fd = bpf.library().bpf_enable_stats(0)
    stack = ExitStack()
    stack.callback(os.close, fd)
    return stack


# ---- ranks


class Rank:
    """One rank of every job, and of a gloo group."""

    def __init__(self, rank: int, world: int, address: str, device: str, master: str) -> None:
        self.rank, self.world, self._address = rank, world, address
        self._device, self._lossy = device, False
        self._stack = ExitStack()
        self._jobs: dict[str, tuple[Client, LaneType]] = {}
        self._out: dict[
            tuple[str, int], Numbers
        ] = {}  # as in training, memory that has been written to before
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=master, rank=rank, world_size=world, timeout=GROUP_S)
        self._stack.callback(dist.destroy_process_group)

    def join(
        self,
        name: str,
        control: tuple[str, int],
        lanes: str,
        mtu: int,
        slots: int,
        runs: bool,
        deadline_ms: int = 0,
    ) -> dict[str, Any]:
        """Is a rank of this job from now on. `runs`: it hands over runs of packets, whatever the grant says. `deadline_ms`: the job is
        lossy, and takes all slots that it gets."""
        kind = LaneType[lanes]
        client = self._stack.enter_context(Client((self._address, 0)))
        table = _table(self.world) if kind.indexed else (0,) * 16
        wish = MOST_SLOTS if deadline_ms else slots
        terms = Terms(name, self.world, kind, kind.elements(mtu), wish, table, deadline_ms=deadline_ms)
        where = (control[0], control[1])
        member = self._stack.enter_context(Membership(where, SECRET, terms, self.rank, client.port))
        client.start(member.job, self.rank, member.plane, segment=runs or member.segment, window=slots)
        self._jobs[name] = client, kind
        return {"slots": len(member.job.slots)}

    def prepare(self, lanes: str, numel: int) -> dict[str, Any]:
        """Makes what will be summed up, before time counts."""
        _vector(lanes, numel, self.rank, self.world)
        return {}

    def sum(self, name: str, numel: int, start_s: float) -> dict[str, Any]:
        """One vector through a plane."""
        client, lanes = self._jobs[name]
        data, expected = _vector(lanes.name, numel, self.rank, self.world)
        out = self._out.setdefault((lanes.name, numel), np.empty(lanes.result_nbytes(numel), np.uint8))
        out.fill(0xFF)  # no sum of an earlier round
        before = client.stats
        _sleep_until(start_s)
        outcome = client.reduce(data, out, numel, patience_s=PATIENCE_S)
        took_s = time.monotonic() - start_s
        after = client.stats
        return {
            "took_s": took_s,
            "exact": outcome is SumOutcome.DONE and np.array_equal(out.view(lanes.dtype), expected),
            "nbytes": data.nbytes,
            "repaired": after.repaired - before.repaired,
            "timeouts": after.timeouts - before.timeouts,
            "late": after.late - before.late,
            "round_trip_s": after.round_trip_s,
            "timeout_s": after.timeout_s,
        }

    def lossy(self, name: str, numel: int, start_s: float) -> dict[str, Any]:
        """The same through a lossy job: which sum came, and whether it is that of the ranks that it says are in it."""
        client, _ = self._jobs[name]
        vectors = [_floats(numel, rank) for rank in range(self.world)]
        own = _framed(numel, self.rank)
        out = self._out.setdefault((name, numel), np.empty(own.nbytes, np.uint8))
        before = client.stats
        _sleep_until(start_s)
        outcome = client.reduce(
            own.view(torch.uint8).view(-1).numpy(), out, own.numel(), patience_s=PATIENCE_S
        )
        took_s = time.monotonic() - start_s
        after = client.stats
        total = torch.from_numpy(out).view(torch.float32).view(own.shape)
        found = presence.read(total.clone(), vectors[self.rank], self.world, self.rank)
        expected = sum(_framed(numel, rank) * found.present[:, rank, None] for rank in range(self.world))
        return {
            "took_s": took_s,
            "exact": outcome is SumOutcome.DONE and torch.equal(total, expected),
            "crc": zlib.crc32(out),
            "left_out": int((~found.present).sum()),
            "parts": found.present.numel(),
            "repaired": after.repaired - before.repaired,
            "timeouts": after.timeouts - before.timeouts,
        }

    def steps(
        self,
        name: str,
        numel: int,
        steps: int,
        compute_s: float,
        late: int,
        every: int,
        pause_s: float,
        start_s: float,
    ) -> dict[str, Any]:
        """Steps that compute (sleep) and sum; rank `late` pauses before each `every`-th. In a lossy job, a rank that finds the
        others in its next step takes what they have closed, and computes nothing."""
        client, lanes = self._jobs[name]
        floats = lanes is LaneType.F32
        if floats:
            framed = _framed(numel, self.rank)
            data, count = framed.view(torch.uint8).view(-1).numpy(), framed.numel()
        else:
            data, count = _vector(lanes.name, numel, self.rank, self.world)[0], numel
        out = np.empty(lanes.result_nbytes(8) * count // 8, np.uint8)
        step_s, skipped, crc, left_out = list[float](), 0, 0, 0
        _sleep_until(start_s)
        for step in range(steps):
            began_s = time.monotonic()
            if self.rank == late and step % every == every // 2:
                time.sleep(pause_s)
            if floats and client.ahead:
                skipped += 1
            else:
                time.sleep(compute_s)
            outcome = client.reduce(data, out, count, patience_s=PATIENCE_S)
            assert outcome is SumOutcome.DONE
            step_s.append(time.monotonic() - began_s)
            crc = zlib.crc32(out, crc)
            if floats:
                left_out += int((client.counts < self.world).sum())
        return {"step_s": step_s, "skipped": skipped, "crc": crc, "partial": left_out}

    def gloo(self, numel: int, start_s: float) -> dict[str, Any]:
        """The same numbers as float32, all-reduced: whole ones below 2^24, so that any order gives the same sum."""
        data, expected = _vector("I32", numel, self.rank, self.world)
        x = torch.from_numpy(data.view(np.int32).astype(np.float32))
        _sleep_until(start_s)
        dist.all_reduce(x)
        took_s = time.monotonic() - start_s
        return {"took_s": took_s, "exact": np.array_equal(x.numpy(), expected), "nbytes": 4 * numel}

    def lose(self, share: float) -> dict[str, Any]:
        """From now on a share of packets each way is lost at this rank's interface; 0: none."""
        with _nft() as nft:
            nft.begin()
            if self._lossy:
                nft.table("del", name="loss")
            if share:
                nft.table("add", name="loss")
            for way, hook in WAYS.items() if share else ():
                at = {"attrs": [("NFTA_HOOK_HOOKNUM", hook), ("NFTA_HOOK_PRIORITY", 0), ("NFTA_HOOK_DEV", self._device)]}  # fmt: skip
                chain = {"table": "loss", "name": way, "type": "filter", "hook": at}
                nft._command(nft_chain_msg, {"add": NFT_MSG_NEWCHAIN}, "add", chain)
                drop = (_one_in(share), [genex("counter", {})], verdict(code=0))
                nft.rule("add", table="loss", chain=way, expressions=drop)
            nft.commit()
        self._lossy = bool(share)
        return {}

    def close(self) -> None:
        self._stack.close()


@cache
def _vector(lanes: str, numel: int, rank: int, world: int) -> tuple[Numbers, Numbers]:
    """A rank's bytes, and the numbers that the sum of all ranks' must have."""
    kind, numbers, own, total = LaneType[lanes], np.random.default_rng(numel), None, None
    table = np.array(_table(world), np.uint8)
    for each in range(world):
        if kind is LaneType.I32:
            added = numbers.integers(-(2**22), 2**22, numel, np.int32)
            data = added.view(np.uint8)
        elif kind is LaneType.U8:
            added = data = numbers.integers(0, 256 // world, numel, np.uint8)
        else:
            data = numbers.integers(0, 256, kind.data_nbytes(numel), np.uint8)
            added = np.stack([table[data & 15], table[data >> 4]], axis=1).reshape(-1)
        own = data if each == rank else own
        total = added.copy() if total is None else np.add(total, added, out=total)
    assert own is not None
    assert total is not None
    return own, total


@cache
def _floats(numel: int, rank: int) -> torch.Tensor:
    """Whole numbers, so that any order of any ranks gives the same sum."""
    return torch.randint(-(2**16), 2**16, (numel,), generator=torch.Generator().manual_seed(rank)).float()


@cache
def _framed(numel: int, rank: int) -> torch.Tensor:
    return presence.framed(_floats(numel, rank), LaneType.F32.elements(MTU), rank)


def _table(world: int) -> tuple[int, ...]:
    """Whose sums over all ranks stay below a lane's limit."""
    step = 16 // world
    return tuple(range(0, 16 * step, step))


def _sleep_until(start_s: float) -> None:
    time.sleep(max(0.0, start_s - time.monotonic()))


def main() -> None:
    """Builds what the arguments say, then does as it is told until nobody tells it anything more."""
    order = json.loads(sys.argv[1])
    node = {"planes": Planes, "rank": Rank}[order.pop("role")](**order)
    _say({"ready": True})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            _say(getattr(node, request.pop("do"))(**request))
    finally:
        node.close()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
