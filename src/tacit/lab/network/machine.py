"""Whether this machine can run a lab: everything is tried, nothing is guessed from names or versions."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tacit.lab.errors import LabError
from tacit.lab.network.keeper import How
from tacit.lab.network.lab import kernel_features

_BPF_PROG_LOAD, _XDP = 5, 6
_BPF_CALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280}
_RETURN_2 = bytes([0xB7, 0, 0, 0, 2, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0])  # r0 = 2 (XDP_PASS); exit


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that a lab can use; `why` it is not there, and the `way_out`."""

    name: str
    there: bool
    needed: bool
    what_for: str
    why: str = ""
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found. `how` is the way in which a lab would be built here: "root", "user", or "unshaped" (it cannot)."""

    how: str
    cores: int
    findings: tuple[Capability, ...]

    @property
    def able(self) -> bool:
        return self.how != "unshaped" and all(f.there for f in self.findings if f.needed)

    @property
    def verdict(self) -> str:
        if self.able:
            by = "as root" if self.how == "root" else "without root, in user namespaces"
            missing = [f.name for f in self.findings if not f.there and not _another_way(f, self.how)]
            rest = f"; not here: {', '.join(missing)}" if missing else ""
            return f"This machine can run the lab {by}{rest}."
        if self.how == "unshaped":
            return "This machine cannot build networks for this user: the lab would use loopback, labelled unshaped."
        missing = [f.name for f in self.findings if f.needed and not f.there]
        return f"This machine cannot run the lab: its kernel lacks {', '.join(missing)}."


def check() -> Machine:
    """Tries all of it in throw-away namespaces; a second or two."""
    root_why, root = _features("root")
    user_why, user = _features("user")
    how = "root" if root is not None else "user" if user is not None else "unshaped"
    found = root if root is not None else user
    cores = len(os.sched_getaffinity(0))
    findings = [
        Capability("root", root is not None, False, "real-time priority, BPF", root_why, "run as root"),
        Capability("user namespaces", user is not None, False, "labs without root", user_why, _allow_users()),
        *(_feature(name, found) for name in _FEATURES),
        _tried("real-time priority", "steady times on a shared machine", _realtime, "run as root"),
        _tried("BPF", "adding in the kernel", _load_bpf, "run as root, with CONFIG_BPF_SYSCALL"),
        Capability(
            "cores", cores >= 2, False, f"{cores} here: trust rates up to about {_highest(cores)} with 4 hosts",
            "" if cores >= 2 else "one core runs ranks and network in turn", "use a machine with 2 or more",
        ),
    ]  # fmt: skip
    return Machine(how, cores, tuple(replace(f, way_out="") if f.there else f for f in findings))


_MODULE = "use a kernel that has it (Debian: linux-image-amd64 rather than a cloud kernel; then modprobe {})"
_FEATURES = {
    "veth": (True, "links", _MODULE.format("veth")),
    "bridge": (True, "switches", _MODULE.format("bridge")),
    "htb": (True, "rates", _MODULE.format("sch_htb")),
    "gso": (True, "short messages that take their time", "use Linux 4.16 or newer"),
    "cubic": (True, "the usual congestion control, by route", _MODULE.format("tcp_cubic")),
    "nft": (False, "packet loss", _MODULE.format("nft_numgen")),
    "netem": (False, "delay; without it links have the lab's own, about 0.1 ms", _MODULE.format("sch_netem")),
}


def _features(how: How) -> tuple[str, dict[str, str] | None]:
    try:
        return "", kernel_features(how)
    except LabError as cause:
        return re.sub(r".*\((.*)\).*", r"\1", str(cause)), None


def _feature(name: str, found: dict[str, str] | None) -> Capability:
    needed, what_for, way_out = _FEATURES[name]
    why = "not tried: no namespaces" if found is None else found[name]
    return Capability(
        name, not why, needed, what_for, why, way_out if found is not None else "allow namespaces first"
    )


def _tried(name: str, what_for: str, attempt: Callable[[], None], way_out: str) -> Capability:
    try:
        attempt()
    except OSError as cause:
        return Capability(name, False, False, what_for, cause.strerror or str(cause), way_out)
    return Capability(name, True, False, what_for)


def _another_way(finding: Capability, how: str) -> bool:
    """Root needs no user namespaces, and they need no root."""
    return finding.name in ("root", "user namespaces") and how != "unshaped"


def _allow_users() -> str:
    """What keeps this user from making user namespaces, as far as the kernel shows it."""
    for file, forbids in (
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
        ("user/max_user_namespaces", "0"),
    ):
        path = Path("/proc/sys") / file
        if path.exists() and path.read_text().strip() == forbids:
            value = {"0": "1", "1": "0"}[forbids] if file.startswith("kernel") else "15000"
            return f"ask root for: sysctl -w {file.replace('/', '.')}={value}"
    return "in a container, start it with --privileged, or with --security-opt seccomp=unconfined --cap-add SYS_ADMIN"


def _highest(cores: int) -> str:
    """n x R <= 10 Gbit was measured on 2 cores (shared/papers/lab.md); more cores were not."""
    return "2.5 Gbit" if cores >= 2 else "0.5 Gbit"


def _realtime() -> None:
    failed: list[OSError] = []

    def attempt() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except OSError as cause:
            failed.append(cause)

    thread = threading.Thread(target=attempt)  # a thread's priority is its own, and goes with it
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def _load_bpf() -> None:
    """Loads a program of two instructions, and forgets it."""
    if platform.machine() not in _BPF_CALL:
        raise OSError(f"the number of bpf() on {platform.machine()} is not known here")
    libc = ctypes.CDLL(None, use_errno=True)
    code, licence = ctypes.create_string_buffer(_RETURN_2), ctypes.create_string_buffer(b"GPL")
    attributes = (ctypes.c_uint64 * 16)()
    attributes[0] = _XDP | 2 << 32  # program type, number of instructions
    attributes[1], attributes[2] = ctypes.addressof(code), ctypes.addressof(licence)
    fd = libc.syscall(
        _BPF_CALL[platform.machine()], _BPF_PROG_LOAD, ctypes.byref(attributes), ctypes.sizeof(attributes)
    )
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(fd)
