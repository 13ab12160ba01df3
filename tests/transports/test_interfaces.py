"""The network interface of an exchange: found in the kernel's tables, named, and doubted where another one is probably meant."""

import ctypes
import logging
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist
from toys import deep

import tacit
from tacit.transports import interfaces
from tacit.transports.interfaces import Interface, doubt

CLONE_NEWNET = 0x40000000
LOOPBACK = Interface("lo", "127.0.0.1")
MANAGEMENT = Interface("eth0", "10.0.0.1", 1e9)
FAST = Interface("eth1", "10.1.0.1", 25e9)
UNKNOWN = Interface("wg0", "10.2.0.1")


def test_a_new_connection_is_found_with_the_interface_that_owns_its_address():
    before = interfaces.connections()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        made = interfaces.connections() - before
    assert [i.name for i in interfaces.used_by(made)] == ["lo"]
    assert interfaces.used_by([]) == []


@pytest.mark.parametrize(
    ("used", "alone", "backend", "said"),
    [
        ([MANAGEMENT], False, "gloo", "the exchange uses eth0 (10.0.0.1, 1Gbit), and eth1 (10.1.0.1, 25Gbit) is up; "
         "if it reaches the other hosts, set GLOO_SOCKET_IFNAME=eth1"),
        ([LOOPBACK], False, "nccl", "the exchange uses loopback, and ranks run on several hosts; set NCCL_SOCKET_IFNAME to eth0, eth1, wg0"),
        ([FAST], False, "gloo", ""),
        ([UNKNOWN], False, "gloo", ""),
        ([], False, "gloo", ""),
        ([MANAGEMENT], True, "gloo", ""),
        ([LOOPBACK], True, "gloo", ""),
    ],
)  # fmt: skip
def test_a_doubt_names_both_interfaces_and_the_variable(used, alone, backend, said):
    here = [LOOPBACK, MANAGEMENT, FAST, UNKNOWN]
    assert doubt(used, here, alone=alone, backend=backend) == said


def _in_namespace(rank, world):
    """Two ranks in a namespace with two interfaces and loopback, whose group is told to take one; what they report."""
    where = [None]
    if rank == 0:
        _enter_new_namespace()
        for number, name in enumerate(("slow0", "fast0")):
            for words in (
                f"link add {name} type veth peer name {name}p",
                f"addr add 10.9.{number}.1/24 dev {name}",
                f"link set {name} up",
                f"link set {name}p up",
                "link set lo up",
            ):
                subprocess.run(["ip", *words.split()], check=True)
        where = [f"/proc/{os.getpid()}/ns/net"]
    dist.broadcast_object_list(where)
    if rank > 0:
        with Path(where[0]).open() as namespace:
            _check(ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET))
    dist.barrier()
    os.environ |= {"GLOO_SOCKET_IFNAME": "slow0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("tacit").addHandler(handler)
    logging.getLogger("tacit").setLevel(logging.INFO)
    here = {str(i) for i in interfaces.on_this_host() if i.address.startswith("10.")}
    with tacit.attach(deep(), None, "none") as handle:
        return here, handle.stats.over, f"over {handle.stats.over}" in str(handle.stats), heard


def _enter_new_namespace():
    """Of this thread, and of those it starts: it ends with them."""
    _check(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET))


def _check(result):
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces of its own need root")
def test_ranks_with_two_interfaces_name_the_one_that_is_used(ranks):
    for here, over, shown, heard in ranks.run(2, _in_namespace):
        assert here == {"slow0 (10.9.0.1, 10Gbit)", "fast0 (10.9.1.1, 10Gbit)"}  # what veth reports
        assert over == "slow0 (10.9.0.1, 10Gbit)" and shown
        assert heard == ["exchanges over slow0 (10.9.0.1, 10Gbit) with gloo"]  # neither is twice as fast
