"""Linux namespaces by system call: Python 3.11 has no `unshare` or `setns` of its own."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from contextlib import suppress
from pathlib import Path

NEWNS, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_REC, _PRIVATE, _BIND, _NOSUID, _NODEV, _NOEXEC = 16384, 1 << 18, 4096, 2, 4, 8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_CAPABILITIES = 1 << 12 | 1 << 21  # CAP_NET_ADMIN, CAP_SYS_ADMIN

NAMES = Path("/run/netns")  # inside the lab only, whose /run is its own; `ip netns` finds them there

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """This process leaves the namespaces named by `flags` for new ones (a new PID namespace starts with its next child)."""
    _check(_libc.unshare(flags), "unshare")


def check_root() -> None:
    """Raises PermissionError unless this process may make mount and network namespaces and change them: root may lack the
    capabilities for it, and a container or AppArmor may forbid the mounts."""
    status = Path("/proc/self/status").read_text()
    capable = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    if capable & _CAPABILITIES != _CAPABILITIES:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            unshare(NEWNS | NEWNET)
            own_mounts()
            code = 0
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def setns(fd: int, kind: int) -> None:
    """This thread enters the namespace that `fd` is open on."""
    _check(_libc.setns(fd, kind), "setns")


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends. Cleared by a change of user or namespace: call it after those."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def be_seen() -> None:
    """/proc/PID/ns of this process opens again for its own user, which a new user namespace forbids at first."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def map_to_root(uid: int, gid: int) -> None:
    """In the user namespace just made, the user outside is root; nobody else is there."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def own_mounts() -> None:
    """Mounts from here on are seen in this mount namespace only: a fresh /run, and /proc of this PID namespace."""
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/run", "tmpfs", _NOSUID | _NODEV)
    NAMES.mkdir()
    with suppress(OSError):  # forbidden in a container that hides parts of /proc: it shows outer ids then
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def name_this_network(name: str) -> None:
    """The network namespace of this process can be entered by `name` for as long as the mount namespace lives."""
    place = NAMES / name
    place.touch()
    _mount("/proc/self/ns/net", str(place), None, _BIND)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    made = _libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    _check(made, f"mount on {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
