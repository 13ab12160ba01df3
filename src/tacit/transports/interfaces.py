"""Which network interface the connections of a process group use, and whether this host has a faster one.

Process groups choose it from an environment variable, or from what the host's name resolves to, and report neither:
training over a slow management port differs from training over the right one only in how long it takes. Linux only;
elsewhere, and for connections that are no sockets of the kernel (InfiniBand), nothing is known.
"""

import array
import fcntl
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from tacit.units import rate_text

_NET = Path("/proc/thread-self/net")  # of this thread's namespace
_ESTABLISHED = "01"
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCETHTOOL = 0x8912, 0x8913, 0x8946
_IFREQ_NBYTES = 40
_UP_AND_RUNNING = 0x1 | 0x40
_ETHTOOL_GSET, _ETHTOOL_GDRVINFO = 0x1, 0x3
_UNKNOWN_MBPS = (0, 0xFFFFFFFF)
_NO_RATE = frozenset({"bridge", "tun", "openvswitch"})  # drivers whose rate is a made-up number
_FASTER = 2.0  # so many times the rate is worth a warning


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface, one of its addresses, and its rate where the driver knows it."""

    name: str
    address: str
    rate_bps: float | None = None

    @property
    def loopback(self) -> bool:
        return ip_address(self.address).is_loopback

    def __str__(self) -> str:
        rate = "" if self.rate_bps is None else f", {rate_text(self.rate_bps)}"
        return f"{self.name} ({self.address}{rate})"


def connections() -> frozenset[tuple[str, str]]:
    """This process's established TCP connections: (inode, local address)."""
    with suppress(OSError):
        own = {
            text[8:-1] for text in map(_link_of, Path("/proc/self/fd").iterdir()) if text[:8] == "socket:["
        }
        return frozenset(
            (inode, address) for inode, address in [*_table("tcp"), *_table("tcp6")] if inode in own
        )
    return frozenset()


def used_by(made: Iterable[tuple[str, str]]) -> list[Interface]:
    """The interfaces that own the local addresses of connections, by name."""
    addresses = {address for _, address in made}
    return sorted((i for i in on_this_host() if i.address in addresses), key=lambda i: i.name)


def on_this_host() -> list[Interface]:
    """Every address of every interface that is up."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        pairs = [*_ipv4_addresses(any_socket), *_ipv6_addresses()]
        return [
            Interface(name, address, _rate_bps(any_socket, name))
            for name, address in pairs
            if _is_up(any_socket, name)
        ]
    return []


def doubt(used: Iterable[Interface], here: Iterable[Interface], *, alone: bool, backend: str) -> str:
    """Why the interfaces in use are probably the wrong ones, in one sentence with the way out; "" where they are not.

    Args:
        used: What carries the exchange.
        here: All that this host has.
        alone: Whether all ranks are on this host, where any interface serves.
        backend: The process group's, whose variable chooses an interface.
    """
    used, variable = list(used), f"{backend.upper()}_SOCKET_IFNAME"
    others = [other for other in here if not other.loopback and other.name not in {i.name for i in used}]
    if alone or not used:
        return ""
    if all(interface.loopback for interface in used):
        ways = ", ".join(sorted({other.name for other in others})) or "one that reaches the other hosts"
        return f"the exchange uses loopback, and ranks run on several hosts; set {variable} to {ways}"
    known = [i.rate_bps for i in used if i.rate_bps is not None and not i.loopback]
    faster = max((o for o in others if o.rate_bps is not None), key=lambda o: o.rate_bps or 0, default=None)
    if known and faster is not None and (faster.rate_bps or 0) >= _FASTER * min(known):
        names = " and ".join(map(str, used))
        return f"the exchange uses {names}, and {faster} is up; if it reaches the other hosts, set {variable}={faster.name}"
    return ""


def _link_of(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # closed meanwhile
        return ""


def _table(name: str) -> Iterable[tuple[str, str]]:
    """(inode, local address) of what /proc lists as established."""
    with suppress(OSError):
        for line in (_NET / name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _ESTABLISHED:
                yield words[9], _address(words[1].partition(":")[0])


def _address(text: str) -> str:
    """/proc writes addresses as words in the host's byte order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    address = ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _ipv4_addresses(any_socket: socket.socket) -> list[tuple[str, str]]:
    room = array.array("B", bytes(_IFREQ_NBYTES * 256))
    request = struct.pack("iP", len(room), room.buffer_info()[0])
    nbytes = struct.unpack("iP", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
    entries = (room[at : at + _IFREQ_NBYTES].tobytes() for at in range(0, nbytes, _IFREQ_NBYTES))
    return [(entry[:16].split(b"\0")[0].decode(), socket.inet_ntoa(entry[20:24])) for entry in entries]


def _ipv6_addresses() -> list[tuple[str, str]]:
    with suppress(OSError):
        lines = (_NET / "if_inet6").read_text().splitlines()
        return [(line.split()[5], str(IPv6Address(int(line.split()[0], 16)))) for line in lines]
    return []


def _is_up(any_socket: socket.socket, name: str) -> bool:
    with suppress(OSError):
        found = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16s24x", name.encode()))
        flags: int = struct.unpack_from("H", found, 16)[0]
        return flags & _UP_AND_RUNNING == _UP_AND_RUNNING
    return False


def _rate_bps(any_socket: socket.socket, name: str) -> float | None:
    with suppress(OSError):
        driver = _ethtool(any_socket, name, _ETHTOOL_GDRVINFO, 196)[4:36].split(b"\0")[0].decode()
        if driver in _NO_RATE:
            return None
        settings = _ethtool(any_socket, name, _ETHTOOL_GSET, 44)
        low, high = struct.unpack_from("H", settings, 12)[0], struct.unpack_from("H", settings, 28)[0]
        mbps = high << 16 | low
        return None if mbps in _UNKNOWN_MBPS else mbps * 1e6
    return None


def _ethtool(any_socket: socket.socket, name: str, command: int, nbytes: int) -> bytes:
    """What the driver answers, in `nbytes` that begin with the command."""
    room = array.array("B", struct.pack("I", command) + bytes(nbytes - 4))
    fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), room.buffer_info()[0]))
    return room.tobytes()
