"""A plan made real over netlink, inside the keeper's namespaces. The only file that knows pyroute2.

A namespace is entered, its netlink socket opened, and left again: the socket stays in it. One thread, so this is safe.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tacit.extras import extra
from tacit.lab.errors import LabError
from tacit.lab.network import namespaces
from tacit.lab.network.plan import (
    LEAST_WINDOW_NBYTES,
    TCP_WMEM_NBYTES,
    Cable,
    HostPlan,
    NetworkPlan,
    Port,
    Shaper,
    SwitchPlan,
)

with extra("lab"):
    from pyroute2 import IPRoute, NetlinkError
    from pyroute2.netlink import nla
    from pyroute2.netlink.nfnetlink.nftsocket import NFT_MSG_NEWCHAIN, nft_chain_msg
    from pyroute2.netlink.rtnl.tcmsg import plugins, sched_template
    from pyroute2.nftables.expressions import genex, verdict
    from pyroute2.nftables.main import NFTables

_ROOT, _CLASS, _LEAF = 0x10000, 0x10010, 0x100000
_NETDEV, _INGRESS = 5, 0  # nft's family and hook of what arrives at one device
_LOSS_UNIT = 1_000_000
_STATIC = 0x40  # NUD_NOARP: known for good (NUD_PERMANENT would mean the bridge itself)
_MASTER = 0x04  # NTF_MASTER


class _FifoOptions(nla):  # type: ignore[misc]
    fields = (("limit", "I"),)


# pyroute2 has no bfifo of its own: its options are one number, the queue's bytes.
plugins["bfifo"] = SimpleNamespace(
    options=_FifoOptions,
    parent=sched_template.parent,
    get_parameters=lambda given: {"limit": given["limit"]},
    stats=sched_template.stats,
    stats2=sched_template.stats2,
)


class Wiring:
    """The namespaces of one lab, by node, and the netlink sockets in them."""

    def __init__(self) -> None:
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._namespaces: dict[str, int] = {}
        self._netlink: dict[str, IPRoute] = {}
        self._index: dict[tuple[str, str], int] = {}
        self._cables: tuple[Cable, ...] = ()

    def build(self, plan: NetworkPlan) -> None:
        """Everything, in the order in which it depends on each other."""
        for name in [node.name for node in plan.hosts] + [node.name for node in plan.switches]:
            self._new_namespace(name, plan.window_nbytes)
        for switch in plan.switches:
            self._add_bridge(switch.name, "bridge", address=switch.mac)
        for cable in plan.cables:
            self._add_cable(cable, plan)
        for switch in plan.switches:
            self._fill_table(switch)
        for host in plan.hosts:
            self._address(host)
        self._cables = plan.cables

    def reshape(self, plan: NetworkPlan) -> None:
        """The same cables with other shapers, without taking the network down."""
        for host in plan.hosts:
            with self._inside(host.name):
                _limit_window(plan.window_nbytes)
        for cable in plan.cables:
            for port in (cable.a, cable.b):
                self._set(port, gso_max_size=plan.gso_nbytes)
                self._shape(port, cable.shaper, "change")
        self._cables = plan.cables

    def counters(self) -> dict[str, dict[str, dict[str, int]]]:
        """By node and device: what the interface counted, and what its shaper did."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for cable in self._cables:
            for port in (cable.a, cable.b):
                found.setdefault(port.node, {})[port.device] = self._count(port)
        return found

    # ---- one namespace ----

    def _new_namespace(self, name: str, window_nbytes: int) -> None:
        try:
            namespaces.unshare(namespaces.NEWNET)
            namespaces.name_this_network(name)
            self._namespaces[name] = os.open(namespaces.NAMES / name, os.O_RDONLY | os.O_CLOEXEC)
            self._netlink[name] = IPRoute()
            for file, value in _SYSCTLS.items():
                _write(Path("/proc/sys/net") / file, value)
            _limit_window(window_nbytes)
        finally:
            namespaces.setns(self._home, namespaces.NEWNET)
        self._netlink[name].link("set", index=1, state="up")

    @contextmanager
    def _inside(self, node: str) -> Iterator[None]:
        namespaces.setns(self._namespaces[node], namespaces.NEWNET)
        try:
            yield
        finally:
            namespaces.setns(self._home, namespaces.NEWNET)

    def _lookup(self, node: str, device: str) -> int:
        if (node, device) not in self._index:
            self._index[node, device] = self._netlink[node].link_lookup(ifname=device)[0]
        return self._index[node, device]

    def _set(self, port: Port, **what: Any) -> None:
        self._netlink[port.node].link("set", index=self._lookup(port.node, port.device), **what)

    # ---- links ----

    def _add_bridge(self, node: str, device: str, **more: Any) -> None:
        self._netlink[node].link("add", ifname=device, kind="bridge", br_mcast_snooping=0, **more)
        self._netlink[node].link("set", index=self._lookup(node, device), state="up")

    def _add_cable(self, cable: Cable, plan: NetworkPlan) -> None:
        a, b = cable.a, cable.b
        with _named_errors(f"the veth pair {a.node} - {b.node}"):
            self._netlink[a.node].link(
                "add",
                kind="veth",
                ifname=a.device,
                address=a.mac,
                mtu=cable.mtu,
                peer={
                    "ifname": b.device,
                    "net_ns_fd": self._namespaces[b.node],
                    "address": b.mac,
                    "mtu": cable.mtu,
                },
            )
        for port in (a, b):
            self._set(port, gso_max_size=plan.gso_nbytes)
            if any(switch.name == port.node for switch in plan.switches):
                self._set(port, master=self._lookup(port.node, "bridge"))
            self._set(port, state="up")
            self._shape(port, cable.shaper, "add")
            if cable.loss:
                self._lose(port, cable.loss)

    def _fill_table(self, switch: SwitchPlan) -> None:
        netlink = self._netlink[switch.name]
        for device in {device for device, _ in switch.table}:
            netlink.brport(
                "set",
                index=self._lookup(switch.name, device),
                learning=0,
                unicast_flood=0,
                mcast_flood=0,
                bcast_flood=0,
            )
        for device, mac in switch.table:
            device_index = self._lookup(switch.name, device)
            netlink.fdb("append", ifindex=device_index, lladdr=mac, state=_STATIC, flags=_MASTER)

        bridge = self._lookup(switch.name, "bridge")
        netlink.addr("add", index=bridge, address=switch.address, prefixlen=32)
        for address, mac in switch.hosts:
            netlink.neigh("replace", dst=address, lladdr=mac, ifindex=bridge)
            netlink.route("add", dst=f"{address}/32", oif=bridge, prefsrc=switch.address, scope="link")

    def _address(self, host: HostPlan) -> None:
        netlink = self._netlink[host.name]
        if host.device == "net0":  # several links, or none: the address is on a device of its own
            self._add_bridge(host.name, "net0")
            with self._inside(host.name):
                _write(Path("/proc/sys/net/ipv4/ip_forward"), "1")
        netlink.addr("add", index=self._lookup(host.name, host.device), address=host.address, prefixlen=32)
        for route in (*host.routes, *host.switches):
            device = self._lookup(host.name, route.device)
            netlink.neigh("replace", dst=route.next_address, lladdr=route.mac, ifindex=device)
        for route in (*host.routes, *host.switches):
            direct = route.next_address == route.address
            netlink.route(
                "add",
                dst=f"{route.address}/32",
                oif=self._lookup(host.name, route.device),
                prefsrc=host.address,
                # by route, because the sysctl is root's; bbr is slower and less steady
                metrics={"cc_algo": "cubic"} | ({"mtu": route.mtu} if route.mtu else {}),
                **({"scope": "link"} if direct else {"gateway": route.next_address, "flags": ["onlink"]}),
            )

    # ---- shaping and losing ----

    def _shape(self, port: Port, shaper: Shaper, verb: str) -> None:
        """htb for the rate, behind it a queue of bytes, or netem where the link delays."""
        tc, device = self._netlink[port.node].tc, self._lookup(port.node, port.device)
        quantum = max(1514, min(shaper.gso_nbytes, 60_000))
        with _named_errors(f"the htb shaper of {port.node}'s {port.device}"):
            if verb == "add":
                tc("add", "htb", device, _ROOT, default=_CLASS & 0xFFFF)
            tc(
                f"{verb}-class", "htb", device, _CLASS, parent=_ROOT, rate=round(shaper.rate_bps / 8),
                burst=shaper.burst_nbytes, cburst=shaper.burst_nbytes, quantum=quantum,
            )  # fmt: skip
        if not shaper.delay_s:
            tc(verb, "bfifo", device, _LEAF, parent=_CLASS, limit=shaper.queue_nbytes)
            return
        waiting = shaper.queue_nbytes + shaper.rate_bps / 8 * shaper.delay_s  # queued, and on the way
        with _named_errors("a delay (netem)"):
            tc(
                verb, "netem", device, _LEAF, parent=_CLASS, delay=round(shaper.delay_s * 1e6),
                limit=max(1000, round(waiting / 1514)),
            )  # fmt: skip

    def _lose(self, port: Port, loss: float) -> None:
        """Drops arriving packets at random, after they have had their time on the link."""
        with self._inside(port.node), _named_errors("packet loss (nft numgen)"), _nft() as nft:
            nft.begin()
            nft.table("add", name="loss")
            hook = [
                ("NFTA_HOOK_HOOKNUM", _INGRESS),
                ("NFTA_HOOK_PRIORITY", 0),
                ("NFTA_HOOK_DEV", port.device),
            ]
            chain = {"table": "loss", "name": port.device, "type": "filter", "hook": {"attrs": hook}}
            nft._command(nft_chain_msg, {"add": NFT_MSG_NEWCHAIN}, "add", chain)
            nft.rule(
                "add",
                table="loss",
                chain=port.device,
                expressions=(_one_in(loss), [genex("counter", {})], verdict(code=0)),
            )
            nft.commit()

    def _count(self, port: Port) -> dict[str, int]:
        netlink, device = self._netlink[port.node], self._lookup(port.node, port.device)
        stats = netlink.get_links(device)[0].get_attr("IFLA_STATS64")
        found = {
            f"{way}_{name}": int(stats[f"{way}_{kernel}"])
            for way in ("rx", "tx")
            for name, kernel in (("nbytes", "bytes"), ("packets", "packets"))
        }
        htb = next(q for q in netlink.get_qdiscs(index=device) if q.get_attr("TCA_KIND") == "htb")
        stats2 = htb.get_attr("TCA_STATS2")
        basic, queue = stats2.get_attr("TCA_STATS_BASIC"), stats2.get_attr("TCA_STATS_QUEUE")
        return found | {
            "qdisc_nbytes": int(basic["bytes"]),
            "qdisc_packets": int(basic["packets"]),
            "qdisc_drops": int(queue["drops"]),
        }


_SYSCTLS = {
    "ipv6/conf/all/disable_ipv6": "1",  # no router solicitations among the bytes that are counted
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    "ipv4/tcp_wmem": f"4096 65536 {TCP_WMEM_NBYTES}",
    "ipv4/tcp_no_metrics_save": "1",  # a run does not learn from the one before
    "ipv4/ping_group_range": "0 0",
}


def _limit_window(nbytes: int) -> None:
    """For sockets opened from now on in this network namespace; the window is half of a receive buffer."""
    _write(Path("/proc/sys/net/ipv4/tcp_rmem"), f"4096 {min(131072, 2 * nbytes)} {2 * nbytes}")


def _write(path: Path, value: str) -> None:
    if path.exists():  # a kernel without IPv6 has nothing to switch off
        path.write_text(value)


@contextmanager
def _nft() -> Iterator[Any]:
    nft = NFTables(nfgen_family=_NETDEV)
    try:
        yield nft
    finally:
        nft.close()


def _one_in(loss: float) -> list[Any]:
    """Goes on for a share of `loss` of the packets: a random number below a million, compared."""
    limit = round(loss * _LOSS_UNIT).to_bytes(4, "big")
    number = {"dreg": 1, "modulus": _LOSS_UNIT, "type": 1, "offset": 0}
    return [
        {
            "attrs": [
                ("NFTA_EXPR_NAME", "numgen"),
                ("NFTA_EXPR_DATA", {"attrs": [(f"NFTA_NG_{k.upper()}", v) for k, v in number.items()]}),
            ]
        },
        genex("byteorder", {"sreg": 1, "dreg": 1, "op": 1, "len": 4, "size": 4}),
        genex("cmp", {"sreg": 1, "op": 2, "data": {"attrs": [("NFTA_DATA_VALUE", limit)]}}),
    ]


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    """A refusal of the kernel, with the name of what it refused."""
    try:
        yield
    except NetlinkError as cause:
        raise LabError(
            f"this kernel refuses {what}: {os.strerror(cause.code)}; `tacit lab check` lists what it can do"
        ) from cause


# ---- what this kernel can do ----


def features() -> dict[str, str]:
    """What the kernel did when asked, by name: an empty text, or why it refused. Nothing is left behind."""
    wiring = Wiring()
    wiring._new_namespace("probe", LEAST_WINDOW_NBYTES)
    port = Port("probe", "probe0", "02:7a:00:ff:ff:00")
    netlink = wiring._netlink["probe"]
    shaper = Shaper(1e8, 2000, 8192, 1 << 20)
    tries: dict[str, Callable[[], object]] = {
        "veth": lambda: netlink.link("add", kind="veth", ifname="probe0", peer={"ifname": "probe1"}),
        "bridge": lambda: netlink.link("add", kind="bridge", ifname="probe2"),
        "htb": lambda: wiring._shape(port, shaper, "add"),
        "netem": lambda: netlink.tc(
            "replace", "netem", wiring._lookup("probe", "probe1"), 0x20000, delay=1000
        ),
        "nft": lambda: wiring._lose(port, 0.5),
        "cubic": lambda: netlink.route("add", dst="10.77.9.9/32", oif=1, metrics={"cc_algo": "cubic"}),
        "gso": lambda: wiring._set(port, gso_max_size=2900),
    }
    return {name: _why(attempt) for name, attempt in tries.items()}


def _why(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except NetlinkError as cause:
        return "not in this kernel" if cause.code == errno.ENOENT else os.strerror(cause.code)
    except IndexError:
        return "not tried: there is no veth to try it on"
    except (LabError, OSError) as cause:
        return str(cause) or type(cause).__name__
    return ""
