"""What of tacit works on this machine, and how to get the rest: every part is tried, nothing is guessed.

for part in doctor.examine():
    print(part.name, part.works, part.finding, part.way_out)
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path

from tacit import extras
from tacit.errors import ConfigError, TacitError, one_line

_WANTED_RMEM_NBYTES = 8 << 20  # what an aggregator asks for, of the kernel's receive buffers


@dataclass(frozen=True, slots=True)
class Part:
    """One part of tacit. `finding` is what there is, or why it does not work; `way_out` what would change that, or make it better."""

    name: str
    what_for: str
    works: bool
    finding: str
    way_out: str = ""


class _MissingError(TacitError):
    """A part cannot work here; the second argument is the way out."""

    @property
    def way_out(self) -> str:
        return str(self.args[1]) if len(self.args) > 1 else ""

    def __str__(self) -> str:
        return str(self.args[0])


Found = tuple[str, str]  # a finding, and what would make it better


def examine() -> Iterator[Part]:
    """Each part in turn, as it has been tried; a few seconds in all. Nothing that it starts is left."""
    for name, (what_for, attempt) in PARTS.items():
        try:
            finding, better = attempt()
            yield Part(name, what_for, True, finding, better)
        except _MissingError as cause:
            yield Part(name, what_for, False, str(cause), cause.way_out)
        except (TacitError, OSError, ImportError) as cause:
            yield Part(name, what_for, False, *_split(one_line(str(cause))))


def _split(sentence: str) -> Found:
    """An error of ours names the fault, then the way out behind a semicolon."""
    fault, _, way_out = sentence.partition("; ")
    return fault, way_out


def _core() -> Found:
    try:
        from tacit import _core
    except ImportError as cause:
        raise _MissingError(
            str(cause), "build it: pip install . in a clone, with a C++20 compiler"
        ) from cause
    used, known = _core.simd(), ", ".join(_core.simd_variants())
    return f"kernels for {used} (of {known}) on {platform.machine()}", ""


def _training() -> Found:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as cause:
        raise _MissingError("torch is not installed", "pip install torch") from cause
    if not dist.is_available():
        raise _MissingError(
            f"torch {torch.__version__} was built without torch.distributed", "install a build that has it"
        )
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    return f"torch {torch.__version__} with {', '.join(backends) or 'no backend'}", ""


def _accelerators() -> Found:
    import torch

    if not torch.cuda.is_available():
        raise _MissingError("no accelerator that torch sees", "training on CPUs needs none")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}", ""


def _network() -> Found:
    from tacit.transports import interfaces

    here = [
        i for i in interfaces.on_this_host() if not i.loopback and not ip_address(i.address).is_link_local
    ]
    if not here:
        raise _MissingError(
            "only loopback is up", "ranks of this machine can train; others cannot be reached"
        )
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    way_out = ""
    if not address or ip_address(address).is_loopback:
        points = f"resolves to {address}" if address else "does not resolve"
        way_out = (
            f"for several machines set GLOO_SOCKET_IFNAME={here[0].name}: the host's name {name!r} {points}"
        )
    return ", ".join(map(str, here)), way_out


def _report() -> Found:
    extras.require("report")
    return f"matplotlib {metadata.version('matplotlib')}, jinja2 {metadata.version('jinja2')}", ""


def _demo() -> Found:
    if find_spec("sklearn") is None:
        raise _MissingError("scikit-learn is not installed", "pip install 'tacit[demo]'")
    return f"scikit-learn {metadata.version('scikit-learn')}", ""


def _lab() -> Found:
    from tacit.lab.network.machine import check

    extras.require("lab")
    machine = check()
    if not machine.able:
        raise _MissingError(machine.verdict, "tacit lab check has each cause, and what to do about it")
    return machine.verdict, ""


def _aggregator() -> Found:
    from tacit.aggregator import UserPlane

    with UserPlane(("127.0.0.1", 0)):
        most = Path("/proc/sys/net/core/rmem_max")
        nbytes = int(most.read_text()) if most.exists() else _WANTED_RMEM_NBYTES
    better = "" if nbytes >= _WANTED_RMEM_NBYTES else "for fast links: sysctl -w net.core.rmem_max=33554432"
    return "adds packets in a process of any user", better


def _kernel_plane() -> Found:
    from tacit.aggregator.planes.kernel_plane import KernelPlane

    if reason := KernelPlane.missing():
        raise ConfigError(reason)
    return "adds packets in the kernel", ""


def _loggers() -> Found:
    found = [name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name) is not None]
    if not found:
        raise _MissingError("none of tensorboard, wandb and mlflow is installed", "pip install tensorboard")
    return ", ".join(found), ""


PARTS: dict[str, tuple[str, Callable[[], Found]]] = {
    "core": ("codecs at the speed of memory", _core),
    "training": ("tacit.attach, tacit plan", _training),
    "accelerators": ("codecs on GPUs", _accelerators),
    "network": ("ranks on other machines", _network),
    "aggregator": ("tacit aggregate, `star`", _aggregator),
    "kernel-plane": ("tacit aggregate --plane kernel", _kernel_plane),
    "lab": ("networks from namespaces: tacit lab, make demo", _lab),
    "report": ("figures and HTML pages", _report),
    "demo": ("the data of tacit demo", _demo),
    "loggers": ("handle.stats in a dashboard", _loggers),
}
